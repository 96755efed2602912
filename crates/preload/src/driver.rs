//! The driver's functions that this library calls, by their addresses, so that its own calls do not go through the hooks.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::lookup;

/// A result of the driver.
pub(crate) type Code = c_int;

pub(crate) const CUDA_SUCCESS: Code = 0;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: Code = 3;
pub(crate) const CUDA_ERROR_INVALID_CONTEXT: Code = 201;
pub(crate) const CUDA_ERROR_NOT_FOUND: Code = 500;
pub(crate) const CUDA_ERROR_NOT_READY: Code = 600;
pub(crate) const CUDA_ERROR_CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: Code = 901;
const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: Code = 906;
pub(crate) const CUDA_ERROR_UNKNOWN: Code = 999;

/// An event. The type keeps events apart from contexts, which are numbers.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EventHandle(usize);

/// Flags of `cuMemHostAlloc`.
const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
pub(crate) const CU_MEMHOSTALLOC_WRITECOMBINED: c_uint = 4;

/// The flags of served memory.
pub(crate) const SERVED_FLAGS: c_uint = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;

/// The handle that names the legacy default stream explicitly.
pub(crate) const CU_STREAM_LEGACY: usize = 1;
/// The handle of the per-thread default stream. For programs that use per-thread default streams, handle 0 means it too.
pub(crate) const CU_STREAM_PER_THREAD: usize = 2;
const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
const CU_EVENT_DISABLE_TIMING: c_uint = 2;

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal fn($($type:ty),*);)*) => {
        /// The addresses of the functions.
        #[derive(Debug)]
        #[allow(non_snake_case)]
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        impl Functions {
            /// Finds all functions. Fails with the name of the first function that the driver lacks.
            fn find() -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($field: {
                        let found = lookup::real_function($name).ok_or($name)?;
                        // SAFETY: preload-I2: the driver exports this name with these arguments.
                        unsafe { mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($type),*) -> Code>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    host_alloc = c"cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    free_host = c"cuMemFreeHost" fn(*mut c_void);
    context_id = c"cuCtxGetId" fn(usize, *mut u64);
    current = c"cuCtxGetCurrent" fn(*mut usize);
    push = c"cuCtxPushCurrent_v2" fn(usize);
    pop = c"cuCtxPopCurrent_v2" fn(*mut usize);
    device = c"cuCtxGetDevice" fn(*mut c_int);
    record_context = c"cuCtxRecordEvent" fn(usize, EventHandle);
    device_count = c"cuDeviceGetCount" fn(*mut c_int);
    primary_state = c"cuDevicePrimaryCtxGetState" fn(c_int, *mut c_uint, *mut c_int);
    primary_retain = c"cuDevicePrimaryCtxRetain" fn(*mut usize, c_int);
    primary_release = c"cuDevicePrimaryCtxRelease_v2" fn(c_int);
    event_create = c"cuEventCreate" fn(*mut EventHandle, c_uint);
    event_query = c"cuEventQuery" fn(EventHandle);
    event_wait = c"cuEventSynchronize" fn(EventHandle);
    stream_context = c"cuStreamGetCtx" fn(usize, *mut usize);
    is_capturing = c"cuStreamIsCapturing" fn(usize, *mut c_int);
    exchange_mode = c"cuThreadExchangeStreamCaptureMode" fn(*mut c_int);
    error_name = c"cuGetErrorName" fn(c_int, *mut *const c_char);
}

/// The driver of this process.
#[derive(Debug)]
pub(crate) struct Driver(Functions);

impl Driver {
    /// Returns the driver that the program has loaded. Fails if the driver lacks a function.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return driver.as_ref().map_err(Clone::clone);
        }
        let error = |name: &CStr| {
            format!("the driver has no {} (CUDA 12.5, driver 555 and newer have it)", name.to_string_lossy())
        };
        match Functions::find().map(Self).map_err(error) {
            // The driver may be loaded later.
            Err(missing) if lookup::real_function(c"cuMemHostAlloc").is_none() => Err(missing),
            driver => DRIVER.get_or_init(|| driver).as_ref().map_err(Clone::clone),
        }
    }

    /// Returns the name of a code.
    pub(crate) fn name(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: a valid out-pointer.
        if unsafe { (self.0.error_name)(code, &raw mut name) } != CUDA_SUCCESS || name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: `name` points to a text of the driver that is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Returns the context that is current on this thread.
    pub(crate) fn current(&self) -> Option<usize> {
        // SAFETY: a valid out-pointer.
        value(|context| unsafe { (self.0.current)(context) }).ok().filter(|&context| context != 0)
    }

    /// Returns the ID of a context, which no other context of the process ever has.
    pub(crate) fn id_of(&self, context: usize) -> Result<u64, Code> {
        // SAFETY: the driver refuses the handle of a context that has ended; the out-pointer is valid.
        value(|id| unsafe { (self.0.context_id)(context, id) })
    }

    /// Returns the context of a stream other than a default stream.
    pub(crate) fn context_of(&self, stream: usize) -> Result<usize, Code> {
        // SAFETY: the stream exists, since the program is about to use it; the out-pointer is valid.
        value(|context| unsafe { (self.0.stream_context)(stream, context) })
    }

    /// Returns the device of a live context.
    pub(crate) fn device_of(&self, context: usize) -> Result<c_int, Code> {
        let _entered = self.enter(context)?;
        // SAFETY: a valid out-pointer.
        value(|device| unsafe { (self.0.device)(device) })
    }

    /// Returns the devices.
    pub(crate) fn devices(&self) -> Range<c_int> {
        // SAFETY: a valid out-pointer.
        0..value(|count| unsafe { (self.0.device_count)(count) }).unwrap_or(0)
    }

    /// Returns whether the device has a primary context.
    pub(crate) fn has_primary(&self, device: c_int) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: two valid out-pointers.
        unsafe { (self.0.primary_state)(device, &raw mut flags, &raw mut active) == CUDA_SUCCESS && active != 0 }
    }

    /// Retains the primary context of the device.
    pub(crate) fn retain_primary(&self, device: c_int) -> Result<usize, Code> {
        // SAFETY: a valid out-pointer.
        value(|context| unsafe { (self.0.primary_retain)(context, device) })
    }

    /// Releases the primary context of the device, once for each [`retain_primary`](Self::retain_primary).
    pub(crate) fn release_primary(&self, device: c_int) -> Code {
        // SAFETY: the function takes no pointers.
        unsafe { (self.0.primary_release)(device) }
    }

    /// Makes `context` current, and keeps this thread's calls from disturbing captures, until the result is dropped.
    pub(crate) fn enter(&self, context: usize) -> Result<PushedContext<'_>, Code> {
        let is_pushed = self.current() != Some(context);
        if is_pushed {
            // SAFETY: the context is alive: the caller is in `Context::while_alive`, or it was just used or retained.
            check(unsafe { (self.0.push)(context) })?;
        }
        Ok(PushedContext { driver: self, is_pushed, _relaxed: self.relax() })
    }

    /// Keeps this thread's calls from disturbing captures until the result is dropped.
    pub(crate) fn relax(&self) -> RelaxedMode<'_> {
        RelaxedMode { driver: self, before: self.exchange(CU_STREAM_CAPTURE_MODE_RELAXED) }
    }

    fn exchange(&self, mut mode: c_int) -> Option<c_int> {
        // SAFETY: `mode` is a mode, which the driver reads and overwrites with the previous mode.
        (unsafe { (self.0.exchange_mode)(&raw mut mode) } == CUDA_SUCCESS).then_some(mode)
    }

    /// Allocates pinned memory of the driver in the current context.
    pub(crate) fn host_alloc(&self, bytes: usize, flags: c_uint) -> Result<NonNull<c_void>, Code> {
        let mut block = std::ptr::null_mut();
        // SAFETY: a valid out-pointer.
        check(unsafe { (self.0.host_alloc)(&raw mut block, bytes, flags) })?;
        NonNull::new(block).ok_or(CUDA_ERROR_UNKNOWN)
    }

    /// Frees memory of [`host_alloc`](Self::host_alloc).
    ///
    /// # Safety
    ///
    /// The memory must come from `host_alloc`, must not have been freed, and must not be in use.
    pub(crate) unsafe fn free_host(&self, block: NonNull<c_void>) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        check(unsafe { (self.0.free_host)(block.as_ptr()) })
    }

    /// Creates an event in the current context.
    pub(crate) fn create_event(&self) -> Result<EventHandle, Code> {
        // SAFETY: a valid out-pointer.
        value(|event| unsafe { (self.0.event_create)(event, CU_EVENT_DISABLE_TIMING) })
    }

    /// Records `event`, which belongs to `context`, after all work of that context. Fails if a stream of the context
    /// captures, and then invalidates that capture.
    pub(crate) fn record_context_event(&self, context: usize, event: EventHandle) -> Result<(), Code> {
        // SAFETY: both are alive (`Context::while_alive`).
        check(unsafe { (self.0.record_context)(context, event) })
    }

    /// Returns whether all work before the event's record has completed.
    pub(crate) fn is_complete(&self, event: EventHandle) -> Result<bool, Code> {
        // SAFETY: the event belongs to a live context.
        match unsafe { (self.0.event_query)(event) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code).map(|()| true),
        }
    }

    /// Waits for the event. Its context must be current.
    pub(crate) fn wait_for_event(&self, event: EventHandle) -> Result<(), Code> {
        // SAFETY: the event belongs to a live context.
        check(unsafe { (self.0.event_wait)(event) })
    }

    /// Returns whether the stream is capturing; for the legacy stream of the current context, whether a stream that is ordered with
    /// it is. The query does not invalidate the capture.
    pub(crate) fn is_captured(&self, stream: usize) -> bool {
        let mut status = 0;
        // SAFETY: a default stream, or a stream that the program has just used; a valid out-pointer.
        let code = unsafe { (self.0.is_capturing)(stream, &raw mut status) };
        status != 0 || is_refused_by_capture(code)
    }
}

/// Returns the value that `call` stores, or the code of a failed call.
fn value<T: Default>(call: impl FnOnce(*mut T) -> Code) -> Result<T, Code> {
    let mut value = T::default();
    check(call(&raw mut value)).map(|()| value)
}

/// Returns whether a call was refused because of a capture (900 to 906) and may succeed later. The other two codes about
/// captures do not say that: 907 is an event that was recorded in a capture, 908 an end of a capture by another thread. Unlike the
/// pinpool library, this crate also includes 902 to 906, since the program does not see its calls.
pub(crate) fn is_refused_by_capture(code: Code) -> bool {
    (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED..=CUDA_ERROR_STREAM_CAPTURE_IMPLICIT).contains(&code)
}

/// Turns a code into a result.
pub(crate) fn check(code: Code) -> Result<(), Code> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// Keeps a context current on this thread, with the capture mode relaxed, until it is dropped. Unlike the guard of the pinpool
/// library, it pushes and pops, so that it changes no entry of the program's context stack.
#[derive(Debug)]
pub(crate) struct PushedContext<'a> {
    driver: &'a Driver,
    is_pushed: bool,
    _relaxed: RelaxedMode<'a>,
}

impl Drop for PushedContext<'_> {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = 0;
            // SAFETY: `enter` pushed the context on this thread; the out-pointer is valid. Fails if the context is gone.
            let _ = unsafe { (self.driver.0.pop)(&raw mut popped) };
        }
    }
}

/// Keeps the capture mode of this thread relaxed until it is dropped: the thread may query events and pin memory while
/// another thread captures.
#[derive(Debug)]
pub(crate) struct RelaxedMode<'a> {
    driver: &'a Driver,
    before: Option<c_int>,
}

impl Drop for RelaxedMode<'_> {
    fn drop(&mut self) {
        let _ = self.before.and_then(|before| self.driver.exchange(before));
    }
}
