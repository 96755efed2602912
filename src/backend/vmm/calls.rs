//! Access to granules, for every GPU.
//!
//! ```text
//!   CPU, own GPU, other GPUs   in one call ──refused──▶ CPU, own GPU   in one call
//!   (see `table`)                                       each other GPU in its own call: a refused GPU is remembered
//! ```
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_int;

use crate::driver::calls::is_primary_active;
use crate::driver::code::{Code, Failed};
use crate::driver::virtual_memory::{AccessDescriptor, GranuleHandle, MemoryLocation, VmmApi};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

/// A granule that the driver created.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    pub(super) handle: GranuleHandle,
    pub(super) bytes: usize,
}

pub(super) fn bytes_of(granules: &[Granule]) -> usize {
    granules.iter().map(|granule| granule.bytes).sum()
}

/// Devices are numbered in a word of bits.
const DEVICES_MAX: u32 = 64;

/// Which devices may access the granules of one source.
#[derive(Debug)]
pub(super) struct Calls {
    driver: VmmApi,
    /// The CPU and the own device.
    own: [AccessDescriptor; 2],
    /// Other devices that are not refused, a bit each.
    others: AtomicU64,
    /// Why devices were refused, each once.
    refused: Mutex<Vec<(u32, Failed)>>,
}

/// Whether a plain address was returned on a machine with several devices.
static ADDRESSES_ARE_OUT: AtomicBool = AtomicBool::new(false);

pub(super) fn are_addresses_out() -> bool {
    // Relaxed, here and below: who stores it then locks each table, and who maps a granule locks its table before the last look.
    ADDRESSES_ARE_OUT.load(Ordering::Relaxed)
}

pub(super) fn record_addresses_out() {
    ADDRESSES_ARE_OUT.store(true, Ordering::Relaxed);
}

/// Other devices with access, a bit each, and the devices for which access was requested.
pub(super) type Reached = (u64, u64);

/// The devices of a word of bits.
pub(super) fn devices_in(bits: u64) -> impl Iterator<Item = u32> + Clone {
    (0..DEVICES_MAX).filter(move |device| bits >> device & 1 == 1)
}

// Relaxed, for the words of bits: hints, which save calls that are refused.
impl Calls {
    /// For memory at `node`, a source of `device`, and a driver that lists `devices` devices.
    pub(super) fn new(driver: VmmApi, node: MemoryLocation, device: u32, devices: u32) -> Self {
        let own = [node, of_device(device)].map(AccessDescriptor::read_write);
        let others =
            (0..devices.min(DEVICES_MAX)).filter(|&other| other != device).fold(0, |bits, other| bits | 1 << other);
        Self { driver, own, others: AtomicU64::new(others), refused: Mutex::default() }
    }

    /// Devices that were refused, each with the driver's answer.
    pub(super) fn refused(&self) -> Vec<(u32, Failed)> {
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

    /// Makes `granules` readable and writable from `start` on: by the CPU and the own device, or fails, and by the other
    /// devices that it returns: those with an active primary context, or all once a plain address was returned.
    ///
    /// # Safety
    ///
    /// They are mapped there.
    pub(super) unsafe fn set_access(&self, start: u64, granules: &[Granule]) -> Result<Reached, Failed> {
        let are_all = are_addresses_out();
        // If the state of a device is unknown, access is requested, and a refusal is remembered.
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
                Err(failed) => {
                    // Memory may be there the next time.
                    if failed.1 != Code::OUT_OF_MEMORY {
                        self.refused.lock().push((device, failed));
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
    unsafe fn set(&self, start: u64, granules: &[Granule], access: &[AccessDescriptor]) -> Result<(), Failed> {
        // SAFETY: the caller's promise; `access` has the length passed.
        unsafe { self.driver.set_access(start, bytes_of(granules), access.as_ptr(), access.len()) }
    }
}

fn of_device(device: u32) -> MemoryLocation {
    MemoryLocation::device(c_int::try_from(device).unwrap_or(0))
}
