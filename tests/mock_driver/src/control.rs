//! The control call: the function of the loaded `cdylib` by which [`crate::Double`] controls it.
//!
//! Test and mock driver each have a copy of this crate, made from the same source by the same build; only [`Control`] and
//! [`Counts`] cross from one to the other.

use std::ffi::{CStr, c_void};

use crate::code::Code;
use crate::ledger::{self, Counts};
use crate::{
    address_space::{self, Owner},
    context, cruel, device, event, faults, settings, stream, symbols, virtual_memory,
};

/// The name under which the `cdylib` exports the control call.
pub(crate) const NAME: &CStr = c"double_control";

/// The type of the control call.
pub(crate) type ControlCall = extern "C" fn(*mut c_void) -> u64;

/// A text that the mock driver writes for a test.
pub(crate) type Space = [u8; 256];

/// What a test asks for.
#[repr(C)]
pub(crate) enum Control<'a> {
    /// Repairs the device and removes scripts and counts.
    Reset,
    /// Removes scripts of failures.
    ResetScripts,
    /// Live objects, and events since the last reset.
    Counts(&'a mut Counts),
    /// Calls of this name since the last reset.
    Calls(&'a str),
    /// The `nth` call from now and the `times - 1` after it fail.
    Fail { name: &'a str, nth: u64, times: u64, code: Code },
    /// Closes or opens the gate of a call.
    HoldCall(&'a str, bool),
    /// Returns once this many calls wait at the gate.
    WaitForHeld(&'a str, u64),
    /// Closes or opens the gate of a stream, by its handle or its number; stream 0 is all of them. Returns its number, which
    /// stays valid when the handle is given to another stream.
    HoldStream(usize, bool),
    /// Lets this many operations pass the closed gate of a stream.
    LetPass(usize, u64),
    /// More pinned bytes than this are refused.
    LimitPinned(u64),
    /// No access to memory is given to these devices, a bit each.
    RefuseAccess(u64),
    /// Live granules that can be exported to other processes.
    ExportableGranules,
    /// Whether granules get memory only when they are written to.
    SetSparseGranules(bool),
    /// Sets the number of devices.
    SetDeviceCount(usize),
    /// Sets the answer of every device for this attribute.
    SetAttribute(i32, i32),
    /// Sets the NUMA nodes that have memory, a bit each.
    SetMemoryNodes(u64),
    /// Destroys all primary contexts, with their streams and events.
    RenewContexts,
    /// Turns these switches on, a bit each, and all others off.
    SetCruel(u64),
    /// Loses the device: every later call fails with this code.
    LoseDevice(Code),
    /// The driver answers as after the end of the process.
    ShutDown,
    /// Makes a function impossible to find; 1 if it could be found before.
    Hide(&'a CStr),
    /// Writes the description of one misuse and returns its length; `u64::MAX` past the last.
    WrongUse(usize, &'a mut Space),
    /// Writes the name of one function that was called and returns its length; `u64::MAX` past the last.
    Called(usize, &'a mut Space),
}

/// Writes as much of the text as there is space for; returns its length.
fn write(text: Option<&str>, space: &mut Space) -> u64 {
    let Some(text) = text else { return u64::MAX };
    let kept = text.len().min(space.len());
    space[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    kept as u64
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
        ..ledger::counts()
    }
}

fn reset() {
    faults::reset();
    stream::reset();
    context::reset();
    device::reset();
    virtual_memory::set_memory_nodes(1);
    virtual_memory::set_sparse(false);
    virtual_memory::refuse_access(0);
    cruel::set(settings::get().cruel);
    symbols::show_all();
    ledger::reset();
}

#[unsafe(no_mangle)]
extern "C" fn double_control(control: *mut c_void) -> u64 {
    // SAFETY: only `Double` makes this call, with a live `Control` of the same source and build, and waits for the answer.
    match unsafe { &mut *control.cast::<Control<'_>>() } {
        Control::Reset => reset(),
        Control::ResetScripts => faults::reset(),
        Control::Counts(out) => **out = counts(),
        Control::Calls(name) => return faults::calls(name),
        Control::Fail { name, nth, times, code } => faults::fail(name, *nth, *times, *code),
        Control::HoldCall(name, held) => faults::hold(name, *held),
        Control::WaitForHeld(name, count) => faults::wait_for_held(name, *count),
        Control::HoldStream(stream, held) => return stream::hold(*stream, *held) as u64,
        Control::LetPass(stream, count) => stream::let_pass(*stream, *count),
        Control::LimitPinned(bytes) => ledger::limit_pinned(*bytes),
        Control::RefuseAccess(devices) => virtual_memory::refuse_access(*devices),
        Control::ExportableGranules => return virtual_memory::exportable(),
        Control::SetSparseGranules(is_sparse) => virtual_memory::set_sparse(*is_sparse),
        Control::SetDeviceCount(count) => context::set_device_count(*count),
        Control::SetAttribute(attribute, value) => device::set_attribute(*attribute, *value),
        Control::SetMemoryNodes(bits) => virtual_memory::set_memory_nodes(*bits),
        Control::RenewContexts => context::renew(),
        Control::SetCruel(bits) => cruel::set(*bits),
        Control::LoseDevice(code) => stream::lose(*code),
        Control::ShutDown => context::shut_down(),
        Control::Hide(name) => return u64::from(symbols::hide(name)),
        Control::WrongUse(index, space) => return write(ledger::misuse(*index).as_deref(), space),
        Control::Called(index, space) => return write(faults::all_calls().get(*index).map(|(name, _)| *name), space),
    }
    0
}
