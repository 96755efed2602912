//! The functions of `pinpool.h`, called from Rust and from C and C++.
//!
//! | module | holds |
//! | --- | --- |
//! | `requests` | requests, returns, what a config string sets, and errors |
//! | `destruction` | pools that are destroyed with calls running and buffers out |
//! | `threads` | many concurrent threads, on one pool and on many |
//! | `logging` | the log callback |
//! | `header` | `pinpool.h` is up to date with the sources |
//! | `library` | the files: exported names, SONAME, the header in C99 and C++11 |
//! | `programs` | programs in C and C++ that link to the installed files |
//!
//! `tests/streams` is a separate test binary.
#![allow(unsafe_code)] // Calls C functions.

mod destruction;
#[path = "../fixture/mod.rs"]
mod fixture;
mod header;
mod library;
mod logging;
mod programs;
mod requests;
mod threads;
