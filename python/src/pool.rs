//! The base of the class `Pool`, which is written in Python.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use pinpool::unstable::config::env::{PREFIX, VARIABLES, is_known, nearest};
use pinpool::unstable::config::text::format_bytes;
use pinpool::unstable::{Kind, Unit};
use pinpool::{Error, Limit, PinnedBuf, Preset, Request};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{LONGEST_WAIT, request_timeout, seconds, size, text};
use crate::buffer::Buffer;
use crate::errors::exception;
use crate::handle::{PoolHandle, buffer};
use crate::interrupts::{SIGNAL_CHECK_INTERVAL, wait_interruptibly};
use crate::log;
use crate::pending::PendingRequest;

/// The name of a setting that has no variable.
const MAINTENANCE_THREAD: &str = "maintenance_thread";

/// The methods of `Pool` that are written in Rust.
#[pyclass(frozen, subclass, weakref, module = "pinpool._pinpool")]
pub struct PoolCore {
    // Dropped first, so that `PoolHandle` drops the last reference to the pool, without the GIL.
    tagged: Option<pinpool::Pool>,
    pub(crate) handle: Arc<PoolHandle>,
}

/// Unparks a waiting thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl PoolCore {
    pub(crate) fn pool(&self) -> PyResult<&pinpool::Pool> {
        self.handle.pool()
    }

    /// Returns the pool, with the tag of this handle.
    pub(crate) fn tagged_pool(&self) -> PyResult<&pinpool::Pool> {
        self.tagged.as_ref().map_or_else(|| self.pool(), Ok)
    }

    /// Returns an idle buffer, if a hit is short enough to keep the GIL.
    fn get_idle_with_gil(&self, len: usize) -> PyResult<Option<Buffer>> {
        let keeps_gil = self.handle.origin.get().is_some_and(|origin| origin.keeps_gil_on_hit());
        if keeps_gil && pinpool::unstable::fast_path::is_open(self.pool()?) { self.try_get_idle(len) } else { Ok(None) }
    }

    fn try_get_idle(&self, len: usize) -> PyResult<Option<Buffer>> {
        Ok(self.tagged_pool()?.try_get(len).map_err(|error| exception(&error))?.map(|buf| buffer(buf, &self.handle)))
    }

    /// Waits for a buffer and checks for signals periodically. The request keeps its place in the queue.
    fn get_interruptibly(&self, py: Python<'_>, request: Request) -> PyResult<Result<PinnedBuf, Error>> {
        let mut future = self.tagged_pool()?.get_async(request);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let served = wait_interruptibly(py, None, |wait| {
            if let Poll::Ready(served) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
                return served.map(Some);
            }
            thread::park_timeout(wait);
            Ok(None)
        });
        py.detach(move || drop(future));
        // Without a timeout, there is a buffer or an error.
        Ok(served?.map(|buf| buf.unwrap_or_else(|| unreachable!("it waits until the request ends"))))
    }

    fn call<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&pinpool::Pool) -> T + Send) -> PyResult<T> {
        let outcome = self.pool().map(|pool| py.detach(|| call(pool)))?;
        log::flush(py)?;
        Ok(outcome)
    }
}

#[pymethods]
impl PoolCore {
    #[new]
    #[pyo3(signature = (*, _core=None, name=None, env=true, **settings))]
    fn new(
        py: Python<'_>,
        _core: Option<PyRef<'_, Self>>,
        name: Option<&Bound<'_, PyAny>>,
        env: bool,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        if let Some(Self { tagged, handle }) = _core.as_deref() {
            return Ok(Self { tagged: tagged.clone(), handle: handle.clone() });
        }
        log::start();
        let builder = pinpool::Pool::builder();
        let mut builder = if env { builder } else { builder.without_env() };
        if let Some(name) = name {
            builder = builder.name(text("name", name)?);
        }
        let (arguments, device) = (py.import("pinpool._arguments")?, py.import("pinpool._device")?);
        let preferred = device.call_method0("default_device_of_rank")?.extract().ok();
        builder = builder.unstable_settings(|extra| extra.default_device = preferred);
        for (name, value) in settings.into_iter().flatten() {
            let name: String = name.extract()?;
            let variable = variable(&name)?;
            if let Some(text) = arguments.call_method1("setting_text", (&name, value))?.extract::<Option<String>>()? {
                builder = builder.setting(&variable, &text);
            }
        }
        let built = py.detach(move || builder.build().map(PoolHandle::new));
        log::flush(py)?;
        built.map(|handle| Self { handle: Arc::new(handle), tagged: None }).map_err(|error| exception(&error))
    }

    /// Returns a buffer: reuses pinned memory, or pins more. When the pool is full, waits for a release.
    ///
    /// Args:
    ///     nbytes: length in bytes, or text such as "64MiB".
    ///     timeout: maximum wait for memory: seconds, a timedelta, text such as "500ms", None for no limit, or "wait" for the
    ///         setting `wait` of the pool. With 0 the call may still wait for other threads' driver calls (up to 0.1 s).
    ///
    /// Raises:
    ///     TimeoutError: the pool was full until the timeout.
    ///     LimitError: the pool is full and the timeout is 0, or the request exceeds the limit (`max_bytes`).
    ///     RequestError: the length or `timeout` is invalid.
    ///     TypeError: `nbytes` or `timeout` has a wrong type.
    ///     BackendError: the driver or the kernel refused to pin memory.
    ///     ForkError: the pool belongs to the parent of this process.
    ///     ClosedError: the pool was closed.
    #[pyo3(signature = (nbytes, *, timeout=None), text_signature = "($self, nbytes, *, timeout='wait')")]
    fn get(
        &self,
        py: Python<'_>,
        nbytes: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = request_timeout)] timeout: Option<Duration>,
    ) -> PyResult<Buffer> {
        let (len, pool) = (size("nbytes", nbytes)?, self.pool()?);
        let wait = timeout.or(pool.unstable_config().wait).unwrap_or(LONGEST_WAIT);
        if let Some(idle) = self.get_idle_with_gil(len)? {
            return Ok(idle);
        }
        let request = Request::new(len).timeout(wait);
        let served = if wait > SIGNAL_CHECK_INTERVAL {
            self.get_interruptibly(py, request)?
        } else {
            let pool = self.tagged_pool()?;
            py.detach(|| pool.get_with(request))
        };
        let served = served.map(|buf| buffer(buf, &self.handle));
        log::flush(py)?;
        served.map_err(|error| exception(&error))
    }

    /// Returns an idle buffer of `nbytes` bytes, or None if there is none. Pins nothing and does not wait for room. Raises
    /// RequestError, TypeError, ForkError and ClosedError as `get` does.
    fn try_get(&self, py: Python<'_>, nbytes: &Bound<'_, PyAny>) -> PyResult<Option<Buffer>> {
        let len = size("nbytes", nbytes)?;
        py.detach(|| self.try_get_idle(len))
    }

    /// An idle buffer, or a waiting request.
    fn _begin_get<'py>(
        &self,
        py: Python<'py>,
        nbytes: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = request_timeout)] timeout: Option<Duration>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (len, pool) = (size("nbytes", nbytes)?, self.pool()?);
        let wait = timeout.or(pool.unstable_config().wait).unwrap_or(LONGEST_WAIT);
        if let Some(idle) = self.get_idle_with_gil(len)? {
            return Ok(Bound::new(py, idle)?.into_any());
        }
        let request = Request::new(len).timeout(wait);
        let waiting = PendingRequest::new(self.tagged_pool()?.get_async(request), self.handle.clone())?;
        Ok(Bound::new(py, waiting)?.into_any())
    }

    /// The statistics as JSON.
    fn _stats_json(&self, py: Python<'_>) -> PyResult<String> {
        let json = self.pool().map(|pool| py.detach(|| serde_json::to_string(&pool.stats())))?;
        json.map_err(|error| PyRuntimeError::new_err(format!("the statistics cannot be written: {error}")))
    }

    /// Returns the meaning of each statistic in `stats` by its path, such as "memory.in_use_bytes".
    #[staticmethod]
    fn describe_stats() -> std::collections::BTreeMap<String, &'static str> {
        let described = pinpool::Stats::default().unstable_list().into_iter().map(|statistic| {
            let is_duration = statistic.unit == Unit::Seconds && statistic.kind != Kind::Histogram;
            (statistic.path + if is_duration { "_seconds" } else { "" }, statistic.help)
        });
        described.collect()
    }

    /// The text and the attributes of a `Diagnosis`.
    #[allow(clippy::type_complexity)] // Unpacked by Python.
    fn _diagnosis(&self, py: Python<'_>) -> PyResult<(String, &str, bool, f64, Option<(String, String)>)> {
        let diagnosis = self.pool().map(|pool| py.detach(|| pool.diagnose()))?;
        let setting = diagnosis.setting.as_ref().map(|setting| (keyword(setting.variable), setting.value.clone()));
        Ok((diagnosis.to_string(), diagnosis.cause.name(), diagnosis.is_alarm, diagnosis.lost.as_secs_f64(), setting))
    }

    /// Returns a report of the pool's memory: the largest holders by tag, the bytes by state, the limit, and, if memory is
    /// short, the likely cause.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        self.pool().map(|pool| py.detach(|| pool.dump().to_string()))
    }

    /// Pins `nbytes` more bytes and keeps them; with `reserve_wait=False`, most of them in the background. If the driver or the
    /// kernel refuses a part, the pool warns and keeps the smaller reserve.
    ///
    /// Raises:
    ///     SettingError: the preset is "tensorflow".
    ///     LimitError: the bytes exceed the limit (`max_bytes`), or leave no room for a waiting request.
    ///     BackendError: the driver or the kernel refused to pin any of them.
    ///     ForkError, ClosedError: as for `get`.
    fn reserve(&self, py: Python<'_>, nbytes: &Bound<'_, PyAny>) -> PyResult<()> {
        let bytes = size("nbytes", nbytes)? as u64;
        self.call(py, |pool| pool.reserve(bytes))?.map_err(|error| exception(&error))
    }

    /// Waits until the whole reserve is pinned, for a pool with `reserve_wait=False`.
    ///
    /// Args:
    ///     timeout: maximum wait: seconds, a timedelta, text such as "500ms", or None for no limit.
    ///
    /// Returns:
    ///     True, or False after the timeout.
    ///
    /// Raises:
    ///     BackendError: the driver or the kernel refused a part, so the rest of the reserve was abandoned.
    ///     ForkError: as for `get`.
    #[pyo3(signature = (*, timeout=None))]
    fn wait_for_reserve(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let (pool, timeout) = (self.pool()?, timeout.map(seconds).transpose()?);
        let reserved = wait_interruptibly(py, timeout, |wait| {
            pool.wait_for_reserve(wait).map(|is_pinned| is_pinned.then_some(()))
        })?;
        Ok(reserved.map_err(|error| exception(&error))?.is_some())
    }

    /// Source of the memory: "vmm", "register", "cuda", "mlock" or "heap".
    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.call(py, |pool| pool.stats().backend)
    }

    /// What pins the memory: "driver", "kernel" (`mlock`) or None.
    #[getter]
    fn pinned_by(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.call(py, |pool| pool.stats().pinned_by.map(pinpool::PinnedBy::name))
    }

    /// Limit on the bytes held, or None if unlimited.
    #[getter]
    fn max_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.call(py, |pool| pool.stats().limits.max_bytes)
    }

    /// Fraction of the reserve that is pinned, from 0.0 to 1.0.
    #[getter]
    fn reserve_fraction(&self, py: Python<'_>) -> PyResult<f64> {
        self.call(py, |pool| pool.stats().memory.reserve_fraction())
    }

    /// Releases idle memory to the system until at most `to_bytes` are held or nothing is idle. Keeps reserves. On register and
    /// cuda, waits for all work on the device.
    #[pyo3(signature = (to_bytes=None), text_signature = "($self, to_bytes=0)")]
    fn trim(&self, py: Python<'_>, to_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let bytes = to_bytes.map_or(Ok(0), |bytes| size("to_bytes", bytes))? as u64;
        self.call(py, |pool| pool.trim(bytes))
    }

    /// Makes waiting and later requests fail with ClosedError, and releases idle memory except reserves. Buffers in use stay
    /// valid; after their release, `trim()` releases their memory. On register and cuda, waits for all work on the device. A `with`
    /// block closes the pool at its end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |pool| pool.close())
    }

    /// Detects completed copies and releases idle memory that is due, as the maintenance thread does.
    fn maintain(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |pool| pool.maintain())
    }

    /// Changes the limit: a size, "auto", or "none" for no limit. With 0 the pool pins nothing more. Buffers in use stay valid.
    ///
    /// Raises:
    ///     RequestError, TypeError: the limit is invalid.
    ///     ForkError: as for `get`.
    fn set_max_bytes(&self, py: Python<'_>, max_bytes: &Bound<'_, PyAny>) -> PyResult<()> {
        let limit = match max_bytes.extract::<String>().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
            "auto" => Limit::Auto,
            "none" => Limit::Unlimited,
            _ => Limit::Bytes(size("max_bytes", max_bytes).map_err(|error| {
                PyErr::from_type(error.get_type(py), format!("{}, \"auto\", or \"none\" for no limit", error.value(py)))
            })? as u64),
        };
        self.call(py, |pool| pool.set_max_bytes(limit))?.map_err(|error| exception(&error))
    }

    /// A handle to the same pool, for the constructor.
    fn _tagged(&self, py: Python<'_>, tag: &str) -> PyResult<Self> {
        Ok(Self { handle: self.handle.clone(), tagged: Some(self.call(py, |pool| pool.tagged(tag))?) })
    }

    /// Name of the pool, or None.
    #[getter]
    fn name(&self) -> PyResult<Option<&str>> {
        Ok(self.pool()?.name())
    }

    /// Tag of this handle, or None.
    #[getter]
    fn tag(&self) -> Option<&str> {
        self.tagged.as_ref()?.tag()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let pool = self.pool()?;
        let stats = py.detach(|| pool.stats());
        let name = pool.name().map_or_else(String::new, |name| format!(" {name:?}"));
        let tag = self.tag().map_or_else(String::new, |tag| format!(" tag={tag:?}"));
        let preset = if pool.unstable_config().preset == Preset::TensorFlow { "tensorflow" } else { "adaptive" };
        let limit = stats.limits.max_bytes.map_or_else(|| "none".to_owned(), format_bytes);
        let (backend, held, in_use) = (stats.backend, format_bytes(stats.memory.held_bytes), stats.memory.in_use);
        let sizes = format!("max_bytes={limit} held={held} in_use={in_use}");
        Ok(format!("<pinpool.Pool{name} preset={preset} backend={backend} {sizes}{tag}>"))
    }

    /// Names of all settings.
    #[staticmethod]
    fn _setting_names() -> Vec<String> {
        setting_names().collect()
    }
}

fn setting_names() -> impl Iterator<Item = String> {
    VARIABLES.iter().map(|variable| keyword(variable.name)).chain([MAINTENANCE_THREAD.to_owned()])
}

fn keyword(variable: &str) -> String {
    variable.trim_start_matches(PREFIX).to_ascii_lowercase()
}

/// Returns the variable of the setting that a keyword names.
fn variable(name: &str) -> PyResult<String> {
    let full = if name == MAINTENANCE_THREAD { name.to_owned() } else { format!("{PREFIX}{}", name.to_uppercase()) };
    let known = Some(full).filter(|full| is_known(full) && name == name.to_lowercase());
    known.ok_or_else(|| {
        let advice = nearest(name).map_or_else(
            || format!("they are name, env, {}", setting_names().collect::<Vec<_>>().join(", ")),
            |nearest| format!("did you mean {}?", keyword(nearest)),
        );
        PyTypeError::new_err(format!("{name:?} is not a setting of a pool; {advice}"))
    })
}
