//! The front for many threads, with TensorFlow's check on its counts and the rules of time.

use super::{Aftermath, Figures};
use crate::engine::block::{Block, Parts};
use crate::engine::idle::thread_cache::{self, ThreadCache};
use crate::policy::{self, Check, Window};
use crate::size_class::{Class, EIGHTHS_CLASSES};
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// The unit of the coarse time that a put leaves on its buffer: 10 ms, so that 32 bits last for over a year.
const STAMP_US: u64 = 10_000;

/// Idle blocks, each thread's own first.
#[derive(Debug)]
pub(in crate::engine) struct AdaptiveIdle {
    front: ThreadCache<Parts>,
    auto_resize: bool,
    start_limit: u64,
    /// One check or lowering at a time.
    resizing: Mutex<()>,
    last_miss_us: AtomicU64,
    reclaimed: AtomicU64,
    aged: AtomicU64,
    checks: AtomicU64,
    raises: AtomicU64,
    lowers: AtomicU64,
    /// Puts that came after the end, which the front does not count.
    put_too_late: AtomicU64,
    sealed: AtomicBool,
}

impl AdaptiveIdle {
    pub(in crate::engine) fn new(limit: u64, auto_resize: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(8, usize::from);
        Self {
            front: ThreadCache::new(EIGHTHS_CLASSES, as_count(limit), 2 * cores),
            auto_resize,
            start_limit: limit,
            resizing: Mutex::new(()),
            last_miss_us: AtomicU64::new(0),
            reclaimed: AtomicU64::new(0),
            aged: AtomicU64::new(0),
            checks: AtomicU64::new(0),
            raises: AtomicU64::new(0),
            lowers: AtomicU64::new(0),
            put_too_late: AtomicU64::new(0),
            sealed: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn take(&self, class: Class) -> Option<Block> {
        self.front.take(class.index).map(Block::of_entry)
    }

    #[inline]
    pub(super) fn put(&self, block: Block, now_us: u64) -> Aftermath {
        let thread_cache::Put { handed_back, victim, check_due } = self.front.put(block.into_entry(), stamp(now_us));
        if handed_back.is_some() {
            // Relaxed: as the front's own counts; who closes the pool puts a fence behind it.
            self.put_too_late.fetch_add(1, Ordering::Relaxed);
        }
        Aftermath {
            victim: victim.map(Block::of_entry),
            unkept: handed_back.map(Block::of_entry),
            check: if check_due { self.check() } else { None },
        }
    }

    pub(super) fn count_allocated(&self) {
        self.front.count_allocated();
    }

    /// A get found nothing idle.
    pub(in crate::engine) fn missed(&self, now_us: u64) {
        // Relaxed: time guards no memory.
        self.last_miss_us.fetch_max(now_us, Ordering::Relaxed);
    }

    pub(super) fn reclaim(&self) -> Option<Block> {
        let block = self.front.evict_oldest()?;
        // Relaxed, here and below: counts on their own.
        self.reclaimed.fetch_add(1, Ordering::Relaxed);
        Some(Block::of_entry(block))
    }

    /// What has been idle for longer than the rules keep it in front.
    pub(in crate::engine) fn aged(&self, now_us: u64) -> Vec<Block> {
        let Some(oldest_us) = now_us.checked_sub(policy::FRONT_AGE_US) else { return Vec::new() };
        let mut blocks = Vec::new();
        self.front.drain_older_than(stamp(oldest_us).saturating_add(1), |entry| blocks.push(Block::of_entry(entry)));
        self.aged.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        blocks
    }

    /// Lowers a limit that nobody has needed for long: from, to, and what that pushes out.
    pub(in crate::engine) fn lower(&self, now_us: u64) -> Option<(u64, u64, Vec<Block>)> {
        let _one_at_a_time = self.resizing.try_lock()?;
        let limit = self.limit();
        let to = policy::lowered(limit, self.start_limit, self.last_miss_us.load(Ordering::Relaxed), now_us)?;
        // The next halving is as far away again.
        self.last_miss_us.store(now_us, Ordering::Relaxed);
        self.lowers.fetch_add(1, Ordering::Relaxed);
        let mut blocks = Vec::new();
        self.front.set_limit(as_count(to), |entry| blocks.push(Block::of_entry(entry)));
        Some((limit, to, blocks))
    }

    fn check(&self) -> Option<Check> {
        // Another thread's check is under way: its window is ours.
        let _one_at_a_time = self.resizing.try_lock()?;
        let check = policy::check(self.front.window(), self.limit(), self.auto_resize);
        self.checks.fetch_add(1, Ordering::Relaxed);
        if let Some(limit) = check.raised_to {
            self.raises.fetch_add(1, Ordering::Relaxed);
            self.front.reset_window();
            // A higher limit pushes nothing out.
            self.front.set_limit(as_count(limit), drop);
        }
        Some(check)
    }

    fn limit(&self) -> u64 {
        self.front.limit() as u64
    }

    fn drain(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        self.front.drain_all(|entry| blocks.push(Block::of_entry(entry)));
        blocks
    }

    pub(super) fn clear(&self) -> Vec<Block> {
        self.front.reset_window();
        self.drain()
    }

    pub(super) fn seal(&self) -> Vec<Block> {
        self.front.seal();
        // Release: who sees the seal sees the front sealed.
        self.sealed.store(true, Ordering::Release);
        self.drain()
    }

    /// See [`ThreadCache::order_with_puts`].
    pub(super) fn order_with_puts(&self) {
        self.front.order_with_puts();
    }

    #[inline]
    pub(super) fn is_sealed(&self) -> bool {
        // Acquire: pairs with `seal`.
        self.sealed.load(Ordering::Acquire)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.front.idle_bytes() as u64
    }

    pub(super) fn figures(&self) -> Figures {
        let total = self.front.totals();
        Figures {
            window: self.front.window(),
            total: Window { put: total.put + self.put_too_late.load(Ordering::Relaxed), ..total },
            limit: self.limit(),
            buffers: self.front.idle_count() as u64,
            bytes: self.bytes(),
            reclaimed: self.reclaimed.load(Ordering::Relaxed),
            aged: self.aged.load(Ordering::Relaxed),
            checks: self.checks.load(Ordering::Relaxed),
            raises: self.raises.load(Ordering::Relaxed),
            lowers: self.lowers.load(Ordering::Relaxed),
        }
    }
}

fn stamp(now_us: u64) -> u32 {
    u32::try_from(now_us / STAMP_US).unwrap_or(u32::MAX)
}

fn as_count(limit: u64) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}
