use std::sync::atomic::AtomicUsize as Count;
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use super::*;
use crate::engine::memory::{SlowCalls, Stop};

const LONG: Duration = Duration::from_secs(3600);
const CLASS: Class = Class { bytes: 4096, index: 0 };
const OTHER: Class = Class { bytes: 8192, index: 1 };

/// A pool as the line sees it: idle items of one class.
#[derive(Debug, Default)]
struct TestPool {
    waiters: Waiters<u32>,
    idle: Mutex<Vec<u32>>,
    /// What `attend` was called with, each time.
    told: Mutex<Vec<bool>>,
    attempts: Count,
    panics: std::sync::atomic::AtomicBool,
}

impl TestPool {
    fn put(&self, item: u32, class: Class) {
        match self.waiters.offer(item, class, (0, 0), |is_waiting| self.attend(is_waiting)) {
            Offer::HandedOver => {}
            Offer::MakeRoom(item) | Offer::Keep(item) => {
                self.idle.lock().push(item);
                self.waiters.wake_first();
            }
        }
    }

    fn until_in_line(&self, gets: usize) {
        while self.waiters.line.lock().gets.len() != gets {
            thread::yield_now();
        }
    }
}

impl Server for TestPool {
    type Item = u32;
    type Refusal = &'static str;

    fn waiters(&self) -> &Waiters<u32> {
        &self.waiters
    }

    fn attend(&self, is_waiting: bool) {
        self.told.lock().push(is_waiting);
    }

    fn sweep(&self) {}

    fn serve(self: &Arc<Self>, _class: Class, _: &Self::Refusal, _: SlowCalls) -> Result<u32, Stop<&'static str>> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics.swap(false, Ordering::SeqCst), "the attempt panics");
        self.idle.lock().pop().ok_or(Stop::Refused("nothing is idle"))
    }

    fn take_back(&self, item: u32) {
        self.put(item, CLASS);
    }

    fn patience(&self, _since: Instant) -> Duration {
        LONG
    }
}

fn get_by(pool: &Arc<TestPool>, deadline: Instant) -> Option<u32> {
    Turn::join(pool, CLASS, deadline).wait(&mut "")
}

fn get(pool: &Arc<TestPool>) -> Option<u32> {
    get_by(pool, Instant::now() + LONG)
}

/// Counts how often it is woken.
#[derive(Debug, Default)]
struct Counting(Count);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(turn: &Turn<TestPool>, waker: &Waker) -> Look<u32> {
    turn.poll(&mut Context::from_waker(waker), &mut "")
}

#[test]
fn a_get_that_is_served_at_once_never_sleeps() {
    let pool = Arc::new(TestPool::default());
    pool.idle.lock().push(7);
    assert_eq!(get(&pool), Some(7));
    assert!(!pool.waiters.has_waiters());
    assert_eq!(*pool.told.lock(), [true, false]);
}

#[test]
fn a_deadline_in_the_past_allows_one_attempt() {
    let pool = Arc::new(TestPool::default());
    assert_eq!(get_by(&pool, Instant::now()), None);
    assert_eq!(pool.attempts.load(Ordering::SeqCst), 1);
}

#[test]
fn waiters_are_served_in_the_order_of_arrival() {
    let (pool, order) = (Arc::new(TestPool::default()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for name in 0..4 {
            let (pool, order) = (&pool, &order);
            scope.spawn(move || {
                let item = get(pool);
                order.lock().push((name, item));
            });
            pool.until_in_line(name + 1);
        }
        for item in 0..4 {
            pool.put(item, CLASS);
            while order.lock().len() <= item as usize {
                thread::yield_now();
            }
        }
    });
    assert_eq!(*order.lock(), [0, 1, 2, 3].map(|name| (name as usize, Some(name))));
    assert_eq!(*pool.told.lock(), [true, false], "once for the whole line");
}

#[test]
fn a_put_hands_over_without_an_attempt_and_one_of_another_class_makes_room() {
    let pool = Arc::new(TestPool::default());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| get(&pool));
        pool.until_in_line(1);
        assert!(matches!(pool.waiters.offer(1, OTHER, (0, 0), |_| ()), Offer::MakeRoom(1)));
        assert!(matches!(pool.waiters.offer(2, CLASS, (0, 0), |_| ()), Offer::HandedOver));
        assert!(matches!(pool.waiters.offer(3, CLASS, (0, 0), |_| ()), Offer::Keep(3)));
        assert_eq!(waiting.join().unwrap(), Some(2));
    });
}

#[test]
fn an_attempt_that_panics_leaves_the_line_and_the_next_is_served() {
    let pool = Arc::new(TestPool::default());
    pool.panics.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let unwinding = scope.spawn(|| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| get(&pool))).is_err());
        assert!(unwinding.join().unwrap());
        assert!(!pool.waiters.has_waiters());
        let next = scope.spawn(|| get(&pool));
        pool.until_in_line(1);
        pool.put(1, CLASS);
        assert_eq!(next.join().unwrap(), Some(1));
    });
}

#[test]
fn what_a_get_was_handed_when_it_is_dropped_goes_to_the_next() {
    let pool = Arc::new(TestPool::default());
    let first = Turn::join(&pool, CLASS, Instant::now() + LONG);
    let second = Turn::join(&pool, CLASS, Instant::now() + LONG);
    pool.put(1, CLASS);
    drop(first);
    assert_eq!(second.wait(&mut ""), Some(1));
    assert!(pool.idle.lock().is_empty());
}

#[test]
fn a_task_is_woken_by_the_put_that_serves_it_through_the_waker_of_its_last_poll() {
    let pool = Arc::new(TestPool::default());
    let (first, second) = (Arc::new(Counting::default()), Arc::new(Counting::default()));
    let turn = Turn::join(&pool, CLASS, Instant::now() + LONG);
    assert_eq!(poll(&turn, &first.clone().into()), Look::Pending);
    assert_eq!(poll(&turn, &second.clone().into()), Look::Pending);
    pool.put(1, CLASS);
    assert_eq!((first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(poll(&turn, &second.into()), Look::Over(Some(1)));
}

#[test]
fn a_waker_that_panics_keeps_no_get_from_its_item() {
    struct Panicking;
    impl Wake for Panicking {
        fn wake(self: Arc<Self>) {
            panic!("the waker panics");
        }
    }
    let pool = Arc::new(TestPool::default());
    let turn = Turn::join(&pool, CLASS, Instant::now() + LONG);
    assert_eq!(poll(&turn, &Arc::new(Panicking).into()), Look::Pending);
    pool.put(1, CLASS);
    assert_eq!(poll(&turn, Waker::noop()), Look::Over(Some(1)));
}

#[test]
fn a_late_task_that_is_polled_no_more_leaves_the_line_to_the_next() {
    let pool = Arc::new(TestPool::default());
    let deadline = Instant::now() + Duration::from_millis(20);
    let abandoned = Turn::join(&pool, CLASS, deadline);
    pool.waiters.line.lock().gets[0].register(Waker::noop());
    let waiting = Turn::join(&pool, CLASS, Instant::now() + LONG);
    assert_eq!(waiting.next_look(), deadline);
    thread::sleep(Duration::from_millis(20));
    assert!(waiting.next_look() > deadline, "a late head is no reason to look again and again");
    pool.put(1, CLASS);
    assert_eq!(poll(&waiting, Waker::noop()), Look::Over(Some(1)));
    drop(waiting);
    assert!(!pool.waiters.has_waiters(), "the late one counts no more");
    drop(abandoned);
    assert!(!pool.waiters.has_waiters());
}

#[test]
fn a_late_task_that_is_alone_leaves_no_attention_behind() {
    let pool = Arc::new(TestPool::default());
    let turn = Turn::join(&pool, CLASS, Instant::now());
    assert_eq!(poll(&turn, Waker::noop()), Look::Over(None));
    assert_eq!(*pool.told.lock(), [true, false]);
    drop(turn);
    assert_eq!(*pool.told.lock(), [true, false]);
}

#[test]
fn a_put_that_finds_only_late_tasks_ends_the_attention() {
    let pool = Arc::new(TestPool::default());
    let late = [(); 2].map(|()| Turn::join(&pool, CLASS, Instant::now()));
    pool.waiters.line.lock().gets.iter().for_each(|waiter| waiter.register(Waker::noop()));
    pool.put(1, CLASS);
    assert_eq!(
        (pool.waiters.has_waiters(), &*pool.told.lock(), &*pool.idle.lock()),
        (false, &vec![true, false], &vec![1])
    );
    drop(late);
    assert_eq!(*pool.told.lock(), [true, false]);
}

/// The next number of a repeatable sequence (xorshift64), below `end`.
fn draw(state: &mut u64, end: usize) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    usize::try_from(*state >> 40).unwrap() % end
}

#[test]
fn however_gets_leave_the_line_its_end_is_told_and_no_item_is_lost() {
    let (rounds, items) = (if cfg!(miri) { 20 } else { 3_000 }, 2);
    let pool = Arc::new(TestPool::default());
    pool.idle.lock().extend(0..items);
    thread::scope(|scope| {
        for seed in 1..5 {
            let pool = &pool;
            scope.spawn(move || {
                let mut state = seed;
                let mut unpolled = Vec::new();
                for _ in 0..rounds {
                    let late_or_soon = [Instant::now(), Instant::now() + Duration::from_micros(20)];
                    let deadline = late_or_soon[draw(&mut state, 2)];
                    let served = match draw(&mut state, 6) {
                        0 => get_by(pool, deadline),
                        // Cancelled, or late at its first poll.
                        1 => match poll(&Turn::join(pool, CLASS, deadline), Waker::noop()) {
                            Look::Over(served) => served,
                            Look::Pending | Look::NeedsCall => None,
                        },
                        // A task that is polled no more, and is dropped later.
                        2 => {
                            let turn = Turn::join(pool, CLASS, deadline);
                            let polled = poll(&turn, Waker::noop());
                            unpolled.push(turn);
                            if let Look::Over(served) = polled { served } else { None }
                        }
                        3 => {
                            unpolled.clear();
                            None
                        }
                        4 => {
                            drop(Turn::join(pool, CLASS, deadline));
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
    assert!(!pool.waiters.has_waiters());
    assert!(told.iter().enumerate().all(|(at, &is_waiting)| is_waiting == (at % 2 == 0)), "told once for each change");
    assert!(told.len() > 1 && told.len() % 2 == 0, "told at last that nobody waits");
    let mut idle = pool.idle.lock().clone();
    idle.sort_unstable();
    assert_eq!(idle, (0..items).collect::<Vec<_>>());
}

#[test]
fn the_next_is_woken_when_a_later_get_finds_the_first_late() {
    let pool = Arc::new(TestPool::default());
    let next = Arc::new(Counting::default());
    let _abandoned = Turn::join(&pool, CLASS, Instant::now());
    let _next = Turn::join(&pool, CLASS, Instant::now() + LONG);
    pool.waiters.line.lock().gets[0].register(Waker::noop());
    pool.waiters.line.lock().gets[1].register(&next.clone().into());
    let later = Turn::join(&pool, CLASS, Instant::now() + LONG);
    assert_eq!(poll(&later, Waker::noop()), Look::Pending);
    assert_eq!(next.0.load(Ordering::SeqCst), 1);
    assert_eq!(poll(&later, Waker::noop()), Look::Pending);
    assert_eq!(next.0.load(Ordering::SeqCst), 1, "once: the first in line has not changed");
}

#[test]
fn only_the_first_in_line_looks_for_memory() {
    let pool = Arc::new(TestPool::default());
    let [first, second] = [(); 2].map(|()| Turn::join(&pool, CLASS, Instant::now() + LONG));
    assert_eq!(poll(&first, Waker::noop()), Look::Pending);
    pool.idle.lock().push(7);
    assert_eq!(poll(&second, Waker::noop()), Look::Pending);
    assert_eq!(pool.attempts.load(Ordering::SeqCst), 1);
    drop(first);
    assert_eq!(poll(&second, Waker::noop()), Look::Over(Some(7)));
}

#[test]
fn gets_pass_the_first_in_line_within_the_room_beside_it() {
    let pool = TestPool::default();
    let beside = |needed_bytes| pool.waiters.pass(|_| Beside { room_bytes: 10, needed_bytes });
    assert!(matches!(beside(4), Pass::Free));
    let pool = Arc::new(pool);
    let beside = |needed_bytes| pool.waiters.pass(|_| Beside { room_bytes: 10, needed_bytes });
    let first = Turn::join(&pool, CLASS, Instant::now() + LONG);
    let second = Turn::join(&pool, OTHER, Instant::now() + LONG);
    let Pass::Beside { number } = beside(4) else { panic!("4 fit beside") };
    assert!(matches!(beside(6), Pass::Beside { .. }));
    assert!(matches!(beside(1), Pass::Behind { waiting: 2, first_bytes: 4096 }));
    // What passed comes back: by a put, or because there was no memory.
    assert!(matches!(pool.waiters.offer(1, OTHER, (number, 4), |_| ()), Offer::MakeRoom(1)));
    assert!(matches!(beside(4), Pass::Beside { .. }));
    pool.waiters.end_pass(number, 6);
    assert!(matches!(beside(7), Pass::Behind { .. }));
    assert!(matches!(beside(6), Pass::Beside { .. }));
    assert!(matches!(beside(0), Pass::Behind { .. }), "a get that may not pass");
    drop(Turn::join(&pool, OTHER, Instant::now() + LONG));
    assert!(matches!(beside(1), Pass::Behind { .. }), "one behind the first has left");
    drop(first);
    assert!(matches!(beside(10), Pass::Beside { .. }), "another first: what passed the other counts as held");
    assert!(matches!(pool.waiters.offer(1, CLASS, (number, 4), |_| ()), Offer::MakeRoom(1)));
    assert!(matches!(beside(1), Pass::Behind { .. }), "it passed another one");
    drop(second);
}
