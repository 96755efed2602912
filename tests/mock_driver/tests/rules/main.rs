//! The mock driver under unmodified cudarc. One binary, since a process has one driver; tests run one at a time
//! ([`mock_driver::MockDriver::load`]).
#![allow(unsafe_code, clippy::cast_possible_truncation)] // Calls C functions, on 64-bit machines.

mod environment;
mod refusals;
mod through_cudarc;
mod virtual_memory;
