//! A partition of a pool: its own limit on the bytes in use, and its own wait queue.
//!
//! ```text
//!   request ─▶ claim ─no room─▶ wait queue of the partition ─▶ claim ─▶ the pool, as any other request ─▶ buffer with the claim
//!   buffer idle, or released ─▶ the claim ends ─▶ the head of the partition's queue claims
//! ```
//!
//! So a full partition delays no other user of the pool, and a request with a claim waits in the pool's queue in order of
//! arrival. The buffers of a partition have a holder record under the partition's tag, so their returns take the slow path,
//! which ends the claim.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Block, PoolCore, Purpose};
use crate::engine::memory::Refusal;
use crate::engine::meter::holders::Tag;
use crate::engine::meter::{Counter, Times};
use crate::engine::wait_queue::{FirstAttempt, KeepAlive, Server, WaitQueue, WaitTicket, Waiter};
use crate::error::{ErrorKind, Result};
use crate::in_flight::QueryScope;
use crate::quota::{Budget, BudgetUser, Claim, LimitLevel};
use crate::report::PoolLog;
use crate::size_class::Class;
use crate::stats::Stats;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU64, Ordering, fence};

/// A request with its size class, tag and partition.
#[derive(Clone)]
pub(crate) struct BlockRequest {
    pub(crate) len: usize,
    pub(crate) class: Class,
    pub(crate) tag: Option<Arc<Tag>>,
    /// The partition of the request.
    pub(crate) partition: Option<Arc<PartitionCore>>,
}

impl BlockRequest {
    /// Returns a request for `bytes` of memory outside buffers. It has no class of the pool: its class is exactly `bytes`.
    pub(super) fn of(bytes: u64) -> Self {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        Self { len, class: Class { bytes: len, index: 0 }, tag: None, partition: None }
    }
}

/// A partition of a pool.
pub(crate) struct PartitionCore {
    core: Arc<PoolCore>,
    /// `POOL/NAME`, or `NAME` if the pool is unnamed.
    pub(crate) name: String,
    /// Unique among the pools and partitions of the process.
    number: u64,
    budget: Arc<Budget>,
    pub(super) waiters: WaitQueue<Self>,
    is_closed: AtomicBool,
    hits: Counter,
    misses: Counter,
    /// Requests that failed because there was no room in the partition or in the pool.
    pub(super) failed: Counter,
    timeouts: Counter,
    waits: Times,
    peak_bytes: AtomicU64,
}

impl PoolCore {
    /// Creates a partition of this pool.
    pub(crate) fn open_partition(self: &Arc<Self>, name: &str, max_bytes: Option<u64>) -> Arc<PartitionCore> {
        self.log.partition(name, max_bytes, self.memory.budget.max_bytes());
        let partition = Arc::new_cyclic(|partition: &Weak<PartitionCore>| PartitionCore {
            name: self.name().map_or_else(|| name.to_owned(), |pool| format!("{pool}/{name}")),
            number: PoolLog::next_number(),
            budget: Budget::for_partition(max_bytes, partition.clone()),
            waiters: WaitQueue::new(!cfg!(miri) && !self.time.is_manual()),
            is_closed: AtomicBool::new(false),
            hits: Counter::default(),
            misses: Counter::default(),
            failed: Counter::default(),
            timeouts: Counter::default(),
            waits: Times::default(),
            peak_bytes: AtomicU64::new(0),
            core: self.clone(),
        });
        let mut known = self.partitions.lock();
        known.retain(|other| other.strong_count() > 0);
        known.push(Arc::downgrade(&partition));
        drop(known);
        partition
    }

    /// Returns the live partitions, oldest first.
    pub(crate) fn live_partitions(&self) -> Vec<Arc<PartitionCore>> {
        // In a forked child, the lock may be held by a thread that does not exist there.
        let known = if self.is_forked() { Vec::new() } else { self.partitions.lock().clone() };
        known.iter().filter_map(Weak::upgrade).collect()
    }

    /// Wakes the heads of the queues of all partitions: a copy has begun, and its end may make room.
    pub(super) fn wake_partitions(&self) {
        // SeqCst: after the fence of `announce_copy`.
        if self.waiting_partitions.load(Ordering::SeqCst) > 0 {
            self.live_partitions().iter().for_each(|partition| partition.waiters.wake_head());
        }
    }
}

impl PartitionCore {
    /// # Errors
    ///
    /// Fails after [`close`](Self::close), and after the pool was closed.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closed() { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    fn is_closed(&self) -> bool {
        // Relaxed: `close` sets the flag, locks the queue and wakes its requests. A request that joins later locks the queue
        // after that, so it sees the flag.
        self.is_closed.load(Ordering::Relaxed) || self.core.is_closed()
    }

    /// Closes the partition: waiting and later requests fail.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.waiters.wake_all();
    }

    /// Changes the limit.
    pub(crate) fn set_max_bytes(&self, max_bytes: Option<u64>) {
        self.budget.set_max_bytes(max_bytes);
        self.waiters.wake_all();
    }

    /// Charges `block` to this partition until it is idle or released.
    pub(crate) fn charge(&self, block: &mut Block, claim: Claim) {
        let count = if block.is_timed() { &self.misses } else { &self.hits };
        count.add(1);
        self.peak_bytes.fetch_max(self.budget.used_bytes(), Ordering::Relaxed);
        block.set_claim(claim);
    }

    /// Claims the bytes of a request. If there is no room, the request joins the queue for at most `wait`, or fails if `wait` is
    /// zero or the request exceeds a limit. The request of a task has a `keep_alive`.
    pub(crate) fn begin_claim(
        self: &Arc<Self>,
        request: &BlockRequest,
        wait: Duration,
        keep_alive: Option<KeepAlive>,
    ) -> Result<FirstAttempt<Self>> {
        let refusal = match self.try_claim(request.class) {
            Ok(claim) => return Ok(FirstAttempt::Served(claim)),
            Err(refusal) => refusal,
        };
        if wait.is_zero() || refusal.is_too_large() {
            return Err(self.refuse(request, refusal));
        }
        self.core.log.waiting(request.len as u64, request.class.bytes as u64);
        let waiter = Waiter::new(request.clone(), request.class, (Instant::now(), wait), keep_alive);
        Ok(FirstAttempt::Waiting(WaitTicket::new(self, waiter, Some(refusal))))
    }

    /// Claims the bytes of a request of `class`, unless earlier requests wait.
    pub(super) fn try_claim(&self, class: Class) -> Result<Claim, Refusal> {
        let (needed_bytes, waiting) = (self.core.memory.supply.block_bytes(class), self.waiters.waiting_bytes());
        match waiting.first() {
            Some(&first_bytes) if self.budget.could_hold(needed_bytes) => {
                Err(Refusal::Queued { level: LimitLevel::Partition, waiting: waiting.len() as u64, first_bytes })
            }
            _ => Ok(self.budget.claim(needed_bytes)?),
        }
    }

    fn refuse(&self, request: &BlockRequest, refusal: Refusal) -> crate::Error {
        self.failed.add(1);
        self.core.counters.failed_requests.add(1);
        if self.is_closed() {
            return ErrorKind::Closed.into();
        }
        let refusal = self.core.device_lost.get().cloned().map_or(refusal, Refusal::Source);
        let error = self.core.refusal_error(request, refusal, Purpose::Request);
        self.core.record_outcome(&Err::<Block, _>(()), request, None);
        error
    }

    /// Returns the statistics of this partition.
    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats { is_partition: true, ..self.core.empty_stats(Some(self.name.clone()), self.number) };
        if self.core.is_forked() {
            return stats;
        }
        let (requests, memory) = (&mut stats.requests, &mut stats.memory);
        (requests.hits, requests.misses, requests.failed) = (self.hits.get(), self.misses.get(), self.failed.get());
        requests.served = requests.hits + requests.misses;
        (requests.waits, requests.waiting) = self.waiters.counts();
        (requests.timeouts, requests.wait_time) = (self.timeouts.get(), self.waits.get());
        memory.in_use_bytes = self.budget.used_bytes();
        memory.held_bytes = memory.in_use_bytes;
        memory.peak_held_bytes = self.peak_bytes.load(Ordering::Relaxed);
        stats.limits.max_bytes = self.budget.max_bytes();
        stats
    }
}

impl BudgetUser for PartitionCore {
    fn on_bytes_returned(&self) {
        if self.waiters.has_waiters() {
            self.waiters.wake_head();
        }
    }
}

impl Server for PartitionCore {
    type Request = BlockRequest;
    type Item = Claim;
    type Refusal = Refusal;

    fn queue(&self) -> &WaitQueue<Self> {
        &self.waiters
    }

    fn on_waiting_changed(&self, is_waiting: bool) {
        let count = if is_waiting { AtomicU64::fetch_add } else { AtomicU64::fetch_sub };
        count(&self.core.waiting_partitions, 1, Ordering::SeqCst);
    }

    fn sweep(&self) {
        self.core.sweep_copies(QueryScope::Undecided);
    }

    fn serve(self: &Arc<Self>, waiter: &Waiter<Self>, _: Instant) -> Result<Claim, Refusal> {
        // Pairs with the fence of a return (quota-I3).
        fence(Ordering::SeqCst);
        Ok(self.budget.claim(self.core.memory.supply.block_bytes(waiter.class))?)
    }

    fn finish_wait(self: &Arc<Self>, ticket: &WaitTicket<Self>, claim: Option<Claim>) -> Result<Claim> {
        let request = ticket.request();
        self.core.log.waited(request.len as u64, ticket.age(), claim.is_some());
        claim.ok_or_else(|| {
            let timed_out = !self.is_hopeless(ticket.waiter.refusal().as_ref());
            self.timeouts.add(timed_out.into());
            let needed_bytes = self.core.memory.supply.block_bytes(request.class);
            let full = || self.budget.own_refusal(needed_bytes).into();
            self.refuse(request, ticket.waiter.refusal().unwrap_or_else(full)).after_wait(timed_out)
        })
    }

    fn longest_sleep(&self, since: Instant) -> Duration {
        self.core.longest_sleep(since)
    }

    fn is_hopeless(&self, refusal: Option<&Refusal>) -> bool {
        self.is_closed() || self.core.has_ended() || refusal.is_some_and(Refusal::is_too_large)
    }

    fn count_wait(&self, waited: Duration) {
        self.waits.record(waited);
    }
}
