//! Pins memory that a user mapped, as a source pins its own memory.
//!
//! - pinned-range-I1: a [`PinnedRange`] ends by [`end`](PinnedRange::end), while its memory is mapped; if the driver refuses, the
//!   memory stays mapped.
#![allow(unsafe_code)] // Pins and unpins memory.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::mapping;
use super::mlock;
#[cfg(feature = "cuda")]
use super::register::RegisterSource;
use super::source::{PinnedBy, Region, Source};
use crate::error::SourceError;

/// The owner of a pin.
#[derive(Debug)]
pub(crate) enum PinnedRange {
    /// Nothing pins it.
    None,
    /// The kernel, which unlocks what is unmapped.
    Kernel,
    #[cfg(feature = "cuda")]
    Driver(Arc<RegisterSource>),
}

impl PinnedRange {
    /// Pins `region` as `source` pins its own memory. A driver pins it for `device`. While a driver has locked its pages,
    /// children of `fork` do not get them.
    ///
    /// # Safety
    ///
    /// Whole pages, mapped until [`end`](Self::end) has returned without an error.
    pub(crate) unsafe fn pin(region: &Region, source: &dyn Source, device: u32) -> Result<Self, SourceError> {
        let _no_device = device;
        if source.pinned_by().is_none() {
            return Ok(Self::None);
        }
        #[cfg(feature = "cuda")]
        if source.needs_gpu() {
            let source = Arc::new(RegisterSource::new(device, None)?);
            mapping::inherit(region, false)?;
            // SAFETY: mapped until `end` has unregistered them, as the caller promised.
            let registered = unsafe { source.register_other(region) };
            registered.inspect_err(|_| {
                let _ = mapping::inherit(region, true);
            })?;
            return Ok(Self::Driver(source));
        }
        mlock::lock(region.start(), region.len_bytes())?;
        Ok(Self::Kernel)
    }

    pub(crate) fn pinned_by(&self) -> Option<PinnedBy> {
        match self {
            Self::None => None,
            Self::Kernel => Some(PinnedBy::Kernel),
            #[cfg(feature = "cuda")]
            Self::Driver(_) => Some(PinnedBy::Driver),
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
            Self::Driver(source) => {
                // SAFETY: as the caller promised.
                unsafe { source.unregister(region.start()) }?;
                let _ = mapping::inherit(region, true);
                Ok(())
            }
        }
    }
}
