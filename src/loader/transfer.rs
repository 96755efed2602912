//! The one thread that copies: takes batches in order, puts each on a free lane, and sees to it that it arrived.
//!
//! Owns the destination, the flights under way and the figures. Never reads a file.
//!
//! ```text
//!   deliveries, as workers finish them        early (held back until their turn)
//!         3 1 2  ->  [1] [2] [3]  ->  lane 0: 1 ....... done, verified, counted
//!                                     lane 1: 2 ..          '- then lane 0 takes 3
//! ```
//!
//! I1. Batches are sent in the order of the plan, whichever worker is done first.
//! I2. A lane carries one flight, and is idle or in `flights`, never both.
//! I3. No lane waits for another: flights land in the order in which they are done.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};
use crossbeam::utils::Backoff;
use xxhash_rust::xxh3::xxh3_64;

use super::destination::Destination;
use super::failure::{Cause, Failure};
use super::plan::Planned;
use super::read::{Loss, Segment};
use super::summary::{Ended, Outcome};
use super::window::Window;
use super::worker::Delivery;
use super::{Landed, Loader, Observer};
use crate::{Completion, Error, PinnedBuf};

/// How long the courier listens for the next batch, or waits for a lane, before it looks after the flights again. Short against a copy of
/// megabytes, long against the look.
const LISTEN: Duration = Duration::from_micros(200);

/// A batch whose copy has started.
#[derive(Debug)]
struct Flight {
    lane: usize,
    planned: Planned,
    segments: Vec<Segment>,
    completion: Completion,
}

pub(super) struct Courier<'a> {
    loader: &'a Loader<'a>,
    window: &'a Window,
    destination: &'a mut dyn Destination,
    observer: &'a mut dyn Observer,
    outcome: Outcome,
    /// Set by whatever ends the run before its plan does.
    ended_early: Option<Ended>,
    next_number: u64,
    early: BTreeMap<u64, Delivery>,
    flights: VecDeque<Flight>,
    idle_lanes: Vec<usize>,
    failed_sources: HashSet<usize>,
    /// Samples arrived of each source, over all epochs.
    arrived: Vec<u64>,
}

impl<'a> Courier<'a> {
    pub(super) fn new(
        loader: &'a Loader<'a>,
        window: &'a Window,
        destination: &'a mut dyn Destination,
        observer: &'a mut dyn Observer,
    ) -> Courier<'a> {
        let idle_lanes = (0..destination.lanes()).rev().collect();
        Courier {
            loader,
            window,
            destination,
            observer,
            outcome: Outcome::default(),
            ended_early: None,
            next_number: 0,
            early: BTreeMap::new(),
            flights: VecDeque::new(),
            idle_lanes,
            failed_sources: HashSet::new(),
            arrived: vec![0; loader.catalog.sources.len()],
        }
    }

    /// Carries every batch that comes, then waits for those still in the air.
    pub(super) fn carry(mut self, deliveries: &Receiver<Delivery>) -> Outcome {
        let started = Instant::now();
        if self.idle_lanes.is_empty() {
            self.end(Ended::Broken("the destination has no lanes".to_string()));
        }
        while let Some(delivery) = self.next(deliveries) {
            self.take(delivery);
        }
        self.window.close();
        while let Some(flight) = self.flights.pop_front() {
            self.land(flight);
        }
        self.outcome.elapsed = started.elapsed();
        self.finish()
    }

    /// The next batch in order (I1), as soon as there is a lane for it. `None`: the run is over, or no more will come.
    fn next(&mut self, deliveries: &Receiver<Delivery>) -> Option<Delivery> {
        let backoff = Backoff::new();
        loop {
            self.land_finished();
            if self.is_over() {
                return None;
            }
            if self.idle_lanes.is_empty() {
                // Whichever lands first is welcome: to wait for one of them would let a slow lane hold up the others.
                if backoff.is_completed() {
                    thread::sleep(LISTEN)
                } else {
                    backoff.snooze()
                }
                continue;
            }
            if let Some(delivery) = self.early.remove(&self.next_number) {
                self.next_number += 1;
                return Some(delivery);
            }
            // A worker at the pool's ceiling waits for a landing, so flights must be looked after while none comes.
            let delivery = match self.flights.is_empty() {
                true => deliveries.recv().map_err(RecvTimeoutError::from),
                false => deliveries.recv_timeout(LISTEN),
            };
            match delivery {
                Ok(delivery) => drop(self.early.insert(delivery.planned.number, delivery)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn take(&mut self, delivery: Delivery) {
        let Delivery { planned, filled, buffer } = delivery;
        self.outcome.epochs = planned.epoch;
        for loss in filled.losses {
            self.lose(loss);
        }
        let in_the_air = match buffer {
            // A strict run ends with a loss; what was read beside it stays here.
            _ if self.is_over() => false,
            Some(buffer) => self.send(planned, filled.segments, buffer),
            None => {
                // Empty files are all there with nothing sent.
                let there = vec![xxh3_64(&[]); filled.segments.len()];
                self.arrive(&planned, &filled.segments, &there);
                false
            }
        };
        self.window.sent();
        if !in_the_air {
            self.window.landed();
        }
    }

    /// Starts the copy. `false`: it was not started, and the buffer is back in the pool.
    fn send(&mut self, planned: Planned, segments: Vec<Segment>, buffer: PinnedBuf) -> bool {
        // `next` gives out a batch only when there is one.
        let Some(lane) = self.idle_lanes.pop() else { return false };
        match self.destination.send(lane, buffer) {
            Ok(completion) => {
                self.flights.push_back(Flight { lane, planned, segments, completion });
                let in_flight = self.flights.len() as u64;
                self.outcome.max_in_flight_batches = self.outcome.max_in_flight_batches.max(in_flight);
                true
            }
            Err(error) => {
                self.end(Ended::Broken(error.to_string()));
                self.lose(self.loader.lost_batch(&planned, error));
                false
            }
        }
    }

    /// Lands what is done (I3).
    fn land_finished(&mut self) {
        let mut at = 0;
        while at < self.flights.len() {
            match self.flights[at].completion.is_done() {
                Ok(false) => at += 1,
                // An error ends the flight as well; landing it brings the error out.
                Ok(true) | Err(_) => {
                    if let Some(flight) = self.flights.remove(at) {
                        self.land(flight);
                    }
                }
            }
        }
    }

    fn land(&mut self, flight: Flight) {
        let Flight { lane, planned, segments, completion } = flight;
        match completion.wait().and_then(|()| self.checksums_there(lane, &segments)) {
            Ok(there) => self.arrive(&planned, &segments, &there),
            Err(error) => {
                self.end(Ended::Broken(error.to_string()));
                self.lose(self.loader.lost_batch(&planned, error));
            }
        }
        self.idle_lanes.push(lane);
        self.window.landed();
    }

    /// Sums of the segments as the far end holds them, if the run verifies; else nothing.
    fn checksums_there(&mut self, lane: usize, segments: &[Segment]) -> Result<Vec<u64>, Error> {
        let mut there = Vec::new();
        if self.loader.options.verify {
            self.destination.read_back(lane, &mut |bytes| {
                let place = |segment: &Segment| bytes.get(segment.offset..segment.offset + segment.len_bytes);
                there.extend(segments.iter().map(|segment| xxh3_64(place(segment).unwrap_or_default())));
            })?;
        }
        Ok(there)
    }

    /// Counts what arrived. `there` has the sums of the far end; a run that verifies takes one that is missing for damage.
    fn arrive(&mut self, planned: &Planned, segments: &[Segment], there: &[u64]) {
        if segments.is_empty() {
            return;
        }
        let mut damaged = 0;
        let mut landed = Landed { batch: planned.number, samples: 0, bytes: 0 };
        for (at, segment) in segments.iter().enumerate() {
            match segment.checksum {
                Some(read) if there.get(at) != Some(&read) => {
                    damaged += 1;
                    self.lose(self.damaged(planned, segment, read, there.get(at).copied().unwrap_or_default()));
                }
                _ => {
                    landed.samples += 1;
                    landed.bytes += segment.len_bytes as u64;
                    self.count_file(self.loader.catalog.samples[segment.sample].source);
                }
            }
        }
        self.outcome.samples += landed.samples;
        self.outcome.bytes += landed.bytes;
        self.outcome.batches += 1;
        self.outcome.verified_batches += u64::from(self.loader.options.verify && damaged == 0);
        self.observer.landed(&landed);
    }

    /// A file counts when the last of its samples has arrived, once in each epoch.
    fn count_file(&mut self, source: usize) {
        self.arrived[source] += 1;
        let whole = self.arrived[source].is_multiple_of(self.loader.catalog.sources[source].samples);
        self.outcome.files += u64::from(whole && !self.failed_sources.contains(&source));
    }

    fn damaged(&self, planned: &Planned, segment: &Segment, read: u64, arrived: u64) -> Loss {
        let name = format!("batch {}, {}", planned.number, self.loader.catalog.name(segment.sample));
        let cause = Cause::Corrupted { len_bytes: segment.len_bytes, read, arrived };
        let source = self.loader.catalog.samples[segment.sample].source;
        Loss { sources: vec![source], failure: Failure::new(name, cause) }
    }

    /// Names a loss once for each file, however many of its samples or epochs it spoils.
    fn lose(&mut self, loss: Loss) {
        let failed_before = self.failed_sources.len();
        self.failed_sources.extend(loss.sources);
        let newly_failed = (self.failed_sources.len() - failed_before) as u64;
        self.outcome.failed_files += newly_failed;
        if newly_failed > 0 {
            self.observer.failed(&loss.failure);
        }
        if self.loader.options.strict {
            self.end(Ended::Strict);
        }
    }

    /// The first reason stands.
    fn end(&mut self, ended: Ended) {
        self.ended_early.get_or_insert(ended);
    }

    fn is_over(&self) -> bool {
        self.ended_early.is_some() || self.loader.stop.is_requested()
    }

    fn finish(mut self) -> Outcome {
        self.outcome.ended = match self.ended_early {
            Some(ended) => ended,
            None if self.loader.stop.is_requested() => Ended::Stopped,
            None => {
                self.outcome.epochs = self.loader.options.epochs;
                Ended::Complete
            }
        };
        // A container with nothing in it has no sample to be counted by.
        let empty = self.loader.catalog.sources.iter().filter(|source| source.samples == 0).count() as u64;
        // Epochs of nothing but empty containers cost no time, so they can be as many as a number holds.
        self.outcome.files = self.outcome.files.saturating_add(empty.saturating_mul(self.outcome.epochs));
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use crossbeam::channel;

    use super::super::catalog::Catalog;
    use super::super::plan::Cut;
    use super::super::read::Filled;
    use super::super::stop::Stop;
    use super::super::{Landed, Options};
    use super::*;
    use crate::copy::sink::{SinkGate, SinkMem, SinkStream};
    use crate::{Backend, Pool};

    /// Two lanes of one byte each, the first held by a gate if a test wants it so.
    struct TwoLanes {
        lanes: [(SinkStream, SinkMem); 2],
        sent: Vec<u8>,
    }

    impl Destination for TwoLanes {
        fn describe(&self) -> String {
            "two lanes".to_string()
        }

        fn lanes(&self) -> usize {
            2
        }

        fn send(&mut self, lane: usize, batch: PinnedBuf) -> Result<Completion, Error> {
            self.sent.push(batch.as_slice_untracked()?[0]);
            let (stream, memory) = &mut self.lanes[lane];
            batch.copy_to(stream, memory)
        }

        fn read_back(&mut self, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
            // Shows nothing.
            Ok(())
        }
    }

    /// Lets the gate go when a given batch has landed.
    #[derive(Default)]
    struct Gatekeeper {
        landed: Vec<u64>,
        failed: usize,
        gate: Option<(u64, SinkGate)>,
    }

    impl Observer for Gatekeeper {
        fn landed(&mut self, landed: &Landed) {
            self.landed.push(landed.batch);
            self.gate = self.gate.take().filter(|(batch, _)| *batch != landed.batch);
        }

        fn failed(&mut self, _: &Failure) {
            self.failed += 1;
        }
    }

    fn destination() -> TwoLanes {
        let lane = || (SinkStream::new().unwrap(), SinkMem::new(1));
        TwoLanes { lanes: [lane(), lane()], sent: Vec::new() }
    }

    /// Carries one-byte batches that come in the order of `numbers`, from workers that are all done already.
    fn carry(numbers: &[u8], verify: bool, destination: &mut TwoLanes, observer: &mut Gatekeeper) -> Outcome {
        let catalog = Catalog::synthetic(numbers.len() as u64, 0);
        let options = Options {
            workers: NonZeroUsize::MIN,
            prefetch: NonZeroUsize::MIN,
            cut: Cut { max_samples: None, max_bytes: None },
            epochs: 1,
            shuffle_seed: None,
            verify,
            strict: false,
        };
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let (deliver, deliveries) = channel::unbounded();
        for &number in numbers {
            let mut buffer = pool.get(1).unwrap();
            buffer.as_mut_slice().unwrap().fill(number);
            let sample = usize::from(number);
            let checksum = verify.then(|| xxh3_64(&[number]));
            let segment = Segment { sample, offset: 0, len_bytes: 1, checksum };
            let filled = Filled { segments: vec![segment], len_bytes: 1, ..Filled::default() };
            let planned = Planned { number: number.into(), epoch: 0, samples: vec![sample], len_bytes: 1 };
            deliver.send(Delivery { planned, filled, buffer: Some(buffer) }).unwrap();
        }
        drop(deliver);
        let loader = Loader { pool, catalog: &catalog, options, stop: Stop::new() };
        let window = Window::new(numbers.len() as u64);
        Courier::new(&loader, &window, destination, observer).carry(&deliveries)
    }

    #[test]
    fn batches_are_sent_in_order_however_they_come() {
        let mut destination = destination();
        let mut observer = Gatekeeper::default();
        let outcome = carry(&[3, 1, 0, 5, 2, 4], false, &mut destination, &mut observer);
        assert_eq!(destination.sent, [0, 1, 2, 3, 4, 5]);
        assert_eq!((outcome.batches, outcome.files), (6, 6));
    }

    #[test]
    fn a_slow_lane_does_not_hold_up_the_other() {
        let mut destination = destination();
        // The first lane is the first to be used; it opens when all other batches have landed.
        let gate = destination.lanes[0].0.hold();
        let mut observer = Gatekeeper { gate: Some((5, gate)), ..Gatekeeper::default() };
        let outcome = carry(&[0, 1, 2, 3, 4, 5], false, &mut destination, &mut observer);
        assert_eq!(observer.landed, [1, 2, 3, 4, 5, 0]);
        assert_eq!(outcome.max_in_flight_batches, 2);
    }

    #[test]
    fn a_far_end_that_shows_nothing_verifies_nothing() {
        let mut observer = Gatekeeper::default();
        let outcome = carry(&[0, 1], true, &mut destination(), &mut observer);
        assert_eq!((outcome.verified_batches, outcome.failed_files, observer.failed), (0, 2, 2));
    }

    #[test]
    fn a_lane_that_fails_ends_the_run_and_its_batch_is_named() {
        let mut destination = destination();
        let gate = destination.lanes[0].0.hold();
        destination.lanes[0].0.fail();
        let mut observer = Gatekeeper::default();
        let outcome = carry(&[0, 1, 2, 3], false, &mut destination, &mut observer);
        drop(gate);
        assert!(matches!(outcome.ended, Ended::Broken(_)), "{outcome:?}");
        assert_eq!((outcome.failed_files, observer.failed), (1, 1));
        assert!(!observer.landed.contains(&0));
    }
}
