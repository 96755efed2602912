//! What the library reads and keeps to itself, for property tests and fuzz targets. No part of the public interface.

use std::path::Path;

use crate::backend::PageTiers;
use crate::config::Config;
use crate::config::env;
use pinpool_os::host;

/// The value that the variable `name` would have in a pool of `config`.
pub fn value(config: &Config, name: &str) -> String {
    env::values(config).find(|(found, _)| found == name).map(|(_, value)| value).unwrap_or_default()
}

/// Total and available bytes of a process whose files lie below `root`.
pub fn memory(root: &Path) -> Option<(u64, u64)> {
    host::memory(root).map(|memory| (memory.total_bytes, memory.available_bytes))
}

/// The signs of a shortage of memory below `root`.
#[derive(Debug)]
pub struct PressureReadings(host::PressureGauge);

impl PressureReadings {
    /// `None` where there is no sign.
    pub fn open(root: &Path) -> Option<Self> {
        host::PressureGauge::of_kernel(root).map(Self)
    }

    /// The worst sign since the last reading: 0 calm, 1 some, 2 severe.
    pub fn read(&mut self) -> u8 {
        self.0.read() as u8
    }
}

/// Percent of the last ten seconds in which some tasks waited, and all of them, as a file of `/proc/pressure` says.
pub fn stall(text: &str) -> Option<(f64, f64)> {
    host::stall(text).map(|stall| (stall.some_percent, stall.full_percent))
}

/// The numbers of a list of memory nodes or processors.
pub fn number_list(text: &str) -> Option<Vec<u32>> {
    host::parse_list(text)
}

/// The pages behind `len_bytes` addresses from `start`, as the text of an smaps file says.
pub fn page_tiers(smaps: &str, start: usize, len_bytes: usize) -> PageTiers {
    PageTiers::in_smaps(smaps, start, len_bytes)
}
