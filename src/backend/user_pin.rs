//! Pins memory that a user mapped, as a source pins its own memory.
//!
//! - **user-pin-I1**: every [`UserPin`] is ended by [`unpin`](UserPin::unpin) while its memory is still mapped; if the
//!   driver refuses, the memory stays mapped.
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

/// The component that has pinned a range of user memory.
#[derive(Debug)]
pub(crate) enum UserPin {
    /// Nothing has pinned the memory.
    None,
    /// The kernel, which also unlocks pages when they are unmapped.
    Kernel,
    #[cfg(feature = "cuda")]
    Driver(Arc<RegisterSource>),
}

impl UserPin {
    /// Pins `region` as `source` pins its own memory. If the driver pins it, the driver does so for `device`, and forked children do
    /// not inherit the pages while they are pinned.
    ///
    /// # Safety
    ///
    /// `region` must consist of whole pages, which stay mapped until [`unpin`](Self::unpin) has returned without an error.
    pub(crate) unsafe fn pin(region: &Region, source: &dyn Source, device: u32) -> Result<Self, SourceError> {
        let _no_device = device;
        if source.pinned_by().is_none() {
            return Ok(Self::None);
        }
        #[cfg(feature = "cuda")]
        if source.needs_gpu() {
            let source = Arc::new(RegisterSource::new(device, None)?);
            mapping::inherit(region, false)?;
            // SAFETY: the caller promises that the pages stay mapped until `unpin` has unregistered them.
            unsafe { source.register_other(region) }.inspect_err(|_| {
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

    /// Unpins `region`. If the driver has pinned it, waits for all work on the device; after an error devices may still
    /// access the pages.
    ///
    /// # Safety
    ///
    /// `region` must be the region that [`pin`](Self::pin) pinned, and no device may use it.
    pub(crate) unsafe fn unpin(&self, region: &Region) -> Result<(), SourceError> {
        match self {
            Self::None => Ok(()),
            Self::Kernel => mlock::unlock(region.start(), region.len_bytes()),
            #[cfg(feature = "cuda")]
            Self::Driver(source) => {
                // SAFETY: the caller promises that `pin` registered `region` and that no device uses it.
                unsafe { source.unregister(region.start()) }?;
                let _ = mapping::inherit(region, true);
                Ok(())
            }
        }
    }
}
