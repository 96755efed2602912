//! The granules of a source that are mapped, by address, and which devices may access them.
//!
//! ```text
//!   commit, remap ──▶ CPU, own device, other devices   in one call
//!                       └─ refused ──▶ CPU, own device      in one call, or the commit fails
//!                                      each other device    in its own call: a refused device is remembered
//!   a copy by a refused device ──▶ access to the granules of the copy, or the copy fails
//! ```
//!
//! Every device that the process sees gets access, since the pool does not see the copies that other libraries start from an address,
//! and the context of a device may be created later. A refused device is not requested again by later commits, so a
//! device that fails, or that cannot access host memory, does not keep a pool from growing.
//!
//! The tables of all sources are in one process-wide list, because a copy has an address and a stream, but no pool. The list
//! is searched only after a device was refused.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::RangeInclusive;
use std::sync::{Arc, Weak};

use crate::driver::code::FailedCall;
use crate::driver::device::Device;
use crate::driver::vmm::{self as driver, AccessDescriptor, GranuleHandle, MemoryLocation};
use crate::error::SourceError;
use pinpool_os::fork::PerProcess;
use pinpool_os::sync::unmodeled::{AtomicBool, Mutex, Ordering};

/// A granule that the driver created.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    pub(super) handle: GranuleHandle,
    pub(super) bytes: usize,
}

pub(super) fn bytes_of(granules: &[Granule]) -> usize {
    granules.iter().map(|granule| granule.bytes).sum()
}

/// Consecutive granules.
pub(super) struct GranuleRun {
    pub(super) start: u64,
    pub(super) granules: Vec<Granule>,
}

/// Returns consecutive granules with their addresses.
pub(super) fn placed(start: u64, granules: &[Granule]) -> impl Iterator<Item = (u64, Granule)> {
    granules.iter().scan(start, |next, &granule| {
        let at = *next;
        *next += granule.bytes as u64;
        Some((at, granule))
    })
}

/// The granules of one source.
#[derive(Debug)]
pub(super) struct GranuleTable {
    device: Arc<Device>,
    /// Access for the CPU and the source's own device.
    own: [AccessDescriptor; 2],
    /// Number of devices that the process sees (`CUDA_VISIBLE_DEVICES`).
    devices: u32,
    mapped: Mutex<BTreeMap<u64, Granule>>,
    /// Devices that were refused access, each with the driver's answer.
    pub(super) refused: Mutex<Vec<(u32, FailedCall)>>,
}

/// The tables of all sources.
static TABLES: PerProcess<Mutex<Vec<Weak<GranuleTable>>>> = PerProcess::new(Mutex::default);

/// Whether any device was refused access.
static IS_ANY_REFUSED: AtomicBool = AtomicBool::new(false);

/// Gives `device` access to the `len` bytes at `start` if the device was refused access to memory of their source. Nothing may
/// remap these bytes meanwhile.
///
/// # Errors
///
/// The driver refuses again.
pub(crate) fn ensure_access(device: u32, start: *const u8, len: usize) -> Result<(), SourceError> {
    // Relaxed: the flag is stored before the commit of the memory returns, and a thread gets a buffer only after that.
    if !IS_ANY_REFUSED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let (start, end) = (start.addr() as u64, start.addr() as u64 + len as u64);
    let tables: Vec<_> = TABLES.get().lock().iter().filter_map(Weak::upgrade).collect();
    tables.iter().try_for_each(|table| table.ensure_access(device, start, end)).map_err(|failed| {
        let remedy = "the pool's own device has access; create a separate pool for this device (PINPOOL_DEVICE)";
        SourceError::from(failed).with_remedy(remedy)
    })
}

impl GranuleTable {
    /// Returns an empty table of a source of `device`, for memory at `location`, on a machine with `devices` devices.
    pub(super) fn new(device: Arc<Device>, location: MemoryLocation, devices: u32) -> Arc<Self> {
        let own = [AccessDescriptor::read_write(location), of_device(device.ordinal)];
        let table = Arc::new(Self { device, own, devices, mapped: Mutex::default(), refused: Mutex::default() });
        let mut tables = TABLES.get().lock();
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Arc::downgrade(&table));
        drop(tables);
        table
    }

    fn is_refused(&self, device: u32) -> bool {
        self.refused.lock().iter().any(|&(refused, _)| refused == device)
    }

    /// Makes `granules`, from `start` on, accessible to the CPU, the source's device, and each other device that was
    /// not refused before. Fails unless the CPU and the source's device get access; records other refused devices.
    ///
    /// # Safety
    ///
    /// The granules must be mapped at these addresses.
    pub(super) unsafe fn set_access(&self, start: u64, granules: &[Granule]) -> Result<(), FailedCall> {
        let is_other = |&device: &u32| device != self.device.ordinal && !self.is_refused(device);
        let others: Vec<_> = (0..self.devices).filter(is_other).collect();
        let all: Vec<_> = self.own.into_iter().chain(others.iter().map(|&device| of_device(device))).collect();
        // SAFETY: the caller's promise, here and below.
        let refused = match unsafe { set(start, bytes_of(granules), &all) } {
            Err(refused) if !others.is_empty() => refused,
            answer => return answer,
        };
        // SAFETY: as above.
        unsafe { set(start, bytes_of(granules), &self.own) }.map_err(|_| refused)?;
        for device in others {
            // SAFETY: as above.
            if let Err(failed) = unsafe { set(start, bytes_of(granules), &[of_device(device)]) } {
                IS_ANY_REFUSED.store(true, Ordering::Relaxed);
                self.refused.lock().push((device, failed));
            }
        }
        Ok(())
    }

    /// Records that `granules` are mapped from `start` on.
    pub(super) fn remember(&self, start: u64, granules: &[Granule]) {
        self.mapped.lock().extend(placed(start, granules));
    }

    pub(super) fn forget(&self, run: &GranuleRun) {
        let mut mapped = self.mapped.lock();
        for (address, _) in placed(run.start, &run.granules) {
            mapped.remove(&address);
        }
    }

    /// Returns whether a granule begins in `addresses`.
    pub(super) fn has_granules(&self, addresses: RangeInclusive<u64>) -> bool {
        self.mapped.lock().range(addresses).next().is_some()
    }

    /// Returns the granules that make up the `bytes` at `start`; `None` if some bytes have no granule, or if a granule is only partly
    /// in these bytes.
    pub(super) fn run_at(&self, start: u64, bytes: usize) -> Option<GranuleRun> {
        let end = start + bytes as u64;
        let mut at = start;
        let mut granules = Vec::new();
        let mapped = self.mapped.lock();
        while let Some(&granule) = mapped.get(&at).filter(|_| at < end) {
            at += granule.bytes as u64;
            granules.push(granule);
        }
        (at == end).then_some(GranuleRun { start, granules })
    }

    /// Gives `device`, if it was refused, access to the granules that the addresses from `start` to `end` touch.
    fn ensure_access(&self, device: u32, start: u64, end: u64) -> Result<(), FailedCall> {
        if !self.is_refused(device) {
            return Ok(());
        }
        let mapped = self.mapped.lock();
        let before = |at: u64| mapped.range(..at).next_back().map(|(&at, granule)| (at, at + granule.bytes as u64));
        let touched = before(start + 1).filter(|&(_, first_end)| first_end > start).zip(before(end));
        drop(mapped);
        let Some(((first, _), (_, last_end))) = touched else { return Ok(()) };
        // A failure is ignored, because the driver also sets access without a context.
        let _entered = self.device.enter_if_active();
        let bytes = usize::try_from(last_end - first).unwrap_or(usize::MAX);
        // SAFETY: consecutive granules that are mapped; a buffer of the caller lies in them, so nothing unmaps them during the call
        // (core-I1).
        unsafe { set(first, bytes, &[of_device(device)]) }
    }
}

fn of_device(device: u32) -> AccessDescriptor {
    AccessDescriptor::read_write(MemoryLocation::device(c_int::try_from(device).unwrap_or(0)))
}

/// # Safety
///
/// Granules must be mapped at these addresses.
unsafe fn set(start: u64, bytes: usize, access: &[AccessDescriptor]) -> Result<(), FailedCall> {
    // SAFETY: the caller's promise; `access` has the length passed.
    unsafe { driver::set_access(start, bytes, access.as_ptr(), access.len()) }
}
