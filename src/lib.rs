//! A pool of page-locked host memory.
