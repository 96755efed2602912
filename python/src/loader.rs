//! The loader behind the Python package `pinpool_loader`: files, and batches read ahead.
//!
//! ```text
//!   SampleCatalog ──begin──▶ Reader ──next──▶ Buffer, and the position of each sample
//! ```
//!
//! The GIL is not held while files are listed or read, and signals interrupt the wait.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use pinpool_loader::{
    BatchReader, Catalog, DecodedField, Failure, FailureCause, ListOptions, LoadOptions, LoadedBatch, Loader, Rank,
    StopFlag,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::{IntoPyObjectExt, prelude::*};

use crate::buffer::Buffer;
use crate::decode::{self, Decoder};
use crate::errors;
use crate::handle::{self, PoolHandle};
use crate::interrupts::wait_interruptibly;
use crate::labels::Labels;
use crate::pool::PoolCore;
use crate::without_gil::without_gil;

/// The text of a failure, and the exception if the pool had no memory.
type Failed = (String, Option<Py<PyAny>>);
/// Number of the sample, first byte in the buffer, length, and first byte in the sample.
type Part = (usize, usize, usize, u64);
/// Index overall, epoch, index in the epoch, buffer, parts, first byte of each array, labels if a field has them, failures.
type RawBatch = (u64, u64, u64, Buffer, Vec<Part>, Vec<usize>, Option<Vec<Py<PyAny>>>, Vec<Failed>);

/// The files, their samples and the options.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct SampleCatalog {
    // With the tag of the Python object; dropped before `handle`.
    pool: pinpool::Pool,
    handle: Arc<PoolHandle>,
    catalog: Catalog,
    options: LoadOptions,
    labels: Option<Arc<Labels>>,
}

/// Batches read ahead.
#[pyclass(frozen, module = "pinpool._pinpool")]
pub struct Reader {
    // Declared before the pool, so that the threads end first. `None` only during the drop.
    reader: Mutex<Option<BatchReader>>,
    handle: Arc<PoolHandle>,
    pid: u32,
    catalog: Catalog,
    decode: Vec<DecodedField>,
    labels: Option<Arc<Labels>>,
}

/// Runs `call` on a dedicated thread and checks for signals meanwhile. An interrupt sets `stop` and waits for the thread.
fn run_on_thread<T: Send>(py: Python<'_>, stop: &StopFlag, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    thread::scope(|scope| {
        let (send, mut done) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("pinpool-list".to_owned());
        let spawned = thread.spawn_scoped(scope, move || drop(send.send(call())));
        let no_thread = |error| PyRuntimeError::new_err(format!("cannot start a thread to list the files: {error}"));
        let listing = spawned.map_err(no_thread)?;
        let done = &mut done;
        let listed = wait_interruptibly(py, None, move |wait| match done.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => Ok(None),
            ended => ended.map(Some),
        });
        if listed.is_err() {
            stop.raise();
        }
        // Joined here without the GIL. The end of the scope would join while it holds the GIL.
        let _ = py.detach(|| listing.join());
        listed?.ok().flatten().ok_or_else(|| PyRuntimeError::new_err("the listing has failed"))
    })
}

/// Returns the text of a failure, and the exception if the pool had no memory.
fn text_and_error(py: Python<'_>, failure: &Failure) -> Failed {
    let FailureCause::Pool(error) = &failure.cause else { return (failure.to_string(), None) };
    let raised = errors::with_text(error, (failure.to_string(), error.report()));
    (failure.to_string(), Some(raised.into_value(py).into_any()))
}

#[pymethods]
impl SampleCatalog {
    /// Lists `paths`. 0 means no limit for `batch_size` and `batch_bytes`, and the default for `num_threads` and `read_ahead`.
    #[new]
    #[pyo3(signature = (pool, paths, open_archives, batch_size, batch_bytes, num_threads, read_ahead, seed, rank, world_size, even, drop_last, labels=None, decode=vec![]))]
    #[allow(clippy::too_many_arguments)] // One call, by keyword.
    fn new(
        py: Python<'_>,
        pool: &PoolCore,
        paths: Vec<PathBuf>,
        open_archives: bool,
        batch_size: u64,
        batch_bytes: u64,
        num_threads: usize,
        read_ahead: usize,
        seed: Option<u64>,
        rank: u64,
        world_size: u64,
        even: bool,
        drop_last: bool,
        labels: Option<(String, Py<PyAny>)>,
        decode: Vec<(Vec<String>, PyRef<'_, Decoder>)>,
    ) -> PyResult<Self> {
        let Some(this_rank) = Rank::new(rank, world_size) else {
            return Err(PyValueError::new_err(format!("rank must be less than world_size={world_size}, not {rank}")));
        };
        let options = LoadOptions {
            batch_samples: NonZeroU64::new(batch_size),
            batch_bytes: NonZeroU64::new(batch_bytes),
            threads: NonZeroUsize::new(num_threads).unwrap_or(LoadOptions::default().threads),
            read_ahead: NonZeroUsize::new(read_ahead),
            shuffle_seed: seed,
            rank: Some(this_rank),
            even,
            drop_last,
            decode: decode::fields(decode),
            ..LoadOptions::default()
        };
        let labels = labels.map(|(field, parse)| Arc::new(Labels { field, parse }));
        let mut listing = ListOptions::default();
        listing.open_archives = open_archives;
        let catalog = run_on_thread(py, &listing.stop, || listing.from_paths(&paths))?;
        Ok(Self { pool: pool.tagged_pool()?.clone(), handle: pool.handle.clone(), catalog, options, labels })
    }

    /// Descriptions of files that could not be listed.
    fn failures(&self) -> Vec<String> {
        self.catalog.failures().iter().map(Failure::to_string).collect()
    }

    /// Number of samples.
    fn __len__(&self) -> usize {
        self.catalog.samples().len()
    }

    /// Number of files that could be listed.
    fn num_files(&self) -> usize {
        self.catalog.files().len()
    }

    /// The first compressed file that was opened.
    fn first_compressed(&self) -> Option<String> {
        self.catalog.files().iter().find(|file| file.compression.is_some()).map(|file| file.origin.to_string())
    }

    /// The archives and compressed files that were listed as plain files.
    fn unopened(&self) -> Vec<String> {
        self.catalog.unopened_files().map(|path| path.display().to_string()).collect()
    }

    /// Why the first file that lacks a field to decode cannot be decoded. Members of archives are not checked.
    fn undecodable(&self) -> Option<String> {
        self.catalog.first_undecodable(&self.options.decode).map(|failure| failure.to_string())
    }

    /// The names of the directories of plain files, sorted, and whether a sample is a member of an archive.
    fn classes(&self) -> (Vec<String>, bool) {
        let samples = self.catalog.samples();
        let plain = (0..samples.len()).filter(|&sample| samples[sample].member.is_none());
        let names: BTreeSet<_> = plain.map(|sample| self.catalog.label(sample).into_owned()).collect();
        (names.into_iter().collect(), samples.iter().any(|sample| sample.member.is_some()))
    }

    /// A hash of the names and lengths of all samples, independent of the loader's settings.
    fn fingerprint(&self, py: Python<'_>) -> String {
        let loader = Loader::new(&self.pool, &self.catalog, LoadOptions::default());
        py.detach(|| format!("{:016x}", loader.start_state().plan_hash))
    }

    /// Bytes of all samples.
    fn nbytes(&self) -> u64 {
        self.catalog.len_bytes()
    }

    /// Bytes of one sample.
    fn sample_bytes(&self, sample: usize) -> Option<u64> {
        self.catalog.samples().get(sample).map(|sample| sample.len_bytes)
    }

    fn names(&self, indices: Vec<usize>) -> Vec<String> {
        indices.into_iter().map(|sample| self.catalog.name(sample)).collect()
    }

    fn labels(&self, indices: Vec<usize>) -> Vec<String> {
        indices.into_iter().map(|sample| self.catalog.label(sample).into_owned()).collect()
    }

    /// The undecoded fields of each sample: name, first byte in its part of a batch, end.
    fn fields(&self, indices: Vec<usize>) -> Vec<Vec<(String, u64, u64)>> {
        let fields = |sample: usize| {
            let sample = self.catalog.samples().get(sample).into_iter();
            let fields = sample.flat_map(|sample| sample.kept_fields(&self.options.decode));
            fields.map(|(name, bytes)| (name.to_owned(), bytes.start, bytes.end)).collect()
        };
        indices.into_iter().map(fields).collect()
    }

    /// Number of batches of an epoch.
    fn num_batches(&self, py: Python<'_>, epoch: u64) -> u64 {
        let loader = self.loader(epoch.saturating_add(1));
        py.detach(|| loader.batches_in_epoch(epoch))
    }

    /// Starts reading from `position` (epoch, index in the epoch, index overall) to the end of epoch `epochs - 1`.
    fn begin(&self, py: Python<'_>, epochs: u64, position: (u64, u64, u64)) -> PyResult<Reader> {
        let loader = self.loader(epochs);
        let reader = py.detach(|| {
            let mut start = loader.start_state();
            (start.epoch, start.index_in_epoch, start.index_overall) = position;
            let loader = loader.resume_at(start).map_err(|error| PyValueError::new_err(error.to_string()))?;
            loader.batches().map_err(|error| PyRuntimeError::new_err(error.to_string()))
        })?;
        Ok(Reader {
            reader: Mutex::new(Some(reader)),
            handle: self.handle.clone(),
            pid: std::process::id(),
            catalog: self.catalog.clone(),
            decode: self.options.decode.clone(),
            labels: self.labels.clone(),
        })
    }
}

impl SampleCatalog {
    fn loader(&self, epochs: u64) -> Loader {
        let mut options = self.options.clone();
        options.epochs = epochs;
        Loader::new(&self.pool, &self.catalog, options)
    }
}

impl Reader {
    fn reader(&self) -> MutexGuard<'_, Option<BatchReader>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raw_batch(&self, py: Python<'_>, batch: LoadedBatch) -> PyResult<RawBatch> {
        let LoadedBatch { index_overall, epoch, index_in_epoch, mut buffer, arrays, mut parts, failures, .. } = batch;
        let mut failures: Vec<_> = failures.iter().map(|failure| text_and_error(py, failure)).collect();
        let labels = self.labels.as_ref().map(|labels| {
            let bytes = buffer.wait_slice_mut().map_err(|error| errors::exception(&error))?;
            labels.take_labels(py, &self.catalog, &self.decode, bytes, &arrays, &mut parts, &mut failures)
        });
        let labels = labels.transpose()?;
        let parts = parts.into_iter().map(|part| (part.sample, part.range.start, part.range.len(), part.sample_offset));
        let arrays = arrays.into_iter().map(|array| array.start).collect();
        let buffer = handle::buffer(buffer, &self.handle);
        Ok((index_overall, epoch, index_in_epoch, buffer, parts.collect(), arrays, labels, failures))
    }
}

#[pymethods]
impl Reader {
    /// The next batch; None at the end, and False if there is none within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        if self.pid != std::process::id() {
            return Err(errors::ForkError::new_err(
                "this loader was created in a parent of this process: create one after the fork, in the process that uses it",
            ));
        }
        let Ok(next) = wait_interruptibly(py, timeout.map(std::time::Duration::from_secs_f64), |wait| {
            Ok::<_, Infallible>(self.reader().as_mut().map_or(Ok(None), |reader| reader.next_timeout(wait)).ok())
        })?;
        let Some(next) = next else { return false.into_py_any(py).map(Some) };
        next.map(|batch| self.raw_batch(py, batch)?.into_py_any(py)).transpose()
    }

    /// Ends the threads. Batches that were handed out stay valid.
    fn stop(&self, py: Python<'_>) {
        if self.pid == std::process::id() {
            py.detach(|| self.reader().iter_mut().for_each(BatchReader::stop));
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let reader = self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        without_gil(move || drop(reader));
    }
}

/// The number of threads of a single rank: as many as the process can run at once, within its CPU quota.
#[pyfunction]
pub(crate) fn _default_threads() -> usize {
    LoadOptions::default().threads.get()
}
