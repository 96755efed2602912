//! A GPU with its stream for copies, and the pieces of memory that are kept for later batches.
#![allow(unsafe_code)] // Calls the driver.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pinpool::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, sys};
use pyo3::prelude::*;

use crate::errors::{DeviceError, ForkError, LimitError};
use crate::stream;
use crate::unlocked::unlocked;

/// Pieces of memory that are kept for later batches.
const IDLE: usize = 2;

pub(super) struct Gpu {
    pub(super) ordinal: u32,
    pub(super) context: Arc<CudaContext>,
    /// Ends in `drop`, where the thread's context is kept.
    pub(super) stream: ManuallyDrop<Arc<CudaStream>>,
    pub(super) idle: Mutex<Vec<CudaSlice<u8>>>,
    pub(super) process: u32,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the thread's context (device-I3).
pub(super) struct KeepContext(sys::CUcontext);

impl KeepContext {
    pub(super) fn new() -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: memory for a handle; the driver is loaded, since there is a device. On a failure it stays null.
        let _none = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        Self(context)
    }
}

impl Drop for KeepContext {
    fn drop(&mut self) {
        // SAFETY: the context that was current before, or none.
        let _lost = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

impl Gpu {
    pub(super) fn failed(&self, what: &str, error: DriverError) -> PyErr {
        let text = format!("device cuda:{}: {what}: {:?}; `pinpool doctor` says what is wrong", self.ordinal, error.0);
        DeviceError::new_err(text)
    }

    pub(super) fn check_process(&self) -> PyResult<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(ForkError::new_err(format!(
                "device cuda:{}: a child of fork cannot use the GPU of its parent: make the loader in the process that uses \
                 it, started by `spawn`",
                self.ordinal
            ))),
        }
    }

    /// Memory of at least `len` bytes, for work on the loader's stream.
    pub(super) fn slice(&self, len: usize) -> PyResult<CudaSlice<u8>> {
        let fits = |slice: &CudaSlice<u8>| slice.len() >= len && slice.len() / 2 <= len;
        let mut idle = locked(&self.idle);
        if let Some(at) = idle.iter().position(fits) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        // Batches differ in length, and one is to serve for the next.
        let rounded = len.checked_next_multiple_of((len.checked_next_power_of_two().unwrap_or(len) / 8).max(512));
        let len = rounded.unwrap_or(len);
        // SAFETY: bytes are read only where copies have written them; all else is handed out as what it is, memory that
        // was not set.
        unsafe { self.stream.alloc(len) }.map_err(|error| {
            if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return self.failed("no memory", error);
            }
            LimitError::new_err(format!(
                "device cuda:{} has no room for {len} B: let earlier batches go, or use smaller ones",
                self.ordinal
            ))
        })
    }

    /// Makes the loader's stream wait for what `streams` were given so far.
    fn wait_for(&self, streams: &BTreeSet<usize>) -> Result<(), DriverError> {
        for &handle in streams {
            // SAFETY: a stream of this device that its user keeps alive as long as the memory that was handed to it.
            let stream = unsafe { stream::on_device(self.ordinal, handle) }?;
            // By the object of the stream's own context, which is the same one.
            let event = stream.record_event(None)?;
            self.stream.wait(&event)?;
        }
        Ok(())
    }

    /// Takes memory back that nobody refers to any more (device-I1, device-I2). The caller keeps the thread's context.
    pub(super) fn put(&self, slice: CudaSlice<u8>, streams: &BTreeSet<usize>, is_lent: bool) {
        // A failure shows in the calls below.
        let _bound = self.context.bind_to_thread();
        if (is_lent || self.wait_for(streams).is_err())
            && let Err(error) = self.context.synchronize()
        {
            log::error!(
                "{} bytes of cuda:{} are never used again: whether its work is over is unknown ({:?})",
                slice.len(),
                self.ordinal,
                error.0
            );
            return std::mem::forget(slice);
        }
        let mut idle = locked(&self.idle);
        let surplus = if idle.len() < IDLE { None } else { Some(idle.remove(0)) };
        idle.push(slice);
        drop(idle);
        drop(surplus);
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let idle = std::mem::take(self.idle.get_mut().unwrap_or_else(PoisonError::into_inner));
        if self.process != std::process::id() {
            // The driver of the parent is none of this process.
            return std::mem::forget(idle);
        }
        // SAFETY: this is the end of the only owner, which uses it no more.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        unlocked(move || {
            let _keep = KeepContext::new();
            // A failure shows in the calls below.
            let _bound = stream.context().bind_to_thread();
            drop((idle, stream));
        });
    }
}
