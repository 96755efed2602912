//! Requests: hits, misses, the wait queue, deadlines, tasks, and the end of a pool.

mod async_get;
mod async_stress;
mod close;
mod deadlines;
mod fast_path;
mod full_pool;
mod hit_allocates_nothing;
#[cfg(all(target_os = "linux", not(miri)))]
mod hit_calls_nothing;
mod not_kept_waiting;
mod wait_queue;
