//! The reference loader: files in, batches on a device out, on nothing but the public pool.
//!
//! Shows how a pool of pinned memory is used. Moves bytes from files to a [`Destination`]. Never pins memory,
//! never prints, and never copies a byte on the host.
//!
//! ```text
//!                       Catalog            files, containers and their samples
//!                          |
//!                       batches            which samples go together, in what order
//!                          |
//!   +-------------- one batch at a time -----------+
//!   |  worker 0         worker 1         worker 2  |     pool.get(len): a pinned buffer
//!   |  pread            pread            pread     |     file -> buffer.as_mut_slice(), checksum on the way
//!   +----------------------------------------------+
//!                          |  in order, at most `prefetch` ahead
//!                       transfer                         buffer.copy_to(stream, memory): takes the buffer
//!                     lane 0 | lane 1                    completion.is_done(): the buffer is back in the pool
//!                          |
//!                     Destination          a GPU, or a host sink; checksums of what arrived
//! ```
//!
//! ```
//! use pinpool::Pool;
//! use pinpool::loader::{Catalog, Failure, LoadOptions, Loader, Observer, SinkDestination, StopFlag};
//!
//! struct PrintFailures;
//!
//! impl Observer for PrintFailures {
//!     fn failed(&mut self, failure: &Failure) {
//!         eprintln!("{failure}");
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = Pool::from_env()?;
//! let catalog = Catalog::from_paths(&["src"], false, &StopFlag::new());
//! let mut options = LoadOptions::default();
//! options.verify = true;
//! // With the feature `cuda` and a GPU: `CudaDestination::new(0, 2)?`.
//! let mut destination = SinkDestination::new(2)?;
//! let summary = Loader::new(&pool, &catalog, options).run(&mut destination, &mut PrintFailures);
//! assert!(summary.is_clean());
//! assert_eq!(summary.bytes, catalog.len_bytes());
//! println!("{} files, {:.1} GB/s", summary.files, summary.gb_per_s());
//! # Ok(())
//! # }
//! ```
//!
//! - **loader-I1**: a run holds at most `prefetch` buffers ahead of the copies and one for each lane of the destination. Each
//!   has at most `batch_bytes`, rounded up to a class of the pool (less than an eighth more). So a run holds at most
//!   `(prefetch + lanes) * batch_bytes` of the pool, however long a file is. The destination has `lanes * batch_bytes` of its own.
//! - **loader-I2**: what cannot be loaded is reported once to the [`Observer`], counted and skipped; the rest arrives.

mod batches;
mod catalog;
mod container;
#[cfg(feature = "cuda")]
mod cuda_destination;
mod destination;
mod failure;
mod listing;
mod open_files;
mod read;
mod read_ahead;
mod run;
mod summary;
mod synthetic;
mod transfer;
mod worker;

use std::num::NonZeroUsize;
use std::sync::mpsc;
use std::thread;

use parking_lot::Mutex;

pub use self::catalog::{Catalog, DataFile, DataOrigin, FileRange, Sample};
#[cfg(feature = "cuda")]
pub use self::cuda_destination::CudaDestination;
pub use self::destination::{Destination, SinkDestination};
pub use self::failure::{Failure, FailureCause, SafetensorsError, TarError};
pub use self::run::{LoadOptions, Loader, StopFlag};
pub use self::summary::{BatchDone, Ended, LoadError, LoadSummary, Observer};

use self::batches::Batches;
use self::open_files::OpenFiles;
use self::read_ahead::ReadAhead;
use self::transfer::Transfer;
use self::worker::Workers;

impl Loader<'_> {
    /// Loads the catalog into `destination` and reports to `observer`.
    ///
    /// The calling thread copies; [`LoadOptions::workers`] threads read, and end with this call. Failures are in the summary
    /// and never a panic. The failures of the catalog are reported first.
    pub fn run(&self, destination: &mut dyn Destination, observer: &mut dyn Observer) -> LoadSummary {
        let unlisted = &self.catalog.failures;
        let is_over = self.options.strict && !unlisted.is_empty();
        let unlisted = if is_over { &unlisted[..1] } else { unlisted };
        for failure in unlisted {
            observer.failed(failure);
        }
        let mut summary = if is_over {
            LoadSummary { ended: Ended::Strict, ..LoadSummary::default() }
        } else {
            let workers = self.options.workers.get();
            let prefetch = self.options.prefetch.map_or(workers.saturating_mul(2), NonZeroUsize::get);
            let ahead = ReadAhead::new(prefetch as u64);
            let batches = Mutex::new(Batches::new(self.catalog, &self.options));
            let reading = Workers { loader: self, ahead: &ahead, files: OpenFiles::default(), batches };
            let transfer = Transfer::new(self, &ahead, destination, observer);
            let summary = run_threads(&reading, transfer, workers);
            // Returns the buffers of the last copies to the pool, which no later get may do.
            self.pool.poll();
            summary
        };
        summary.failed_files += unlisted.len() as u64;
        summary
    }
}

fn run_threads(workers: &Workers<'_>, transfer: Transfer<'_>, threads: usize) -> LoadSummary {
    let (send, filled) = mpsc::channel();
    thread::scope(|scope| {
        for number in 0..threads {
            let send = send.clone();
            let thread = thread::Builder::new().name(format!("pinpool-read-{number}"));
            match thread.spawn_scoped(scope, move || workers.work(&send)) {
                Ok(_) => {}
                Err(error) if number == 0 => {
                    let ended = Ended::Failed(LoadError::NoThread(error));
                    return LoadSummary { ended, ..LoadSummary::default() };
                }
                // Fewer workers load the same batches.
                Err(_) => break,
            }
        }
        drop(send);
        transfer.run(&filled)
    })
}
