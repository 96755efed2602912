//! Calls of the driver over runs of granules, one by one where the driver takes no run, and access for every GPU.
//!
//! ```text
//!   access    CPU, own GPU, other GPUs   over the run ──refused──▶ CPU, own GPU   over the run ──refused──▶ granule by granule
//!             (see `table`)                                        each other GPU apart: one that is refused is remembered
//!   unmap     the run ──refused──▶ granule by granule
//! ```
//!
//! What the driver refused once for a run and took for its granules is not asked for a run again.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_int;

use super::granule::{Granule, placed};
use crate::driver::calls::is_primary_active;
use crate::driver::virtual_memory::{AccessDescriptor, DriverRefusal, MemoryLocation, VmmApi};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Devices are numbered in a word of bits.
const DEVICES_MAX: u32 = 64;

/// How the driver of one source takes calls over granules.
#[derive(Debug)]
pub(super) struct Calls {
    driver: VmmApi,
    /// The CPU and the own device.
    own: [AccessDescriptor; 2],
    /// Other devices that are not refused, a bit each.
    others: AtomicU64,
    /// Why devices were refused, each once.
    refused: Mutex<Vec<(u32, DriverRefusal)>>,
    /// Access is set granule by granule.
    sets_singly: AtomicBool,
    unmaps_singly: AtomicBool,
    /// A granule is mapped at one address at a time.
    maps_once: AtomicBool,
}

/// Whether a plain address was handed out on a machine with several devices.
static ADDRESSES_ARE_OUT: AtomicBool = AtomicBool::new(false);

pub(super) fn are_addresses_out() -> bool {
    // Relaxed, here and below: who stores it then locks each table, and who maps a granule locks its table before the last look.
    ADDRESSES_ARE_OUT.load(Ordering::Relaxed)
}

pub(super) fn note_addresses_out() {
    ADDRESSES_ARE_OUT.store(true, Ordering::Relaxed);
}

/// Other devices with access, a bit each, and those for which it was asked.
pub(super) type Reached = (u64, u64);

/// The devices of a word of bits.
pub(super) fn devices_in(bits: u64) -> impl Iterator<Item = u32> + Clone {
    (0..DEVICES_MAX).filter(move |device| bits >> device & 1 == 1)
}

// Relaxed, for all of the flags: hints, which save calls that are refused.
impl Calls {
    /// For memory at `node`, a source of `device`, and a driver that lists so many `devices`.
    pub(super) fn new(driver: VmmApi, node: MemoryLocation, device: u32, devices: u32) -> Self {
        let own = [node, of_device(device)].map(AccessDescriptor::read_write);
        let others =
            (0..devices.min(DEVICES_MAX)).filter(|&other| other != device).fold(0, |bits, other| bits | 1 << other);
        let (refused, sets_singly, unmaps_singly, maps_once) = Default::default();
        Self { driver, own, others: AtomicU64::new(others), refused, sets_singly, unmaps_singly, maps_once }
    }

    /// Devices that were refused, each with the driver's answer.
    pub(super) fn refused(&self) -> Vec<(u32, DriverRefusal)> {
        self.refused.lock().clone()
    }

    /// Other devices that are not refused, a bit each.
    pub(super) fn others(&self) -> u64 {
        self.others.load(Ordering::Relaxed)
    }

    /// Asks for access of `device` again from now on.
    pub(super) fn restore(&self, device: u32) {
        self.refused.lock().retain(|&(refused, _)| refused != device);
        self.others.fetch_or(1_u64.checked_shl(device).unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn maps_once(&self) -> bool {
        self.maps_once.load(Ordering::Relaxed)
    }

    /// The driver refused a granule at a second address, and took it at one.
    pub(super) fn note_maps_once(&self) {
        self.maps_once.store(true, Ordering::Relaxed);
    }

    /// Makes `granules` readable and writable from `start` on: by the CPU and the own device, or fails, and by the other
    /// devices that it returns: those with an active primary context, or all once addresses are out.
    ///
    /// # Safety
    ///
    /// They are mapped there.
    pub(super) unsafe fn set_access(&self, start: u64, granules: &[Granule]) -> Result<Reached, DriverRefusal> {
        let are_all = are_addresses_out();
        // A device that does not answer is asked, and its refusal remembered.
        let is_asked = |&device: &u32| are_all || is_primary_active(device.cast_signed()).unwrap_or(true);
        let devices = devices_in(self.others()).filter(is_asked).collect::<Vec<_>>();
        let asked = devices.iter().fold(0, |bits, device| bits | 1 << device);
        let of_others: Vec<_> = devices.iter().map(|&device| AccessDescriptor::read_write(of_device(device))).collect();
        // SAFETY: the caller's promise, here and below.
        match unsafe { self.set(start, granules, &[&self.own[..], &of_others].concat()) } {
            Ok(()) => return Ok((asked, asked)),
            Err(refusal) if asked == 0 => return Err(refusal),
            Err(_) => {}
        }
        // SAFETY: as above.
        unsafe { self.set(start, granules, &self.own) }?;
        let reached = devices.iter().zip(&of_others).fold(0, |reached, (&device, descriptor)| {
            // SAFETY: as above.
            match unsafe { self.set(start, granules, std::slice::from_ref(descriptor)) } {
                Ok(()) => reached | 1 << device,
                Err(refusal) => {
                    if !refusal.may_pass() {
                        self.refused.lock().push((device, refusal));
                        self.others.fetch_and(!(1 << device), Ordering::Relaxed);
                    }
                    reached
                }
            }
        });
        Ok((reached, asked))
    }

    /// # Safety
    ///
    /// The granules are mapped there.
    unsafe fn set(&self, start: u64, granules: &[Granule], access: &[AccessDescriptor]) -> Result<(), DriverRefusal> {
        let set = |at, bytes| {
            // SAFETY: the caller's promise; `access` has the length passed.
            unsafe { self.driver.set_access(at, bytes, access.as_ptr(), access.len()) }
        };
        let all = || set(start, granules.iter().map(|granule| granule.bytes).sum());
        let each = || placed(start, granules).try_for_each(|(at, granule)| set(at, granule.bytes));
        run_or_each(granules.len(), &self.sets_singly, all, each)
    }

    /// Unmaps `granules` from `start` on. Returns how many of them are unmapped: all, unless there is an error.
    ///
    /// # Safety
    ///
    /// They are mapped there, and nothing uses them.
    pub(super) unsafe fn unmap(&self, start: u64, lengths: &[usize]) -> (usize, Result<(), DriverRefusal>) {
        let unmap = |at, bytes| {
            // SAFETY: the caller's promise: whole mappings.
            unsafe { self.driver.unmap(at, bytes) }
        };
        let (mut at, mut unmapped) = (start, 0);
        let each = || {
            lengths.iter().try_for_each(|&bytes| {
                unmap(at, bytes)?;
                (at, unmapped) = (at + bytes as u64, unmapped + 1);
                Ok(())
            })
        };
        let outcome = run_or_each(lengths.len(), &self.unmaps_singly, || unmap(start, lengths.iter().sum()), each);
        (if outcome.is_ok() { lengths.len() } else { unmapped }, outcome)
    }
}

fn of_device(device: u32) -> MemoryLocation {
    MemoryLocation::device(c_int::try_from(device).unwrap_or(0))
}

/// Calls `run` for `count` granules at once, and `each` where the driver takes them one by one, which `singly` remembers.
fn run_or_each(
    count: usize,
    singly: &AtomicBool,
    run: impl FnOnce() -> Result<(), DriverRefusal>,
    each: impl FnOnce() -> Result<(), DriverRefusal>,
) -> Result<(), DriverRefusal> {
    if count > 1 && singly.load(Ordering::Relaxed) {
        return each();
    }
    let refusal = match run() {
        Err(refusal) if count > 1 && refusal.is_of_arguments() => refusal,
        outcome => return outcome,
    };
    // The first refusal is the one that names the cause.
    each().map_err(|_| refusal)?;
    singly.store(true, Ordering::Relaxed);
    Ok(())
}
