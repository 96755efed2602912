//! Failing sources, panics of user code, and everything at once.

mod fault;
mod panics;
mod stress;
