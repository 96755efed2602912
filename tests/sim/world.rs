//! Runs the steps: a pool with its partitions, the held buffers, and the effect of each step.

use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake};
use std::time::Duration;

use pinpool::Rounding;
use pinpool::unstable::{LogSampler, ManualClock};
use pinpool::{
    Backend, Error, GetFuture, Limit, OnFull, Partition, PendingBuf, PinnedBuf, Pool, Preset, Request, Stats,
};

use crate::checks;
use crate::device::{Device, ReleasesBuffer, SimStream, SimTarget, finish_all, stamp};
use crate::memory::{Memory, SimMemory, Slab};
use crate::scenario::{Call, Op, Scenario, Setup, Step};
use crate::site::Site;

/// Streams of the device.
const STREAMS: usize = 3;
/// A timeout that no request reaches.
const FOREVER: Duration = Duration::from_secs(1 << 20);
/// A timeout that has expired when the request is polled for the first time.
const LATE: Duration = Duration::from_nanos(1);
/// The number of runs in this process so far.
static WORLDS: AtomicU64 = AtomicU64::new(0);
/// A pool and its partitions.
const POOLS_MAX: usize = 3;

/// A handle of the pool or of a partition.
#[derive(Clone)]
pub(crate) enum Handle {
    Pool(Pool),
    Partition(Partition),
}

impl Handle {
    /// Requests a buffer, of any alignment if `align` is 0.
    fn get(&self, len: usize, align: usize) -> Result<PinnedBuf, Error> {
        match self {
            Self::Pool(pool) if align == 0 => pool.get(len),
            Self::Pool(pool) => pool.get_with(Request::new(len).align(align)),
            Self::Partition(partition) => partition.get_with(Request::new(len).align(align.max(1))),
        }
    }

    fn get_async(&self, request: Request) -> GetFuture {
        match self {
            Self::Pool(pool) => pool.get_async(request),
            Self::Partition(partition) => partition.get_async(request),
        }
    }

    fn try_get(&self, len: usize) -> Result<Option<PinnedBuf>, Error> {
        match self {
            Self::Pool(pool) => pool.try_get(len),
            Self::Partition(partition) => partition.try_get(len),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        match self {
            Self::Pool(pool) => pool.stats(),
            Self::Partition(partition) => partition.stats(),
        }
    }
}

/// The state of a run. Its cells are not borrowed during a pool call, because the call may lead back here.
pub(crate) struct World {
    pub(crate) site: Arc<Site>,
    pub(crate) setup: Setup,
    clock: ManualClock,
    pub(crate) pools: RefCell<Vec<Option<Handle>>>,
    pub(crate) held: RefCell<Vec<Held>>,
    pub(crate) pending: RefCell<Vec<Pending>>,
    pub(crate) waiting: RefCell<Vec<Waiting>>,
    /// A request that may be waiting is being polled. Other steps may run inside its source calls.
    is_polling: Cell<bool>,
    pub(crate) tallies: RefCell<Vec<Tally>>,
    armed: RefCell<Vec<(Call, Step)>>,
    is_inside: Cell<bool>,
    next_value: Cell<u64>,
    /// The index of the running step.
    at: Cell<usize>,
    trace: Cell<u64>,
    /// A copy failed, or may have failed.
    pub(crate) device_failed: Cell<bool>,
    has_limit: Cell<bool>,
    /// A reserve was made or the limit was changed, so there may be less room than a waiting request needs.
    took_room: Cell<bool>,
}

/// A buffer in use.
pub(crate) struct Held {
    buf: PinnedBuf,
    pub(crate) pool: usize,
    pub(crate) start: usize,
    pub(crate) value: u64,
}

/// A buffer that a copy writes to.
pub(crate) struct Pending {
    buf: PendingBuf,
    pub(crate) pool: usize,
    pub(crate) start: usize,
    value: u64,
}

/// Whether a task was woken since its last poll.
#[derive(Debug, Default)]
pub(crate) struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A waiting request, in the order of the queue of its pool.
pub(crate) struct Waiting {
    get: Pin<Box<GetFuture>>,
    woken: Arc<Woken>,
    /// The step that polled it last.
    polled_at: usize,
    pub(crate) pool: usize,
    len: usize,
    /// The source's failures before the last poll.
    failures: [u64; 3],
}

/// The counts that a pool must report.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) gets: u64,
    pub(crate) failed: u64,
}

impl Held {
    pub(crate) fn len(&self) -> usize {
        self.buf.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.buf.capacity()
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.buf.pinned_by().is_some()
    }
}

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

/// Lets the actors act that wait for a source call of this kind.
pub(crate) fn act_during(call: Call) {
    let world = WORLD.with_borrow(Clone::clone);
    world.into_iter().for_each(|world| world.act_during(call));
}

/// The step that this thread's run had reached when it panicked.
pub(crate) fn reached() -> usize {
    WORLD.with_borrow(|world| world.as_ref().map_or(0, |world| world.at.get()))
}

/// Runs `scenario` on this thread. Returns its trace, or the step that broke a promise, and which.
pub(crate) fn run(scenario: &Scenario, slab: Slab) -> Result<u64, (usize, String)> {
    let world = Rc::new(World::new(scenario.setup, slab).map_err(|error| (0, error))?);
    WORLD.set(Some(world.clone()));
    let result = world.run(&scenario.steps);
    WORLD.set(None);
    result
}

impl World {
    fn new(setup: Setup, slab: Slab) -> Result<Self, String> {
        let device = Device::with_streams(STREAMS, setup.lying_device == 1);
        let site = Site::new(Memory::new(slab, &setup), device);
        let clock = ManualClock::default();
        let source = SimMemory { site: site.clone(), setup };
        // A separate root, because a refused request also waits for memory of other pools on the same machine.
        let root = format!("/simulation/{}", WORLDS.fetch_add(1, Ordering::Relaxed));
        let max_bytes = if setup.max_bytes == 0 { Limit::Unlimited } else { Limit::Bytes(setup.max_bytes) };
        let mut builder = Pool::builder()
            .without_env()
            .backend(Backend::Source(Arc::new(source)))
            .max_bytes(max_bytes)
            .pool_size_limit(setup.limit)
            .wait(Duration::ZERO)
            .unstable_settings(|only| only.copies_wait = Some(Duration::ZERO))
            .maintenance_thread(false)
            .reserve_wait(setup.background == 0)
            .on_full(if setup.pageable == 1 { OnFull::Pageable } else { OnFull::Error })
            .idle_timeout((setup.idle_seconds > 0).then(|| Duration::from_secs(setup.idle_seconds)))
            .unstable_settings(|only| only.pressure = Some("/dev/null".into()))
            .unstable_host_root(root)
            .unstable_log_sampler(LogSampler::new())
            .unstable_clock(clock.clone());
        builder = match (setup.tensorflow, setup.exact) {
            (0, _) => builder.preset(Preset::Adaptive).reserve(setup.reserve_bytes),
            (_, 0) => builder.preset(Preset::TensorFlow),
            _ => builder.preset(Preset::TensorFlow).rounding(Rounding::Exact),
        };
        let pool = builder.build().map_err(|error| format!("the pool cannot be built: {error}"))?;
        Ok(Self {
            site,
            setup,
            clock,
            pools: RefCell::new(vec![Some(Handle::Pool(pool))]),
            held: RefCell::default(),
            pending: RefCell::default(),
            waiting: RefCell::default(),
            is_polling: Cell::new(false),
            tallies: RefCell::new(vec![Tally::default()]),
            armed: RefCell::default(),
            is_inside: Cell::new(false),
            next_value: Cell::new(0),
            at: Cell::new(0),
            trace: Cell::new(0xcbf2_9ce4_8422_2325),
            device_failed: Cell::new(false),
            has_limit: Cell::new(setup.max_bytes > 0),
            took_room: Cell::new(false),
        })
    }

    fn run(&self, steps: &[Step]) -> Result<u64, (usize, String)> {
        for (at, &step) in steps.iter().enumerate() {
            self.at.set(at);
            let in_flight_before = self.in_flight();
            match step.during {
                Some(call) if self.may_be_inside(step.op) => self.armed.borrow_mut().push((call, step)),
                _ => self.act(step),
            }
            self.abandon();
            checks::after_step(self).map_err(|what| (at, what))?;
            if self.in_flight() > in_flight_before {
                self.check_woken().map_err(|what| (at, what))?;
            }
        }
        self.at.set(steps.len());
        self.end();
        checks::after_end(self).map_err(|what| (steps.len(), what))?;
        Ok(self.trace.get())
    }

    /// Buffers in flight.
    fn in_flight(&self) -> u64 {
        self.pools.borrow()[0].as_ref().map_or(0, |pool| pool.stats().copies.in_flight)
    }

    /// Checks, after a copy has begun in this step, that the head of each queue was woken or has been polled since.
    fn check_woken(&self) -> Result<(), String> {
        let waiting = self.waiting.borrow();
        let mut in_pool: Vec<&Waiting> = Vec::new();
        let sleeps = |first: &Waiting| first.polled_at < self.at.get() && !first.woken.0.load(Ordering::SeqCst);
        for (index, pool) in self.pools.borrow().iter().enumerate() {
            let mine: Vec<_> = waiting.iter().filter(|waiting| waiting.pool == index).collect();
            // Requests that already claimed bytes from the partition wait in the pool's queue; they came first.
            let stats = pool.as_ref().filter(|_| index > 0).map(Handle::stats);
            let of_partition = as_len(stats.map_or(0, |stats| stats.requests.waiting)).min(mine.len());
            let (claimed, claiming) = mine.split_at(mine.len() - of_partition);
            if let Some(first) = claiming.first().filter(|first| sleeps(first)) {
                return Err(format!("a copy begins while the request of {} B in partition {index} sleeps", first.len));
            }
            in_pool.extend(claimed);
        }
        if !in_pool.is_empty() && in_pool.iter().all(|waiting| sleeps(waiting)) {
            return Err(format!("a copy begins, and all {} requests that wait in the pool sleep", in_pool.len()));
        }
        Ok(())
    }

    /// Adds `word` to the trace, by which two runs are compared.
    pub(crate) fn note(&self, word: u64) {
        self.trace.set((self.trace.get() ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(17));
    }

    /// Returns whether another thread could perform `op` during a source call, without waiting for the end of the source call.
    fn may_be_inside(&self, op: Op) -> bool {
        match op {
            Op::Get => self.setup.tensorflow == 1,
            Op::CopyTo
            | Op::CopyRange
            | Op::Put
            | Op::TryGet
            | Op::Finish
            | Op::Poll
            | Op::Trim
            | Op::Clear
            | Op::Advance => true,
            _ => false,
        }
    }

    fn act_during(&self, call: Call) {
        // Without the first pool, a return may end the arena, which waits for the running call.
        let may_act = !self.is_inside.get() && self.pools.borrow()[0].is_some();
        let armed = || {
            let mut armed = self.armed.borrow_mut();
            armed.iter().position(|(other, _)| *other == call).map(|at| armed.remove(at).1)
        };
        let Some(step) = may_act.then(armed).flatten() else { return };
        self.is_inside.set(true);
        self.act(step);
        self.is_inside.set(false);
    }

    fn act(&self, Step { op, args, .. }: Step) {
        self.note(op as u64);
        match op {
            Op::Get => self.get(args[0], as_len(args[1]), as_len(args[2])),
            Op::TryGet => self.try_get(args[0], as_len(args[1])),
            Op::GetAsync => self.with_handle(args[0], |index, pool| {
                let (len, failures) = (as_len(args[1]), self.site.memory().failures);
                let (is_late, before) = (args[2] == 1, self.waiting.borrow().len());
                let get = Box::pin(pool.get_async(Request::new(len).timeout(if is_late { LATE } else { FOREVER })));
                self.poll_get(Waiting { get, woken: Arc::default(), polled_at: 0, pool: index, len, failures });
                if is_late && self.waiting.borrow().len() > before {
                    self.site.report(format!("a request for {len} B waits although its deadline has passed"));
                }
            }),
            Op::PollGet => self.take_waiting(args[0]).into_iter().for_each(|(at, waiting)| {
                if let Some(waiting) = self.look(waiting) {
                    self.waiting.borrow_mut().insert(at, waiting);
                }
            }),
            Op::CancelGet => drop(self.take_waiting(args[0])),
            Op::Put => self.take_held(args[0]).into_iter().for_each(|held| self.put(held)),
            Op::Rewrite => self.rewrite(args[0]),
            Op::CopyTo => self.copy_to(args[0], args[1]),
            Op::CopyRange => self.copy_range(args[0], args[1]),
            Op::CopyFrom => self.copy_from(args[0], args[1]),
            Op::Await => self.await_copy(args[0]),
            Op::DropPending => self.take_pending(args[0]).into_iter().for_each(|pending| self.drop_pending(pending)),
            Op::ReleaseAfter => self.release_after(args[0], args[1]),
            Op::Finish => {
                let stream = self.stream(args[0]);
                let finished = (0..args[1]).take_while(|_| stream.finish_one()).count();
                self.note(finished as u64);
            }
            Op::Advance => self.clock.advance_us(args[0]),
            Op::Poll => self.with_pool(|pool| pool.maintain()),
            Op::Trim => self.with_pool(|pool| pool.trim(args[1])),
            Op::Clear => self.with_pool(|pool| pool.clear()),
            Op::Reserve => self.with_pool(|pool| {
                self.took_room.set(true);
                self.note(u64::from(pool.reserve(args[1]).is_ok()));
            }),
            Op::Partition => self.partition(args[0]),
            Op::SetMaxBytes => self.with_pool(|pool| {
                // Set before the call, because a lower limit also applies to memory that others acquire during the call.
                self.site.memory().set_max_bytes(args[0]);
                self.has_limit.set(true);
                self.took_room.set(true);
                self.note(u64::from(pool.set_max_bytes(Limit::Bytes(args[0])).is_ok()));
            }),
            Op::DropPool => self.drop_pool(args[0]),
            Op::FailCalls => {
                let call = Call::ALL[as_len(args[0]) % Call::ALL.len()];
                self.site.memory().fail(call, args[1], args[2]);
            }
            Op::LoseRemaps => self.site.memory().lose_remaps(args[0], args[1]),
            Op::LimitHost => self.site.memory().limit_host(args[0]),
            Op::FailStream => {
                self.device_failed.set(true);
                let stream = self.stream(args[0]);
                self.site.device().fail_stream(stream.index);
            }
            Op::FailQuery => {
                self.device_failed.set(true);
                let stream = self.stream(args[0]);
                self.site.device().fail_query(stream.index);
            }
            Op::RefuseCopy => {
                let stream = self.stream(args[0]);
                self.site.device().refuse(stream.index);
            }
            Op::UnknownCopy => {
                self.device_failed.set(true);
                let stream = self.stream(args[0]);
                self.site.device().make_outcome_unknown(stream.index);
            }
            Op::Heal => self.heal(),
        }
    }

    fn heal(&self) {
        self.site.memory().heal();
        self.site.device().heal();
    }

    fn stream(&self, nth: u64) -> SimStream {
        let index = self.site.device().working(nth);
        SimStream { site: self.site.clone(), index }
    }

    /// Calls `act` with the pool, unless its handle was dropped.
    fn with_pool(&self, act: impl FnOnce(&Pool)) {
        let pool = self.pools.borrow()[0].clone();
        if let Some(Handle::Pool(pool)) = pool {
            act(&pool);
        }
    }

    /// Calls `act` with the pool or a partition, unless its handle was dropped.
    fn with_handle(&self, nth: u64, act: impl FnOnce(usize, &Handle)) {
        let pools = self.pools.borrow();
        let index = as_len(nth) % pools.len();
        // A clone would keep the pool alive after the handle is dropped.
        let Some(pool) = pools[index].clone() else { return };
        drop(pools);
        act(index, &pool);
    }

    fn get(&self, pool: u64, len: usize, align: usize) {
        self.with_handle(pool, |index, pool| {
            let failures = self.site.memory().failures;
            match pool.get(len, align) {
                Ok(buf) => {
                    if !buf.as_ptr().addr().is_multiple_of(align.max(4096)) {
                        self.site.report(format!("a buffer is not aligned to {align} B"));
                    }
                    self.hand_out(index, buf, len, align);
                }
                Err(error) => self.record_refused(index, len, failures, &error),
            }
        });
    }

    /// Records a failed request; `failures` are the source's failures before it.
    fn record_refused(&self, pool: usize, len: usize, failures: [u64; 3], error: &Error) {
        self.note(2);
        self.tallies.borrow_mut()[pool].failed += 1;
        let is_explained = if error.is_limit() {
            // Without a limit only the queue can be in the way.
            self.has_limit.get() || pool > 0 || self.is_polling.get() || !self.waiting.borrow().is_empty()
        } else {
            error.is_backend() && self.site.memory().failures != failures
        };
        if !is_explained {
            self.site.report(format!("a request for {len} B failed without a reason: {error}"));
        }
    }

    fn try_get(&self, pool: u64, len: usize) {
        self.with_handle(pool, |index, pool| match pool.try_get(len) {
            Ok(Some(buf)) => self.hand_out(index, buf, len, 0),
            Ok(None) => self.note(3),
            Err(error) => self.site.report(format!("try_get of {len} B failed: {error}")),
        });
    }

    fn take_waiting(&self, which: u64) -> Option<(usize, Waiting)> {
        let mut waiting = self.waiting.borrow_mut();
        let at = as_len(which) % NonZeroUsize::new(waiting.len())?;
        Some((at, waiting.remove(at)))
    }

    fn poll_get(&self, waiting: Waiting) {
        self.look(waiting).into_iter().for_each(|waiting| self.waiting.borrow_mut().push(waiting));
    }

    /// Polls a request. Returns it if it is still waiting.
    fn look(&self, mut waiting: Waiting) -> Option<Waiting> {
        let failures = self.site.memory().failures;
        // The schedule, not the waker, decides when the request is polled again.
        let outer = self.is_polling.replace(true);
        waiting.woken.0.store(false, Ordering::SeqCst);
        waiting.polled_at = self.at.get();
        let polled = waiting.get.as_mut().poll(&mut Context::from_waker(&waiting.woken.clone().into()));
        self.is_polling.set(outer);
        match polled {
            Poll::Pending => {
                self.note(6);
                waiting.failures = failures;
                return Some(waiting);
            }
            Poll::Ready(Ok(buf)) => self.hand_out(waiting.pool, buf, waiting.len, 0),
            Poll::Ready(Err(error)) => self.record_refused(waiting.pool, waiting.len, waiting.failures, &error),
        }
        None
    }

    fn hand_out(&self, pool: usize, buf: PinnedBuf, len: usize, align: usize) {
        self.note(buf.unstable_id().unwrap_or(0));
        // The capacity of an aligned buffer depends on its address, which the system chooses for pageable memory.
        self.note(if buf.pinned_by().is_some() { buf.capacity() as u64 } else { 0 });
        let start = buf.as_ptr().expose_provenance();
        if buf.len() != len || buf.capacity() < len {
            self.site.report(format!("a request for {len} B returned {} of {} B", buf.len(), buf.capacity()));
        }
        let bytes = start..start + buf.capacity();
        if buf.pinned_by().is_some() && !self.site.memory().is_committed(&bytes) {
            self.site.report(format!("a request for {len} B returned bytes without memory"));
        }
        self.site.hand_out(bytes, align);
        self.tallies.borrow_mut()[pool].gets += 1;
        let value = self.new_value();
        self.hold(Held { buf, pool, start, value });
    }

    fn new_value(&self) -> u64 {
        self.next_value.set(self.next_value.get() + 1);
        // All eight bytes differ between neighbors.
        self.next_value.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }

    /// Fills the buffer with its value.
    #[allow(unsafe_code)]
    fn hold(&self, held: Held) {
        // SAFETY: the buffer is held, and no copy uses it.
        unsafe { stamp(held.start, held.len(), held.value) };
        self.held.borrow_mut().push(held);
    }

    fn take_held(&self, which: u64) -> Option<Held> {
        let mut held = self.held.borrow_mut();
        let at = as_len(which) % NonZeroUsize::new(held.len())?;
        Some(held.swap_remove(at))
    }

    fn take_pending(&self, which: u64) -> Option<Pending> {
        let mut pending = self.pending.borrow_mut();
        let at = as_len(which) % NonZeroUsize::new(pending.len())?;
        Some(pending.swap_remove(at))
    }

    fn put(&self, held: Held) {
        self.site.give_up(held.start);
        drop(held.buf);
    }

    fn rewrite(&self, which: u64) {
        let Some(mut held) = self.take_held(which) else { return };
        if held.buf.wait_slice_mut().is_err() {
            // A copy into the buffer failed, and may still write to it.
            self.note(4);
            return self.put(held);
        }
        let value = self.new_value();
        self.hold(Held { value, ..held });
    }

    fn copy_to(&self, which: u64, stream: u64) {
        let Some(Held { buf, start, value, .. }) = self.take_held(which) else { return };
        let mut target = SimTarget::new(start, value, ReleasesBuffer::Always);
        let copied = buf.copy_to(&self.stream(stream), &mut target);
        self.note(u64::from(copied.is_ok()));
        if !target.has_released.get() {
            self.site.give_up(start);
        }
    }

    fn copy_range(&self, which: u64, stream: u64) {
        let Some(mut held) = self.take_held(which) else { return };
        let (len, mut target) = (held.len(), SimTarget::new(held.start, held.value, ReleasesBuffer::Never));
        let copied = held.buf.copy_range_to(0..len, &self.stream(stream), &mut target);
        self.note(u64::from(copied.is_ok()));
        // The copy has an unknown outcome, so it kept the buffer.
        if !target.has_released.get() {
            self.held.borrow_mut().push(held);
        } else if !held.buf.is_empty() {
            self.site.report("a buffer is still there after a copy of unknown end".to_owned());
        }
    }

    fn copy_from(&self, which: u64, stream: u64) {
        let Some(Held { buf, pool, start, .. }) = self.take_held(which) else { return };
        let value = self.new_value();
        let target = SimTarget::new(start, value, ReleasesBuffer::IfRefused);
        match buf.copy_from(&self.stream(stream), &target) {
            Ok(buf) => self.pending.borrow_mut().push(Pending { buf, pool, start, value }),
            Err(_) if target.has_released.get() => self.note(5),
            Err(_) => self.site.give_up(start),
        }
    }

    fn await_copy(&self, which: u64) {
        let Some(Pending { buf, pool, start, value }) = self.take_pending(which) else { return };
        match buf.wait() {
            Ok(buf) => self.held.borrow_mut().push(Held { buf, pool, start, value }),
            Err(_) => self.site.give_up(start),
        }
    }

    fn drop_pending(&self, pending: Pending) {
        self.site.give_up(pending.start);
        drop(pending.buf);
    }

    fn release_after(&self, which: u64, stream: u64) {
        let Some(Held { buf, start, .. }) = self.take_held(which) else { return };
        self.site.device().marked = Some(start);
        if buf.release_after(&self.stream(stream)).is_err() {
            self.site.device().marked = None;
            self.site.lose(start);
            self.site.give_up(start);
        }
    }

    fn partition(&self, max_bytes: u64) {
        let count = self.pools.borrow().len();
        if count == POOLS_MAX {
            return;
        }
        let mut made = None;
        self.with_pool(|pool| made = pool.open_partition("part", max_bytes).ok());
        if let Some(partition) = made {
            self.pools.borrow_mut().push(Some(Handle::Partition(partition)));
            self.tallies.borrow_mut().push(Tally::default());
        }
    }

    fn drop_pool(&self, nth: u64) {
        let mut pools = self.pools.borrow_mut();
        let index = as_len(nth) % pools.len();
        let pool = pools[index].take();
        // A waiting request keeps its pool alive.
        let waiting = self.waiting.take();
        let (leaving, staying) = waiting.into_iter().partition(|waiting| waiting.pool == index && pool.is_some());
        self.waiting.replace(staying);
        if pools.iter().all(Option::is_none) {
            self.site.memory().is_ending = true;
        }
        drop(pools);
        // Steps that wait for a source call would otherwise run during the end of the pool.
        let armed = self.armed.take();
        drop::<Vec<Waiting>>(leaving);
        drop(pool);
        self.armed.replace(armed);
    }

    /// Excuses leaks once no handle and no buffer keeps the pool open, because it then waits for no copy.
    fn abandon(&self) {
        let is_used = !self.held.borrow().is_empty() || !self.pending.borrow().is_empty();
        if !is_used && self.pools.borrow().iter().all(Option::is_none) {
            self.site.excuse_pool();
        }
    }

    fn finish_all(&self) {
        finish_all(&self.site);
    }

    /// Returns all buffers, and checks that all waiting requests are served, unless there is less room now or a fault remains.
    fn serve_all(&self) {
        if self.waiting.borrow().is_empty() || self.setup.serve_all == 0 {
            return;
        }
        self.heal();
        self.finish_all();
        // A partition's request may wait twice.
        let rounds = 2 * self.waiting.borrow().len() + 1;
        for _ in 0..rounds {
            while let Some(held) = self.take_held(0) {
                self.put(held);
            }
            while let Some(pending) = self.take_pending(0) {
                self.drop_pending(pending);
            }
            // A request repeats failed source calls after 5 ms.
            self.clock.advance_us(5_000);
            for waiting in self.waiting.take() {
                self.poll_get(waiting);
            }
        }
        let has_less_room = self.took_room.get() || self.site.any_excused();
        let is_explained = has_less_room || self.device_failed.get() || self.site.memory().is_faulty();
        if !self.waiting.borrow().is_empty() && !is_explained {
            self.site.report("a request waits although everything was returned".to_owned());
        }
    }

    /// Ends a run and drops everything.
    fn end(&self) {
        self.armed.take();
        if self.setup.stay_faulty == 0 {
            self.heal();
        }
        if self.setup.finish_first == 1 {
            self.finish_all();
        }
        self.serve_all();
        let drop_pools = || (0..POOLS_MAX as u64).for_each(|nth| self.drop_pool(nth));
        if self.setup.pools_first == 1 {
            drop_pools();
        }
        while let Some(held) = self.take_held(0) {
            self.put(held);
            self.abandon();
        }
        while let Some(pending) = self.take_pending(0) {
            self.drop_pending(pending);
            self.abandon();
        }
        drop_pools();
        self.abandon();
    }
}

fn as_len(number: u64) -> usize {
    usize::try_from(number).unwrap()
}
