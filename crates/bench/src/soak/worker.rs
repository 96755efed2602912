//! One thread of a soak: random requests, returns, copies and hand-overs. Each buffer is checked before it is returned or
//! copied. A buffer that was handed over is checked by the thread that takes it.
//!
//! ```text
//!   of 1024 operations, on average
//!     1004   request, fill, check, return               a buffer of 64 B to 1 KiB: a hit
//!        8   request and fill one more, or check and return a held buffer
//!        8   hand a held buffer to any thread, or take, check and return one
//!        4   copy a held buffer to the destination; when the copy has completed, check the bytes there
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;
use pinpool::{Completion, PinnedBuf, Pool};
use pinpool_loader::{Destination, LoadedBatch, StopFlag};
use serde::Serialize;

use super::content;

/// Maximum number of buffers that a thread holds, in addition to the current one.
const HELD: usize = 8;
/// Smallest and largest buffer of a hit, in bytes: small, so that the pool takes most of the time.
const HIT_BYTES: (usize, usize) = (64, 1024);
/// Largest buffer that is held, handed over or copied, as a power of two; the smallest is 1 KiB.
const LEN_LOG2_MAX: u32 = 18;
/// Operations between two checks of the clock and of the running copy.
const CHUNK: u64 = 1024;

/// A filled buffer and the seed of its content.
#[derive(Debug)]
pub(super) struct Filled {
    buffer: PinnedBuf,
    seed: u64,
}

/// State shared by the threads of a run.
pub(super) struct Shared<'a> {
    pub(super) pool: &'a Pool,
    pub(super) stop: &'a StopFlag,
    /// Set at the first error, and when the time is up.
    pub(super) over: AtomicBool,
    /// Buffers handed over between threads.
    pub(super) given: ArrayQueue<Filled>,
    /// Operations of each thread so far.
    pub(super) done: Vec<CachePadded<AtomicU64>>,
    /// Maximum number of operations of one thread.
    pub(super) most_ops: u64,
}

/// Operations that a thread has performed.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Counts {
    pub(super) gets: u64,
    pub(super) puts: u64,
    pub(super) copies: u64,
    pub(super) given: u64,
    pub(super) taken: u64,
    /// Buffers compared with their content, byte by byte.
    pub(super) checks: u64,
    pub(super) checked_bytes: u64,
    /// Checks that found wrong bytes.
    pub(super) bad_checks: u64,
}

impl Counts {
    pub(super) fn ops(&self) -> u64 {
        self.gets + self.puts + self.copies + self.given + self.taken
    }

    pub(super) fn add(&mut self, other: &Counts) {
        self.gets += other.gets;
        self.puts += other.puts;
        self.copies += other.copies;
        self.given += other.given;
        self.taken += other.taken;
        self.checks += other.checks;
        self.checked_bytes += other.checked_bytes;
        self.bad_checks += other.bad_checks;
    }

    fn check(&mut self, bytes: &[u8], seed: u64) {
        self.checks += 1;
        self.checked_bytes += bytes.len() as u64;
        self.bad_checks += u64::from(!content::is_intact(bytes, seed));
    }

    /// Checks a buffer and returns it.
    pub(super) fn put(&mut self, filled: Filled) -> Result<(), pinpool::Error> {
        self.check(filled.buffer.wait_slice()?, filled.seed);
        self.puts += 1;
        drop(filled.buffer);
        Ok(())
    }
}

/// A copy that has not completed.
struct RunningCopy {
    completion: Completion,
    seed: u64,
    len: usize,
}

pub(super) struct Worker<'a> {
    shared: &'a Shared<'a>,
    counts: Counts,
    /// State of the generator (xorshift); never 0.
    random: u64,
    held: Vec<Filled>,
    destination: Box<dyn Destination>,
    copy: Option<RunningCopy>,
}

impl<'a> Worker<'a> {
    pub(super) fn new(shared: &'a Shared<'a>, seed: u64, destination: Box<dyn Destination>) -> Worker<'a> {
        let random = seed | 1;
        Worker { shared, counts: Counts::default(), random, held: Vec::new(), destination, copy: None }
    }

    /// Works until the end of the run. The counts include the operations before an error.
    pub(super) fn run(mut self, number: usize) -> (Counts, Result<(), pinpool::Error>) {
        let result = self.work(number).and_then(|()| self.finish());
        if result.is_err() {
            // Relaxed: the flag publishes no other data.
            self.shared.over.store(true, Ordering::Relaxed);
        }
        (self.counts, result)
    }

    fn work(&mut self, number: usize) -> Result<(), pinpool::Error> {
        while self.counts.ops() < self.shared.most_ops {
            if self.shared.stop.is_raised() || self.shared.over.load(Ordering::Relaxed) {
                break;
            }
            for _ in 0..CHUNK.min(self.shared.most_ops) {
                self.step()?;
            }
            self.poll_copy()?;
            self.shared.done[number].store(self.counts.ops(), Ordering::Relaxed);
        }
        Ok(())
    }

    #[inline]
    fn step(&mut self) -> Result<(), pinpool::Error> {
        let random = self.next_random();
        match random & 1023 {
            0..=7 => self.hold_or_put(random >> 10),
            8..=15 => self.give_or_take(random >> 10),
            16..=19 => self.start_copy(),
            _ => {
                let (least, most) = HIT_BYTES;
                let len = least + (random >> 10) as usize % (most - least + 1);
                let filled = self.get(len)?;
                self.counts.put(filled)
            }
        }
    }

    #[inline]
    fn get(&mut self, len: usize) -> Result<Filled, pinpool::Error> {
        let seed = self.next_random();
        let mut buffer = self.shared.pool.get(len)?;
        self.counts.gets += 1;
        content::fill(buffer.wait_slice_mut()?, seed);
        Ok(Filled { buffer, seed })
    }

    /// Requests and fills a buffer of 1 KiB to 256 KiB; every power of two is equally likely.
    fn get_any(&mut self, random: u64) -> Result<Filled, pinpool::Error> {
        // Both values are small, so the casts lose nothing.
        #[expect(clippy::cast_possible_truncation)]
        let (log2, within) = (10 + random as u32 % (LEN_LOG2_MAX - 10), (random >> 8) as usize);
        let least = 1_usize << log2;
        self.get(least + within % least)
    }

    fn hold_or_put(&mut self, random: u64) -> Result<(), pinpool::Error> {
        if self.held.len() < HELD && random & 1 == 0 {
            let filled = self.get_any(random >> 1)?;
            self.held.push(filled);
        } else if !self.held.is_empty() {
            let filled = self.held.swap_remove((random >> 1) as usize % self.held.len());
            self.counts.put(filled)?;
        }
        Ok(())
    }

    fn give_or_take(&mut self, random: u64) -> Result<(), pinpool::Error> {
        if random & 1 == 0 {
            let filled = self.held.pop().map_or_else(|| self.get_any(random >> 1), Ok)?;
            match self.shared.given.push(filled) {
                Ok(()) => self.counts.given += 1,
                Err(full) => self.counts.put(full)?,
            }
        } else if let Some(filled) = self.shared.given.pop() {
            self.counts.taken += 1;
            self.counts.put(filled)?;
        }
        Ok(())
    }

    fn start_copy(&mut self) -> Result<(), pinpool::Error> {
        self.poll_copy()?;
        if self.copy.is_some() {
            return Ok(());
        }
        let filled = match self.held.pop() {
            Some(filled) => filled,
            None => {
                let random = self.next_random();
                self.get_any(random)?
            }
        };
        let Filled { buffer, seed } = filled;
        let len = buffer.len();
        self.counts.check(buffer.wait_slice()?, seed);
        // The copy returns the buffer.
        self.counts.copies += 1;
        self.counts.puts += 1;
        let completion = self.destination.send(0, &LoadedBatch::default(), buffer)?;
        self.copy = Some(RunningCopy { completion, seed, len });
        Ok(())
    }

    /// If the copy has completed, checks the bytes at the destination.
    fn poll_copy(&mut self) -> Result<(), pinpool::Error> {
        if self.copy.as_ref().map_or(Ok(false), |copy| copy.completion.is_complete())? {
            self.end_copy()?;
        }
        Ok(())
    }

    fn end_copy(&mut self) -> Result<(), pinpool::Error> {
        let Some(RunningCopy { completion, seed, len }) = self.copy.take() else { return Ok(()) };
        completion.wait()?;
        let counts = &mut self.counts;
        let mut arrived = false;
        self.destination.read_back(0, &mut |bytes| {
            if let Some(bytes) = bytes.get(..len) {
                arrived = true;
                counts.check(bytes, seed);
            }
        })?;
        counts.bad_checks += u64::from(!arrived);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), pinpool::Error> {
        self.end_copy()?;
        for filled in std::mem::take(&mut self.held) {
            self.counts.put(filled)?;
        }
        Ok(())
    }

    #[inline]
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
