//! The properties of a device: attributes, name, addresses.
//!
//! The defaults match a data-centre card with 64-bit addressing and host NUMA virtual memory. A test may
//! override any attribute; an unknown attribute is 0.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::Mutex;

use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::context::check_device;
use crate::sync::lock;

/// 13.0, as the driver encodes it.
const VERSION: c_int = 13000;
const NAME: &[u8] = b"mock driver";

/// Number and value, as in the driver's header.
const ATTRIBUTES: [(c_int, c_int); 9] = [
    (33, 0xD0), // PCI bus
    (41, 1),    // unified addressing
    (75, 9),    // compute capability, major
    (91, 1),    // registered memory keeps the host's address on the device
    (99, 1),    // registers host memory
    (102, 1),   // virtual memory management
    (115, 1),   // memory pools
    (134, 0),   // the nearest NUMA node of the host
    (141, 1),   // virtual memory on a host NUMA node
];

static OVERRIDES: Mutex<BTreeMap<c_int, c_int>> = Mutex::new(BTreeMap::new());

/// Overrides an attribute of every device.
pub(crate) fn set_attribute(attribute: c_int, value: c_int) {
    lock(&OVERRIDES).insert(attribute, value);
}

/// Removes all overrides.
pub(crate) fn reset() {
    lock(&OVERRIDES).clear();
}

/// Returns the value of an attribute.
pub(crate) fn attribute(number: c_int) -> c_int {
    if let Some(&value) = lock(&OVERRIDES).get(&number) {
        return value;
    }
    ATTRIBUTES.iter().find(|(known, _)| *known == number).map_or(0, |&(_, value)| value)
}

/// Writes at most `capacity` bytes, the last of them 0.
fn put_text(text: &[u8], first: *mut u8, capacity: c_int) -> Outcome {
    let room = usize::try_from(capacity).ok().and_then(|capacity| capacity.checked_sub(1));
    let kept = text.iter().copied().take(room.ok_or(Code::INVALID_VALUE)?).chain([0]);
    kept.enumerate().try_for_each(|(index, byte)| Out::at(first, index).put(byte))
}

driver_call! { Lookup fn cuDriverGetVersion(out: Out<c_int>) {
    out.put(VERSION)
}}

driver_call! { Process fn cuDeviceGetAttribute(out: Out<c_int>, number: c_int, device: c_int) {
    check_device(device)?;
    out.put(attribute(number))
}}

driver_call! { Process fn cuDeviceGetName(first: *mut c_char, capacity: c_int, device: c_int) {
    check_device(device)?;
    put_text(NAME, first.cast(), capacity)
}}

driver_call! { Process fn cuDeviceGetPCIBusId(first: *mut c_char, capacity: c_int, device: c_int) {
    let ordinal = check_device(device)?;
    put_text(format!("{:04X}:{:02X}:{ordinal:02X}.0", attribute(50), attribute(33)).as_bytes(), first.cast(), capacity)
}}
