//! Device memory: addresses that a CPU cannot access, backed by ordinary memory that only copies reach.
//!
//! Addresses lie above what a process can map, so a program that mistakes a device pointer for a host pointer crashes at
//! once. Addresses are never used twice, so that a late copy into freed memory is detected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::address_space::{self, MemoryKind, Owner};
use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::copy::{self, Endpoint};
use crate::stream::Op;
use crate::{capture, context, counts, memory, stream};

const FIRST_ADDRESS: u64 = 1 << 48;
const ALIGNMENT: u64 = 512;

// Its accesses are relaxed: the counter publishes no other data.
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(FIRST_ADDRESS);

fn allocate(bytes: usize) -> Result<u64, Code> {
    context::current()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let backing = memory::map(bytes)?;
    // Blocks are one alignment apart, so that an access past the end of a block hits no other block.
    let spaced_bytes = (bytes as u64).next_multiple_of(ALIGNMENT) + ALIGNMENT;
    let address = NEXT_ADDRESS.fetch_add(spaced_bytes, Ordering::Relaxed);
    memory::insert(address, bytes as u64, Owner::Device { backing })?;
    Ok(address)
}

/// Frees a block immediately.
pub(crate) fn release(address: u64) -> Outcome {
    let Some(range) = address_space::remove(address, |owner| matches!(owner, Owner::Device { .. })) else {
        counts::misused(format!("free of device memory at {address:#x}, which is not the start of a block"));
        return Err(Code::INVALID_VALUE);
    };
    memory::release(range);
    Ok(())
}

driver_call! { Enqueue fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) {
    capture::forbid_unsafe_call()?;
    out.put(allocate(bytes)?)
}}

driver_call! { Enqueue fn cuMemFree_v2(address: u64) {
    if address == 0 {
        return Ok(());
    }
    memory::wait_for_all_work()?;
    release(address)
}}

driver_call! { Enqueue fn cuMemAllocAsync(out: Out<u64>, bytes: usize, handle: usize) {
    stream::resolve(handle)?;
    out.put(allocate(bytes)?)
}}

driver_call! { Enqueue fn cuMemFreeAsync(address: u64, handle: usize) {
    stream::enqueue(stream::resolve(handle)?, Op::Run(Arc::new(move || release(address)))).map(drop)
}}

driver_call! { Enqueue fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, handle: usize) {
    if address_space::read().locate(address, bytes as u64)? == MemoryKind::Pageable {
        return Err(Code::INVALID_VALUE);
    }
    let (to, from) = (Endpoint::Owned(address), Endpoint::Staged(vec![value; bytes].into()));
    copy::enqueue(stream::resolve(handle)?, to, from, bytes as u64)
}}
