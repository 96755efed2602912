//! The granules that are mapped, by address, and which devices may reach each.
//!
//! ```text
//!   commit, remap ──▶ access for the CPU, the own device and each with an active primary context, but those that were refused
//!   a copy of device 1 from [a, b) ──▶ granules of [a, b) without access for device 1 ──▶ access for it, and a note
//!   a plain address leaves the crate ──▶ access for all devices, now and at each later commit
//! ```
//!
//! A copy that the crate enqueues is preceded by [`let_reach`]. Copies that another library starts from a plain address (torch,
//! a C program, a preloaded pool) are not visible here, and a device may copy even if its context is made later: so once an
//! address was handed out ([`let_all_reach`]), every device of the machine has access to every granule of the process, as far
//! as it is not refused.
//!
//! Access for a refused device is requested again when it copies through the pool, and only for those granules: a device that
//! answers no more, or that can reach no memory of the host, fails its own copies and keeps no pool from growing.
//!
//! All tables are in one list of the process, because a copy knows an address and a stream, and no pool. On a machine with
//! one device the list is empty, and copies of the one device that all sources have do not look at it.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Weak};

use super::calls::{Calls, Granule, Reached, are_addresses_out, devices_in, record_addresses_out};
use crate::driver::code::Failed;
use crate::driver::device::Device;
use crate::driver::virtual_memory::{AccessDescriptor, MemoryLocation, VmmApi};
use crate::error::SourceError;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU32, Ordering};

/// Consecutive granules.
pub(super) struct GranuleRun {
    pub(super) start: u64,
    pub(super) granules: Vec<Granule>,
}

/// Consecutive granules with their addresses.
pub(super) fn placed(start: u64, granules: &[Granule]) -> impl Iterator<Item = (u64, Granule)> {
    granules.iter().scan(start, |next, &granule| {
        let at = *next;
        *next += granule.bytes as u64;
        Some((at, granule))
    })
}

/// A granule where it is mapped.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    granule: Granule,
    /// Other devices that may reach it, one bit each.
    others: u64,
}

/// The granules of one source.
#[derive(Debug)]
pub(super) struct GranuleTable {
    driver: VmmApi,
    calls: Arc<Calls>,
    device: Arc<Device>,
    mapped: Mutex<BTreeMap<u64, Mapped>>,
}

/// The tables of all sources of a machine with several devices.
static TABLES: OfProcess<Mutex<Vec<Weak<GranuleTable>>>> = OfProcess::new(Mutex::default);

/// The device of all sources in the list, plus 1; 0 if there is none, `SEVERAL` if they differ.
static OWN_DEVICE: AtomicU32 = AtomicU32::new(0);
const SEVERAL: u32 = u32::MAX;

/// A pool of the process has returned a plain address: gives all devices access to all granules. Only the first call is slow.
pub(crate) fn let_all_reach() {
    if OWN_DEVICE.load(Ordering::Relaxed) == 0 || are_addresses_out() {
        return;
    }
    record_addresses_out();
    let tables: Vec<_> = TABLES.get().lock().iter().filter_map(Weak::upgrade).collect();
    tables.iter().for_each(|table| table.let_all_reach());
}

/// Gives `device` access to the `len` bytes at `start`, if they lie in granules of a source with another device.
/// Nothing may remap them meanwhile. A slow call only at the first copy of a device from them.
///
/// # Errors
///
/// What the driver says of this device.
pub(crate) fn let_reach(device: u32, start: *const u8, len: usize) -> Result<(), SourceError> {
    // Relaxed: a table is listed before its source returns memory, and a thread that has a buffer comes after that.
    if matches!(OWN_DEVICE.load(Ordering::Relaxed), own if own == 0 || own == device.saturating_add(1)) {
        return Ok(());
    }
    let (start, end) = (start.addr() as u64, start.addr() as u64 + len as u64);
    let tables: Vec<_> = TABLES.get().lock().iter().filter_map(Weak::upgrade).collect();
    let mut others = tables.iter().filter(|table| table.device.ordinal != device);
    others.try_for_each(|table| table.let_reach(device, start, end)).map_err(|failed| {
        let remedy = "the pool's own device has access; create a separate pool for this device (PINPOOL_DEVICE)";
        SourceError::from(failed).with_remedy(remedy)
    })
}

impl GranuleTable {
    /// An empty table; `is_listed` if there are other devices than `device`.
    pub(super) fn new(driver: VmmApi, calls: Arc<Calls>, device: Arc<Device>, is_listed: bool) -> Arc<Self> {
        let own_device = device.ordinal;
        let table = Arc::new(Self { driver, calls, device, mapped: Mutex::new(BTreeMap::new()) });
        if is_listed {
            let mut tables = TABLES.get().lock();
            tables.retain(|table| table.strong_count() > 0);
            tables.push(Arc::downgrade(&table));
            let alike = tables.iter().filter_map(Weak::upgrade).all(|other| other.device.ordinal == own_device);
            // Relaxed: see `let_reach`.
            OWN_DEVICE.store(if alike { own_device.saturating_add(1) } else { SEVERAL }, Ordering::Relaxed);
        }
        table
    }

    /// The `granules` are mapped from `start` on, with access for the `others`.
    pub(super) fn remember(&self, start: u64, granules: &[Granule], (others, asked): Reached) {
        let mapped = placed(start, granules).map(|(address, granule)| (address, Mapped { granule, others }));
        self.mapped.lock().extend(mapped);
        // An address was handed out since.
        if are_addresses_out() && self.calls.others() & !asked != 0 {
            self.let_all_reach();
        }
    }

    /// Gives all devices that are not refused access to all granules.
    fn let_all_reach(&self) {
        for device in devices_in(self.calls.others()) {
            // The next commit asks again, and remembers a refusal.
            let _refused = self.let_reach(device, 0, u64::MAX);
        }
    }

    pub(super) fn forget(&self, run: &GranuleRun) {
        let mut mapped = self.mapped.lock();
        for (address, _) in placed(run.start, &run.granules) {
            mapped.remove(&address);
        }
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        self.mapped.lock().contains_key(&address)
    }

    /// Bytes of the granules that begin in `addresses`.
    pub(super) fn bytes_in(&self, addresses: std::ops::Range<u64>) -> u64 {
        self.mapped.lock().range(addresses).map(|(_, mapped)| mapped.granule.bytes as u64).sum()
    }

    /// The granules that make up the `bytes` at `start`; `None` if some are not mapped or only in part there.
    pub(super) fn run_at(&self, start: u64, bytes: usize) -> Option<GranuleRun> {
        let end = start + bytes as u64;
        let (mut at, mut granules) = (start, Vec::new());
        let all = self.mapped.lock();
        while let Some(&Mapped { granule, .. }) = all.get(&at).filter(|_| at < end) {
            at += granule.bytes as u64;
            granules.push(granule);
        }
        (at == end).then_some(GranuleRun { start, granules })
    }

    /// Gives `device` access to the granules that the addresses from `start` to `end` touch.
    fn let_reach(&self, device: u32, start: u64, end: u64) -> Result<(), Failed> {
        // A device beyond the bits has its access set each time.
        let bit = 1_u64.checked_shl(device).unwrap_or(0);
        let lacking: Vec<_> = {
            let mapped = self.mapped.lock();
            let first = mapped.range(..=start).next_back().map_or(start, |(&address, _)| address);
            let touched = mapped.range(first..end).filter(|&(&at, mapped)| at + mapped.granule.bytes as u64 > start);
            touched.filter(|(_, mapped)| mapped.others & bit == 0).map(|(&at, mapped)| (at, mapped.granule)).collect()
        };
        if lacking.is_empty() {
            return Ok(());
        }
        let access = AccessDescriptor::read_write(MemoryLocation::device(c_int::try_from(device).unwrap_or(0)));
        // Without a context, as before the first one, drivers set access all the same.
        let _entered = self.device.enter_if_active();
        let mut reached = Ok(());
        for (address, granule) in lacking {
            // SAFETY: mapped with this length; a buffer of the caller's lies in it, so nothing unmaps it meanwhile (core-I1), or
            // the driver refuses an address at which nothing is mapped any more. One descriptor, alive as long as the call.
            match unsafe { self.driver.set_access(address, granule.bytes, &raw const access, 1) } {
                Ok(()) => self.mapped.lock().get_mut(&address).into_iter().for_each(|mapped| mapped.others |= bit),
                refused => reached = reached.and(refused),
            }
        }
        reached.map(|()| self.calls.restore(device))
    }
}
