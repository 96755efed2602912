//! Threads that start together or not at all.
//!
//! If the system refuses to create a thread, the earlier threads end without working, and the error contains their number. No
//! thread waits at a barrier for a missing thread.

use std::sync::{Arc, OnceLock};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crate::{BenchError, Measured};

/// A thread that returns `Some` if all threads were created.
pub(crate) type Started<'scope, T> = ScopedJoinHandle<'scope, Option<T>>;

/// Runs `work` with the numbers from 0 to `count - 1`, each on a dedicated thread.
pub(crate) fn spawn_all<'scope, 'env, T, F>(
    scope: &'scope Scope<'scope, 'env>,
    count: usize,
    work: &'scope F,
) -> Measured<Vec<Started<'scope, T>>>
where
    T: Send + 'scope,
    F: Fn(usize) -> T + Sync,
{
    // Set once, to whether the threads run `work`.
    let start = Arc::new(OnceLock::<bool>::new());
    let mut threads = Vec::with_capacity(count);
    for number in 0..count {
        let at_start = start.clone();
        let thread = Builder::new()
            .name(format!("pinpool-{number}"))
            .spawn_scoped(scope, move || at_start.wait().then(|| work(number)));
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                let _ = start.set(false);
                return Err(BenchError::TooManyThreads { made: number, asked: count, error });
            }
        }
    }
    let _ = start.set(true);
    Ok(threads)
}
