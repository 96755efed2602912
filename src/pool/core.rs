//! The order of steps: lock, ask the rooms, unlock, then the slow calls.
//!
//! ```text
//!  get:  sweep ─▶ [lock: take] ─hit─▶ block
//!                      └─miss─▶ acquire (no lock) ─▶ [lock: count] ─▶ block
//!                                  └─ceiling─▶ [lock: oldest idle] ─▶ release (no lock) ─▶ again
//!  put:  sweep ─▶ [lock: count, evict, check, keep] ─▶ release the victim, print the check (no lock)
//!  copy: block waits in the in-flight room; its put happens when a sweep sees that the copy is over
//! ```
//!
//! Has no arithmetic of its own: `policy` decides, `store` orders, `stats` counts, `supply` pins and unpins.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::block::Block;
use super::supply::{Refusal, Supply};
use crate::config::Config;
use crate::diag::{self, Voice};
use crate::error::{Error, Holdings, Kind, Result};
use crate::in_flight::{InFlight, SharedFence, Swept};
use crate::policy::{self, Check};
use crate::stats::{Ledger, Removal, Stats};
use crate::store::Exact;
use crate::sync::plain::Mutex;

/// What all handles and buffers of one pool share.
#[derive(Debug)]
pub(crate) struct Core {
    config: Config,
    state: Mutex<State>,
    supply: Supply,
    in_flight: InFlight<Block>,
    voice: Voice,
}

#[derive(Debug)]
struct State {
    store: Exact<Block>,
    ledger: Ledger,
    limit: u64,
    /// Blocks whose end on the device nobody will know, and their bytes.
    lost: u64,
    lost_bytes: u64,
    /// No handle is left: nothing can be got any more, and what comes back is released.
    sealed: bool,
}

/// What a put leaves to do once the lock is open.
#[derive(Debug, Default)]
struct Aftermath {
    release: Option<Block>,
    check: Option<Check>,
    /// The last buffer of a sealed pool came back.
    close: bool,
}

impl Core {
    pub(crate) fn new(config: Config, supply: Supply, voice: Voice) -> Self {
        let state = State {
            store: Exact::new(),
            ledger: Ledger::default(),
            limit: config.pool_size_limit,
            lost: 0,
            lost_bytes: 0,
            sealed: false,
        };
        Self { config, state: Mutex::new(state), supply, in_flight: InFlight::new(), voice }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.supply.source().is_pinned()
    }

    /// A block of exactly `class_bytes`, idle or new; `len` is what the user asked for.
    pub(crate) fn get(self: &Arc<Self>, len: usize, class_bytes: usize) -> Result<Block> {
        self.poll();
        if let Some(block) = self.take_idle(class_bytes) {
            return Ok(block);
        }
        match self.allocate(class_bytes) {
            Ok(block) => Ok(block),
            Err(refusal) => {
                self.state.lock().ledger.failed_gets += 1;
                Err(self.refused(len, refusal))
            }
        }
    }

    /// An idle block of exactly `class_bytes`; never asks the back-end.
    pub(crate) fn try_get(&self, class_bytes: usize) -> Option<Block> {
        self.poll();
        self.take_idle(class_bytes)
    }

    fn take_idle(&self, class_bytes: usize) -> Option<Block> {
        let mut state = self.state.lock();
        let block = state.store.take(class_bytes)?;
        state.ledger.hit(block.held_bytes());
        Some(block)
    }

    fn allocate(self: &Arc<Self>, class_bytes: usize) -> Result<Block, Refusal> {
        let memory = loop {
            match self.supply.acquire(class_bytes) {
                Ok(memory) => break memory,
                // What could never fit is no reason to empty the pool.
                Err(Refusal::Ceiling(_)) if self.supply.could_hold(class_bytes) && self.reclaim_oldest() => {}
                Err(refusal) => return Err(refusal),
            }
        };
        let block = Block::new(self.clone(), memory);
        self.state.lock().ledger.allocated(block.held_bytes(), self.is_pooling());
        Ok(block)
    }

    /// Releases the buffer that has been idle longest; false if none is.
    fn reclaim_oldest(&self) -> bool {
        let oldest = {
            let mut state = self.state.lock();
            let oldest = state.store.evict();
            if let Some(block) = &oldest {
                state.ledger.removed(block.held_bytes(), Removal::Reclaimed);
            }
            oldest
        };
        oldest.map(|block| self.release(block)).is_some()
    }

    /// The user is done with `block`, and so is every device.
    pub(crate) fn put(&self, block: Block) {
        self.poll();
        self.put_home(block);
    }

    /// The user is done with `block`; devices may be reading it until all `fences` are over.
    pub(crate) fn put_after(&self, block: Block, fences: Vec<SharedFence>) {
        let bytes = block.held_bytes();
        self.in_flight.arrive(block, bytes, fences, Instant::now());
        self.poll();
        self.close_if_unused();
    }

    /// Nobody will ever know when the device is done with `block`: it is never used again.
    pub(crate) fn lose(&self, block: Block, error: &Error) {
        let held_bytes = block.held_bytes();
        // The memory stays as it is, and with it the pool that it belongs to.
        std::mem::forget(block);
        {
            let mut state = self.state.lock();
            state.ledger.lost(held_bytes);
            state.lost += 1;
            state.lost_bytes += held_bytes;
        }
        diag::completion_unknown(held_bytes, error);
        self.close_if_unused();
    }

    /// Puts back what devices have finished with. Costs one load when nothing is in flight.
    pub(crate) fn poll(&self) {
        if self.in_flight.count() > 0 {
            self.land(self.in_flight.sweep());
        }
    }

    fn land(&self, swept: Swept<Block>) {
        swept.landed.into_iter().for_each(|block| self.put_home(block));
        swept.lost.into_iter().for_each(|(block, error)| self.lose(block, &error));
    }

    fn put_home(&self, block: Block) {
        let Aftermath { release, check, close } =
            self.state.lock().put(block, self.is_pooling(), self.config.auto_resize);
        if let Some(block) = release {
            self.release(block);
        }
        if let Some(check) = check {
            self.voice.checked(check);
        }
        if close {
            self.close();
        }
    }

    /// Releases every idle block and begins a new window.
    pub(crate) fn clear(&self) {
        self.poll();
        let idle = {
            let mut state = self.state.lock();
            state.ledger.begin_window();
            state.drain()
        };
        idle.into_iter().for_each(|block| self.release(block));
    }

    /// A slow call: no lock may be held.
    fn release(&self, block: Block) {
        // The block's own reference to this pool goes last.
        let (core, memory) = block.into_parts();
        if let Err((held_bytes, error)) = core.supply.release(memory) {
            diag::release_failed(held_bytes, &error);
        }
    }

    /// No handle is left. What is idle goes now; what is in use goes when it comes back.
    pub(crate) fn seal(&self) {
        self.poll();
        let idle = {
            let mut state = self.state.lock();
            state.sealed = true;
            state.drain()
        };
        idle.into_iter().for_each(|block| self.release(block));
        self.close_if_unused();
    }

    fn close_if_unused(&self) {
        // In flight is no use: those copies are what `close` waits for.
        let unused = {
            let state = self.state.lock();
            state.sealed && state.ledger.handed_out <= self.in_flight.count()
        };
        if unused {
            self.close();
        }
    }

    /// Waits for the copies in flight, at most as long as configured, and leaves alone what does not end.
    fn close(&self) {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(20);
        while self.in_flight.count() > 0 {
            self.land(self.in_flight.sweep());
            if begun.elapsed() >= self.config.close_wait {
                break;
            }
            thread::sleep(pause.min(self.config.close_wait));
            // Short copies are over at once; a stuck one is not worth a busy processor.
            pause = (pause * 2).min(Duration::from_millis(10));
        }
        let (copies, bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let abandoned = self.in_flight.abandon();
        if !abandoned.is_empty() {
            diag::closed_in_flight(copies, bytes, begun.elapsed());
        }
        // Nothing is freed on a guess.
        abandoned.into_iter().for_each(std::mem::forget);
    }

    /// Limit 0: gets and puts go straight through.
    fn is_pooling(&self) -> bool {
        self.config.pool_size_limit != 0
    }

    fn refused(&self, len: usize, refusal: Refusal) -> Error {
        let asked_bytes = len as u64;
        let holdings = self.holdings();
        match refusal {
            Refusal::Ceiling(needed_bytes) => Kind::Limit { asked_bytes, needed_bytes, holdings }.into(),
            Refusal::Source(source) => {
                Kind::Backend { backend: self.supply.source().name(), asked_bytes, holdings, source }.into()
            }
        }
    }

    fn holdings(&self) -> Holdings {
        let stats = self.stats();
        Holdings {
            held_bytes: stats.pinned_bytes,
            in_use_bytes: stats.in_use_bytes,
            idle_bytes: stats.idle_bytes,
            in_flight_bytes: stats.in_flight_bytes,
            max_bytes: stats.max_bytes,
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let state = self.state.lock();
        let ledger = state.ledger;
        let (in_flight, in_flight_bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let (limit, buffers_in_pool) = (state.limit, state.store.len() as u64);
        let (lost, lost_bytes) = (state.lost, state.lost_bytes + self.supply.lost_bytes());
        drop(state);
        Stats {
            backend: self.supply.source().name(),
            is_pinned: self.is_pinned(),
            pool_size_limit: limit,
            window: ledger.window,
            gets: ledger.total.gets(),
            hits: ledger.total.get_from_pool,
            misses: ledger.total.allocated,
            failed_gets: ledger.failed_gets,
            puts: ledger.total.put,
            evicted: ledger.total.evicted,
            reclaimed: ledger.reclaimed,
            checks: ledger.checks,
            raises: ledger.raises,
            buffers_in_pool,
            idle_bytes: ledger.idle_bytes,
            // Copies land between the two readings while other threads run; at rest the difference is exact.
            in_use: ledger.handed_out.saturating_sub(in_flight),
            in_use_bytes: ledger.handed_out_bytes.saturating_sub(in_flight_bytes),
            in_flight,
            in_flight_bytes,
            oldest_in_flight: self.in_flight.oldest(Instant::now()),
            lost,
            lost_bytes,
            pinned_bytes: self.supply.budget().held_bytes(),
            peak_pinned_bytes: self.supply.budget().peak_bytes(),
            max_bytes: self.supply.budget().max_bytes(),
            underlying: self.supply.calls(),
        }
    }
}

impl State {
    /// TensorFlow's put: count, evict while the limit is reached, check, then keep.
    fn put(&mut self, block: Block, is_pooling: bool, auto_resize: bool) -> Aftermath {
        self.ledger.put(block.held_bytes(), is_pooling);
        if self.sealed {
            return Aftermath { release: Some(block), close: self.ledger.handed_out == 0, ..Aftermath::default() };
        }
        if !is_pooling {
            return Aftermath { release: Some(block), ..Aftermath::default() };
        }
        let mut aftermath = Aftermath::default();
        if self.store.len() as u64 >= self.limit {
            aftermath.release = self.store.evict();
            if let Some(victim) = &aftermath.release {
                self.ledger.removed(victim.held_bytes(), Removal::Evicted);
                aftermath.check = self.check_if_due(auto_resize);
            }
        }
        self.ledger.kept(block.held_bytes());
        self.store.put(block.class_bytes(), block);
        aftermath
    }

    fn check_if_due(&mut self, auto_resize: bool) -> Option<Check> {
        let window = self.ledger.window;
        window.check_is_due().then(|| {
            let check = policy::check(window, self.limit, auto_resize);
            self.ledger.checked(&check);
            self.limit = check.raised_to.unwrap_or(self.limit);
            check
        })
    }

    fn drain(&mut self) -> Vec<Block> {
        let idle = self.store.drain();
        idle.iter().for_each(|block| self.ledger.removed(block.held_bytes(), Removal::Cleared));
        idle
    }
}
