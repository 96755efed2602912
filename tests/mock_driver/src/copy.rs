//! Copies: the checks of both sides, and the movement of the bytes.
//!
//! Bytes move when the work runs, in steps, with the address map locked. So a source that was overwritten meanwhile shows in the data,
//! and a freed source is a fault.
//!
//! | from | to | what the call does |
//! | --- | --- | --- |
//! | pinned or device | pinned or device | returns immediately |
//! | pageable | device | reads the source before it returns |
//! | device | pageable | returns when the bytes are there |

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::thread;

use crate::address_space::{self, MemoryKind, Space};
use crate::adversarial::{self, Deviation};
use crate::call::{Outcome, driver_call};
use crate::code::Code;
use crate::stream::{LEGACY, Op};
use crate::{context, counts, settings, stream, virtual_memory};

/// Bytes moved under one lock of the address map.
const STEP_BYTES: u64 = 256 << 10;

/// One side of a copy.
pub(crate) enum Endpoint {
    /// Memory in the address map.
    Owned(u64),
    /// Pageable memory; the call waits for the copy.
    Pageable(usize),
    /// A copy of pageable memory, made before the call returned.
    Staged(Arc<[u8]>),
}

impl Endpoint {
    fn pointer(&self, space: &Space, offset: u64) -> Result<(*mut u8, u64), Code> {
        match self {
            Endpoint::Owned(address) => space.backing(address + offset).ok_or_else(|| fault(address + offset)),
            Endpoint::Pageable(address) => Ok((ptr::with_exposed_provenance_mut(address + offset as usize), u64::MAX)),
            Endpoint::Staged(bytes) => Ok((bytes[offset as usize..].as_ptr().cast_mut(), bytes.len() as u64 - offset)),
        }
    }
}

/// Largest copy that the driver stages under [`Deviation::SmallCopies`].
const SMALL_BYTES: u64 = 64 << 10;

/// Records a misuse and returns the error of work on memory that was freed before the work ran.
pub(crate) fn fault(address: u64) -> Code {
    counts::misused(format!("work reached {address:#x} after that memory was freed"));
    Code::ILLEGAL_ADDRESS
}

/// Enqueues a copy.
pub(crate) fn enqueue(stream: usize, to: Endpoint, from: Endpoint, bytes: u64) -> Outcome {
    stream::enqueue(stream, Op::Run(Arc::new(move || run(&to, &from, bytes)))).map(drop)
}

/// Moves the bytes, on a stream's worker.
fn run(to: &Endpoint, from: &Endpoint, bytes: u64) -> Outcome {
    thread::sleep(settings::get().copy_delay);
    let mut done = 0;
    while done < bytes {
        let space = address_space::read();
        let (target, target_left) = to.pointer(&space, done)?;
        let (source, source_left) = from.pointer(&space, done)?;
        let step = STEP_BYTES.min(bytes - done).min(target_left).min(source_left);
        // SAFETY: (address-I2) owned memory is backed while the map is borrowed; staged bytes are held by
        // `from`; the caller of the copy guarantees pageable memory (call-I1), and waits. `copy` allows overlap.
        unsafe { ptr::copy(source, target, step as usize) };
        done += step;
    }
    Ok(())
}

fn copy(to: u64, from: u64, bytes: usize, handle: usize, is_to_device: bool) -> Outcome {
    let stream = stream::resolve(handle)?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Ok(());
    }
    let (target, source) = {
        let space = address_space::read();
        let kind = |address| match space.locate(address, bytes) {
            Err(_) if bytes <= SMALL_BYTES && adversarial::is_on(Deviation::SmallCopies) => Ok(MemoryKind::Pageable),
            found => found,
        };
        (kind(to)?, kind(from)?)
    };
    if [target, source].map(|kind| kind == MemoryKind::Device) != [is_to_device, !is_to_device] {
        return Err(Code::INVALID_VALUE);
    }
    if let Ok(device) = context::current_device()
        && ![to, from].into_iter().all(|address| virtual_memory::can_reach(device, address, bytes))
    {
        if adversarial::is_on(Deviation::StickyFaults) {
            stream::lock_streams().lose(Code::ILLEGAL_ADDRESS);
        }
        return Err(Code::ILLEGAL_ADDRESS);
    }
    let waits = target == MemoryKind::Pageable;
    let to = if waits { Endpoint::Pageable(to as usize) } else { Endpoint::Owned(to) };
    let from = if source == MemoryKind::Pageable { stage(from, bytes) } else { Endpoint::Owned(from) };
    enqueue(stream, to, from, bytes)?;
    if waits { stream::wait_for(stream) } else { Ok(()) }
}

fn stage(from: u64, bytes: u64) -> Endpoint {
    let source = ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: (call-I1) the caller of the copy guarantees its source until the call returns.
    Endpoint::Staged(unsafe { std::slice::from_raw_parts(source, bytes as usize) }.into())
}

fn address(pointer: *const c_void) -> u64 {
    pointer.expose_provenance() as u64
}

driver_call! { Enqueue fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) {
    copy(to, address(from), bytes, stream, true)
}}

driver_call! { Enqueue fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) {
    copy(address(to), from, bytes, stream, false)
}}

fn copy_now(to: u64, from: u64, bytes: usize, is_to_device: bool) -> Outcome {
    copy(to, from, bytes, LEGACY, is_to_device)?;
    stream::wait_for(stream::resolve(LEGACY)?)
}

driver_call! { Enqueue fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
    copy_now(to, address(from), bytes, true)
}}

driver_call! { Enqueue fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
    copy_now(address(to), from, bytes, false)
}}
