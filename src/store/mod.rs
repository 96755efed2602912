//! What is idle, and in which order it is reused and evicted.
//!
//! [`Exact`] is the sequential store of the `tensorflow` preset: one list in the order of the puts, and through it one
//! list for each class. It holds whatever it is given (its tests hold integers), gives victims back by value, and never
//! calls a back-end.

mod exact;

pub(crate) use exact::Exact;
