//! The pool in its process: forks, and the maintenance thread.

mod fork;
#[cfg(not(miri))]
mod maintenance;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod orphans;
