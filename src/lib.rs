//! A pool of page-locked host memory.

// Not part of the API: public because the benchmark `arena` measures it from outside.
#[doc(hidden)]
pub mod arena;
