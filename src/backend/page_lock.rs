//! Page-locks memory that a user mapped, as the memory of a source is.
//!
//! - page-lock-I1: a [`PageLock`] ends by [`end`](PageLock::end), while its memory is mapped; if the driver refuses, the memory
//!   stays mapped.
#![allow(unsafe_code)] // Page-locks memory and ends that.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::populate::populate;
#[cfg(feature = "cuda")]
use super::register::RegisterSource;
use super::source::Region;
use super::{mapping, mlock};
use crate::error::SourceError;

/// What page-locks a region.
#[derive(Debug)]
pub(crate) enum PageLock {
    /// Nothing page-locks it.
    None,
    /// The kernel, which unlocks what is unmapped.
    Kernel,
    #[cfg(feature = "cuda")]
    Driver(Arc<RegisterSource>),
}

impl PageLock {
    /// Brings the pages of `region` into memory by `threads` threads, if this kernel can do so without a write to them (Linux
    /// 5.14). Then page-locks them as the source `source` of the device `device` does.
    ///
    /// # Safety
    ///
    /// Whole pages, mapped until [`end`](Self::end) has returned without an error.
    pub(crate) unsafe fn of(region: &Region, source: &str, device: u32, threads: usize) -> Result<Self, SourceError> {
        if mapping::can_populate(region).is_ok() {
            // SAFETY: the pages are mapped, and this kernel populates them without changing them.
            unsafe { populate(region, threads, None, &|_| {}) }?;
        }
        match source {
            #[cfg(feature = "cuda")]
            "vmm" | "register" | "cuda" => {
                let source = Arc::new(RegisterSource::new(device, None)?);
                mapping::keep_from_children(region)?;
                // SAFETY: mapped until `end` has unregistered them, as the caller promised.
                unsafe { source.register_other(region) }?;
                Ok(Self::Driver(source))
            }
            "mlock" => mlock::lock(region.start(), region.len_bytes()).map(|()| Self::Kernel),
            _ => {
                let _no_device = device;
                Ok(Self::None)
            }
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Kernel => "mlock",
            #[cfg(feature = "cuda")]
            Self::Driver(_) => "register",
        }
    }

    /// Ends it; waits for all work of a device. After an error devices may still access the pages.
    ///
    /// # Safety
    ///
    /// `region` is what was locked, and no device uses it.
    pub(crate) unsafe fn end(&self, region: &Region) -> Result<(), SourceError> {
        match self {
            Self::None => Ok(()),
            Self::Kernel => mlock::unlock(region.start(), region.len_bytes()),
            #[cfg(feature = "cuda")]
            // SAFETY: as the caller promised.
            Self::Driver(source) => unsafe { source.unregister(region.start()) },
        }
    }
}
