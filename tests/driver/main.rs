//! The CUDA path without a GPU: unmodified cudarc over the mock driver.
//!
//! | module | tests |
//! | --- | --- |
//! | `access` | which devices can access the memory |
//! | `adopt` | user memory: pinned, copied from, and unpinned after its last copy, or never |
//! | `limit` | the pinned bytes that the driver counts, against the limit |
//! | `copies`, `tracked_copies` | copies made by the pool, and every common way to start one |
//! | `interop` | copies by cudarc, untracked work, handles of other frameworks, timelines |
//! | `sources` | the contract of `vmm` and `register`, and each step that can fail |
//! | `remaps` | remapped granules: the calls that a request waits for, and those that come later |
//! | `reserves` | reserves, also on drivers that register no memory |
//! | `handles` | streams and events that are known by their handles |
//! | `granules` | granules of several sizes, and the number of mappings |
//! | `held_calls` | a thread inside a driver call delays no other thread |
//! | `each_call_fails` | each driver call fails at each of its first times |
//! | `refusals` | calls that are refused once, or while a stream captures a graph |
//! | `pools` | pools over each backend |
//! | `releases` | when `register` and `cuda` release memory |
//! | `several_gpus` | copies by other libraries on any GPU, and no context on an unused one |
//! | `seeds` | random runs over an adversarial driver |
//! | `resets` | a device reset under a pool |
//! | `old_drivers`, `fork` | drivers that lack functions, and forked processes |
//! | `fall_through` | the backend that `auto` chooses if a trial step is refused |
//! | `stub` | a toolkit's libcuda stub before the driver, and a driver that is loaded already |
//! | `unused_gpu` | warnings about a GPU that is present and not used |
//!
//! One process has one driver, so tests take turns ([`mock_driver::MockDriver::load`]). A test that needs a driver from its
//! first call on, or a fork, runs again as a child ([`child::alone`]).
#![cfg(feature = "cuda")]

mod access;
mod adopt;
mod copies;
#[path = "../gpu/driver_facts.rs"]
mod driver_facts;
mod each_call_fails;
#[path = "../gpu/events_only.rs"]
mod events_only;
mod fall_through;
mod fixture;
mod fork;
mod granules;
mod handles;
mod held_calls;
mod interop;
mod limit;
mod old_drivers;
mod pools;
mod refusals;
mod releases;
mod remaps;
mod reserves;
mod resets;
mod seeds;
mod several_gpus;
mod sources;
mod stub;
mod tracked_copies;
mod unused_gpu;

use test_common::{captured_log, child, draw, pressure_file, until, valid_stats};
