//! The handle of a pool.

/// A pool. An opaque handle; do not dereference it. Any thread may use it at any time.
#[derive(Debug)]
pub struct pp_pool {
    _private: [u8; 0],
}
