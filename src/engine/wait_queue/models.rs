//! Every interleaving of waiting requests, returns and hits.
//!
//! The idle items are behind a lock with the flag that the queue sets, as in the shards of the thread cache: a return that finds
//! no flag keeps its item and does nothing else; it reads no count of waiting requests and executes no barrier. A
//! request sleeps without a time limit unless it sees an item in flight, so loom reports a lost wake-up as a deadlock.

use super::*;
use loom::thread;
use pinpool_os::sync::Condvar;
use pinpool_os::sync::atomic::{AtomicU32, fence};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

const CLASS: Class = Class { bytes: 4096, index: 0 };
const OTHER: Class = Class { bytes: 8192, index: 1 };

#[derive(Debug, Default)]
struct Shard {
    idle: u32,
    is_slow: bool,
}

struct ModelPool {
    queue: WaitQueue<Self>,
    shard: Mutex<Shard>,
    /// Items with copies that run until a thread checks them.
    in_flight: AtomicU32,
}

impl ModelPool {
    fn put(&self, class: Class) {
        {
            let mut shard = self.shard.lock();
            if !shard.is_slow {
                shard.idle += 1;
                return;
            }
        }
        if self.queue.offer(self, (), class).is_some() {
            self.shard.lock().idle += 1;
            self.queue.wake_head();
        }
    }

    /// `PoolCore::announce_copy`.
    fn put_in_flight(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.queue.has_waiters() {
            self.queue.wake_head();
        }
    }

    fn take(&self) -> Option<()> {
        let mut shard = self.shard.lock();
        shard.idle = shard.idle.checked_sub(1)?;
        Some(())
    }
}

impl Server for ModelPool {
    type Request = ();
    type Item = ();
    type Refusal = ();

    fn queue(&self) -> &WaitQueue<Self> {
        &self.queue
    }

    fn on_waiting_changed(&self, is_waiting: bool) {
        self.shard.lock().is_slow = is_waiting;
    }

    fn sweep(&self) {
        (0..self.in_flight.swap(0, Ordering::Relaxed)).for_each(|_| self.put(CLASS));
    }

    fn serve(self: &Arc<Self>, _: &Waiter<Self>, _: Instant) -> Result<(), ()> {
        self.take().ok_or(())
    }

    fn finish_wait(self: &Arc<Self>, _: &WaitTicket<Self>, served: Option<()>) -> crate::Result<()> {
        served.ok_or_else(|| crate::error::ErrorKind::Closed.into())
    }

    fn return_unused(&self, (): ()) {
        self.put(CLASS);
    }

    fn longest_sleep(&self, _since: Instant) -> Duration {
        fence(Ordering::SeqCst);
        if self.in_flight.load(Ordering::Relaxed) > 0 { Duration::ZERO } else { FOREVER }
    }

    fn is_hopeless(&self, _: Option<&()>) -> bool {
        false
    }
}

const FOREVER: Duration = Duration::from_secs(1 << 20);
/// A wait that ends at the first search.
const NO_TIME: Duration = Duration::from_nanos(1);

/// The request of a thread.
fn join(pool: &Arc<ModelPool>, wait: Duration) -> WaitTicket<ModelPool> {
    WaitTicket::new(pool, Waiter::new((), CLASS, (Instant::now(), wait), None), Some(()))
}

/// The request of a task.
fn join_task(pool: &Arc<ModelPool>, wait: Duration, refusal: Option<()>) -> WaitTicket<ModelPool> {
    WaitTicket::new(pool, Waiter::new((), CLASS, (Instant::now(), wait), Some(std::sync::Arc::new(()))), refusal)
}

fn get(pool: &Arc<ModelPool>) {
    assert!(join(pool, FOREVER).wait().is_some());
}

/// Checks the interleavings of `check`. Each must leave `left` idle items.
fn model(left: u32, check: impl Fn(&Arc<ModelPool>) + Sync + Send + 'static) {
    model_within(3, left, check);
}

/// With three threads, at most two preemptions: more take hours.
fn model_of_three(left: u32, check: impl Fn(&Arc<ModelPool>) + Sync + Send + 'static) {
    model_within(2, left, check);
}

fn model_within(preemptions: usize, left: u32, check: impl Fn(&Arc<ModelPool>) + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let pool =
            Arc::new(ModelPool { queue: WaitQueue::new(false), shard: Mutex::default(), in_flight: AtomicU32::new(0) });
        check(&pool);
        assert!(!pool.queue.has_waiters());
        let shard = pool.shard.lock();
        assert_eq!((shard.idle, shard.is_slow), (left, false));
    });
}

fn spawn(pool: &Arc<ModelPool>, act: impl FnOnce(&Arc<ModelPool>) + 'static) -> thread::JoinHandle<()> {
    let pool = pool.clone();
    thread::spawn(move || act(&pool))
}

#[test]
fn loom_a_return_serves_a_waiter() {
    model(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        get(pool);
        putting.join().unwrap();
    });
}

/// Fails without the wake-up in `put_in_flight`, and without either fence.
#[test]
fn loom_a_copy_that_begins_while_a_request_waits_is_seen() {
    model(0, |pool| {
        let putting = spawn(pool, |pool| pool.put_in_flight());
        get(pool);
        putting.join().unwrap();
    });
}

#[test]
fn loom_a_copy_that_begins_while_a_task_waits_is_seen() {
    model(0, |pool| {
        let putting = spawn(pool, |pool| pool.put_in_flight());
        await_item(pool);
        putting.join().unwrap();
    });
}

#[test]
fn loom_a_return_of_another_class_wakes_a_waiter() {
    model(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(OTHER));
        get(pool);
        putting.join().unwrap();
    });
}

#[test]
fn loom_two_returns_serve_two_waiters() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| {
            pool.put(CLASS);
            pool.put(OTHER);
        });
        let waiting = spawn(pool, get);
        get(pool);
        waiting.join().unwrap();
        putting.join().unwrap();
    });
}

/// Models a thread that hits and puts in a loop: it may hit once more after the request joined, and its return serves
/// the request.
#[test]
fn loom_one_waiter_one_put_one_hit() {
    model(0, |pool| {
        let looping = spawn(pool, |pool| {
            pool.put(CLASS);
            if pool.take().is_some() {
                pool.put(CLASS);
            }
        });
        get(pool);
        looping.join().unwrap();
    });
}

#[test]
fn loom_a_waiter_that_times_out_passes_on_what_it_has() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        let giving_up = spawn(pool, |pool| {
            // The deadline has passed: the request makes one attempt, and returns an item that this attempt takes.
            if join(pool, NO_TIME).wait().is_some() {
                pool.put(CLASS);
            }
        });
        get(pool);
        giving_up.join().unwrap();
        putting.join().unwrap();
    });
}

/// The waiter is dropped, as it is when its thread unwinds or its future is dropped.
#[test]
fn loom_a_waiter_that_is_dropped_passes_on_what_it_was_handed() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        let cancelled = spawn(pool, |pool| drop(join(pool, FOREVER)));
        get(pool);
        cancelled.join().unwrap();
        putting.join().unwrap();
    });
}

/// A task that joins after its deadline. Returns once it has left the queue, and passes on what it received.
fn be_late(pool: &Arc<ModelPool>) {
    let mut ticket = join_task(pool, NO_TIME, Some(()));
    let Poll::Ready(served) = ticket.poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("its deadline has passed")
    };
    served.into_iter().for_each(|()| pool.put(CLASS));
}

/// Fails if a late task that leaves the queue at its own poll does not clear the slow-path flag.
#[test]
fn loom_a_late_task_leaves_the_slow_path_flag_clear() {
    model(1, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        be_late(pool);
        putting.join().unwrap();
    });
}

/// Fails if the last of two leaving tasks clears the slow-path flag only if it finds itself in the queue.
#[test]
fn loom_late_tasks_leave_the_slow_path_flag_clear() {
    model_of_three(1, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        let late = spawn(pool, be_late);
        be_late(pool);
        late.join().unwrap();
        putting.join().unwrap();
    });
}

#[test]
fn loom_a_late_task_before_a_waiter_passes_the_queue_on() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        let late = spawn(pool, be_late);
        get(pool);
        late.join().unwrap();
        putting.join().unwrap();
    });
}

/// The task is at the head of the queue and is no longer polled: the return finds it late. Fails if that return does not clear
/// the slow-path flag.
#[test]
fn loom_a_return_that_finds_only_a_late_task_leaves_the_slow_path_flag_clear() {
    model(1, |pool| {
        let ticket = join_task(pool, NO_TIME, Some(()));
        let putting = spawn(pool, |pool| pool.put(CLASS));
        drop(ticket);
        putting.join().unwrap();
    });
}

/// Blocks a thread of the model until it is woken.
#[derive(Debug, Default)]
struct Parked {
    is_woken: Mutex<bool>,
    woken: Condvar,
}

impl Parked {
    fn park(&self) {
        let mut is_woken = self.is_woken.lock();
        while !*is_woken {
            is_woken = self.woken.wait(is_woken);
        }
        *is_woken = false;
    }
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        *self.is_woken.lock() = true;
        self.woken.notify_one();
    }
}

/// Awaits an item by a request that searches when it is polled, without the reminders of a poll, which come from another thread.
fn await_item(pool: &Arc<ModelPool>) {
    let parked = Arc::new(Parked::default());
    let waker = parked.clone().into();
    let ticket = join_task(pool, FOREVER, Some(()));
    loop {
        ticket.waiter.register(&waker);
        pool.queue.search_for_task(pool, &ticket.waiter);
        if ticket.waiter.has_ended() {
            assert_eq!(ticket.waiter.take().0, Some(()));
            return;
        }
        if pool.queue.next_search(&**pool, &ticket.waiter) > Instant::now() {
            parked.park();
        }
    }
}

/// Awaits an item by a request for which a thread searches.
fn await_thread(pool: &Arc<ModelPool>, refusal: Option<()>) {
    let parked = Arc::new(Parked::default());
    let ticket = join_task(pool, FOREVER, refusal);
    pool.queue.state.lock().has_thread = true;
    ticket.waiter.register(&parked.clone().into());
    let serving = spawn(pool, |pool| pool.queue.serve_tasks(pool));
    while !ticket.waiter.has_ended() {
        parked.park();
        ticket.waiter.register(&parked.clone().into());
    }
    assert_eq!(ticket.waiter.take().0, Some(()));
    drop(ticket);
    serving.join().unwrap();
}

#[test]
fn loom_a_task_is_woken() {
    model(0, |pool| {
        let putting = spawn(pool, |pool| pool.put(CLASS));
        await_item(pool);
        putting.join().unwrap();
    });
}

#[test]
fn loom_a_task_and_a_thread_are_served_from_one_queue() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| {
            pool.put(CLASS);
            pool.put(CLASS);
        });
        let waiting = spawn(pool, get);
        await_item(pool);
        waiting.join().unwrap();
        putting.join().unwrap();
    });
}

#[test]
fn loom_a_task_is_served_by_the_thread_whether_it_is_deferred_or_not() {
    for refusal in [None, Some(())] {
        model_of_three(0, move |pool| {
            let putting = spawn(pool, |pool| pool.put(CLASS));
            await_thread(pool, refusal);
            putting.join().unwrap();
        });
    }
}

#[test]
fn loom_a_copy_that_begins_while_the_thread_serves_a_task_is_seen() {
    model_of_three(0, |pool| {
        let putting = spawn(pool, |pool| pool.put_in_flight());
        await_thread(pool, Some(()));
        putting.join().unwrap();
    });
}

#[test]
fn loom_the_thread_ends_when_the_task_is_dropped() {
    model_of_three(1, |pool| {
        let ticket = join_task(pool, FOREVER, None);
        pool.queue.state.lock().has_thread = true;
        let serving = spawn(pool, |pool| pool.queue.serve_tasks(pool));
        let putting = spawn(pool, |pool| pool.put(CLASS));
        drop(ticket);
        putting.join().unwrap();
        serving.join().unwrap();
    });
}
