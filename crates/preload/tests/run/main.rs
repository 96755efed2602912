//! Programs in C that know nothing of pinpool, over the mock driver: alone, and with their memory served from a pool.
#![allow(unsafe_code)] // Calls functions of C.

mod blocks;
mod fixture;
mod programs;
mod symbols;
