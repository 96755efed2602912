//! The driver functions that this crate calls. [`symbol`](super::symbol) finds each function by name in the driver of this process.
//! Results are plain numbers, and an error names its call ([`FailedCall`]).
//!
//! cudarc's bindings are not used for these calls, because they return a Rust enum ([`code`](super::code)), and because cudarc finds
//! the functions in a library that it chooses separately, which may be a toolkit's stub. cudarc itself still calls the driver when
//! its objects are created or used: the streams, events and device memory of users, and this crate's context object, through which
//! cudarc records an event after a lent slice (`copy::cuda::own_context`).
//!
//! The functions for virtual memory are in a separate table (`vmm`), since drivers without them are supported too.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::{fmt, ptr};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUstream};

use super::code::{Code, FailedCall};

pub(crate) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;

/// `CUgreenCtx`, which bindings before CUDA 12.4 lack.
pub(crate) type GreenContext = *mut c_void;

/// Defines functions that call a driver function, which the first call finds by name.
macro_rules! calls {
    ($($(#[$doc:meta])* $vis:vis $function:ident = $name:literal($($arg:ident: $type:ty),* $(,)?);)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// The driver's manual states the conditions of this call.
        $vis unsafe fn $function($($arg: $type),*) -> Result<(), super::code::FailedCall> {
            use super::code::{Code, FailedCall};
            type Call = unsafe extern "C" fn($($type),*) -> c_int;
            /// `None` if this driver does not have the function.
            static FOUND: std::sync::OnceLock<Option<Call>> = std::sync::OnceLock::new();
            let call = match FOUND.get() {
                Some(call) => *call,
                None => {
                    // SAFETY: the driver exports this name with these arguments (its header), and is never unloaded.
                    let found = super::library::symbol($name).map(|found| unsafe { std::mem::transmute::<std::ptr::NonNull<_>, Call>(found) });
                    *FOUND.get_or_init(|| found)
                }
            };
            // SAFETY: the caller's promise.
            let answer = call.map_or(Err(Code::NOT_FOUND), |call| Code::check(unsafe { call($($arg),*) }));
            answer.map_err(|code| FailedCall::new($name, code))
        }
    )*};
}

pub(super) use calls;

/// Defines safe functions that return the result of a driver function, which stores it through its first argument. The other
/// arguments are numbers, references, and pointers that the driver looks up but does not dereference.
macro_rules! values {
    ($($(#[$doc:meta])* $vis:vis $function:ident = $name:literal($($arg:ident: $type:ty),*) -> $value:ty;)*) => {$(
        $(#[$doc])*
        $vis fn $function($($arg: $type),*) -> Result<$value, super::code::FailedCall> {
            super::calls::calls! { call = $name(value: *mut $value $(, $arg: $type)*); }
            // SAFETY: all of these types are numbers or raw pointers, which may be zero.
            let mut value: $value = unsafe { std::mem::zeroed() };
            // SAFETY: `value` takes the result. The driver refuses a call that lacks the context it needs, an unknown device or an
            // unknown pointer.
            unsafe { call(&raw mut value $(, $arg)*) }.map(|()| value)
        }
    )*};
}

pub(super) use values;

values! {
    /// Returns the CUDA version of the driver's library: 13020 is 13.2.
    pub(crate) driver_version = c"cuDriverGetVersion"() -> c_int;
    pub(crate) device = c"cuDeviceGet"(ordinal: c_int) -> CUdevice;
    pub(crate) device_count = c"cuDeviceGetCount"() -> c_int;
    pub(super) device_attribute = c"cuDeviceGetAttribute"(number: c_int, device: CUdevice) -> c_int;
    /// Takes a reference to the primary context of a device, and creates the context if there is none.
    pub(crate) primary_retain = c"cuDevicePrimaryCtxRetain"(device: CUdevice) -> CUcontext;
    /// Returns the context that is current on this thread, or null.
    pub(crate) current_context = c"cuCtxGetCurrent"() -> CUcontext;
    /// Returns the device of the context that is current on this thread.
    pub(crate) current_device = c"cuCtxGetDevice"() -> CUdevice;
    pub(crate) stream_create = c"cuStreamCreate"(flags: c_uint) -> CUstream;
    pub(crate) event_create = c"cuEventCreate"(flags: c_uint) -> CUevent;
    /// Allocates pinned memory in the current context.
    pub(crate) host_alloc = c"cuMemHostAlloc"(bytes: usize, flags: c_uint) -> *mut c_void;
    /// Returns the device address of allocated or registered memory in the current context. Reads nothing through `start`.
    pub(crate) host_device_pointer = c"cuMemHostGetDevicePointer_v2"(start: *mut c_void, flags: c_uint) -> CUdeviceptr;
}

calls! {
    pub(super) init = c"cuInit"(flags: c_uint);
    error_name_call = c"cuGetErrorName"(code: c_int, out: *mut *const c_char);
    pub(super) device_name = c"cuDeviceGetName"(text: *mut c_char, bytes: c_int, device: CUdevice);
    pub(super) context_id = c"cuCtxGetId"(context: CUcontext, out: *mut u64);
    pub(crate) pci_bus_id = c"cuDeviceGetPCIBusId"(out: *mut c_char, bytes: c_int, device: CUdevice);
    pub(crate) release_primary = c"cuDevicePrimaryCtxRelease_v2"(device: CUdevice);
    primary_state = c"cuDevicePrimaryCtxGetState"(device: CUdevice, flags: *mut c_uint, active: *mut c_int);

    pub(crate) set_current = c"cuCtxSetCurrent"(context: CUcontext);
    pub(crate) context_synchronize = c"cuCtxSynchronize"();
    exchange_capture_mode_call = c"cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);

    pub(crate) stream_destroy = c"cuStreamDestroy_v2"(stream: CUstream);
    pub(crate) stream_query = c"cuStreamQuery"(stream: CUstream);
    pub(crate) stream_synchronize = c"cuStreamSynchronize"(stream: CUstream);
    pub(crate) stream_wait_event = c"cuStreamWaitEvent"(stream: CUstream, event: CUevent, flags: c_uint);
    pub(crate) stream_id = c"cuStreamGetId"(stream: CUstream, out: *mut u64);
    is_capturing_call = c"cuStreamIsCapturing"(stream: CUstream, status: *mut c_int);
    stream_context_call = c"cuStreamGetCtx"(stream: CUstream, out: *mut CUcontext);
    stream_contexts_call = c"cuStreamGetCtx_v2"(stream: CUstream, out: *mut CUcontext, green: *mut GreenContext);
    pub(crate) stream_write_value = c"cuStreamWriteValue32_v2"(stream: CUstream, address: u64, value: u32, flags: c_uint);

    pub(crate) event_destroy = c"cuEventDestroy_v2"(event: CUevent);
    pub(crate) event_record = c"cuEventRecord"(event: CUevent, stream: CUstream);
    pub(crate) event_query = c"cuEventQuery"(event: CUevent);
    pub(crate) event_elapsed = c"cuEventElapsedTime"(out: *mut f32, first: CUevent, last: CUevent);
    pub(crate) event_synchronize = c"cuEventSynchronize"(event: CUevent);

    pub(crate) host_free = c"cuMemFreeHost"(start: *mut c_void);
    pub(crate) host_register = c"cuMemHostRegister_v2"(start: *mut c_void, bytes: usize, flags: c_uint);
    pub(crate) host_unregister = c"cuMemHostUnregister"(start: *mut c_void);
    pointer_attribute_call = c"cuPointerGetAttribute"(out: *mut c_void, attribute: c_int, address: CUdeviceptr);

    device_alloc_async_call = c"cuMemAllocAsync"(out: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    pub(crate) device_free_async = c"cuMemFreeAsync"(address: CUdeviceptr, stream: CUstream);
    pub(crate) copy_to_device =
        c"cuMemcpyHtoDAsync_v2"(target: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream);
    pub(crate) copy_to_host =
        c"cuMemcpyDtoHAsync_v2"(target: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream);
}

/// Returns whether the device has a primary context. Does not create one.
pub(crate) fn is_primary_active(device: CUdevice) -> Result<bool, FailedCall> {
    let (mut flags, mut is_active) = (0, 0);
    // SAFETY: both take results; the driver refuses a device that it does not know.
    unsafe { primary_state(device, &raw mut flags, &raw mut is_active) }.map(|()| is_active != 0)
}

/// Writes the driver's name for the error, or the number if the driver has no name for it.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = ptr::null();
        // SAFETY: `name` takes the result. The call is allowed at any time, even before `cuInit`.
        match unsafe { error_name_call(self.0, &raw mut name) } {
            // SAFETY: a string of the driver, which is never unloaded.
            Ok(()) if !name.is_null() => f.write_str(&unsafe { CStr::from_ptr(name) }.to_string_lossy()),
            _ => write!(f, "CUDA error {}", self.0),
        }
    }
}

/// Sets this thread's capture mode and returns the previous mode.
pub(crate) fn exchange_capture_mode(mut mode: c_int) -> Result<c_int, FailedCall> {
    // SAFETY: `mode` is one that the driver knows or refuses; it is read and overwritten.
    unsafe { exchange_capture_mode_call(&raw mut mode) }.map(|()| mode)
}

/// Returns whether the stream captures a graph. The query invalidates no capture.
///
/// # Safety
///
/// The stream must be alive.
pub(crate) unsafe fn is_capturing(stream: CUstream) -> Result<bool, FailedCall> {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller's promise; `status` takes the result.
    unsafe { is_capturing_call(stream, &raw mut status) }.map(|()| status != CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Returns the context of a stream, and null. For a stream of a green context, returns the primary context of its device, and the
/// green context. Drivers before CUDA 12.5 do not distinguish the two kinds of streams, so the second result is null.
///
/// # Safety
///
/// The stream must be alive.
pub(crate) unsafe fn stream_context(stream: CUstream) -> Result<(CUcontext, GreenContext), FailedCall> {
    let (mut context, mut green) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the caller's promise; two valid out-pointers.
    match unsafe { stream_contexts_call(stream, &raw mut context, &raw mut green) } {
        // SAFETY: the caller's promise, and a valid out-pointer.
        Err(FailedCall { code: Code::NOT_FOUND, .. }) => unsafe { stream_context_call(stream, &raw mut context) },
        answer => answer,
    }
    .map(|()| (context, green))
}

/// Returns the address at which the device of the current context sees the memory at `start`. The driver must know this memory, which
/// may be virtual memory. Reads nothing through `start`.
pub(crate) fn pointer_device_pointer(start: *const c_void) -> Result<CUdeviceptr, FailedCall> {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`.
    const DEVICE_POINTER: c_int = 3;
    let mut address: CUdeviceptr = 0;
    let place = (&raw mut address).cast();
    // SAFETY: the value of this attribute is an address; the driver looks up the pointer and does not dereference it.
    unsafe { pointer_attribute_call(place, DEVICE_POINTER, start.addr() as CUdeviceptr) }.map(|()| address)
}

/// Allocates device memory that later work of the stream may use.
///
/// # Safety
///
/// The stream must be alive.
pub(crate) unsafe fn device_alloc_async(bytes: usize, stream: CUstream) -> Result<CUdeviceptr, FailedCall> {
    let mut address = 0;
    // SAFETY: the caller's promise; `address` takes the result.
    unsafe { device_alloc_async_call(&raw mut address, bytes, stream) }.map(|()| address)
}
