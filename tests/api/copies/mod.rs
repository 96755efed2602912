//! Copies: no buffer is reused, written to or freed before its last copy has ended.

mod adopt;
#[cfg(not(miri))]
mod async_copy;
mod fences;
mod in_flight;
mod sink;
mod slices;
