//! The control functions of the loaded library.
//!
//! A test and the library that it loads each have a copy of this crate and its statics. A control function runs in the copy of
//! the library, which [`MockDriver`] reaches through one exported table. Programs in other languages call the `mock_driver_*`
//! functions at the end of this file.

use std::ffi::{CStr, c_char, c_int};

use crate::address_space::{self, Owner};
use crate::adversarial::{self, Deviation};
use crate::code::Code;
use crate::counts::{self, Counts};
use crate::mock::MockDriver;
use crate::{context, device, event, faults, memory, settings, stream, virtual_memory};

/// The exported name of the table.
pub(crate) const TABLE: &CStr = c"MOCK_DRIVER_CONTROLS";

/// A line for each function of the table: its name in [`MockDriver`] and the function that runs in the library.
macro_rules! controls {
    ($($(#[$attribute:meta])* $visibility:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? = $function:expr;)*) => {
        /// Addresses of the control functions.
        #[repr(C)]
        pub(crate) struct Controls {
            /// Size of this table, by which a library of another build is detected.
            pub(crate) bytes: usize,
            $($name: fn($($type),*) $(-> $result)?,)*
        }

        #[unsafe(no_mangle)]
        static MOCK_DRIVER_CONTROLS: Controls = Controls { bytes: size_of::<Controls>(), $($name: $function,)* };

        impl MockDriver {
            $($(#[$attribute])* $visibility fn $name(&self, $($arg: $type),*) $(-> $result)? {
                (self.controls.$name)($($arg),*)
            })*
        }
    };
}

controls! {
    /// Opens every gate, removes scripts and counts, repairs a lost device.
    pub fn reset() = reset;

    /// Removes the scripts of driver functions: failures, gates and counts.
    pub fn reset_scripts() = faults::reset;

    /// Returns the numbers of live objects, and of events since the last reset.
    pub fn counts() -> Counts = counts;

    /// Returns the number of calls of a driver function since the last reset.
    pub fn calls(name: &str) -> u64 = faults::calls;

    /// Returns the driver functions called since the last reset, with the number of calls, by name.
    pub fn all_calls() -> Vec<(String, u64)> = faults::all_calls;

    /// Fails the `nth` call from now; 1 is the next.
    pub fn fail(name: &str, nth: u64, code: Code) = |name, nth, code| faults::fail(name, nth, 1, code);

    /// Fails the `nth` call from now and all later ones.
    pub fn fail_from(name: &str, nth: u64, code: Code) = |name, nth, code| faults::fail(name, nth, u64::MAX, code);

    /// Closes or opens the gate of a driver function.
    pub(crate) fn set_call_gate(name: &str, is_closed: bool) = faults::hold;

    /// Returns once this many calls wait at the gate.
    pub(crate) fn wait_for_held(name: &str, count: u64) = faults::wait_for_held;

    /// Closes or opens the gate of a stream, by its handle or its number; 0 means all streams. Returns its number, which
    /// stays valid when another stream gets the handle.
    pub(crate) fn set_stream_gate(stream: usize, is_closed: bool) -> usize = stream::hold;

    /// Refuses to pin more bytes than this: out of memory.
    pub fn limit_pinned(bytes: u64) = counts::limit_pinned;

    /// Refuses access to memory for these devices, a bit each.
    pub fn refuse_access(devices: u64) = virtual_memory::refuse_access;

    /// Sets whether new pinned memory gets pages only when it is written to, so that a test may hold a terabyte. Until then it is zero.
    pub fn set_sparse(is_sparse: bool) = memory::set_sparse;

    /// Sets the number of devices; with none, `cuInit` fails.
    pub fn set_device_count(count: usize) = context::set_device_count;

    /// Retains another context of this device, as `cuCtxCreate` does; returns its handle.
    pub fn create_context(ordinal: usize) -> usize = context::create;

    /// Sets an attribute of every device.
    pub fn set_attribute(attribute: i32, value: i32) = device::set_attribute;

    /// Destroys all primary contexts with their streams and events, as `cuDevicePrimaryCtxReset` does.
    pub fn renew_contexts() = context::renew;

    /// Turns these switches on and all others off, until the next reset.
    pub fn set_deviations(switches: &[Deviation]) = |switches| adversarial::set(switches.iter().map(|one| one.bit()).sum());

    /// Stops all work; every later call fails with this code.
    pub(crate) fn lose(code: Code) = |code| stream::lock_streams().lose(code);

    /// Fails every call with `DEINITIALIZED`, as at the end of a process.
    pub fn shut_down() = context::shut_down;

    /// Returns descriptions of the program's errors in using the driver.
    pub fn wrong_uses() -> Vec<String> = counts::wrong_uses;
}

fn reset() {
    faults::reset();
    stream::reset();
    context::reset();
    device::reset();
    memory::set_sparse(false);
    virtual_memory::refuse_access(0);
    adversarial::set(settings::get().deviations);
    counts::reset();
}

fn counts() -> Counts {
    let [granules, mappings, reservations] = virtual_memory::live();
    Counts {
        host_allocations: address_space::count(|owner| matches!(owner, Owner::Allocated { .. })),
        registrations: address_space::count(|owner| matches!(owner, Owner::Registered { .. })),
        granules,
        mappings,
        reservations,
        device_allocations: address_space::count(|owner| matches!(owner, Owner::Device { .. })),
        streams: stream::live(),
        events: event::live(),
        contexts: context::live(),
        work_in_flight: stream::in_flight(),
        ..counts::recorded()
    }
}

fn text(name: *const c_char) -> &'static str {
    // SAFETY: the caller passes a live string that ends in 0 and waits for the return.
    unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default()
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_calls(name: *const c_char) -> u64 {
    faults::calls(text(name))
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_wait_for_held(name: *const c_char, count: u64) {
    faults::wait_for_held(text(name), count);
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_hold_stream(stream: usize, is_closed: c_int) -> usize {
    stream::hold(stream, is_closed != 0)
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_set_device_count(count: usize) {
    context::set_device_count(count);
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_wrong_uses() -> usize {
    counts::wrong_uses().len()
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_hold_call(name: *const c_char, is_closed: c_int) {
    faults::hold(text(name), is_closed != 0);
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_fail(name: *const c_char, nth: u64, times: u64, code: c_int) {
    faults::fail(text(name), nth, times, Code(code));
}

#[unsafe(no_mangle)]
extern "C" fn mock_driver_reset() {
    reset();
}
