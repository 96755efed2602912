//! The reference loader: files in, batches on a device out, on nothing but the public pool.
//!
//! This is the room to read for how a pool of pinned memory is used. It owns the way of the bytes from files to a
//! [`Destination`]; it never pins, never prints, and never copies a byte twice on the host.
//!
//! ```text
//!                       Catalog            what there is: files, containers, samples
//!                          |
//!                       Batches            which samples go together, in what order
//!                          |
//!   +------------- one claim at a time ------------+
//!   |  worker 0         worker 1         worker 2  |     pool.get(len): a pinned buffer
//!   |  pread            pread            pread     |     file -> buffer.as_mut_slice(), checksum on the way
//!   +----------------------------------------------+
//!                          |  in order, at most `prefetch` ahead
//!                       courier                          buffer.copy_to(stream, memory): the buffer goes along
//!                     lane 0 | lane 1                    completion.is_done(): and is back in the pool
//!                          |
//!                     Destination          a GPU, or a sink that stands for one; checksums compared behind it
//! ```
//!
//! I1. A run holds at most `prefetch` buffers ahead of the copies and one for each lane of the destination.
//! I2. Whatever cannot be loaded is named once to the [`Observer`], counted, and left out; the rest arrives.

pub mod catalog;
mod container;
pub mod destination;
pub mod failure;
pub mod plan;
mod read;
mod stop;
pub mod summary;
mod synthetic;
mod transfer;
pub mod walk;
mod window;
mod worker;

use std::num::NonZeroUsize;
use std::thread;

use crossbeam::channel;

pub use catalog::Catalog;
pub use destination::Destination;
pub use failure::Failure;
pub use stop::Stop;
pub use summary::{Ended, Outcome};

use self::plan::{Batches, Cut};
use self::transfer::Courier;
use self::window::Window;
use self::worker::Bench;
use crate::Pool;
use crate::sync::plain::Mutex;

/// How a catalogue is loaded.
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads that read.
    pub workers: NonZeroUsize,
    /// Batches that may be read or ready before they are sent.
    pub prefetch: NonZeroUsize,
    /// When a batch is full.
    pub cut: Cut,
    /// Passes over the catalogue.
    pub epochs: u64,
    /// Each epoch in an order of its own, drawn from this seed.
    pub shuffle_seed: Option<u64>,
    /// Whether what arrived is compared with what was read.
    pub verify: bool,
    /// Whether the first failure ends the run.
    pub strict: bool,
}

/// Hears of a run while it goes on, on the thread that called [`Loader::run`].
pub trait Observer {
    /// A batch arrived.
    fn landed(&mut self, landed: &Landed);

    /// Something was left out.
    fn failed(&mut self, failure: &Failure);
}

/// A batch that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Landed {
    /// Its number, counted over the run.
    pub batch: u64,
    /// Samples of it that arrived.
    pub samples: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A catalogue, a pool to load it through, and how.
#[derive(Debug)]
pub struct Loader<'a> {
    /// Where every buffer comes from and goes back to.
    pub pool: Pool,
    /// What to load.
    pub catalog: &'a Catalog,
    /// How.
    pub options: Options,
    /// Raised from anywhere, it ends the run with what has arrived so far.
    pub stop: Stop,
}

impl Loader<'_> {
    /// Loads the catalogue into `destination`. The calling thread does the copying; the workers end with this call.
    pub fn run(&self, destination: &mut dyn Destination, observer: &mut dyn Observer) -> Outcome {
        let Options { workers, prefetch, cut, epochs, shuffle_seed, strict, .. } = self.options;
        let left_out = if strict { self.catalog.failures.len().min(1) } else { self.catalog.failures.len() };
        for failure in &self.catalog.failures[..left_out] {
            observer.failed(failure);
        }
        let mut outcome = Outcome::default();
        if strict && left_out > 0 {
            outcome.ended = Ended::Strict;
        } else {
            let window = Window::new(prefetch.get() as u64);
            let turn = Mutex::new(Batches::new(self.catalog, cut, epochs, shuffle_seed));
            let bench = Bench { loader: self, window: &window, turn };
            let courier = Courier::new(self, &window, destination, observer);
            outcome = run_threads(&bench, courier, workers.get());
            // The last copies are over; nobody else may come by to bring their buffers home.
            self.pool.poll();
        }
        outcome.failed_files += left_out as u64;
        outcome
    }
}

fn run_threads(bench: &Bench<'_>, courier: Courier<'_>, workers: usize) -> Outcome {
    let (deliver, deliveries) = channel::unbounded();
    thread::scope(|scope| {
        for number in 0..workers {
            let deliver = deliver.clone();
            let worker = thread::Builder::new().name(format!("pinpool-read-{number}"));
            match worker.spawn_scoped(scope, move || bench.work(&deliver)) {
                Ok(_) => {}
                Err(error) if number == 0 => {
                    let ended = Ended::Broken(format!("no thread to read with: {error}"));
                    return Outcome { ended, ..Outcome::default() };
                }
                // Fewer workers do the same job.
                Err(_) => break,
            }
        }
        drop(deliver);
        courier.carry(&deliveries)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::num::NonZeroU64;

    use super::container::testing::{safetensors_file, tar_file};
    use super::destination::SinkDestination;
    use super::*;
    use crate::{Completion, Error, PinnedBuf};

    /// A sink that does to each copy what a test asks for.
    struct Meddler {
        sink: SinkDestination,
        sent: u64,
        /// Batch on each lane.
        on_lane: Vec<u64>,
        refuse: Option<u64>,
        /// Flip one bit of this byte of this batch, after it arrived.
        flip: Option<(u64, usize)>,
    }

    impl Meddler {
        fn new() -> Meddler {
            let sink = SinkDestination::new(2).unwrap();
            Meddler { sink, sent: 0, on_lane: vec![0; 2], refuse: None, flip: None }
        }
    }

    impl Destination for Meddler {
        fn describe(&self) -> String {
            "meddler".to_string()
        }

        fn lanes(&self) -> usize {
            self.sink.lanes()
        }

        fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error> {
            self.on_lane[lane] = self.sent;
            self.sent += 1;
            if self.refuse == Some(self.on_lane[lane]) {
                return Err(Error::device("the device has left"));
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

    /// Remembers all it hears, and raises a flag at a given batch.
    #[derive(Debug, Default)]
    struct Witness {
        landed: Vec<Landed>,
        failed: Vec<String>,
        stop_at: Option<(u64, Stop)>,
    }

    impl Observer for Witness {
        fn landed(&mut self, landed: &Landed) {
            self.landed.push(*landed);
            if let Some((batch, stop)) = &self.stop_at
                && *batch == landed.batch
            {
                stop.request();
            }
        }

        fn failed(&mut self, failure: &Failure) {
            self.failed.push(failure.to_string());
        }
    }

    fn pool(max_bytes: u64) -> Pool {
        Pool::builder().without_env().backend(crate::Backend::Heap).max_bytes(max_bytes).build().unwrap()
    }

    fn loader(catalog: &Catalog) -> Loader<'_> {
        let cut = Cut { max_samples: NonZeroU64::new(4), max_bytes: None };
        let options = Options {
            workers: NonZeroUsize::new(3).unwrap(),
            prefetch: NonZeroUsize::new(4).unwrap(),
            cut,
            epochs: 1,
            shuffle_seed: None,
            verify: true,
            strict: false,
        };
        Loader { pool: pool(1 << 30), catalog, options, stop: Stop::new() }
    }

    fn run(loader: &Loader<'_>, destination: &mut Meddler) -> (Outcome, Witness) {
        let mut witness = Witness::default();
        let outcome = loader.run(destination, &mut witness);
        let stats = loader.pool.stats();
        assert_eq!((stats.in_use, stats.in_flight), (0, 0), "every buffer is back: {stats:?}");
        (outcome, witness)
    }

    #[test]
    fn everything_arrives_in_every_epoch_verified() {
        let catalog = Catalog::synthetic(22, 5);
        let mut loader = loader(&catalog);
        loader.options.epochs = 3;
        loader.options.shuffle_seed = Some(1);
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert!(outcome.is_clean(), "{outcome:?} {:?}", witness.failed);
        assert_eq!((outcome.epochs, outcome.files, outcome.samples), (3, 66, 66));
        assert_eq!(
            (outcome.batches, outcome.verified_batches),
            (18, 18),
            "six batches an epoch, the last of two files"
        );
        assert_eq!(outcome.bytes, 3 * catalog.len_bytes());
        assert_eq!(witness.landed.iter().map(|landed| landed.bytes).sum::<u64>(), outcome.bytes);
        assert!((1..=2).contains(&outcome.max_in_flight_batches));
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
        let catalog = Catalog::of_paths(&[dir.path()], true, &Stop::new());
        let mut loader = loader(&catalog);
        loader.options.epochs = 2;
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert_eq!((outcome.files, outcome.samples, outcome.bytes), (2 * 4, 2 * 6, 2 * 78));
        assert_eq!((outcome.failed_files, witness.failed.len()), (1, 1), "named once: {:?}", witness.failed);
        assert_eq!(outcome.batches, outcome.verified_batches);
        assert!(!outcome.is_clean());
    }

    #[test]
    fn any_number_of_epochs_over_empty_containers_is_counted_without_overflow() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.tar", "b.tar"] {
            fs::write(dir.path().join(name), tar_file(&[])).unwrap();
        }
        let catalog = Catalog::of_paths(&[dir.path()], true, &Stop::new());
        let mut loader = loader(&catalog);
        loader.options.epochs = u64::MAX;
        let (outcome, _) = run(&loader, &mut Meddler::new());
        assert_eq!((outcome.files, outcome.batches), (u64::MAX, 0));
    }

    #[test]
    fn a_bit_that_flips_on_the_way_is_seen_and_named() {
        let catalog = Catalog::synthetic(12, 5);
        let loader = loader(&catalog);
        let mut destination = Meddler::new();
        // The third file of the second batch.
        let before = catalog.samples[4].len_bytes + catalog.samples[5].len_bytes;
        destination.flip = Some((1, usize::try_from(before).unwrap() + 700));
        let (outcome, witness) = run(&loader, &mut destination);
        assert_eq!((outcome.batches, outcome.verified_batches, outcome.failed_files), (3, 2, 1));
        assert_eq!((outcome.files, outcome.samples), (11, 11));
        assert_eq!(witness.failed.len(), 1);
        assert!(witness.failed[0].starts_with("batch 1, synthetic-5/00000006: "), "{:?}", witness.failed);
        assert!(witness.failed[0].contains("differ at the destination"), "{:?}", witness.failed);
    }

    #[test]
    fn without_verify_nothing_is_compared() {
        let catalog = Catalog::synthetic(12, 5);
        let mut loader = loader(&catalog);
        loader.options.verify = false;
        let mut destination = Meddler::new();
        destination.flip = Some((1, 0));
        let (outcome, _) = run(&loader, &mut destination);
        assert_eq!((outcome.batches, outcome.verified_batches, outcome.failed_files), (3, 0, 0));
    }

    #[test]
    fn a_ceiling_with_room_for_one_batch_slows_the_run_but_does_not_end_it() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..40 {
            fs::write(dir.path().join(format!("{number:02}")), vec![number; 50_000]).unwrap();
        }
        let catalog = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        let mut loader = loader(&catalog);
        // A batch is 200,000 bytes, so 262,144 in its class.
        loader.pool = pool(300_000);
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert!(outcome.is_clean(), "{outcome:?} {:?}", witness.failed);
        assert_eq!((outcome.batches, outcome.verified_batches), (10, 10));
        assert!(loader.pool.stats().peak_pinned_bytes <= 300_000);
    }

    #[test]
    fn no_more_buffers_are_out_than_the_window_and_the_lanes_allow() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..100 {
            fs::write(dir.path().join(format!("{number:02}")), [number; 100]).unwrap();
        }
        let catalog = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        let mut loader = loader(&catalog);
        loader.options.cut = Cut { max_samples: NonZeroU64::new(1), max_bytes: None };
        loader.options.epochs = 5;
        let (outcome, _) = run(&loader, &mut Meddler::new());
        assert_eq!(outcome.verified_batches, 500);
        // One class, so each allocation is a buffer more that was out at once: four ahead and two on lanes.
        let allocs = loader.pool.stats().underlying.allocs;
        assert!(allocs <= 6, "{allocs}");
    }

    #[test]
    fn a_batch_beyond_the_ceiling_is_lost_and_the_rest_arrives() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), [1; 1000]).unwrap();
        fs::write(dir.path().join("b"), vec![2; 3_000_000]).unwrap();
        fs::write(dir.path().join("c"), [3; 1000]).unwrap();
        fs::File::create(dir.path().join("d")).unwrap().set_len(1 << 42).unwrap();
        let catalog = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        let mut loader = loader(&catalog);
        loader.options.cut = Cut { max_samples: NonZeroU64::new(1), max_bytes: None };
        loader.pool = pool(2_000_000);
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert_eq!((outcome.files, outcome.failed_files, outcome.verified_batches), (2, 2, 2));
        assert!(witness.failed[0].starts_with(&dir.path().join("b").display().to_string()), "{:?}", witness.failed);
        assert!(witness.failed[0].contains("PINPOOL_MAX_BYTES"), "{:?}", witness.failed);
    }

    #[test]
    fn a_strict_run_ends_at_the_first_failure() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..40 {
            fs::write(dir.path().join(format!("{number:02}")), [7; 100]).unwrap();
        }
        let catalog = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        for number in 12..40 {
            fs::write(dir.path().join(format!("{number:02}")), b"short").unwrap();
        }
        let mut loader = loader(&catalog);
        loader.options.strict = true;
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert!(matches!(outcome.ended, Ended::Strict), "{outcome:?}");
        assert_eq!((outcome.batches, outcome.files), (3, 12), "what came before has arrived");
        assert!(witness.failed[0].contains("/12: truncated: 5 of the 100 bytes"), "{:?}", witness.failed);

        let missing = Catalog::of_paths(
            &[dir.path().join("missing"), dir.path().join("gone"), dir.path().into()],
            false,
            &Stop::new(),
        );
        let loader = Loader { catalog: &missing, ..loader };
        let (outcome, witness) = run(&loader, &mut Meddler::new());
        assert_eq!((witness.failed.len(), outcome.failed_files, outcome.batches), (1, 1, 0));
    }

    #[test]
    fn a_stop_ends_the_run_with_what_has_arrived() {
        let catalog = Catalog::synthetic(1000, 5);
        let mut loader = loader(&catalog);
        loader.options.cut = Cut { max_samples: NonZeroU64::new(1), max_bytes: None };
        let mut witness = Witness { stop_at: Some((3, loader.stop.clone())), ..Witness::default() };
        let outcome = loader.run(&mut Meddler::new(), &mut witness);
        assert!(matches!(outcome.ended, Ended::Stopped), "{outcome:?}");
        // Those already in the air land: one on each lane at most.
        assert!((4..=6).contains(&outcome.batches), "{outcome:?}");
        assert_eq!(outcome.verified_batches, outcome.batches);
        assert_eq!(outcome.failed_files, 0);
    }

    #[test]
    fn a_destination_that_refuses_ends_the_run_and_names_the_batch() {
        let catalog = Catalog::synthetic(40, 5);
        let loader = loader(&catalog);
        let mut destination = Meddler::new();
        destination.refuse = Some(2);
        let (outcome, witness) = run(&loader, &mut destination);
        assert!(matches!(&outcome.ended, Ended::Broken(why) if why.contains("the device has left")), "{outcome:?}");
        assert_eq!((outcome.batches, outcome.files, outcome.failed_files), (2, 8, 4));
        assert!(witness.failed[0].starts_with("batch 2 (4 samples, the first synthetic-5/00000008): "), "{witness:?}");
    }
}
