//! The copying thread: sends batches in order, each on an idle lane, and checks that they arrived. Owns the destination, the
//! copies in flight and the statistics.
//!
//! ```text
//!   filled batches, in order
//!         [1] [2] [3]  ->  lane 0: 1 ....... done, verified, counted
//!                          lane 1: 2 ..          '- then lane 0 takes 3
//! ```
//!
//! - **transfer-I1**: batches are sent in the order in which they are read (reader-threads-I1).
//! - **transfer-I2**: a lane is either idle or has one copy in `running`.
//! - **transfer-I3**: copies complete in the order in which the lanes finish; no lane waits for another lane.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::Backoff;
use xxhash_rust::xxh3::xxh3_64;

use crate::batch_plan::{LoadedBatch, LoadedPart};
use crate::destination::Destination;
use crate::failure::{Failure, FailureCause};
use crate::loader::Loader;
use crate::loader::reader_threads::ReaderThreads;
use crate::summary::{ArrivedBatch, LoadError, LoadOutcome, LoadSummary, Observer};
use pinpool::{Completion, Error};

/// Longest wait for a batch or a lane between two polls of the running copies: short compared with a copy of megabytes, long
/// compared with a poll.
const POLL_EVERY: Duration = Duration::from_micros(200);

/// A batch with a started copy.
#[derive(Debug)]
struct RunningCopy {
    lane: usize,
    /// The batch, without its buffer.
    batch: LoadedBatch,
    completion: Completion,
}

pub(super) struct Transfer<'a> {
    loader: &'a Loader,
    reader_threads: ReaderThreads,
    destination: &'a mut dyn Destination,
    observer: &'a mut dyn Observer,
    summary: LoadSummary,
    /// Set if the run ends early, to the first reason.
    ended_early: Option<LoadError>,
    running: VecDeque<RunningCopy>,
    idle_lanes: Vec<usize>,
    failed_files: HashSet<usize>,
    /// Samples of each file that arrived, over all epochs.
    arrived: Vec<u64>,
    /// Bytes that arrived of incomplete samples, by epoch and sample. A failed sample stays here.
    arriving: HashMap<(u64, usize), u64>,
}

impl<'a> Transfer<'a> {
    pub(super) fn new(
        loader: &'a Loader,
        reader_threads: ReaderThreads,
        destination: &'a mut dyn Destination,
        observer: &'a mut dyn Observer,
    ) -> Self {
        let idle_lanes = (0..destination.lanes()).rev().collect();
        Transfer {
            loader,
            reader_threads,
            destination,
            observer,
            summary: LoadSummary::default(),
            ended_early: None,
            running: VecDeque::new(),
            idle_lanes,
            failed_files: HashSet::new(),
            arrived: vec![0; loader.catalog.files().len()],
            arriving: HashMap::new(),
        }
    }

    /// Copies all batches, then waits for the copies in flight.
    pub(super) fn run(mut self) -> LoadSummary {
        let started = Instant::now();
        if self.idle_lanes.is_empty() {
            self.ended_early.get_or_insert(LoadError::NoLanes);
        }
        while let Some(batch) = self.next() {
            self.send_or_skip(batch);
        }
        self.reader_threads.ahead().close();
        while let Some(copy) = self.running.pop_front() {
            self.complete(copy);
        }
        self.summary.elapsed = started.elapsed();
        self.summary.outcome = match self.ended_early {
            Some(error) => LoadOutcome::Failed(error),
            None if self.loader.stop.is_raised() => LoadOutcome::Stopped,
            None => {
                self.summary.epochs = self.loader.options.epochs;
                LoadOutcome::Complete
            }
        };
        if self.summary.epochs > 0 {
            // An empty archive has no sample by which `count_file` would count it.
            self.summary.files += self.loader.catalog.files().iter().filter(|file| file.samples == 0).count() as u64;
        }
        self.summary
    }

    /// Waits until a lane is idle, and returns the next batch in order (transfer-I1). Returns `None` at the end of the run.
    fn next(&mut self) -> Option<LoadedBatch> {
        let backoff = Backoff::new();
        loop {
            self.complete_finished();
            if self.has_ended() {
                return None;
            }
            if self.idle_lanes.is_empty() {
                // Poll all lanes: a wait for one lane would let a slow lane delay the others.
                if backoff.is_completed() {
                    thread::sleep(POLL_EVERY)
                } else {
                    backoff.snooze()
                }
                continue;
            }
            // A thread at the pool's limit waits for a completion, so running copies are polled during that wait.
            let until = (!self.running.is_empty()).then(|| Instant::now() + POLL_EVERY);
            if let Ok(batch) = self.reader_threads.next(until) {
                return batch;
            }
        }
    }

    fn send_or_skip(&mut self, mut batch: LoadedBatch) {
        self.summary.epochs = batch.epoch;
        mem::take(&mut batch.failures).into_iter().for_each(|failure| self.report_failure(failure));
        // A run with `stop_at_failure` ends with the failure, so the other samples of the batch are not sent.
        let mut is_in_flight = false;
        if !self.has_ended() && batch.buffer.is_empty() {
            // Empty samples have arrived without a copy.
            self.count_arrived(&batch, &vec![xxh3_64(&[]); batch.parts.len()]);
        } else if !self.has_ended() {
            is_in_flight = self.send(batch);
        }
        self.reader_threads.ahead().count_sent();
        if !is_in_flight {
            self.reader_threads.ahead().count_completed();
        }
    }

    /// Starts the copy. Returns whether it is in flight: after a failure, the buffer has returned to the pool.
    fn send(&mut self, mut batch: LoadedBatch) -> bool {
        // `next` returns a batch only if a lane is idle.
        let Some(lane) = self.idle_lanes.pop() else { return false };
        let buffer = mem::take(&mut batch.buffer);
        match self.destination.send(lane, &batch, buffer) {
            Ok(completion) => {
                self.running.push_back(RunningCopy { lane, batch, completion });
                let in_flight = self.running.len() as u64;
                self.summary.max_in_flight_batches = self.summary.max_in_flight_batches.max(in_flight);
                true
            }
            Err(error) => {
                self.fail_batch(&batch, error);
                false
            }
        }
    }

    /// Completes the copies that are done (transfer-I3).
    fn complete_finished(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            match self.running[at].completion.is_complete() {
                Ok(false) => at += 1,
                // `complete` reports the error.
                Ok(true) | Err(_) => {
                    if let Some(copy) = self.running.remove(at) {
                        self.complete(copy);
                    }
                }
            }
        }
    }

    fn complete(&mut self, copy: RunningCopy) {
        let RunningCopy { lane, batch, completion } = copy;
        match completion.wait().and_then(|()| self.checksums(lane, &batch.parts)) {
            Ok(checksums) => self.count_arrived(&batch, &checksums),
            Err(error) => self.fail_batch(&batch, error),
        }
        self.idle_lanes.push(lane);
        self.reader_threads.ahead().count_completed();
    }

    fn fail_batch(&mut self, batch: &LoadedBatch, error: Error) {
        self.ended_early.get_or_insert(LoadError::Copy(error.clone()));
        let samples: Vec<_> = batch.parts.iter().map(|part| part.sample).collect();
        self.report_failure(batch.failure(&self.loader.catalog, &samples, error));
    }

    /// Returns the checksums of the parts on the destination, or none if the run does not verify.
    fn checksums(&mut self, lane: usize, parts: &[LoadedPart]) -> Result<Vec<u64>, Error> {
        let mut checksums = Vec::new();
        if self.loader.options.verify {
            self.destination.read_back(lane, &mut |bytes| {
                let bytes_of = |part: &LoadedPart| bytes.get(part.range.clone());
                checksums.extend(parts.iter().map(|part| xxh3_64(bytes_of(part).unwrap_or_default())));
            })?;
        }
        Ok(checksums)
    }

    /// Counts a batch that arrived. With verification, a part without a checksum from the destination is corrupted.
    fn count_arrived(&mut self, batch: &LoadedBatch, checksums: &[u64]) {
        if batch.parts.is_empty() {
            return;
        }
        let mut intact = true;
        let mut done = ArrivedBatch { index_overall: batch.index_overall, samples: 0, bytes: 0 };
        for (at, part) in batch.parts.iter().enumerate() {
            match part.checksum {
                Some(read) if checksums.get(at) != Some(&read) => {
                    intact = false;
                    let (len_bytes, arrived) = (part.range.len(), checksums.get(at).copied().unwrap_or_default());
                    let cause = FailureCause::Corrupted { len_bytes, read, arrived };
                    let failure = self.loader.catalog.failure(part.sample, cause);
                    self.report_failure(Failure {
                        name: format!("batch {}, {}", batch.index_overall, failure.name),
                        ..failure
                    });
                }
                _ => {
                    done.bytes += part.range.len() as u64;
                    if self.add_part(batch.epoch, part) {
                        done.samples += 1;
                        self.count_file(self.loader.catalog.samples()[part.sample].file);
                    }
                }
            }
        }
        self.summary.samples += done.samples;
        self.summary.bytes += done.bytes;
        self.summary.batches += 1;
        self.summary.verified_batches += u64::from(intact && batch.parts.iter().all(|part| part.checksum.is_some()));
        self.observer.on_batch(&done);
    }

    /// Adds a part to its sample. Returns whether the sample is complete; parts may arrive in any order.
    fn add_part(&mut self, epoch: u64, part: &LoadedPart) -> bool {
        let sample_bytes = self.loader.catalog.samples()[part.sample].len_bytes;
        let len_bytes = part.range.len() as u64;
        if len_bytes == sample_bytes {
            return true;
        }
        let arrived = self.arriving.entry((epoch, part.sample)).or_default();
        *arrived += len_bytes;
        let whole = *arrived == sample_bytes;
        if whole {
            self.arriving.remove(&(epoch, part.sample));
        }
        whole
    }

    /// Counts a file when the last of its samples has arrived for the first time.
    fn count_file(&mut self, file: usize) {
        self.arrived[file] += 1;
        let whole = self.arrived[file] == self.loader.catalog.files()[file].samples;
        self.summary.files += u64::from(whole && !self.failed_files.contains(&file));
    }

    /// Reports a failure unless all of its files have failed before, in another sample or epoch.
    fn report_failure(&mut self, failure: Failure) {
        let failed_before = self.failed_files.len();
        self.failed_files.extend(&failure.files);
        let newly_failed = (self.failed_files.len() - failed_before) as u64;
        self.summary.failed_files += newly_failed;
        if newly_failed > 0 {
            self.observer.on_failure(&failure);
        }
        if self.loader.options.stop_at_failure {
            self.ended_early.get_or_insert(LoadError::StoppedAtFailure);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended_early.is_some() || self.loader.stop.is_raised()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::catalog::Catalog;
    use crate::destination::SinkDestination;
    use crate::options::LoadOptions;
    use pinpool::{Backend, PinnedBuf, Pool};

    /// A sink that records the first byte, index and first sample of each batch.
    struct SentBatches(SinkDestination, Vec<(u8, u64, usize)>);

    impl Destination for SentBatches {
        fn lanes(&self) -> usize {
            self.0.lanes()
        }

        fn send(&mut self, lane: usize, batch: &LoadedBatch, buffer: PinnedBuf) -> Result<Completion, Error> {
            self.1.push((buffer.wait_slice()?[0], batch.index_overall, batch.parts[0].sample));
            self.0.send(lane, batch, buffer)
        }

        fn read_back(&mut self, lane: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
            self.0.read_back(lane, read)
        }
    }

    #[test]
    fn batches_are_sent_in_order() {
        let catalog = Catalog::synthetic(6, 0);
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let (send, filled) = mpsc::channel();
        for number in [3u8, 1, 0, 5, 2, 4] {
            let mut buffer = pool.get(1).unwrap();
            buffer.wait_slice_mut().unwrap().fill(number);
            let sample = usize::from(number);
            let len = usize::try_from(catalog.samples()[sample].len_bytes).unwrap();
            let loaded = LoadedPart { sample, range: 0..len, sample_offset: 0, checksum: None };
            let index_overall = number.into();
            send.send(LoadedBatch { index_overall, parts: vec![loaded], buffer, ..Default::default() }).unwrap();
        }
        drop(send);
        let loader = Loader::new(&pool, &catalog, LoadOptions::default());
        let mut destination = SentBatches(SinkDestination::new(2).unwrap(), Vec::new());
        let reading = ReaderThreads::from_channel(&loader, 6, filled);
        let summary = Transfer::new(&loader, reading, &mut destination, &mut ()).run();
        assert_eq!(destination.1, [0, 1, 2, 3, 4, 5].map(|number| (number, number.into(), number.into())));
        assert_eq!((summary.batches, summary.files), (6, 6));
    }
}
