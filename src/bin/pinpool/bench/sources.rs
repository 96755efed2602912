//! The back-ends that can be measured here, by name.

use pinpool::{Backend, Pool, PoolBuilder};

/// From the best down; what this build or machine lacks is left out with the reason.
const NAMES: [&str; 5] = ["vmm", "register", "cuda", "mlock", "heap"];

/// Settings for a pool on this back-end and nothing of the environment.
pub(crate) fn builder(backend: Backend) -> PoolBuilder {
    Pool::builder().without_env().backend(backend).max_bytes(None)
}

/// Those asked for, else all; with those that are not there, and why.
pub(crate) fn available(asked: &[Backend]) -> (Vec<Backend>, Vec<String>) {
    let (mut here, mut missing) = (Vec::new(), Vec::new());
    let named = NAMES.iter().filter_map(|name| name.parse().ok()).collect();
    for backend in if asked.is_empty() { named } else { asked.to_vec() } {
        // A page, so that a limit on locked memory shows as well.
        match builder(backend.clone()).build().and_then(|pool| pool.get(4096).map(drop)) {
            Ok(()) => here.push(backend),
            Err(error) => missing.push(format!("{}: {error}", backend.name())),
        }
    }
    (here, missing)
}
