//! The handle of a pool.

/// A pool. A handle is no address: never follow it. Any thread may use it at any time.
#[derive(Debug)]
pub struct pp_pool {
    _private: [u8; 0],
}
