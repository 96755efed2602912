//! The reference loader: files in, batches on a device out, on nothing but the public pool.
//!
//! Shows how a pool of pinned memory is used. Owns the way of the bytes from files to a [`Destination`]. Never pins memory,
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
//! - **loader-I1**: a run holds at most `prefetch` buffers ahead of the copies and one for each lane of the destination.
//! - **loader-I2**: what cannot be loaded is reported once to the [`Observer`], counted and skipped; the rest arrives.

mod batches;
mod catalog;
mod container;
#[cfg(feature = "cuda")]
mod cuda_destination;
mod destination;
mod failure;
mod listing;
mod read;
mod read_ahead;
mod run;
mod summary;
mod synthetic;
mod transfer;
mod worker;

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
            let ahead = ReadAhead::new(self.options.prefetch() as u64);
            let batches = Mutex::new(Batches::new(self.catalog, &self.options));
            let workers = Workers { loader: self, ahead: &ahead, batches };
            let transfer = Transfer::new(self, &ahead, destination, observer);
            let summary = run_threads(&workers, transfer, self.options.workers.get());
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::num::{NonZeroU64, NonZeroUsize};

    use super::container::testing::{safetensors_file, tar_file};
    use super::*;
    use crate::{Completion, Error, PinnedBuf, Pool};

    /// A sink that refuses or corrupts one batch.
    struct FaultyDestination {
        sink: SinkDestination,
        sent: u64,
        /// Number of the batch on each lane.
        on_lane: Vec<u64>,
        refuse: Option<u64>,
        /// Flip one bit of this byte of this batch, after it arrived.
        flip: Option<(u64, usize)>,
    }

    impl FaultyDestination {
        fn new() -> FaultyDestination {
            let sink = SinkDestination::new(2).unwrap();
            FaultyDestination { sink, sent: 0, on_lane: vec![0; 2], refuse: None, flip: None }
        }
    }

    impl Destination for FaultyDestination {
        fn describe(&self) -> String {
            "faulty".to_string()
        }

        fn lanes(&self) -> usize {
            self.sink.lanes()
        }

        fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error> {
            self.on_lane[lane] = self.sent;
            self.sent += 1;
            if self.refuse == Some(self.on_lane[lane]) {
                return Err(Error::device("the device is gone"));
            }
            self.sink.send(lane, batch)
        }

        fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
            let flip = self.flip.filter(|(batch, _)| *batch == self.on_lane[lane]);
            self.sink.read_back(lane, &mut |bytes| {
                let mut bytes = bytes.to_vec();
                if let Some((_, byte)) = flip {
                    bytes[byte] ^= 1;
                }
                read(&bytes);
            })
        }
    }

    /// Records every call, and raises a flag at a given batch.
    #[derive(Debug, Default)]
    struct RecordingObserver {
        done: Vec<BatchDone>,
        failed: Vec<String>,
        stop_at: Option<(u64, StopFlag)>,
    }

    impl Observer for RecordingObserver {
        fn batch_done(&mut self, done: &BatchDone) {
            self.done.push(*done);
            if let Some((batch, stop)) = &self.stop_at
                && *batch == done.batch
            {
                stop.raise();
            }
        }

        fn failed(&mut self, failure: &Failure) {
            self.failed.push(failure.to_string());
        }
    }

    type Ran = (LoadSummary, RecordingObserver);

    fn pool(max_bytes: u64) -> Pool {
        Pool::builder().without_env().backend(crate::Backend::Heap).max_bytes(max_bytes).build().unwrap()
    }

    /// A directory of `files` files of `len` bytes, each filled with its number, and its catalog.
    fn numbered_files(files: u8, len: usize) -> (tempfile::TempDir, Catalog) {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..files {
            fs::write(dir.path().join(format!("{number:02}")), vec![number; len]).unwrap();
        }
        let catalog = Catalog::from_paths(&[dir.path()], false, &StopFlag::new());
        (dir, catalog)
    }

    /// Three workers, batches of four samples, verified.
    fn options() -> LoadOptions {
        LoadOptions {
            workers: NonZeroUsize::new(3).unwrap(),
            prefetch: NonZeroUsize::new(4),
            batch_samples: NonZeroU64::new(4),
            batch_bytes: None,
            verify: true,
            ..LoadOptions::default()
        }
    }

    fn run_in(pool: &Pool, catalog: &Catalog, options: LoadOptions, to: &mut FaultyDestination) -> Ran {
        let mut observer = RecordingObserver::default();
        let summary = Loader::new(pool, catalog, options).run(to, &mut observer);
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.in_flight), (0, 0), "every buffer is back: {stats:?}");
        (summary, observer)
    }

    fn run(catalog: &Catalog, options: LoadOptions, to: &mut FaultyDestination) -> Ran {
        run_in(&pool(1 << 30), catalog, options, to)
    }

    #[test]
    fn everything_arrives_in_every_epoch_verified() {
        let catalog = Catalog::synthetic(22, 5);
        let options = LoadOptions { epochs: 3, shuffle_seed: Some(1), ..options() };
        let (summary, observer) = run(&catalog, options, &mut FaultyDestination::new());
        assert!(summary.is_clean(), "{summary:?} {:?}", observer.failed);
        assert_eq!((summary.epochs, summary.files, summary.samples), (3, 66, 66));
        assert_eq!(
            (summary.batches, summary.verified_batches),
            (18, 18),
            "six batches an epoch, the last of two files"
        );
        assert_eq!(summary.bytes, 3 * catalog.len_bytes());
        assert_eq!(observer.done.iter().map(|done| done.bytes).sum::<u64>(), summary.bytes);
        assert!((1..=2).contains(&summary.max_in_flight_batches));
    }

    #[test]
    fn containers_count_as_one_file_and_their_members_as_samples() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
        put("a.tar", &tar_file(&[("0.jpg", b"abc"), ("0.cls", b"1"), ("1.jpg", b""), ("2.jpg", b"de")]));
        put("b.safetensors", &safetensors_file(&[("w", 64), ("v", 8)]));
        put("c.tar", &tar_file(&[]));
        put("d", b"");
        put("e.tar", b"no tar");
        let catalog = Catalog::from_paths(&[dir.path()], true, &StopFlag::new());
        let options = LoadOptions { epochs: 2, ..options() };
        let (summary, observer) = run(&catalog, options, &mut FaultyDestination::new());
        assert_eq!((summary.files, summary.samples, summary.bytes), (2 * 4, 2 * 6, 2 * 78));
        assert_eq!((summary.failed_files, observer.failed.len()), (1, 1), "named once: {:?}", observer.failed);
        assert_eq!(summary.batches, summary.verified_batches);
        assert!(!summary.is_clean());
    }

    #[test]
    fn any_number_of_epochs_over_empty_containers_is_counted_without_overflow() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.tar", "b.tar"] {
            fs::write(dir.path().join(name), tar_file(&[])).unwrap();
        }
        let catalog = Catalog::from_paths(&[dir.path()], true, &StopFlag::new());
        let options = LoadOptions { epochs: u64::MAX, ..options() };
        let (summary, _) = run(&catalog, options, &mut FaultyDestination::new());
        assert_eq!((summary.files, summary.batches), (u64::MAX, 0));
    }

    #[test]
    fn a_flipped_bit_is_found_and_named() {
        let catalog = Catalog::synthetic(12, 5);
        let mut destination = FaultyDestination::new();
        // The third file of the second batch.
        let before = catalog.samples[4].len_bytes + catalog.samples[5].len_bytes;
        destination.flip = Some((1, usize::try_from(before).unwrap() + 700));
        let (summary, observer) = run(&catalog, options(), &mut destination);
        assert_eq!((summary.batches, summary.verified_batches, summary.failed_files), (3, 2, 1));
        assert_eq!((summary.files, summary.samples), (11, 11));
        assert_eq!(observer.failed.len(), 1);
        assert!(observer.failed[0].starts_with("batch 1, synthetic-5/00000006: "), "{:?}", observer.failed);
        assert!(observer.failed[0].contains("differ at the destination"), "{:?}", observer.failed);
    }

    #[test]
    fn without_verify_nothing_is_compared() {
        let catalog = Catalog::synthetic(12, 5);
        let mut destination = FaultyDestination::new();
        destination.flip = Some((1, 0));
        let options = LoadOptions { verify: false, ..options() };
        let (summary, _) = run(&catalog, options, &mut destination);
        assert_eq!((summary.batches, summary.verified_batches, summary.failed_files), (3, 0, 0));
    }

    #[test]
    fn a_ceiling_of_one_batch_slows_the_run_but_does_not_end_it() {
        let (_dir, catalog) = numbered_files(40, 50_000);
        // A batch is 200,000 bytes, so 262,144 in its class.
        let pool = pool(300_000);
        let (summary, observer) = run_in(&pool, &catalog, options(), &mut FaultyDestination::new());
        assert!(summary.is_clean(), "{summary:?} {:?}", observer.failed);
        assert_eq!((summary.batches, summary.verified_batches), (10, 10));
        assert!(pool.stats().peak_pinned_bytes <= 300_000);
    }

    #[test]
    fn a_run_holds_no_more_buffers_than_prefetch_and_lanes_allow() {
        let (_dir, catalog) = numbered_files(100, 100);
        let pool = pool(1 << 30);
        let options = LoadOptions { batch_samples: NonZeroU64::new(1), epochs: 5, ..options() };
        let (summary, _) = run_in(&pool, &catalog, options, &mut FaultyDestination::new());
        assert_eq!(summary.verified_batches, 500);
        // All buffers are of one class, so there are as many allocations as buffers at once: four ahead and two on lanes.
        let allocs = pool.stats().underlying.allocs;
        assert!(allocs <= 6, "{allocs}");
    }

    #[test]
    fn a_batch_beyond_the_ceiling_is_skipped_and_the_rest_arrives() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), [1; 1000]).unwrap();
        fs::write(dir.path().join("b"), vec![2; 3_000_000]).unwrap();
        fs::write(dir.path().join("c"), [3; 1000]).unwrap();
        fs::File::create(dir.path().join("d")).unwrap().set_len(1 << 42).unwrap();
        let catalog = Catalog::from_paths(&[dir.path()], false, &StopFlag::new());
        let options = LoadOptions { batch_samples: NonZeroU64::new(1), ..options() };
        let (summary, observer) = run_in(&pool(2_000_000), &catalog, options, &mut FaultyDestination::new());
        assert_eq!((summary.files, summary.failed_files, summary.verified_batches), (2, 2, 2));
        assert!(observer.failed[0].starts_with(&dir.path().join("b").display().to_string()), "{:?}", observer.failed);
        assert!(observer.failed[0].contains("PINPOOL_MAX_BYTES"), "{:?}", observer.failed);
    }

    #[test]
    fn a_strict_run_ends_at_the_first_failure() {
        let (dir, catalog) = numbered_files(40, 100);
        for number in 12..40 {
            fs::write(dir.path().join(format!("{number:02}")), b"short").unwrap();
        }
        let options = LoadOptions { strict: true, ..options() };
        let (summary, observer) = run(&catalog, options.clone(), &mut FaultyDestination::new());
        assert!(matches!(summary.ended, Ended::Strict), "{summary:?}");
        assert_eq!((summary.batches, summary.files), (3, 12), "what came before has arrived");
        assert!(observer.failed[0].contains("/12: truncated: 5 of the 100 bytes"), "{:?}", observer.failed);

        let missing = Catalog::from_paths(
            &[dir.path().join("missing"), dir.path().join("gone"), dir.path().into()],
            false,
            &StopFlag::new(),
        );
        let (summary, observer) = run(&missing, options, &mut FaultyDestination::new());
        assert_eq!((observer.failed.len(), summary.failed_files, summary.batches), (1, 1, 0));
    }

    #[test]
    fn a_stop_ends_the_run_with_what_has_arrived() {
        let catalog = Catalog::synthetic(1000, 5);
        let (pool, stop) = (pool(1 << 30), StopFlag::new());
        let mut observer = RecordingObserver { stop_at: Some((3, stop.clone())), ..RecordingObserver::default() };
        let options = LoadOptions { batch_samples: NonZeroU64::new(1), ..options() };
        let loader = Loader::new(&pool, &catalog, options).stop_on(&stop);
        let summary = loader.run(&mut FaultyDestination::new(), &mut observer);
        assert!(matches!(summary.ended, Ended::Stopped), "{summary:?}");
        // Copies in flight complete: at most one on each lane.
        assert!((4..=6).contains(&summary.batches), "{summary:?}");
        assert_eq!(summary.verified_batches, summary.batches);
        assert_eq!(summary.failed_files, 0);
    }

    #[test]
    fn a_destination_that_refuses_ends_the_run_and_names_the_batch() {
        let catalog = Catalog::synthetic(40, 5);
        let mut destination = FaultyDestination::new();
        destination.refuse = Some(2);
        let (summary, observer) = run(&catalog, options(), &mut destination);
        let Ended::Failed(error) = &summary.ended else { panic!("{summary:?}") };
        assert!(error.to_string().contains("the device is gone"), "{error}");
        assert_eq!((summary.batches, summary.files, summary.failed_files), (2, 8, 4));
        assert!(
            observer.failed[0].starts_with("batch 2 (4 samples, the first synthetic-5/00000008): "),
            "{observer:?}"
        );
    }
}
