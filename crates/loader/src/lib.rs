//! The reference loader: reads files into batches in pinned memory and copies them to a device.
//!
//! [`Loader::batches`] iterates over batches in host memory; [`Loader::run`] copies them to a [`Destination`]. The loader never
//! pins memory or prints, and copies bytes on the host only with [`LoadOptions::decode`]. The feature `cuda` (default) adds
//! `CudaDestination`, and `decode` adds `ImageDecoder`.
//!
//! ```text
//!                       Catalog            files, archives and their samples
//!                          |
//!                      batch_plan          the samples of each batch, in order
//!                          |
//!   +-------------- one batch at a time -----------+
//!   |  thread 0         thread 1         thread 2  |     pool.get(len): a pinned buffer
//!   |  pread            pread            pread     |     file -> buffer.wait_slice_mut(), checksum on the way
//!   +----------------------------------------------+
//!                    reader_threads                      in order, at most `read_ahead` ahead
//!               +----------+----------+
//!               |                  transfer              buffer.copy_to(stream, memory): takes the buffer
//!               |                lane 0 | lane 1         completion.wait(): the buffer has returned
//!               |                     |
//!          BatchReader           Destination             a GPU or a host sink; checksums of the copied bytes
//! ```
//!
//! ```
//! use pinpool::Pool;
//! use pinpool_loader::{Catalog, Failure, LoadOptions, Loader, Observer, SinkDestination};
//!
//! struct PrintFailures;
//!
//! impl Observer for PrintFailures {
//!     fn on_failure(&mut self, failure: &Failure) {
//!         eprintln!("{failure}");
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pool = Pool::builder().build()?;
//! let catalog = Catalog::from_paths(&["src"]);
//! let options = LoadOptions { verify: true, ..LoadOptions::default() };
//! // With the feature `cuda` and a GPU: `CudaDestination::new(0, 2)?`.
//! let mut destination = SinkDestination::new(2)?;
//! let summary = Loader::new(&pool, &catalog, options).run(&mut destination, &mut PrintFailures).into_result()?;
//! assert_eq!(summary.bytes, catalog.len_bytes());
//! println!("{} files, {:.1} GB/s", summary.files, summary.gb_per_s());
//! # Ok(())
//! # }
//! ```
//!
//! Batches in host memory, and the state from which a later process can continue:
//!
//! ```
//! use pinpool::Pool;
//! use pinpool_loader::{Catalog, LoadOptions, Loader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let catalog = Catalog::from_paths(&["src"]);
//! let loader = Loader::new(&Pool::builder().build()?, &catalog, LoadOptions::default());
//! let mut batches = loader.batches()?;
//! while let Some(batch) = batches.next() {
//!     for failure in &batch.failures {
//!         eprintln!("skipped {failure}");
//!     }
//!     for part in &batch.parts {
//!         let bytes = &batch.buffer.wait_slice()?[part.range.clone()];
//!         println!("{}: {} bytes", catalog.name(part.sample), bytes.len());
//!     }
//!     println!("{:?}", batches.state()); // `loader.resume_at(state)?` loads the rest
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - **loader-I1**: with `batch_bytes` and without `decode`, a run holds at most `(read_ahead + lanes) * batch_bytes` of the
//!   pool, for files of any length: `read_ahead` buffers ahead of the copies and one for each lane of the destination, each
//!   rounded up to a size class (by less than an eighth; above 16 MiB by less than 2 MiB or a 64th). The destination allocates
//!   another `lanes * batch_bytes`. A [`BatchReader`] holds at most `read_ahead` buffers that `next` has not yet yielded. Each open
//!   compressed file adds a decompressor.
//! - **loader-I2**: a sample that cannot be loaded is skipped. [`Loader::run`] reports the first failure of each file to the
//!   [`Observer`]. A [`BatchReader`] returns each failure with its batch, in [`LoadedBatch::failures`].

mod archive;
mod batch_plan;
mod catalog;
mod compressed;
#[cfg(feature = "cuda")]
mod cuda_destination;
mod decode;
mod destination;
mod failure;
mod listing;
mod loader;
mod options;
mod state;
mod stop;
mod summary;
mod synthetic;

pub use self::batch_plan::{LoadedBatch, LoadedPart};
pub use self::catalog::{Catalog, DataFile, DataOrigin, FileRange, Sample};
pub use self::compressed::Compression;
#[cfg(feature = "cuda")]
pub use self::cuda_destination::CudaDestination;
pub use self::decode::{Decode, DecodedField};
#[cfg(feature = "decode")]
pub use self::decode::{Fit, ImageDecoder, Layout, PIXELS_MAX};
pub use self::destination::{Destination, SinkDestination};
pub use self::failure::{Failure, FailureCause};
pub use self::listing::ListOptions;
pub use self::loader::{BatchReader, Loader, TimedOut};
pub use self::options::{LoadOptions, Rank};
pub use self::state::{LoadState, StateError};
pub use self::stop::StopFlag;
pub use self::summary::{ArrivedBatch, LoadError, LoadOutcome, LoadSummary, Observer};
