//! The threads that read, and the batches that they have filled, in order: the part that every load stands on.
//!
//! Owns the threads. Never sends a batch anywhere: [`Loader::run`](super::Loader::run) copies them to a destination, and
//! [`BatchReader`](super::BatchReader) hands them out.
//!
//! ```text
//!   filled batches, as workers finish them     early (kept until their turn)
//!         3 1 2                     ->         [1] [2] [3]
//! ```
//!
//! - **reading-I1**: batches come in the order of the plan, whichever worker finishes first.
//! - **reading-I2**: when this ends, its threads have ended and every buffer that was not taken is back in the pool.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pinpool_os::sync::plain::Mutex;

use super::batches::Batches;
use super::decoders::Decoders;
use super::open_files::OpenFiles;
use super::read_ahead::ReadAhead;
use super::run::Loader;
use super::summary::LoadError;
use super::worker::{FilledBatch, Workers};
use pinpool_os::fork::ForkGeneration;

#[derive(Debug)]
pub(super) struct Reading {
    workers: Arc<Workers>,
    threads: Vec<JoinHandle<()>>,
    /// `None` once it ends.
    filled: Option<Receiver<FilledBatch>>,
    early: BTreeMap<u64, FilledBatch>,
    next_number: u64,
    generation: ForkGeneration,
}

impl Reading {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If the system has not even one thread to give.
    pub(super) fn start(loader: &Loader) -> Result<Reading, LoadError> {
        let threads = loader.options.workers.get();
        let prefetch = loader.options.prefetch.map_or(threads.saturating_mul(2), NonZeroUsize::get);
        let (send, filled) = mpsc::channel();
        let mut reading = Reading::over(loader, prefetch as u64, filled);
        for number in 0..threads {
            let (send, workers) = (send.clone(), reading.workers.clone());
            let thread = thread::Builder::new().name(format!("pinpool-read-{number}"));
            match thread.spawn(move || workers.work(&send)) {
                Ok(thread) => reading.threads.push(thread),
                Err(error) if number == 0 => return Err(LoadError::NoThread(error)),
                // Fewer workers load the same batches.
                Err(_) => break,
            }
        }
        Ok(reading)
    }

    /// Batches that somebody else fills.
    pub(super) fn over(loader: &Loader, prefetch: u64, filled: Receiver<FilledBatch>) -> Reading {
        let batches = Mutex::new(Batches::new(&loader.catalog, &loader.options, &loader.start));
        let files = OpenFiles::default();
        let (loader, ahead, decoders) = (loader.clone(), ReadAhead::new(prefetch), Decoders::default());
        let next_number = loader.start.number;
        let workers = Workers { loader, ahead, files, decoders, batches };
        Reading {
            workers: Arc::new(workers),
            threads: Vec::new(),
            filled: Some(filled),
            early: BTreeMap::new(),
            next_number,
            generation: ForkGeneration::now(),
        }
    }

    /// Whether the load was stopped, or this is a child of `fork`, where it has no threads.
    pub(super) fn is_stopped(&self) -> bool {
        self.generation.is_stale() || self.workers.loader.stop.is_raised()
    }

    pub(super) fn ahead(&self) -> &ReadAhead {
        &self.workers.ahead
    }

    /// The next batch in order (reading-I1); `None` if none will come. Pending if `wait` passes before another batch is
    /// filled; without `wait` it never is.
    pub(super) fn next(&mut self, wait: Option<Duration>) -> Poll<Option<FilledBatch>> {
        let Some(filled) = &self.filled else { return Poll::Ready(None) };
        loop {
            if let Some(batch) = self.early.remove(&self.next_number) {
                self.next_number += 1;
                return Poll::Ready(Some(batch));
            }
            let batch = match wait {
                None => filled.recv().map_err(RecvTimeoutError::from),
                Some(wait) => filled.recv_timeout(wait),
            };
            match batch {
                Ok(batch) => drop(self.early.insert(batch.planned.number, batch)),
                Err(RecvTimeoutError::Timeout) => return Poll::Pending,
                Err(RecvTimeoutError::Disconnected) => return Poll::Ready(None),
            }
        }
    }

    /// Ends the threads and puts back what was not taken.
    pub(super) fn end(&mut self) {
        if self.generation.is_stale() {
            // A child of `fork` has neither the threads nor, it may be, the locks that they held.
            std::mem::forget((self.filled.take(), std::mem::take(&mut self.early), std::mem::take(&mut self.threads)));
            return;
        }
        self.ahead().close();
        // First, so that no worker waits for the memory of a batch that nobody will take.
        self.filled = None;
        self.early.clear();
        for thread in self.threads.drain(..) {
            // A worker that panicked has closed the read-ahead, and its batch is missing at the end.
            let _ = thread.join();
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.end();
    }
}
