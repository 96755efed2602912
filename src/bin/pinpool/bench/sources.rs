//! The back-ends that can be measured here, by name.

use pinpool::config::Ceiling;
use pinpool::{Backend, Error, Pool, PoolBuilder, Preset};

/// From the best down; what this build or machine lacks is left out with the reason.
const NAMES: [&str; 5] = ["vmm", "register", "cuda", "mlock", "heap"];

/// Settings for a pool on this back-end and nothing of the environment.
pub(crate) fn builder(backend: Backend) -> PoolBuilder {
    Pool::builder().without_env().backend(backend).max_bytes(None)
}

/// What a pool holds at most on this machine unless told otherwise: a quarter of the memory that it may have.
pub(crate) fn most_bytes() -> Result<u64, Error> {
    // Under this preset a pool is made without a range of addresses.
    let pool = builder(Backend::Heap).preset(Preset::Tensorflow).ceiling(Ceiling::Auto).build()?;
    Ok(pool.stats().max_bytes.unwrap_or(u64::MAX))
}

/// Those asked for, else all, of which each held `bytes` once. With those that are not there, or cannot, and why.
pub(crate) fn available(asked: &[Backend], bytes: u64) -> (Vec<Backend>, Vec<String>) {
    let (mut here, mut missing) = (Vec::new(), Vec::new());
    let named = NAMES.iter().filter_map(|name| name.parse().ok()).collect();
    for backend in if asked.is_empty() { named } else { asked.to_vec() } {
        match hold(&backend, bytes) {
            Ok(()) => here.push(backend),
            Err(error) => missing.push(format!("{}: {error}", backend.name())),
        }
    }
    (here, missing)
}

/// Holds `bytes` once: the memory is warm then, and the device has its context.
pub(crate) fn hold(backend: &Backend, bytes: u64) -> Result<(), Error> {
    let pool = builder(backend.clone()).build()?;
    // A reserve is the fastest way to memory, and not always that of a get.
    let _got = pool.get(4096)?;
    pool.prewarm(bytes)
}
