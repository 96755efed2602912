//! Threads that start together or not at all.
//!
//! If the system refuses a thread, the earlier ones end without working and the error says how many were created. So no thread
//! waits at a barrier for a missing one.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// The system cannot create the requested number of threads.
#[derive(Debug, thiserror::Error)]
#[error(
    "created {made} of {asked} threads ({error}): raise the limit on processes (`ulimit -u`, pids.max of the cgroup) or on memory \
     (`ulimit -v`), or request fewer threads"
)]
pub(crate) struct TooManyThreads {
    made: usize,
    asked: usize,
    #[source]
    error: io::Error,
}

/// Opens once: to work, or to end without working.
#[derive(Default)]
struct Start {
    works: Mutex<Option<bool>>,
    opened: Condvar,
}

impl Start {
    fn open(&self, works: bool) {
        *self.works.lock().unwrap_or_else(PoisonError::into_inner) = Some(works);
        self.opened.notify_all();
    }

    fn wait(&self) -> bool {
        let mut works = self.works.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(works) = *works {
                return works;
            }
            works = self.opened.wait(works).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A thread that returns `Some` if all threads were created.
pub(crate) type Started<'scope, T> = ScopedJoinHandle<'scope, Option<T>>;

/// Runs `work` with the numbers from 0 to `count - 1`, each on a dedicated thread.
pub(crate) fn spawn_all<'scope, 'env, T, F>(
    scope: &'scope Scope<'scope, 'env>,
    count: usize,
    work: &'scope F,
) -> Result<Vec<Started<'scope, T>>, TooManyThreads>
where
    T: Send + 'scope,
    F: Fn(usize) -> T + Sync,
{
    let start = Arc::new(Start::default());
    let mut threads = Vec::with_capacity(count);
    for number in 0..count {
        let at_start = start.clone();
        let thread = Builder::new()
            .name(format!("pinpool-{number}"))
            .spawn_scoped(scope, move || at_start.wait().then(|| work(number)));
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                start.open(false);
                return Err(TooManyThreads { made: number, asked: count, error });
            }
        }
    }
    start.open(true);
    Ok(threads)
}
