//! The double under unmodified cudarc. One binary, since a process has one driver; tests take turns
//! ([`driver_double::Double::load`]).

mod environment;
mod refusals;
mod sharing;
mod through_cudarc;
mod virtual_memory;
