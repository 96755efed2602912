//! A get that found nothing idle: where its block comes from, step by step down the ladder.
//!
//! ```text
//!  landed? ─yes─▶ block
//!     └─▶ allocate ─room─▶ block
//!            └─no room─▶ wait in line, try again ─▶ block
//!                     └─out of time─▶ memory that is not pinned, or an error in numbers
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block::Block;
use super::core::{Core, TURN_PATIENCE};
use super::idle::Idle;
use super::supply::{Acquired, Memory, Reclaim, Refusal, Supply};
use crate::backend::Source;
use crate::budget::Claim;
use crate::error::Result;
use crate::size_class::Class;
use crate::sync::process::Ordering;

/// As long as a wait gets.
const LONGEST_WAIT: Duration = Duration::from_secs(1 << 30);
/// So long a get in line sleeps at most while copies are in flight, whose end nobody announces.
const IN_FLIGHT_PATIENCE: Duration = Duration::from_micros(500);
/// And else: room may also come from other pools and processes.
const PATIENCE: Duration = Duration::from_millis(5);

impl Core {
    #[cold]
    pub(super) fn miss(self: &Arc<Self>, len: usize, class: Class, wait: Duration) -> Result<Block> {
        if let Some(block) = self.take_landed(class, TURN_PATIENCE) {
            return Ok(block);
        }
        let now_us = self.look_after();
        if let Idle::Adaptive(idle) = &self.idle {
            idle.missed(now_us);
        }
        // Those in line come first.
        let refusal = if self.queue.is_waiting() {
            Refusal::Ceiling { needed_bytes: class.bytes as u64 }
        } else {
            match self.allocate(class) {
                Ok(block) => {
                    self.episode.over(&self.log, now_us);
                    return Ok(block);
                }
                Err(refusal) => refusal,
            }
        };
        self.without_room(len, class, wait, refusal)
    }

    /// The rest of the ladder: wait in line, then pageable memory or an error.
    fn without_room(self: &Arc<Self>, len: usize, class: Class, wait: Duration, mut refusal: Refusal) -> Result<Block> {
        let could_hold = self.could_hold(class);
        // A request that can never be served is no want of room, unless it is served otherwise.
        if could_hold || self.stand_in.is_some() {
            self.begin_episode(len, &refusal);
        }
        if could_hold && !wait.is_zero() {
            let deadline = Instant::now() + wait.min(LONGEST_WAIT);
            let patience = || if self.in_flight.count() > 0 { IN_FLIGHT_PATIENCE } else { PATIENCE };
            let served = self.queue.wait(deadline, patience, || {
                self.land_copies();
                self.idle.take(class).or_else(|| self.allocate(class).map_err(|later| refusal = later).ok())
            });
            if let Some(block) = served {
                return Ok(block);
            }
        }
        if let Some(block) = self.stand_in(class) {
            // Relaxed, here and below: counts on their own.
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            self.episode.fell_back();
            return Ok(block);
        }
        self.counts.failed_gets.fetch_add(1, Ordering::Relaxed);
        Err(self.refused(len, refusal))
    }

    fn begin_episode(&self, len: usize, refusal: &Refusal) {
        let why = || match refusal {
            Refusal::Ceiling { .. } => {
                ("the ceiling is reached, raise PINPOOL_MAX_BYTES or hold fewer batches".to_owned(), self.holdings())
            }
            Refusal::Source(error) => (error.to_string(), self.holdings()),
        };
        self.episode.begun(&self.log, len as u64, self.time.coarse_us(), why);
    }

    fn stand_in(self: &Arc<Self>, class: Class) -> Option<Block> {
        let region = self.stand_in.as_ref()?.acquire(class.bytes).ok()?;
        Some(Block::new(self.clone(), Memory::Pageable { region }, class))
    }

    fn allocate(self: &Arc<Self>, class: Class) -> Result<Block, Refusal> {
        let memory = match &self.supply {
            Supply::Direct(direct) => loop {
                // Since the last look a put may have come.
                if let Some(block) = self.idle.take(class) {
                    return Ok(block);
                }
                match direct.acquire(class.bytes) {
                    // What could never fit is no reason to empty the pool.
                    Err(Refusal::Ceiling { .. }) if direct.could_hold(class.bytes) && self.give_back_oldest() => {}
                    acquired => break acquired?,
                }
            },
            Supply::Shared(ground) => {
                let own = self.claim_own(class.bytes as u64)?;
                let mut memory = match ground.acquire(class, self.time.coarse_us(), &**self)? {
                    Acquired::New(memory) => memory,
                    Acquired::Reused(block) => return Ok(block),
                };
                if let Memory::Carved { claim, .. } = &mut memory {
                    *claim = Some(own);
                }
                memory
            }
        };
        self.idle.count_allocated();
        Ok(Block::new(self.clone(), memory, class))
    }

    /// A partition's own ceiling: idle buffers of its own make way.
    fn claim_own(&self, bytes: u64) -> Result<Claim, Refusal> {
        let refusal = Refusal::Ceiling { needed_bytes: bytes };
        if !self.could_own(bytes) {
            return Err(refusal);
        }
        loop {
            match self.own.claim(bytes) {
                Some(claim) => return Ok(claim),
                None if self.give_back_oldest() => {}
                None => return Err(refusal),
            }
        }
    }

    /// Could a block of `class` ever exist under the ceilings?
    fn could_hold(&self, class: Class) -> bool {
        self.could_own(class.bytes as u64)
            && match &self.supply {
                Supply::Direct(direct) => direct.could_hold(class.bytes),
                Supply::Shared(ground) => ground.could_hold(class.bytes as u64),
            }
    }

    pub(crate) fn could_own(&self, bytes: u64) -> bool {
        self.own.max_bytes().is_none_or(|max_bytes| bytes <= max_bytes)
    }
}

impl Reclaim for Core {
    fn idle_bytes(&self) -> u64 {
        self.idle.bytes()
    }

    fn give_back_oldest(&self) -> bool {
        self.idle.reclaim().map(|block| self.give_up(block)).is_some()
    }

    fn take_back(&self, class: Class) -> Option<Block> {
        self.idle.take(class)
    }

    fn land_copies(&self) {
        Self::land_copies(self);
    }

    fn grow_old(&self, now_us: u64) {
        self.age(now_us);
    }
}
