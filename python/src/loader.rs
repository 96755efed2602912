//! The crate's loader: what there is to load, and batches that were read ahead. `pinpool/_loader.py` has the classes of it.
//!
//! ```text
//!   Files ──begin──▶ Reader ──next──▶ Buffer, and where each sample lies in it
//!                        └──copy──▶ DeviceBuffer, one batch ahead
//! ```
//!
//! The lock is not held while files are listed or read, and no longer than [`UNINTERRUPTED`] passes without a look at the
//! signals.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use pinpool::PinnedBuf;
use pinpool::unstable::config::text::parse_bytes;
use pinpool_loader::{
    BatchReader, Catalog, DecodedField, Ended, Failure, FailureCause, LoadOptions, LoadState, LoadedBatch, Loader,
    Shard, StopFlag, kept_fields,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::decode::{self, Decoder};
use crate::device::{Device, DeviceBuffer, DeviceMemory};
use crate::errors;
use crate::gets::{self, Gets};
use crate::labels::Labels;
use crate::lines;
use crate::pool::Pool;
use crate::unlocked::unlocked;

/// Longest wait without a look at the signals.
const UNINTERRUPTED: Duration = Duration::from_millis(100);

/// What failed and why, and whether it is that the pool had no memory.
type Failed = (String, bool);
/// Sample, first byte in the buffer, length, first byte in the sample.
type Part = (usize, usize, usize, u64);
/// Number, epoch, place in the epoch, buffer, parts, the first byte of each array, labels if a field has them, and failures.
type Handed<'py> = (u64, u64, u64, Bound<'py, PyAny>, Vec<Part>, Vec<usize>, Option<Vec<Py<PyAny>>>, Vec<Failed>);

/// A batch before Python has it.
struct Ready {
    number: u64,
    epoch: u64,
    in_epoch: u64,
    memory: Loaded,
    parts: Vec<Part>,
    arrays: Vec<usize>,
    labels: Option<Vec<Py<PyAny>>>,
    failures: Vec<Failed>,
    /// The state behind it.
    state: LoadState,
}

enum Loaded {
    Host(PinnedBuf),
    Device(DeviceMemory),
}

/// The files and samples, and how they are loaded.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct Files {
    gets: Arc<Gets>,
    catalog: Catalog,
    options: LoadOptions,
    labels: Option<Arc<Labels>>,
}

/// Batches that are read ahead, until it ends.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct Reader {
    // In this order: the threads end before the pool may.
    reading: Mutex<Reading>,
    gets: Arc<Gets>,
    process: u32,
    catalog: Catalog,
    decode: Vec<DecodedField>,
    labels: Option<Arc<Labels>>,
    device: Option<Device>,
}

#[derive(Default)]
struct Reading {
    /// `None` once it is dropped.
    reader: Option<BatchReader>,
    /// A batch on its way to the device, or why there is none.
    ahead: Option<PyResult<Ready>>,
    /// Behind the batch that was handed out last.
    state: Option<LoadState>,
}

/// Calls `call` on a thread of its own and looks at the signals meanwhile. An interrupt raises `stop` and waits for the end.
fn interruptibly<T: Send>(py: Python<'_>, stop: &StopFlag, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    thread::scope(|scope| {
        let (send, mut done) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("pinpool-list".to_owned());
        let spawned = thread.spawn_scoped(scope, move || drop(send.send(call())));
        let no_thread = |error| PyRuntimeError::new_err(format!("no thread to list the files with: {error}"));
        let listing = spawned.map_err(no_thread)?;
        loop {
            let done = &mut done;
            match py.detach(move || done.recv_timeout(UNINTERRUPTED)) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("the listing has failed")),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(interrupted) = py.check_signals() {
                stop.raise();
                // Here, and not at the end of the scope, where the lock is held.
                let _ = py.detach(|| listing.join());
                return Err(interrupted);
            }
        }
    })
}

/// A failure, and whether it is the pool's.
fn failed(failure: &Failure) -> Failed {
    let is_pool = matches!(failure.cause, FailureCause::Pool(_));
    (failure.to_string(), is_pool)
}

/// A number of bytes from text such as "16MiB".
#[pyfunction]
pub(crate) fn _parse_bytes(text: &str) -> PyResult<u64> {
    parse_bytes(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

#[pymethods]
impl Files {
    /// Lists `paths`. A count of 0 is none.
    #[new]
    #[pyo3(signature = (pool, paths, containers, batch_size, batch_bytes, workers, prefetch, seed, rank, world, labels=None, decode=vec![]))]
    #[allow(clippy::too_many_arguments)] // One call, by keyword.
    fn new(
        py: Python<'_>,
        pool: &Pool,
        paths: Vec<PathBuf>,
        containers: bool,
        batch_size: u64,
        batch_bytes: u64,
        workers: usize,
        prefetch: usize,
        seed: Option<u64>,
        rank: u64,
        world: u64,
        labels: Option<(String, Py<PyAny>)>,
        decode: Vec<(Vec<String>, PyRef<'_, Decoder>)>,
    ) -> PyResult<Self> {
        let shard = Shard::new(rank, world);
        let shard = shard.ok_or_else(|| PyValueError::new_err(format!("rank={rank}: it is below world={world}")))?;
        let mut options = LoadOptions::default();
        options.batch_samples = NonZeroU64::new(batch_size);
        options.batch_bytes = NonZeroU64::new(batch_bytes);
        options.workers = NonZeroUsize::new(workers).unwrap_or(options.workers);
        options.prefetch = NonZeroUsize::new(prefetch);
        options.shuffle_seed = seed;
        options.shard = Some(shard);
        options.decode = decode::fields(decode);
        let labels = labels.map(|(field, parse)| Arc::new(Labels { field, parse }));
        let stop = StopFlag::new();
        let catalog = interruptibly(py, &stop, || Catalog::from_paths(&paths, containers, &stop))?;
        Ok(Self { gets: pool.gets().clone(), catalog, options, labels })
    }

    /// What could not be listed.
    fn failures(&self) -> Vec<Failed> {
        self.catalog.failures().iter().map(failed).collect()
    }

    /// Number of samples.
    fn __len__(&self) -> usize {
        self.catalog.samples().len()
    }

    /// Number of files that could be listed.
    fn files(&self) -> usize {
        self.catalog.files().len()
    }

    /// Whether any was opened as a compressed file.
    fn has_compressed(&self) -> bool {
        self.catalog.files().iter().any(|file| file.compression.is_some())
    }

    /// Bytes of all samples.
    fn nbytes(&self) -> u64 {
        self.catalog.len_bytes()
    }

    /// Bytes of one sample.
    fn sample_bytes(&self, sample: usize) -> Option<u64> {
        self.catalog.samples().get(sample).map(|sample| sample.len_bytes)
    }

    fn names(&self, samples: Vec<usize>) -> Vec<String> {
        samples.into_iter().map(|sample| self.catalog.name(sample)).collect()
    }

    fn labels(&self, samples: Vec<usize>) -> Vec<String> {
        samples.into_iter().map(|sample| self.catalog.label(sample).into_owned()).collect()
    }

    /// The fields of each sample that are not decoded: name, first byte in its part of a batch, end.
    fn fields(&self, samples: Vec<usize>) -> Vec<Vec<(String, u64, u64)>> {
        let fields = |sample: usize| {
            let sample = self.catalog.samples().get(sample).into_iter();
            let fields = sample.flat_map(|sample| kept_fields(&self.options.decode, sample));
            fields.map(|(name, bytes)| (name.to_owned(), bytes.start, bytes.end)).collect()
        };
        samples.into_iter().map(fields).collect()
    }

    /// Number of batches of an epoch.
    fn batches(&self, py: Python<'_>, epoch: u64) -> PyResult<u64> {
        let loader = self.loader(epoch.saturating_add(1))?;
        Ok(py.detach(|| loader.batches_in_epoch(epoch)))
    }

    /// The state before the first batch.
    fn start(&self, py: Python<'_>) -> PyResult<String> {
        let loader = self.loader(1)?;
        Ok(py.detach(|| loader.start_state().to_string()))
    }

    /// The epoch of `state`; ValueError if it is of other batches.
    fn check(&self, py: Python<'_>, state: &str) -> PyResult<u64> {
        let loader = self.loader(u64::MAX)?;
        let state: LoadState = state.parse().map_err(refused)?;
        py.detach(|| loader.resume_at(state)).map_err(refused)?;
        Ok(state.epoch)
    }

    /// Begins to read, from `state` or the start to the end of epoch number `epochs - 1`.
    #[pyo3(signature = (epochs, state=None, device=None))]
    fn begin(
        &self,
        py: Python<'_>,
        epochs: u64,
        state: Option<&str>,
        device: Option<Bound<'_, Device>>,
    ) -> PyResult<Reader> {
        let loader = self.loader(epochs)?;
        let state = state.map(str::parse::<LoadState>).transpose().map_err(refused)?;
        let reader = py.detach(|| {
            let loader = match state {
                Some(state) => loader.resume_at(state).map_err(refused)?,
                None => loader,
            };
            loader.batches().map_err(|error| PyRuntimeError::new_err(error.to_string()))
        })?;
        Ok(Reader {
            reading: Mutex::new(Reading { state: Some(reader.state()), reader: Some(reader), ahead: None }),
            gets: self.gets.clone(),
            process: std::process::id(),
            catalog: self.catalog.clone(),
            decode: self.options.decode.clone(),
            labels: self.labels.clone(),
            device: device.map(|device| device.get().clone()),
        })
    }
}

fn refused(error: pinpool_loader::StateError) -> PyErr {
    PyValueError::new_err(format!("state: {error}"))
}

impl Files {
    fn loader(&self, epochs: u64) -> PyResult<Loader> {
        let mut options = self.options.clone();
        options.epochs = epochs;
        Ok(Loader::new(self.gets.pool()?, &self.catalog, options))
    }
}

impl Reader {
    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next batch, on the device if there is one; pending if none is filled soon.
    fn take(&self) -> Poll<Option<PyResult<Ready>>> {
        let ahead = self.reading().ahead.take();
        let next = match ahead {
            Some(ready) => Poll::Ready(Some(ready)),
            None => self.prepared(|reader| reader.next_within(UNINTERRUPTED)),
        };
        if let Poll::Ready(Some(Ok(ready))) = &next {
            self.reading().state = Some(ready.state);
            // The next batch is copied while this one is used.
            if self.device.is_some()
                && let Poll::Ready(ahead) = self.prepared(BatchReader::next_if_filled)
            {
                self.reading().ahead = ahead;
            }
        }
        next
    }

    /// What the reader gives, made ready under no lock: labels are made by a function of the user.
    fn prepared(
        &self,
        next: impl FnOnce(&mut BatchReader) -> Poll<Option<LoadedBatch>>,
    ) -> Poll<Option<PyResult<Ready>>> {
        let mut reading = self.reading();
        let Some(reader) = &mut reading.reader else { return Poll::Ready(None) };
        let (next, state) = (next(reader), reader.state());
        drop(reading);
        next.map(|next| next.map(|batch| self.ready(batch, state)))
    }

    /// Reads the labels, and begins the copy.
    fn ready(&self, batch: LoadedBatch, state: LoadState) -> PyResult<Ready> {
        let LoadedBatch { number, epoch, in_epoch, mut buffer, arrays, mut parts, failures, .. } = batch;
        let mut failures: Vec<_> = failures.iter().map(failed).collect();
        let labels = match &self.labels {
            Some(labels) => {
                let bytes = buffer.as_mut_slice().map_err(|error| errors::exception(&error))?;
                Some(labels.of(&self.catalog, &self.decode, bytes, &arrays, &mut parts, &mut failures)?)
            }
            None => None,
        };
        let parts = parts.into_iter().map(|part| (part.sample, part.bytes.start, part.bytes.len(), part.start));
        let parts = parts.collect();
        let arrays = arrays.into_iter().map(|array| array.start).collect();
        let memory = match &self.device {
            Some(device) => Loaded::Device(device.copy(buffer)?),
            None => Loaded::Host(buffer),
        };
        Ok(Ready { number, epoch, in_epoch, memory, parts, arrays, labels, failures, state })
    }

    fn handed<'py>(&self, py: Python<'py>, ready: Ready) -> PyResult<Handed<'py>> {
        let Ready { number, epoch, in_epoch, memory, parts, arrays, labels, failures, .. } = ready;
        let buffer = match memory {
            Loaded::Host(buffer) => Bound::new(py, gets::buffer(py, buffer, &self.gets))?.into_any(),
            Loaded::Device(memory) => Bound::new(py, DeviceBuffer::over(memory))?.into_any(),
        };
        Ok((number, epoch, in_epoch, buffer, parts, arrays, labels, failures))
    }
}

#[pymethods]
impl Reader {
    /// The next batch; None at the end.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Handed<'py>>> {
        if self.process != std::process::id() {
            return Err(errors::ForkError::new_err(
                "this loader was made in a parent of this process: make one in the process that uses it, after the fork",
            ));
        }
        loop {
            let next = py.detach(|| self.take());
            lines::flush(py)?;
            match next {
                Poll::Ready(next) => return next.map(|ready| self.handed(py, ready?)).transpose(),
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// The state behind the batch that was handed out last.
    fn state(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.reading().state.map(|state| state.to_string()))
    }

    /// The state behind the last batch of the epochs before epoch number `end`.
    fn end_state(&self, py: Python<'_>, end: u64) -> Option<String> {
        let mut state = py.detach(|| self.reading().state)?;
        (state.epoch, state.batch) = (end, 0);
        Some(state.to_string())
    }

    /// Whether all batches were handed out.
    fn is_complete(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(self.reading().reader.as_ref().and_then(BatchReader::ended), Some(Ended::Complete)))
    }

    /// Ends the threads. What was handed out stays; the state stays as well.
    fn stop(&self, py: Python<'_>) {
        if self.process == std::process::id() {
            py.detach(|| {
                let mut reading = self.reading();
                if let Some(reader) = &mut reading.reader {
                    reader.stop();
                }
                reading.ahead.take()
            });
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let reading = std::mem::take(self.reading.get_mut().unwrap_or_else(PoisonError::into_inner));
        unlocked(move || drop(reading));
    }
}
