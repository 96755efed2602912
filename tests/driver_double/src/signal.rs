//! What a stream tells the host when it comes to it: a value in memory, or a function called.

use crate::address_space::{self, Place};
use crate::call::{Outcome, driver_call};
use crate::code::Code;
use crate::op::{HostFunction, Op};
use crate::stream::{enqueue, resolve};
use crate::toll::{self, Work};

driver_call! { Enqueue fn cuLaunchHostFunc(handle: usize, function: Option<HostFunction>, argument: usize) {
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let _toll = toll::charge(Work::Signal);
    enqueue(resolve(handle)?, Op::Host { function, argument }).map(drop)
}}

fn write_value(handle: usize, address: u64, value: u32) -> Outcome {
    if !address.is_multiple_of(4) || address_space::read().locate(address, 4)? == Place::Pageable {
        return Err(Code::INVALID_VALUE);
    }
    let _toll = toll::charge(Work::Signal);
    enqueue(resolve(handle)?, Op::WriteValue { address, value }).map(drop)
}

driver_call! { Enqueue fn cuStreamWriteValue32(handle: usize, address: u64, value: u32, _flags: u32) {
    write_value(handle, address, value)
}}

driver_call! { Enqueue fn cuStreamWriteValue32_v2(handle: usize, address: u64, value: u32, _flags: u32) {
    write_value(handle, address, value)
}}
