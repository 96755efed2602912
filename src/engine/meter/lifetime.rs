//! The end of a pool by one count of its blocks.
//!
//! ```text
//!   handles dropped ─▶ sealed ─▶ no block exists but in flight ─▶ closed, once
//! ```
//!
//! - **lifetime-I1**: a sealed pool closes once: the last of the seal, the removal of a block, and the begin of a flight
//!   sees the others. Each changes its own word first, and then passes through the count of blocks by an exchange that
//!   acquires and releases; the exchanges of one word have an order.

use crate::stats::Stats;
use pinpool_os::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The blocks of a pool, and whether it has ended.
#[derive(Debug, Default)]
pub(crate) struct Lifetime {
    /// Blocks that exist: idle, in use or in flight.
    blocks: AtomicU64,
    is_sealed: AtomicBool,
    is_closed: AtomicBool,
}

impl Lifetime {
    /// A new block exists.
    pub(crate) fn add_block(&self) {
        // Relaxed: the caller has a handle of the pool, so it is not sealed.
        self.blocks.fetch_add(1, Ordering::Relaxed);
    }

    /// A block exists no more.
    pub(crate) fn remove_block(&self) {
        // AcqRel: lifetime-I1.
        self.blocks.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn fill(&self, stats: &mut Stats) {
        // Relaxed: a statistic.
        stats.memory.buffers = self.blocks.load(Ordering::Relaxed);
    }

    /// No handle of the pool is left.
    pub(crate) fn seal(&self) {
        // Relaxed: the exchange in `begin_close`, which follows, releases it.
        self.is_sealed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_sealed(&self) -> bool {
        // Relaxed: a hint.
        self.is_sealed.load(Ordering::Relaxed)
    }

    /// Call after the seal, and after each removal of a block and begin of a flight. True for the one caller that closes the
    /// pool: it is sealed and no block exists but those `in_flight`.
    pub(crate) fn begin_close(&self, in_flight: impl FnOnce() -> u64) -> bool {
        // An exchange that changes nothing, AcqRel: lifetime-I1.
        let blocks = self.blocks.fetch_add(0, Ordering::AcqRel);
        // Relaxed: if the seal came first, the exchange acquired it.
        self.is_sealed.load(Ordering::Relaxed)
            && blocks <= in_flight()
            // AcqRel: one thread closes, and sees all that was put before.
            && !self.is_closed.swap(true, Ordering::AcqRel)
    }
}

#[cfg(all(test, pinpool_loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use pinpool_os::sync::UnsafeCell;

    struct ModelPool {
        lifetime: Lifetime,
        /// Models the count of `in_flight`, which is Relaxed.
        in_flight: AtomicU64,
        /// What a release leaves and the close uses.
        memory: [UnsafeCell<u32>; 2],
        closed: AtomicU64,
    }

    // SAFETY: loom checks the accesses to the cells.
    #[allow(unsafe_code)]
    unsafe impl Sync for ModelPool {}

    impl ModelPool {
        fn with_blocks(blocks: u64) -> Arc<Self> {
            let lifetime = Lifetime::default();
            (0..blocks).for_each(|_| lifetime.add_block());
            let memory = [(); 2].map(|()| UnsafeCell::new(0));
            Arc::new(Self { lifetime, in_flight: AtomicU64::new(0), memory, closed: AtomicU64::new(0) })
        }

        fn release(&self, block: usize) {
            self.memory[block].with_mut(|_| ());
            self.lifetime.remove_block();
            self.close_if_unused();
        }

        fn begin_flight(&self) {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            self.close_if_unused();
        }

        fn seal(&self) {
            self.lifetime.seal();
            self.close_if_unused();
        }

        fn close_if_unused(&self) {
            if self.lifetime.begin_close(|| self.in_flight.load(Ordering::Relaxed)) {
                self.closed.fetch_add(1, Ordering::Relaxed);
                self.memory.iter().for_each(|memory| memory.with_mut(|_| ()));
            }
        }
    }

    fn model(blocks: u64, acts: [fn(&ModelPool); 3]) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let pool = ModelPool::with_blocks(blocks);
            let [first, second, here] = acts;
            let others = [first, second].map(|act| {
                let pool = pool.clone();
                thread::spawn(move || act(&pool))
            });
            here(&pool);
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(pool.closed.load(Ordering::Relaxed), 1, "the pool closes once");
        });
    }

    /// Fails if `begin_close` reads the count by a load.
    #[test]
    fn loom_of_the_last_puts_and_the_seal_one_closes() {
        model(2, [|pool| pool.release(0), |pool| pool.release(1), ModelPool::seal]);
    }

    /// Fails if `begin_close` reads the count by a load or checks the seal before the count, or if `remove_block` is Relaxed.
    #[test]
    fn loom_of_a_put_in_flight_a_put_and_the_seal_one_closes() {
        model(2, [|pool| pool.release(0), ModelPool::begin_flight, ModelPool::seal]);
    }
}
