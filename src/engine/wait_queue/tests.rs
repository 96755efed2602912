use std::sync::atomic::AtomicUsize as Count;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use super::*;

const LONG: Duration = Duration::from_secs(3600);
const CLASS: Class = Class { bytes: 4096, index: 0 };
const OTHER: Class = Class { bytes: 8192, index: 1 };

/// A pool as the queue sees it: idle items of one class.
struct TestPool {
    queue: WaitQueue<Self>,
    idle: Mutex<Vec<u32>>,
    /// The argument of each call of `on_waiting_changed`.
    told: Mutex<Vec<bool>>,
    attempts: Count,
    panics: std::sync::atomic::AtomicBool,
}

impl TestPool {
    fn with_thread(may_start_thread: bool) -> Arc<Self> {
        Arc::new(Self {
            queue: WaitQueue::new(may_start_thread),
            idle: Mutex::default(),
            told: Mutex::default(),
            attempts: Count::default(),
            panics: false.into(),
        })
    }

    fn new() -> Arc<Self> {
        Self::with_thread(false)
    }

    fn put(&self, item: u32, class: Class) {
        if let Some(item) = self.queue.offer(self, item, class) {
            self.idle.lock().push(item);
            self.queue.wake_head();
        }
    }

    fn until_waiting(&self, requests: usize) {
        while self.queue.state.lock().waiters.len() != requests {
            thread::yield_now();
        }
    }
}

impl Server for TestPool {
    type Request = ();
    type Item = u32;
    type Refusal = &'static str;

    fn queue(&self) -> &WaitQueue<Self> {
        &self.queue
    }

    fn on_waiting_changed(&self, is_waiting: bool) {
        self.told.lock().push(is_waiting);
    }

    fn sweep(&self) {}

    fn serve(self: &Arc<Self>, _: &Waiter<Self>, _: Instant) -> Result<u32, &'static str> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "the attempt panics");
        self.idle.lock().pop().ok_or("nothing is idle")
    }

    fn finish_wait(self: &Arc<Self>, _: &WaitTicket<Self>, served: Option<u32>) -> crate::Result<u32> {
        served.ok_or_else(|| crate::error::ErrorKind::Closed.into())
    }

    fn return_unused(&self, item: u32) {
        self.put(item, CLASS);
    }

    fn longest_sleep(&self, _since: Instant) -> Duration {
        LONG
    }

    /// Would end a request with the refusal that it joined with.
    fn is_hopeless(&self, refusal: Option<&&'static str>) -> bool {
        refusal.is_some_and(|text| text.is_empty())
    }
}

/// A wait that ends at the first search.
const NO_TIME: Duration = Duration::from_nanos(1);

/// The request of a thread.
fn join(pool: &Arc<TestPool>, wait: Duration) -> WaitTicket<TestPool> {
    WaitTicket::new(pool, Waiter::new((), CLASS, (Instant::now(), wait), None), Some(""))
}

/// The request of a task.
fn join_task(pool: &Arc<TestPool>, class: Class, wait: Duration) -> WaitTicket<TestPool> {
    WaitTicket::new(pool, Waiter::new((), class, (Instant::now(), wait), Some(Arc::new(()))), Some(""))
}

/// The request of a task that has not made its first attempt.
fn defer(pool: &Arc<TestPool>) -> WaitTicket<TestPool> {
    WaitTicket::new(pool, Waiter::new((), CLASS, (Instant::now(), LONG), Some(Arc::new(()))), None)
}

/// Counts how often it is woken.
#[derive(Debug, Default)]
struct Counting(Count);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(ticket: &mut WaitTicket<TestPool>, waker: &Waker) -> Poll<Option<u32>> {
    ticket.poll(&mut Context::from_waker(waker))
}

#[test]
fn a_request_that_is_served_at_once_never_sleeps() {
    let pool = TestPool::new();
    pool.idle.lock().push(7);
    assert_eq!(join(&pool, LONG).wait(), Some(7));
    assert!(!pool.queue.has_waiters());
    assert_eq!(*pool.told.lock(), [true, false]);
}

#[test]
fn a_deadline_in_the_past_allows_one_attempt() {
    let pool = TestPool::new();
    assert_eq!(join(&pool, NO_TIME).wait(), None);
    assert_eq!(pool.attempts.load(Ordering::SeqCst), 1);
}

#[test]
fn a_late_task_that_is_polled_no_more_leaves_the_queue_to_the_next() {
    let pool = TestPool::new();
    let head = join_task(&pool, CLASS, LONG);
    let behind = join_task(&pool, CLASS, LONG);
    assert_eq!(pool.queue.next_search(&*pool, &behind.waiter), head.waiter.deadline);
    drop((head, behind));
    let abandoned = join_task(&pool, CLASS, NO_TIME);
    let mut waiting = join_task(&pool, CLASS, LONG);
    let next = pool.queue.next_search(&*pool, &waiting.waiter);
    assert!(next > Instant::now(), "a late head is no reason to search in a loop");
    pool.put(1, CLASS);
    assert_eq!(poll(&mut waiting, Waker::noop()), Poll::Ready(Some(1)));
    drop(waiting);
    assert!(!pool.queue.has_waiters(), "the late task no longer counts");
    drop(abandoned);
    assert!(!pool.queue.has_waiters());
}

/// The next number of a repeatable sequence (xorshift64), below `end`.
fn draw(state: &mut u64, end: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state >> 40).unwrap() % end
}

#[test]
fn no_item_is_lost_however_requests_leave_the_queue() {
    let (rounds, items) = (if cfg!(miri) { 20 } else { 3_000 }, 2);
    let pool = TestPool::new();
    pool.idle.lock().extend(0..items);
    thread::scope(|scope| {
        for seed in 1..5 {
            let pool = &pool;
            scope.spawn(move || {
                let mut state = seed;
                let mut unpolled = Vec::new();
                for _ in 0..rounds {
                    let wait = [NO_TIME, Duration::from_micros(20)][draw(&mut state, 2)];
                    let served = match draw(&mut state, 6) {
                        0 => join(pool, wait).wait(),
                        // Cancelled, or late at its first poll.
                        1 => match poll(&mut join_task(pool, CLASS, wait), Waker::noop()) {
                            Poll::Ready(served) => served,
                            Poll::Pending => None,
                        },
                        // A task that is no longer polled, and is dropped later.
                        2 => {
                            let mut turn = join_task(pool, CLASS, wait);
                            let polled = poll(&mut turn, Waker::noop());
                            unpolled.push(turn);
                            if let Poll::Ready(served) = polled { served } else { None }
                        }
                        3 => {
                            unpolled.clear();
                            None
                        }
                        4 => {
                            drop(join(pool, wait));
                            None
                        }
                        _ => pool.idle.lock().pop(),
                    };
                    let class = [CLASS, OTHER][draw(&mut state, 2)];
                    served.into_iter().for_each(|item| pool.put(item, class));
                }
            });
        }
    });
    let told = pool.told.lock();
    assert!(!pool.queue.has_waiters());
    assert!(told.iter().enumerate().all(|(at, &is_waiting)| is_waiting == (at % 2 == 0)), "notified once per change");
    assert!(told.len() > 1 && told.len().is_multiple_of(2), "the last notification says that no request waits");
    let mut idle = pool.idle.lock().clone();
    idle.sort_unstable();
    assert_eq!(idle, (0..items).collect::<Vec<_>>());
}

#[test]
fn the_next_is_woken_when_a_later_request_finds_the_first_late() {
    let pool = TestPool::new();
    let next = Arc::new(Counting::default());
    let _abandoned = join_task(&pool, CLASS, NO_TIME);
    let second = join_task(&pool, CLASS, LONG);
    second.waiter.register(&next.clone().into());
    let mut later = join_task(&pool, CLASS, LONG);
    assert_eq!(poll(&mut later, Waker::noop()), Poll::Pending);
    assert_eq!(next.0.load(Ordering::SeqCst), 1);
    assert_eq!(poll(&mut later, Waker::noop()), Poll::Pending);
    assert_eq!(next.0.load(Ordering::SeqCst), 1, "not woken again: the head has not changed");
}

#[test]
fn only_the_head_searches_for_memory() {
    let pool = TestPool::new();
    let [mut first, mut second] = [(); 2].map(|()| join_task(&pool, CLASS, LONG));
    assert_eq!(poll(&mut first, Waker::noop()), Poll::Pending);
    pool.idle.lock().push(7);
    assert_eq!(poll(&mut second, Waker::noop()), Poll::Pending);
    assert_eq!(pool.attempts.load(Ordering::SeqCst), 1);
    drop(first);
    assert_eq!(poll(&mut second, Waker::noop()), Poll::Ready(Some(7)));
}

#[test]
fn requests_pass_the_head_within_the_room_next_to_it() {
    let pool = TestPool::new();
    let pass = |needed_bytes| pool.queue.try_overtake(|_| (10, needed_bytes));
    assert_eq!(pass(4), Ok(0), "no request waits");
    let first = join(&pool, LONG);
    let second = join_task(&pool, OTHER, LONG);
    let number = pass(4).expect("4 fit");
    assert_eq!((number, pass(6)), (1, Ok(1)));
    assert_eq!(pass(1), Err((2, 4096)));
    // A pass ends with the return of the buffer, or because there was no memory.
    pool.queue.end_overtaking(number, 4);
    assert_eq!(pass(4), Ok(1));
    pool.queue.end_overtaking(number, 6);
    assert!(pass(7).is_err());
    assert_eq!(pass(6), Ok(1));
    assert!(pass(0).is_err(), "this request may not pass");
    drop(join_task(&pool, OTHER, LONG));
    assert!(pass(1).is_err(), "a request behind the head has left");
    drop(first);
    assert_eq!(pass(10), Ok(2), "a new head: bytes that overtook the old head count as held");
    pool.queue.end_overtaking(number, 4);
    assert!(pass(1).is_err(), "it overtook another head");
    drop(second);
}

/// Blocks this thread until `waker` of a future wakes it.
fn block_on(ticket: &mut WaitTicket<TestPool>) -> Option<u32> {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    loop {
        if let Poll::Ready(served) = poll(ticket, &waker) {
            return served;
        }
        thread::park();
    }
}

#[test]
fn the_thread_serves_tasks_and_ends_with_the_last_of_them() {
    let pool = TestPool::with_thread(!cfg!(miri));
    pool.idle.lock().push(7);
    assert_eq!(block_on(&mut defer(&pool)), Some(7));
    assert_eq!(pool.queue.counts(), (0, 0), "it never waited");
    thread::scope(|scope| {
        let mut waiting = defer(&pool);
        let waiting = scope.spawn(move || block_on(&mut waiting));
        pool.until_waiting(1);
        pool.idle.lock().push(8);
        pool.queue.wake_head();
        assert_eq!(waiting.join().unwrap(), Some(8));
    });
    let mut panics = defer(&pool);
    pool.panics.store(true, Ordering::SeqCst);
    assert_eq!(block_on(&mut panics), None, "the panic of an attempt ends the wait");
    drop(panics);
    while pool.queue.state.lock().has_thread {
        thread::yield_now();
    }
    assert_eq!(*pool.told.lock(), [true, false]);
}

#[test]
fn nothing_is_done_for_a_deferred_task_that_is_dropped() {
    let pool = TestPool::new();
    drop(defer(&pool));
    assert!(pool.queue.state.lock().deferred.is_empty());
    assert_eq!((pool.attempts.load(Ordering::SeqCst), pool.queue.has_waiters()), (0, false));
}

#[test]
fn time_that_the_process_did_not_run_is_no_wait() {
    let pool = TestPool::new();
    let _waiting = join(&pool, LONG);
    while pool.queue.total_waited(Instant::now()) == Duration::ZERO {
        thread::yield_now();
    }
    // Longer than it has waited.
    let now = Instant::now();
    pool.queue.discount_pause(LONG);
    assert_eq!(pool.queue.total_waited(now), Duration::ZERO);
}

#[test]
fn deferred_tasks_do_not_keep_the_head_from_being_served() {
    let pool = TestPool::with_thread(true);
    pool.idle.lock().push(7);
    let (mut head, others) = (join_task(&pool, CLASS, LONG), [(); 3].map(|()| defer(&pool)));
    let _ = poll(&mut head, Waker::noop());
    while !head.waiter.has_ended() {
        assert!(others.iter().all(|task| !task.waiter.has_ended()), "another was served first");
        thread::yield_now();
    }
}

#[test]
fn a_task_that_ended_during_its_first_attempt_joins_no_queue() {
    let pool = TestPool::new();
    let task = defer(&pool);
    pool.queue.end(&*pool, &task.waiter, None);
    pool.queue.search(&pool, &task.waiter);
    assert_eq!((task.waited(), pool.queue.has_waiters()), (None, false));
}
