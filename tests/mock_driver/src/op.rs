//! One operation on a stream, and how the worker runs it.
//!
//! Runs on a stream's worker, which holds no lock. An error is a sticky device fault.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::call::Outcome;
use crate::code::Code;
use crate::copy::{self, Endpoint};
use crate::stream::Ticket;
use crate::{address_space, counts, device_memory};

/// A host function, as `cuLaunchHostFunc` takes it.
pub(crate) type HostFunction = extern "C" fn(*mut c_void);

/// Cloned when a graph is launched again.
#[derive(Clone)]
pub(crate) enum Op {
    Copy {
        to: Endpoint,
        from: Endpoint,
        bytes: u64,
    },
    WriteValue {
        address: u64,
        value: u32,
    },
    FreeDevice {
        address: u64,
    },
    Host {
        function: HostFunction,
        argument: usize,
    },
    RecordEvent,
    /// Handled by the stream: later operations wait for other work.
    WaitFor(Ticket),
}

impl Op {
    /// Runs the operation.
    pub(crate) fn run(self) -> Outcome {
        match self {
            Op::Copy { to, from, bytes } => copy::run(&to, &from, bytes),
            Op::WriteValue { address, value } => write_value(address, value),
            Op::FreeDevice { address } => device_memory::release(address),
            Op::Host { function, argument } => {
                function(ptr::with_exposed_provenance_mut(argument));
                Ok(())
            }
            Op::RecordEvent | Op::WaitFor(_) => Ok(()),
        }
    }
}

/// The error of an operation on memory that was freed before it ran.
pub(crate) fn fault(what: &str, address: u64) -> Code {
    counts::misused(format!("{what} reached {address:#x} after that memory was freed"));
    Code::ILLEGAL_ADDRESS
}

fn write_value(address: u64, value: u32) -> Outcome {
    let space = address_space::read();
    let (place, _) = space.backing(address).ok_or_else(|| fault("a write of a value", address))?;
    // SAFETY: (address-I2) backed while the map is borrowed; the call that enqueued this checked the alignment
    // and that four bytes have one owner.
    let cell = unsafe { AtomicU32::from_ptr(place.cast()) };
    // Release: a thread that reads the value with acquire sees every byte that earlier work of this stream wrote.
    cell.store(value, Ordering::Release);
    Ok(())
}
