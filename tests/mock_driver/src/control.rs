//! The control calls: functions of the loaded `cdylib` that [`crate::MockDriver`] calls by name.
//!
//! Test and double each have a copy of this crate; only these functions cross from one to the other. Each is declared
//! once, here, and the table of their addresses is made from the same list.

use std::ffi::{CStr, c_char, c_int};

use crate::code::Code;
use crate::ledger::{self, Counts};
use crate::{
    address_space::{self, Owner},
    adversarial, context, device, event, faults, memory, settings, stream, symbols, virtual_memory,
};

macro_rules! controls {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {
        $(#[unsafe(no_mangle)] extern "C" fn $name($($arg: $type),*) $(-> $result)? $body)*

        /// The control calls of a loaded double.
        pub(crate) struct Controls {
            $($(#[$doc])* pub(crate) $name: extern "C" fn($($type),*) $(-> $result)?,)*
        }

        impl Controls {
            /// Looks every control call up; `Err` names a missing one.
            pub(crate) fn find(mut look_up: impl FnMut(&CStr) -> *mut std::ffi::c_void) -> Result<Self, &'static str> {
                Ok(Self {$(
                    $name: {
                        let name = concat!(stringify!($name), "\0");
                        let found = CStr::from_bytes_with_nul(name.as_bytes()).map_or(std::ptr::null_mut(), &mut look_up);
                        if found.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: the library exports this very name from the declaration above, so the types agree.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn($($type),*) $(-> $result)?>(found) }
                    },
                )*})
            }
        }
    };
}

/// A name that a test passes; one that is not UTF-8 is empty.
fn text(name: *const c_char) -> &'static str {
    // SAFETY: only `MockDriver` makes control calls, with a live string that ends in 0, and waits for the answer.
    unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default()
}

/// Writes as much of the text as there is space for; returns its length.
fn write(text: &str, space: &mut [u8; 256]) -> usize {
    let kept = text.len().min(space.len());
    space[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    kept
}

controls! {
    /// Repairs the device and removes scripts and counts.
    fn double_reset() {
        faults::reset();
        stream::reset();
        context::reset();
        device::reset();
        memory::set_sparse(false);
        virtual_memory::refuse_access(0);
        adversarial::set(settings::get().deviations);
        symbols::show_all();
        ledger::reset();
    }

    /// Removes scripts of failures.
    fn double_reset_scripts() {
        faults::reset();
    }

    /// Live objects, and events since the last reset.
    fn double_counts(out: &mut Counts) {
        let [granules, mappings, reservations] = virtual_memory::live();
        *out = Counts {
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
            ..ledger::counts()
        };
    }

    /// Calls of this name since the last reset.
    fn double_calls(name: *const c_char) -> u64 {
        faults::calls(text(name))
    }

    /// The `nth` call from now and the `times - 1` after it fail.
    fn double_fail(name: *const c_char, nth: u64, times: u64, code: c_int) {
        faults::fail(text(name), nth, times, Code(code));
    }

    /// Closes (1) or opens (0) the gate of a call.
    fn double_hold_call(name: *const c_char, held: c_int) {
        faults::hold(text(name), held != 0);
    }

    /// Returns once this many calls wait at the gate.
    fn double_wait_for_held(name: *const c_char, count: u64) {
        faults::wait_for_held(text(name), count);
    }

    /// Closes (1) or opens (0) the gate of a stream, by its handle or its number; stream 0 is all of them. Returns its
    /// number, which stays valid when the handle is given to another stream.
    fn double_hold_stream(stream: usize, held: c_int) -> usize {
        stream::hold(stream, held != 0)
    }

    /// More pinned bytes than this are refused.
    fn double_limit_pinned(bytes: u64) {
        ledger::limit_pinned(bytes);
    }

    /// No access to memory is given to these devices, a bit each.
    fn double_refuse_access(devices: u64) {
        virtual_memory::refuse_access(devices);
    }

    /// Granules get memory only when they are written to (1), or at once (0).
    fn double_set_sparse(is_sparse: c_int) {
        memory::set_sparse(is_sparse != 0);
    }

    /// Sets the number of devices.
    fn double_set_device_count(count: usize) {
        context::set_device_count(count);
    }

    /// Sets the answer of every device for this attribute.
    fn double_set_attribute(attribute: c_int, value: c_int) {
        device::set_attribute(attribute, value);
    }

    /// Destroys all primary contexts, with their streams and events.
    fn double_renew_contexts() {
        context::renew();
    }

    /// Turns these switches on, a bit each, and all others off.
    fn double_set_deviations(bits: u64) {
        adversarial::set(bits);
    }

    /// Loses the device: every later call fails with this code.
    fn double_lose_device(code: c_int) {
        stream::lose(Code(code));
    }

    /// The driver answers as after the end of the process.
    fn double_shut_down() {
        context::shut_down();
    }

    /// Makes a function impossible to find; 1 if it could be found before.
    fn double_hide(name: *const c_char) -> c_int {
        // SAFETY: as in `text`.
        c_int::from(symbols::hide(unsafe { CStr::from_ptr(name) }))
    }

    /// Writes the description of one misuse and returns its length; `usize::MAX` past the last.
    fn double_wrong_use(index: usize, space: &mut [u8; 256]) -> usize {
        ledger::misuse(index).map_or(usize::MAX, |words| write(&words, space))
    }

    /// Writes the name of one function that was called and returns its length; `usize::MAX` past the last.
    fn double_called(index: usize, space: &mut [u8; 256]) -> usize {
        faults::all_calls().get(index).map_or(usize::MAX, |(name, _)| write(name, space))
    }
}
