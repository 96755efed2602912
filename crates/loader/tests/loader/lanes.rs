//! Slow and failing lanes, and lanes without read-back.

use pinpool_loader::LoadOutcome;
use pinpool_testing::{SinkMemory, SinkStream};

use super::*;

/// Two lanes of one byte each.
struct TwoLanes([(SinkStream, SinkMemory); 2]);

impl Destination for TwoLanes {
    fn lanes(&self) -> usize {
        2
    }

    fn send(&mut self, lane: usize, _: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error> {
        let (stream, memory) = &mut self.0[lane];
        Ok(buffer.copy_to(stream, memory)?)
    }

    fn read_back(&mut self, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        // Does not call `read`.
        Ok(())
    }
}

fn two_lanes() -> TwoLanes {
    let lane = || (SinkStream::new().unwrap(), SinkMemory::new(1));
    TwoLanes([lane(), lane()])
}

/// Loads files of one byte, each in its own batch.
fn load(files: usize, verify: bool, destination: &mut TwoLanes, observer: &mut RecordingObserver) -> LoadSummary {
    let (_dir, catalog) = numbered_files(&vec![1; files]);
    let options = options(|o| (o.batch_samples, o.verify) = (NonZeroU64::new(1), verify));
    Loader::new(&pool(1 << 30), &catalog, options).run(destination, observer)
}

#[test]
fn a_slow_lane_does_not_delay_the_other() {
    let mut destination = two_lanes();
    // The first batch occupies the first lane until all other batches are done.
    let gate = destination.0[0].0.hold();
    let mut observer = RecordingObserver::at(5, || drop(gate));
    let summary = load(6, false, &mut destination, &mut observer);
    assert_eq!(observer.done.iter().map(|done| done.index_overall).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 0]);
    assert_eq!(summary.max_in_flight_batches, 2);
}

#[test]
fn a_destination_that_reads_nothing_back_verifies_nothing() {
    let mut observer = RecordingObserver::default();
    let summary = load(2, true, &mut two_lanes(), &mut observer);
    assert_eq!((summary.verified_batches, summary.failed_files, observer.failed.len()), (0, 2, 2));
}

#[test]
fn a_lane_that_fails_ends_the_run_and_its_batch_is_named() {
    let (mut destination, mut observer) = (two_lanes(), RecordingObserver::default());
    let gate = destination.0[0].0.hold();
    destination.0[0].0.fail();
    let summary = load(4, false, &mut destination, &mut observer);
    drop(gate);
    assert!(matches!(summary.outcome, LoadOutcome::Failed(_)), "{summary:?}");
    assert_eq!((summary.failed_files, observer.failed.len()), (1, 1));
    assert!(observer.done.iter().all(|done| done.index_overall != 0));
}
