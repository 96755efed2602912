//! The functions of `pinpool.h`, called from Rust and from C and C++.
//!
//! | module | holds |
//! | --- | --- |
//! | `requests` | requests, returns, and what a config string sets |
//! | `misuse` | invalid handles, buffers and arguments |
//! | `closing` | pools that are closed with calls running and buffers out |
//! | `threads` | many concurrent threads, on one pool and on many |
//! | `logging` | the log callback |
//! | `header` | `pinpool.h` is what the sources generate |
//! | `library` | the files: exported names, SONAME, the header in C99 and C++11 |
//! | `programs` | programs in C and C++ that link to the installed files |
//!
//! `tests/streams` is a separate test binary.
#![allow(unsafe_code)] // Calls functions of C.

mod closing;
mod fixture;
mod header;
mod library;
mod logging;
mod misuse;
mod programs;
mod requests;
mod threads;
