//! Driver calls on streams: create, destroy, wait, query, and work that signals the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{NON_BLOCKING, Op, context_of, enqueue, lock_streams, resolve, wait_for};
use crate::address_space::{self, MemoryKind};
use crate::adversarial::{self, Deviation};
use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::copy::fault;
use crate::{capture, context};

/// The handle of a green context, which no thread may make current.
const GREEN: usize = 0x6000_0000;

driver_call! { Device fn cuStreamCreate(out: Out<usize>, flags: u32) {
    let context = context::current()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut streams = lock_streams();
    let number = streams.open(context, Some(flags))?;
    out.put(streams.assign_handle(number))
}}

driver_call! { Device fn cuStreamDestroy_v2(handle: usize) {
    let number = resolve(handle)?;
    let mut streams = lock_streams();
    streams.captures.invalidate(number);
    match streams.by_number.get_mut(&number) {
        Some(stream) if stream.created.is_some() => {
            stream.closing = true;
            stream.worker.notify_all();
            streams.handles.remove(&handle);
            Ok(())
        }
        _ => Err(Code::INVALID_HANDLE),
    }
}}

driver_call! { Device fn cuStreamSynchronize(handle: usize) {
    let stream = resolve(handle)?;
    capture::forbid_waiting(stream)?;
    wait_for(stream)
}}

driver_call! { Device fn cuStreamQuery(handle: usize) {
    let stream = resolve(handle)?;
    capture::forbid_implicit(stream)?;
    capture::forbid_waiting(stream)?;
    let streams = lock_streams();
    if streams.is_complete(streams.last(stream)) { Ok(()) } else { Err(Code::NOT_READY) }
}}

driver_call! { Device fn cuStreamGetCtx(handle: usize, out: Out<usize>) {
    let context = context_of(resolve(handle)?)?;
    out.put(if adversarial::is_on(Deviation::GreenStreams) { GREEN } else { context })
}}

driver_call! { Device fn cuGreenCtxCreate(out: Out<usize>, _resources: usize, _device: i32, _flags: u32) {
    out.put(GREEN)
}}

driver_call! { Device fn cuStreamGetCtx_v2(handle: usize, out: Out<usize>, green: Out<usize>) {
    out.put(context_of(resolve(handle)?)?)?;
    green.put(if adversarial::is_on(Deviation::GreenStreams) { GREEN } else { 0 })
}}

driver_call! { Device fn cuStreamGetFlags(handle: usize, out: Out<u32>) {
    let stream = resolve(handle)?;
    out.put(lock_streams().by_number.get(&stream).and_then(|stream| stream.created).unwrap_or(0))
}}

driver_call! { Device fn cuStreamGetId(handle: usize, out: Out<u64>) {
    let number = resolve(handle)?;
    capture::forbid_naming(number)?;
    out.put(number as u64)
}}

driver_call! { Enqueue fn cuLaunchHostFunc(handle: usize, function: Option<extern "C" fn(usize)>, argument: usize) {
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let work = move || {
        function(argument);
        Ok(())
    };
    enqueue(resolve(handle)?, Op::Run(Arc::new(work))).map(drop)
}}

fn write_value(address: u64, value: u32) -> Outcome {
    let space = address_space::read();
    let (place, _) = space.backing(address).ok_or_else(|| fault(address))?;
    // SAFETY: (address-I2) backed while the map is borrowed; the call that enqueued this checked the alignment
    // and that four bytes have one owner.
    let cell = unsafe { AtomicU32::from_ptr(place.cast()) };
    // Release: a thread that reads the value with acquire sees every byte that earlier work of this stream wrote.
    cell.store(value, Ordering::Release);
    Ok(())
}

driver_call! { Enqueue fn cuStreamWriteValue32_v2(handle: usize, address: u64, value: u32, _flags: u32) {
    if !address.is_multiple_of(4) || address_space::read().locate(address, 4)? == MemoryKind::Pageable {
        return Err(Code::INVALID_VALUE);
    }
    enqueue(resolve(handle)?, Op::Signal(Arc::new(move || write_value(address, value)))).map(drop)
}}
