//! Plays a workload through the public pool on simulated memory, in virtual time.
//!
//! ```text
//!  get:   poll ─▶ pool.get ─▶ held
//!                   └─over the ceiling─▶ a ticket, behind those that wait; what could never fit: a fallback at once
//!  put:   poll ─▶ the buffer goes back; one whose ticket still waits takes it out of the line ─▶ serve
//!  t:     for each second of it, the last one shorter: the clock moves ─▶ poll ─▶ serve
//!  serve: the first ticket asks again; served, or out of time: a fallback; else it and all behind it wait on
//! ```
//!
//! The trace is open-loop: it goes on while its gets wait, so a wait is a ticket and never a blocked thread. One thread
//! plays, and the pool sees no clock but the replay's: the same file gives the same figures everywhere.
//!
//! All figures of memory are the pool's own; the replay itself counts what a blocking get would have met: waits and
//! fallbacks.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::format::{Operation, TraceError};
use super::workload::{Workload, wrong};
use crate::backend::Backend;
use crate::backend::SimSource;
use crate::size_class::DEFAULT_ALIGN;
use crate::{Clock, Error, LogSampler, ManualClock, OnFull, PinnedBuf, Pool, Preset, PressureSource, Rounding};

/// The pool is polled at least so often.
const POLL_EVERY_US: u64 = 1_000_000;
/// So long after the last put it is looked at what is still pinned.
const AFTERWARDS_US: u64 = 60_000_000;

/// What kind of source the pool stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SourceKind {
    /// Buffers may span what is locked at once.
    #[default]
    Span,
    /// They may not: each registration has walls.
    Walls,
}

impl SourceKind {
    /// Name in flags and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Span => "span",
            Self::Walls => "walls",
        }
    }
}

/// Settings of a replay; `None` stands for the preset's default.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Rules that the pool follows.
    pub preset: Option<Preset>,
    /// The memory below it.
    pub source: SourceKind,
    /// How sizes become classes.
    pub rounding: Option<Rounding>,
    /// Most idle buffers kept at the start.
    pub pool_size_limit: Option<u64>,
    /// May that limit rise?
    pub auto_resize: Option<bool>,
    /// How long memory stays idle before it goes back; the inner `None`: for ever.
    pub retain: Option<Option<Duration>>,
    /// The ceiling. `None`: there is none.
    pub max_bytes: Option<u64>,
    /// Longest wait for room under the ceiling, in virtual time.
    pub wait: Duration,
}

impl Default for Replay {
    fn default() -> Self {
        Self {
            preset: None,
            source: SourceKind::default(),
            rounding: None,
            pool_size_limit: None,
            auto_resize: None,
            retain: None,
            max_bytes: None,
            wait: Duration::from_millis(100),
        }
    }
}

/// What a workload cost the pool, in the order in which it is printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replayed {
    /// Rules that the pool followed.
    pub preset: &'static str,
    /// How sizes became classes.
    pub rounding: &'static str,
    /// The memory below it.
    pub source: &'static str,
    /// Calls that locked memory.
    pub page_locks: u64,
    /// Of those, after the first half of the gets.
    pub late_page_locks: u64,
    /// Bytes locked by those calls.
    pub bytes_locked: u64,
    /// Most bytes pinned at any time.
    pub peak_pinned_bytes: u64,
    /// Most bytes that the workload asked for and had not put back.
    pub peak_requested_bytes: u64,
    /// Bytes pinned, averaged over the time of the trace; for a trace without time those at its end.
    pub mean_pinned_bytes: u64,
    /// Bytes pinned a minute after the last put.
    pub pinned_after_60s_bytes: u64,
    /// Gets of more than zero bytes, served or not.
    pub gets: u64,
    /// Of those, served by an idle buffer in front.
    pub front_hits: u64,
    /// Idle buffers evicted by puts over the limit.
    pub evicted: u64,
    /// Idle buffers given back to make room.
    pub reclaimed: u64,
    /// How often the limit rose.
    pub raises: u64,
    /// How often it came down again.
    pub lowers: u64,
    /// Gets that waited for room.
    pub waits: u64,
    /// Gets that found none in time.
    pub fallbacks: u64,
    /// The limit at the end.
    pub pool_size_limit: u64,
    /// The ceiling.
    pub max_bytes: Option<u64>,
}

impl Replayed {
    /// Peak pinned over peak requested; 0 if nothing was requested.
    #[allow(clippy::cast_precision_loss)] // A ratio.
    pub fn peak_ratio(&self) -> f64 {
        if self.peak_requested_bytes == 0 {
            return 0.0;
        }
        self.peak_pinned_bytes as f64 / self.peak_requested_bytes as f64
    }
}

impl Replay {
    /// Plays all of `workload` on a new pool, then lets a minute pass.
    ///
    /// # Errors
    ///
    /// If the settings contradict each other, or the workload asks for what no pool could give.
    pub fn play(&self, workload: &Workload) -> Result<Replayed, TraceError> {
        let clock = ManualClock::default();
        let pool = self.pool(clock.clone())?;
        let mut player = Player {
            pool,
            clock,
            max_bytes: self.max_bytes,
            wait_us: u64::try_from(self.wait.as_micros()).unwrap_or(u64::MAX),
            held: HashMap::new(),
            line: BTreeMap::new(),
            next_ticket: 0,
            tally: Tally { half_gets: workload.gets() / 2, ..Tally::default() },
        };
        for &(line, operation) in workload.lines() {
            player.perform(operation).map_err(|error| wrong(line, operation, error.to_string()))?;
        }
        Ok(player.finish(self.source, workload.peak_requested_bytes())?)
    }

    /// A pool that knows nothing of the machine, the environment or the time of day.
    fn pool(&self, clock: ManualClock) -> Result<Pool, TraceError> {
        let sim = match self.source {
            SourceKind::Span => SimSource::new(SimSource::DEFAULT_TOTAL_BYTES),
            SourceKind::Walls => SimSource::discrete(SimSource::DEFAULT_TOTAL_BYTES),
        };
        let mut builder = Pool::builder()
            .without_env()
            .log_sampler(LogSampler::new())
            .clock(Clock::Manual(clock))
            .pressure(PressureSource::Off)
            .backend(Backend::Source(Arc::new(sim)))
            .max_bytes(self.max_bytes)
            // Waiting is the tickets' business: no virtual time passes while a thread sleeps.
            .wait(Duration::ZERO)
            .on_full(OnFull::Error);
        if let Some(preset) = self.preset {
            builder = builder.preset(preset);
        }
        if let Some(rounding) = self.rounding {
            builder = builder.rounding(rounding);
        }
        if let Some(buffers) = self.pool_size_limit {
            builder = builder.pool_size_limit(buffers);
        }
        if let Some(yes) = self.auto_resize {
            builder = builder.auto_resize(yes);
        }
        if let Some(retain) = self.retain {
            builder = builder.idle_timeout(retain);
        }
        Ok(builder.build()?)
    }
}

/// What a trace calls a buffer; `None` is the one that `r` and `s` lines get and put at once.
type Name = Option<u64>;

/// A pool under a workload.
struct Player {
    pool: Pool,
    clock: ManualClock,
    max_bytes: Option<u64>,
    wait_us: u64,
    held: HashMap<Name, Held>,
    /// Gets that wait, by number: first come first served.
    line: BTreeMap<u64, Ticket>,
    next_ticket: u64,
    tally: Tally,
}

/// What became of a get.
enum Held {
    /// Kept for its drop: the put.
    #[allow(dead_code)]
    Pinned(PinnedBuf),
    Waiting {
        ticket: u64,
    },
    Fallback,
}

struct Ticket {
    name: Name,
    bytes: usize,
    align: usize,
    since_us: u64,
}

#[derive(Default)]
struct Tally {
    gets: u64,
    half_gets: u64,
    page_locks_at_half: u64,
    waits: u64,
    fallbacks: u64,
    pinned_byte_us: u128,
    last_put_us: u64,
    /// Bytes pinned a minute after the last put so far, once that minute is over.
    pinned_afterwards: Option<u64>,
}

impl Player {
    fn perform(&mut self, operation: Operation) -> Result<(), Error> {
        match operation {
            Operation::Get { id, bytes, align } => self.get(Some(id), bytes, align),
            Operation::Put { id } => self.put(Some(id)),
            Operation::Steps { count, bytes, step } => {
                let mut len = bytes;
                for _ in 0..count {
                    self.get(None, len, DEFAULT_ALIGN)?;
                    self.put(None)?;
                    // A workload's sizes do not pass 2^64; the one after the last might.
                    len = len.saturating_add(step);
                }
                Ok(())
            }
            Operation::Clear => {
                self.pool.clear();
                self.serve()
            }
            Operation::Advance { micros } => self.advance(micros),
            Operation::Pool { .. } => Ok(()),
        }
    }

    fn get(&mut self, name: Name, bytes: usize, align: usize) -> Result<(), Error> {
        self.pool.poll();
        let ticket = Ticket { name, bytes, align, since_us: self.clock.now_us() };
        // An empty buffer needs no room, so it stands in no line.
        let pinned = if self.line.is_empty() || bytes == 0 { self.ask(&ticket)? } else { None };
        let held = match pinned {
            Some(buffer) => Held::Pinned(buffer),
            None if self.wait_us == 0 || !self.could_hold(&ticket)? => {
                self.tally.fallbacks += 1;
                Held::Fallback
            }
            None => {
                self.tally.waits += 1;
                self.next_ticket += 1;
                self.line.insert(self.next_ticket, ticket);
                Held::Waiting { ticket: self.next_ticket }
            }
        };
        self.held.insert(name, held);
        if bytes > 0 {
            self.tally.gets += 1;
            if self.tally.gets == self.tally.half_gets {
                self.tally.page_locks_at_half = self.pool.stats().underlying.allocs;
            }
        }
        Ok(())
    }

    fn put(&mut self, name: Name) -> Result<(), Error> {
        self.pool.poll();
        if let Some(Held::Waiting { ticket }) = self.held.remove(&name) {
            self.line.remove(&ticket);
        }
        self.tally.last_put_us = self.clock.now_us();
        self.tally.pinned_afterwards = None;
        self.serve()
    }

    fn advance(&mut self, micros: u64) -> Result<(), Error> {
        let end_us = self.clock.now_us() + micros;
        loop {
            let now_us = self.clock.now_us();
            if now_us >= end_us {
                return Ok(());
            }
            let look_us = self.tally.last_put_us + AFTERWARDS_US;
            let expires_us = self.line.values().next().map(|first| first.since_us.saturating_add(self.wait_us));
            let stops_us = [Some(now_us + POLL_EVERY_US), Some(look_us), expires_us].into_iter().flatten();
            let next_us = stops_us.filter(|&stop_us| stop_us > now_us).fold(end_us, u64::min);
            let step_us = next_us - now_us;
            self.tally.pinned_byte_us += u128::from(self.pool.stats().pinned_bytes) * u128::from(step_us);
            self.clock.advance_us(step_us);
            self.pool.poll();
            self.serve()?;
            if self.clock.now_us() == look_us {
                self.tally.pinned_afterwards = Some(self.pool.stats().pinned_bytes);
            }
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        while let Some((_, first)) = self.line.first_key_value() {
            let held = match self.ask(first)? {
                Some(buffer) => Held::Pinned(buffer),
                None if self.clock.now_us() - first.since_us >= self.wait_us => {
                    self.tally.fallbacks += 1;
                    Held::Fallback
                }
                None => return Ok(()),
            };
            self.held.insert(first.name, held);
            self.line.pop_first();
        }
        Ok(())
    }

    /// A buffer, or `None` where the ceiling leaves no room for it now.
    fn ask(&self, ticket: &Ticket) -> Result<Option<PinnedBuf>, Error> {
        match self.pool.get_aligned(ticket.bytes, ticket.align) {
            Ok(buffer) => Ok(Some(buffer)),
            Err(error) if error.is_limit() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Could there ever be room?
    fn could_hold(&self, ticket: &Ticket) -> Result<bool, Error> {
        let class_bytes = self.pool.config().rounding.class_bytes(ticket.bytes, ticket.align)? as u64;
        Ok(self.max_bytes.is_none_or(|max_bytes| class_bytes <= max_bytes))
    }

    /// Lets the minute after the last put pass, unless the trace did, and adds up.
    fn finish(mut self, source: SourceKind, peak_requested_bytes: u64) -> Result<Replayed, Error> {
        let lasted_us = u128::from(self.clock.now_us());
        let mean_pinned_bytes = match self.tally.pinned_byte_us.checked_div(lasted_us) {
            Some(bytes) => u64::try_from(bytes).unwrap_or(u64::MAX),
            None => self.pool.stats().pinned_bytes,
        };
        let pinned_after_60s_bytes = match self.tally.pinned_afterwards {
            Some(bytes) => bytes,
            None => {
                self.advance(self.tally.last_put_us + AFTERWARDS_US - self.clock.now_us())?;
                self.pool.stats().pinned_bytes
            }
        };
        let stats = self.pool.stats();
        let page_locks = stats.underlying.allocs;
        Ok(Replayed {
            preset: stats.preset,
            rounding: self.pool.config().rounding.name(),
            source: source.name(),
            page_locks,
            late_page_locks: page_locks - self.tally.page_locks_at_half,
            bytes_locked: stats.underlying.alloc_bytes,
            peak_pinned_bytes: stats.peak_pinned_bytes,
            peak_requested_bytes,
            mean_pinned_bytes,
            pinned_after_60s_bytes,
            gets: self.tally.gets,
            front_hits: stats.hits,
            evicted: stats.evicted,
            reclaimed: stats.reclaimed,
            raises: stats.raises,
            lowers: stats.lowers,
            waits: self.tally.waits,
            fallbacks: self.tally.fallbacks,
            pool_size_limit: stats.pool_size_limit,
            max_bytes: self.max_bytes,
        })
    }
}
