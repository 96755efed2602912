//! The driver's functions that this library calls, by address: no own call passes a hook.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::lookup;

/// A result of the driver; 0 is success.
pub(crate) type Code = c_int;

pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CAPTURE_INVALIDATED: Code = 901;
pub(crate) const CAPTURE_IMPLICIT: Code = 906;
pub(crate) const UNKNOWN: Code = 999;

/// Flags of `cuMemHostAlloc`.
pub(crate) const PORTABLE: c_uint = 1;
pub(crate) const MAPPED: c_uint = 2;
pub(crate) const WRITE_COMBINED: c_uint = 4;

/// The legacy default stream by its name.
const LEGACY_STREAM: usize = 1;
const RELAXED: c_int = 2;
const DISABLE_TIMING: c_uint = 2;

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $name:literal fn($($type:ty),*);)*) => {
        /// The functions, all found in one library.
        #[derive(Debug)]
        #[allow(non_snake_case)]
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> Code,)*
            record_context: Option<unsafe extern "C" fn(usize, usize) -> Code>,
        }

        impl Functions {
            /// Finds all of them; the name of the first that the driver lacks.
            fn find() -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($field: {
                        let found = lookup::own($name).ok_or($name)?;
                        // SAFETY: preload-I2: the driver exports this name with these arguments.
                        unsafe { mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($type),*) -> Code>(found) }
                    },)*
                    record_context: lookup::own(c"cuCtxRecordEvent").map(|found| {
                        // SAFETY: as above.
                        unsafe { mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(usize, usize) -> Code>(found) }
                    }),
                })
            }
        }
    };
}

functions! {
    host_alloc = c"cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    free_host = c"cuMemFreeHost" fn(*mut c_void);
    current = c"cuCtxGetCurrent" fn(*mut usize);
    push = c"cuCtxPushCurrent_v2" fn(usize);
    pop = c"cuCtxPopCurrent_v2" fn(*mut usize);
    device = c"cuCtxGetDevice" fn(*mut c_int);
    primary_state = c"cuDevicePrimaryCtxGetState" fn(c_int, *mut c_uint, *mut c_int);
    event_create = c"cuEventCreate" fn(*mut usize, c_uint);
    event_query = c"cuEventQuery" fn(usize);
    event_wait = c"cuEventSynchronize" fn(usize);
    stream_context = c"cuStreamGetCtx" fn(usize, *mut usize);
    is_capturing = c"cuStreamIsCapturing" fn(usize, *mut c_int);
    exchange_mode = c"cuThreadExchangeStreamCaptureMode" fn(*mut c_int);
    error_name = c"cuGetErrorName" fn(c_int, *mut *const c_char);
}

/// The driver of this process.
#[derive(Debug)]
pub(crate) struct Driver(Functions);

impl Driver {
    /// The driver that the program has loaded. Fails if it lacks a function.
    pub(crate) fn get() -> Result<&'static Self, String> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let functions = Functions::find().map_err(|name| format!("the driver has no {}", name.to_string_lossy()))?;
        Ok(DRIVER.get_or_init(|| Self(functions)))
    }

    /// Returns whether it can put an event after all work of a context.
    pub(crate) fn records_contexts(&self) -> bool {
        self.0.record_context.is_some()
    }

    /// The name of a code.
    pub(crate) fn name(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: a valid out-pointer.
        if unsafe { (self.0.error_name)(code, &raw mut name) } != 0 || name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: a text of the driver that is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The context that is current on this thread; 0 is none.
    pub(crate) fn current(&self) -> Result<usize, Code> {
        // SAFETY: a valid out-pointer.
        value(|context| unsafe { (self.0.current)(context) })
    }

    /// The context of a stream that is no default stream.
    pub(crate) fn context_of(&self, stream: usize) -> Result<usize, Code> {
        // SAFETY: the program's stream, which it is about to use, and a valid out-pointer.
        value(|context| unsafe { (self.0.stream_context)(stream, context) })
    }

    /// The device of a context that is alive.
    pub(crate) fn device_of(&self, context: usize) -> Result<c_int, Code> {
        let _entered = self.enter(context)?;
        // SAFETY: a valid out-pointer.
        value(|device| unsafe { (self.0.device)(device) })
    }

    /// Returns whether the device has a primary context.
    pub(crate) fn has_primary(&self, device: c_int) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: two valid out-pointers.
        unsafe { (self.0.primary_state)(device, &raw mut flags, &raw mut active) == 0 && active != 0 }
    }

    /// Makes `context` current, and keeps this thread's calls from disturbing captures, until the result is dropped.
    pub(crate) fn enter(&self, context: usize) -> Result<Entered<'_>, Code> {
        let is_pushed = self.current()? != context;
        if is_pushed {
            // SAFETY: the caller holds the context alive (`Context::while_alive`).
            check(unsafe { (self.0.push)(context) })?;
        }
        Ok(Entered { driver: self, is_pushed, _relaxed: self.relax() })
    }

    /// Keeps this thread's calls from disturbing captures until the result is dropped.
    pub(crate) fn relax(&self) -> Relaxed<'_> {
        Relaxed { driver: self, before: self.exchange(RELAXED) }
    }

    fn exchange(&self, mut mode: c_int) -> Option<c_int> {
        // SAFETY: a mode, which the driver reads and overwrites with the one before.
        (unsafe { (self.0.exchange_mode)(&raw mut mode) } == 0).then_some(mode)
    }

    /// Allocates pinned memory of the driver in the current context.
    pub(crate) fn host_alloc(&self, bytes: usize, flags: c_uint) -> Result<NonNull<c_void>, Code> {
        let mut place = std::ptr::null_mut();
        // SAFETY: a valid out-pointer.
        check(unsafe { (self.0.host_alloc)(&raw mut place, bytes, flags) })?;
        NonNull::new(place).ok_or(UNKNOWN)
    }

    /// Frees such memory.
    ///
    /// # Safety
    ///
    /// Nothing uses it any more.
    pub(crate) unsafe fn free_host(&self, place: NonNull<c_void>) -> Result<(), Code> {
        // SAFETY: the caller's promise.
        check(unsafe { (self.0.free_host)(place.as_ptr()) })
    }

    /// An event of the current context.
    pub(crate) fn event(&self) -> Result<usize, Code> {
        // SAFETY: a valid out-pointer.
        value(|event| unsafe { (self.0.event_create)(event, DISABLE_TIMING) })
    }

    /// Records the event, one of `context`, after all work of that context. While a stream of it captures, this fails and
    /// invalidates the capture.
    pub(crate) fn record(&self, context: usize, event: usize) -> Result<(), Code> {
        let record = self.0.record_context.ok_or(NOT_FOUND)?;
        // SAFETY: both are alive (`Context::while_alive`).
        check(unsafe { record(context, event) })
    }

    /// Returns whether all work before the event's record has completed.
    pub(crate) fn is_complete(&self, event: usize) -> Result<bool, Code> {
        // SAFETY: an event of a live context.
        match unsafe { (self.0.event_query)(event) } {
            NOT_READY => Ok(false),
            code => check(code).map(|()| true),
        }
    }

    /// Waits for the event; its context is current.
    pub(crate) fn wait(&self, event: usize) -> Result<(), Code> {
        // SAFETY: an event of a live context.
        check(unsafe { (self.0.event_wait)(event) })
    }

    /// Returns whether a stream that is ordered with the default stream of the current context captures. The query invalidates no
    /// capture.
    pub(crate) fn is_default_stream_blocked(&self) -> bool {
        let mut status = 0;
        // SAFETY: a stream that always exists, and a valid out-pointer.
        let code = unsafe { (self.0.is_capturing)(LEGACY_STREAM, &raw mut status) };
        status != 0 || matches!(code, CAPTURE_UNSUPPORTED..=CAPTURE_IMPLICIT)
    }
}

/// The value that `call` stores.
fn value<T: Default>(call: impl FnOnce(*mut T) -> Code) -> Result<T, Code> {
    let mut value = T::default();
    check(call(&raw mut value)).map(|()| value)
}

/// A success, or the code.
pub(crate) fn check(code: Code) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// A context that is current on this thread, in a relaxed capture mode.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    driver: &'a Driver,
    is_pushed: bool,
    _relaxed: Relaxed<'a>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = 0;
            // SAFETY: pushed by `enter` on this thread, and a valid out-pointer.
            let _gone = unsafe { (self.driver.0.pop)(&raw mut popped) };
        }
    }
}

/// A relaxed capture mode of this thread: an event may be queried and memory pinned alongside a capture of another one.
#[derive(Debug)]
pub(crate) struct Relaxed<'a> {
    driver: &'a Driver,
    before: Option<c_int>,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let _last = self.before.and_then(|before| self.driver.exchange(before));
    }
}
