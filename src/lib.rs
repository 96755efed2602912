//! A pool of page-locked host memory.

pub mod front;
mod sync;
