//! The CUDA path without a GPU: unmodified cudarc over the driver double.
//!
//! One process has one driver, so tests take turns ([`driver_double::Double::load`]); those that need a driver from its first
//! call on, or a fork, run again in a process of their own.

#[path = "../child/mod.rs"]
mod child;
mod copies;
#[path = "../gpu/driver_facts.rs"]
mod driver_facts;
mod fork;
mod interop;
mod old_drivers;
mod release_gate;
mod sources;
mod tracked_copies;
