//! Threads that start together or not at all.
//!
//! Where the system refuses one, those made before end without having worked, and the error says how many there could be. So
//! no thread waits at a barrier for one that does not exist.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// The system has not as many threads as asked for.
#[derive(Debug, thiserror::Error)]
#[error(
    "{made} of {asked} threads could be made ({error}): raise the limit on processes (`ulimit -u`, pids.max of the control \
     group) or on memory (`ulimit -v`), or ask for fewer threads"
)]
pub(crate) struct TooManyThreads {
    made: usize,
    asked: usize,
    #[source]
    error: io::Error,
}

/// Opens once: for work, or to end without it.
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

/// A thread that returns `Some`, once all of them are made.
pub(crate) type Started<'scope, T> = ScopedJoinHandle<'scope, Option<T>>;

/// Runs `work` with the numbers from 0 up to `count` on threads of their own.
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
