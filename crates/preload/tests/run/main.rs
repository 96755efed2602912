//! C programs that do not know pinpool, over the mock driver: alone, and with their memory served from a pool.
#![allow(unsafe_code)] // Calls C functions.

mod blocks;
mod fixture;
mod programs;
mod symbols;
