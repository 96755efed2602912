//! The thread that makes slow calls for gets that tasks await: `pinpool-get`.
//!
//! Started when there is something to do, it ends when nothing is left. Each pool has its own, so a driver that hangs holds up the
//! tasks of one pool. A task that is gone before its turn has nothing done for it; if it goes later, what was made for it is
//! dropped, and so goes to the next get.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::maintenance_thread::MaintenanceThread;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::threads;
use pinpool_os::unwind::caught;

type Call = Box<dyn FnOnce() + Send>;

/// What the thread of one pool has to do.
#[derive(Default)]
pub(super) struct SideThread(Arc<Mutex<Queue>>);

#[derive(Default)]
struct Queue {
    calls: VecDeque<Call>,
    is_running: bool,
}

/// A call that the thread makes for a task, and its result.
pub(crate) struct SideCall<T>(Arc<Mutex<Slot<T>>>);

struct Slot<T> {
    is_over: bool,
    /// `None` also of a call that panicked.
    result: Option<T>,
    waker: Option<Waker>,
}

impl SideThread {
    /// Has the thread make `call`, after those before it. Makes it on this one if no thread can be had, and in a simulation, where
    /// each step has its time.
    pub(super) fn begin<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
        is_simulated: bool,
    ) -> SideCall<T> {
        let slot = Arc::new(Mutex::new(Slot { is_over: false, result: None, waker: None }));
        let of_thread = slot.clone();
        let call: Call = Box::new(move || {
            if Arc::strong_count(&of_thread) == 1 {
                return;
            }
            let result = caught(call);
            let mut slot = of_thread.lock();
            (slot.is_over, slot.result) = (true, result);
            let waker = slot.waker.take();
            drop(slot);
            if let Some(waker) = waker {
                caught(|| waker.wake());
            }
        });
        // Miri takes a thread that does not end for a leak.
        if cfg!(miri) || is_simulated {
            call();
            return SideCall(slot);
        }
        let mut queue = self.0.lock();
        queue.calls.push_back(call);
        let is_running = std::mem::replace(&mut queue.is_running, true);
        drop(queue);
        let own = self.0.clone();
        if !is_running && threads::spawn(c"pinpool-get", move || run(&own)).is_err() {
            run(&self.0);
        }
        SideCall(slot)
    }
}

/// The thread.
fn run(queue: &Mutex<Queue>) {
    loop {
        let mut all = queue.lock();
        let Some(call) = all.calls.pop_front() else {
            all.is_running = false;
            return;
        };
        drop(all);
        let Some(_entered) = MaintenanceThread::of_process().enter() else {
            // The process has begun to exit: nothing is called any more, and nobody is woken.
            return std::mem::forget(call);
        };
        call();
    }
}

impl<T> SideCall<T> {
    /// The result, once it is there; `None` if the call panicked.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Option<T>> {
        // Clones and drops wakers, which is code of the user, outside of the lock.
        let waker = context.waker().clone();
        let mut slot = self.0.lock();
        if slot.is_over {
            return Poll::Ready(slot.result.take());
        }
        let before = slot.waker.replace(waker);
        drop(slot);
        drop(before);
        Poll::Pending
    }
}

impl std::fmt::Debug for SideThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SideThread").finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for SideCall<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SideCall").finish_non_exhaustive()
    }
}
