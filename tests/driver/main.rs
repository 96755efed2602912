//! The CUDA path without a GPU: unmodified cudarc over the mock driver.
//!
//! | module | holds |
//! | --- | --- |
//! | `access` | which devices may reach the memory |
//! | `adopt` | memory of users: pinned, copied from, unlocked after the last copy or never |
//! | `limit` | what the driver holds against the limit, byte for byte |
//! | `copies`, `tracked_copies` | copies made by the pool, and every natural line that starts one |
//! | `interop` | copies made by cudarc, work of others, handles of other frameworks, timelines |
//! | `sources` | the contract of `vmm` and `register`, and each failing step |
//! | `moves` | granules that a request moves: what it waits for, and what comes later |
//! | `reserves` | reserves where nothing can be registered |
//! | `handles` | streams and events of other code, known by their handles |
//! | `granules` | granules of several sizes, and how many mappings a pool makes |
//! | `held_queries`, `held_registrations`, `held_statistics` | a thread that is in a call of the driver |
//! | `each_call_fails` | every call of the driver, failed at each of its first times |
//! | `refusals` | calls that are refused once, or while a stream captures a graph |
//! | `pools` | pools over each backend |
//! | `releases` | when `register` and `cuda` release memory |
//! | `several_gpus` | copies of other libraries on any GPU, contexts on no other |
//! | `seeds` | drawn runs over the deviations of the mock driver |
//! | `resets` | a reset of the device under a pool |
//! | `old_drivers`, `fork` | processes that lack functions, or are children |
//! | `fall_through` | what `auto` takes when a step of a trial is refused |
//! | `stub` | a toolkit's stub of libcuda before the driver, and a driver that is loaded already |
//! | `unused_gpu` | what is said when there is a driver and no device to use |
//!
//! One process has one driver, so tests take turns ([`mock_driver::MockDriver::load`]). A test that needs a driver from its
//! first call on, or a fork, runs again as a child ([`child::alone`]).
#![cfg(feature = "cuda")]

mod access;
mod adopt;
#[path = "../api/captured_log.rs"]
#[allow(dead_code)] // The tests of the public interface need all of it.
mod captured_log;
#[path = "../child/mod.rs"]
mod child;
mod copies;
#[path = "../sim/draw.rs"]
mod draw;
#[path = "../gpu/driver_facts.rs"]
mod driver_facts;
mod each_call_fails;
mod fall_through;
mod fixture;
mod fork;
mod granules;
mod handles;
mod held_queries;
mod held_registrations;
mod held_statistics;
mod interop;
mod limit;
mod moves;
mod old_drivers;
mod pools;
mod refusals;
mod releases;
mod reserves;
mod resets;
mod seeds;
mod several_gpus;
mod sources;
mod stub;
mod tracked_copies;
#[path = "../until/mod.rs"]
mod until;
mod unused_gpu;
#[path = "../valid_stats/mod.rs"]
mod valid_stats;
