//! The functions that replace the driver's functions: one table, from which the exports and the answers of `cuGetProcAddress` are
//! generated.
//!
//! A row lists the exported name, the name that programs pass to `cuGetProcAddress`, the CUDA versions in which that name has
//! this type, and the default stream that the function uses for handle 0. If a program requests a newer version, it receives
//! the driver's own function.
//!
//! A panic ends in the hook, which then returns the driver's unknown error. In a forked child that may not be served, hooks
//! call the driver's own functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::buffers::{self, FreeOutcome};
use crate::driver::{CUDA_ERROR_NOT_FOUND, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, Code};
use crate::log::{self, NotServed};
use crate::{captures, context_end, contexts, lookup, process, registrations};

/// The first CUDA version with unknown types.
const FIRST_UNKNOWN_VERSION: c_int = 14000;

/// The flag of `cuGetProcAddress` for programs that use the per-thread default stream for handle 0.
const PER_THREAD_FLAG: u64 = 2;

/// The default stream that a function uses for handle 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DefaultStream {
    /// The function takes no stream, or is the same for both default streams.
    Any,
    Legacy,
    PerThread,
}

/// A row of the table.
#[derive(Debug)]
pub(crate) struct Hook {
    name: &'static CStr,
    requested_name: &'static CStr,
    /// CUDA versions, from the first number up to the second, which is excluded.
    versions: (c_int, c_int),
    default_stream: DefaultStream,
    address: fn() -> *mut c_void,
    /// The driver's function (preload-I2); null until it is known.
    real: AtomicPtr<c_void>,
}

impl Hook {
    pub(crate) fn function(&self) -> Option<NonNull<c_void>> {
        NonNull::new((self.address)())
    }

    /// Records the driver's function.
    pub(crate) fn learn(&self, real: NonNull<c_void>) {
        // Relaxed: the function existed before its address is stored. If it is known, the first address stays.
        let _ = self.real.compare_exchange(ptr::null_mut(), real.as_ptr(), Ordering::Relaxed, Ordering::Relaxed);
    }

    fn real(&self) -> Option<NonNull<c_void>> {
        let look_up = || lookup::real_function(self.name).inspect(|&found| self.learn(found));
        NonNull::new(self.real.load(Ordering::Relaxed)).or_else(look_up)
    }
}

/// Returns the hook that is exported under this name.
pub(crate) fn exported(name: &CStr) -> Option<&'static Hook> {
    if !name.to_bytes().starts_with(b"cu") {
        return None;
    }
    HOOKS.iter().find(|hook| hook.name == name)
}

/// Runs the body of a hook with the driver's function.
fn run(hook: &Hook, body: impl FnOnce(NonNull<c_void>) -> Code) -> Code {
    // Without a driver there is no such function.
    let Some(real) = hook.real() else { return CUDA_ERROR_NOT_FOUND };
    catch_unwind(AssertUnwindSafe(|| body(real))).unwrap_or_else(|payload| {
        // Dropping the payload may panic too.
        mem::forget(payload);
        CUDA_ERROR_UNKNOWN
    })
}

macro_rules! hooks {
    ($(
        $name:ident = $requested_name:literal $from:literal..$to:tt $default_stream:ident
        ($($arg:ident: $type:ty),*)
        $real:ident => $body:expr;
    )*) => {
        /// The numbers of the rows.
        #[allow(non_camel_case_types)]
        enum Row {
            $($name,)*
        }

        static HOOKS: [Hook; [$(stringify!($name)),*].len()] = [$(Hook {
            // SAFETY: the text ends in its only NUL.
            name: unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            requested_name: $requested_name,
            versions: ($from, $to),
            default_stream: DefaultStream::$default_stream,
            address: || $name as *mut c_void,
            real: AtomicPtr::new(ptr::null_mut()),
        },)*];

        $(
            /// Replaces the driver's function of this name, with the same contract.
            ///
            /// # Safety
            ///
            /// The contract of the driver's function.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::missing_safety_doc)]
            unsafe extern "C" fn $name($($arg: $type),*) -> Code {
                run(&HOOKS[Row::$name as usize], |real| {
                    // SAFETY: preload-I2.
                    let real = unsafe { mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($type),*) -> Code>(real) };
                    // SAFETY: preload-I1: the program's own call.
                    let $real = |$($arg: $type),*| unsafe { real($($arg),*) };
                    $body
                })
            }
        )*
    };
}

hooks! {
    cuMemHostAlloc = c"cuMemHostAlloc" 2020..FIRST_UNKNOWN_VERSION Any
        (out: *mut *mut c_void, bytes: usize, flags: c_uint)
        real => allocate(|| real(out, bytes, flags), out, bytes, flags);
    cuMemAllocHost_v2 = c"cuMemAllocHost" 3020..FIRST_UNKNOWN_VERSION Any (out: *mut *mut c_void, bytes: usize)
        real => allocate(|| real(out, bytes), out, bytes, 0);
    cuMemFreeHost = c"cuMemFreeHost" 2000..FIRST_UNKNOWN_VERSION Any (start: *mut c_void)
        real => free_host(real, start);
    cuMemHostRegister_v2 = c"cuMemHostRegister" 6050..FIRST_UNKNOWN_VERSION Any (start: *mut c_void, bytes: usize, flags: c_uint)
        real => call_then(|| real(start, bytes, flags), || on_registered(bytes));
    cuStreamCreate = c"cuStreamCreate" 2000..FIRST_UNKNOWN_VERSION Any (out: *mut usize, flags: c_uint)
        real => call_then(|| real(out, flags), contexts::add_current);
    cuStreamCreateWithPriority = c"cuStreamCreateWithPriority" 5050..FIRST_UNKNOWN_VERSION Any
        (out: *mut usize, flags: c_uint, priority: c_int)
        real => call_then(|| real(out, flags, priority), contexts::add_current);
    cuStreamDestroy_v2 = c"cuStreamDestroy" 4000..FIRST_UNKNOWN_VERSION Any (stream: usize)
        real => if_served(|| real(stream), |real| captures::destroy_stream(stream, real));
    cuStreamBeginCapture_v2 = c"cuStreamBeginCapture" 10010..FIRST_UNKNOWN_VERSION Legacy (stream: usize, mode: c_int)
        real => if_served(|| real(stream, mode), |real| begin_capture(stream, real));
    cuStreamBeginCapture_v2_ptsz = c"cuStreamBeginCapture" 10010..FIRST_UNKNOWN_VERSION PerThread
        (stream: usize, mode: c_int)
        real => if_served(|| real(stream, mode), |real| begin_capture(stream, real));
    cuStreamBeginCaptureToGraph = c"cuStreamBeginCaptureToGraph" 12030..FIRST_UNKNOWN_VERSION Legacy
        (stream: usize, graph: usize, nodes: usize, data: usize, count: usize, mode: c_int)
        real => if_served(|| real(stream, graph, nodes, data, count, mode), |real| begin_capture(stream, real));
    cuStreamBeginCaptureToGraph_ptsz = c"cuStreamBeginCaptureToGraph" 12030..FIRST_UNKNOWN_VERSION PerThread
        (stream: usize, graph: usize, nodes: usize, data: usize, count: usize, mode: c_int)
        real => if_served(|| real(stream, graph, nodes, data, count, mode), |real| begin_capture(stream, real));
    cuStreamEndCapture = c"cuStreamEndCapture" 10000..FIRST_UNKNOWN_VERSION Legacy (stream: usize, graph: *mut usize)
        real => if_served(|| real(stream, graph), |real| captures::end(stream, real));
    cuStreamEndCapture_ptsz = c"cuStreamEndCapture" 10000..FIRST_UNKNOWN_VERSION PerThread
        (stream: usize, graph: *mut usize)
        real => if_served(|| real(stream, graph), |real| captures::end(stream, real));

    cuDevicePrimaryCtxRetain = c"cuDevicePrimaryCtxRetain" 7000..FIRST_UNKNOWN_VERSION Any
        (out: *mut usize, device: c_int)
        real => call_then_add_result(|| real(out, device), out, contexts::find_or_add);
    cuDevicePrimaryCtxRelease_v2 = c"cuDevicePrimaryCtxRelease" 11000..FIRST_UNKNOWN_VERSION Any (device: c_int)
        real => if_served(|| real(device), |real| context_end::release(device, real));
    cuDevicePrimaryCtxRelease = c"cuDevicePrimaryCtxRelease" 7000..11000 Any (device: c_int)
        real => if_served(|| real(device), |real| context_end::release(device, real));
    cuDevicePrimaryCtxReset_v2 = c"cuDevicePrimaryCtxReset" 11000..FIRST_UNKNOWN_VERSION Any (device: c_int)
        real => if_served(|| real(device), |real| context_end::reset(device, real));
    cuDevicePrimaryCtxReset = c"cuDevicePrimaryCtxReset" 7000..11000 Any (device: c_int)
        real => if_served(|| real(device), |real| context_end::reset(device, real));
    cuCtxSetCurrent = c"cuCtxSetCurrent" 4000..FIRST_UNKNOWN_VERSION Any (context: usize)
        real => call_then_add_context(|| real(context), context);
    cuCtxPushCurrent_v2 = c"cuCtxPushCurrent" 4000..FIRST_UNKNOWN_VERSION Any (context: usize)
        real => call_then_add_context(|| real(context), context);
    // All forms take the out-pointer first and at most five integer or pointer arguments in all, which are passed in registers;
    // the driver ignores the registers that its form does not use.
    cuCtxCreate_v4 = c"cuCtxCreate" 12050..FIRST_UNKNOWN_VERSION Any
        (out: *mut usize, a: usize, b: usize, c: usize, d: usize)
        real => call_then_add_result(|| real(out, a, b, c, d), out, contexts::add_created);
    cuCtxCreate_v3 = c"cuCtxCreate" 11040..12050 Any (out: *mut usize, a: usize, b: usize, c: usize, d: usize)
        real => call_then_add_result(|| real(out, a, b, c, d), out, contexts::add_created);
    cuCtxCreate_v2 = c"cuCtxCreate" 3020..11040 Any (out: *mut usize, a: usize, b: usize, c: usize, d: usize)
        real => call_then_add_result(|| real(out, a, b, c, d), out, contexts::add_created);
    cuCtxDestroy_v2 = c"cuCtxDestroy" 4000..FIRST_UNKNOWN_VERSION Any (context: usize)
        real => if_served(|| real(context), |real| context_end::destroy(context, real));
    // No event covers the work of a green context that is never current, and its handle is known only after this call.
    cuGreenCtxCreate = c"cuGreenCtxCreate" 12040..FIRST_UNKNOWN_VERSION Any
        (out: *mut usize, resources: usize, device: c_int, flags: c_uint)
        real => call_then(|| real(out, resources, device, flags),
            || process::stop_serving().then(|| log::no_longer_served(process::GREEN_CONTEXT)));

    cuGetProcAddress_v2 = c"cuGetProcAddress" 12000..FIRST_UNKNOWN_VERSION Any
        (name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
        real => proc_address(real(name, out, version, flags, status), name, out, version, flags);
    cuGetProcAddress = c"cuGetProcAddress" 11030..12000 Any
        (name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64)
        real => proc_address(real(name, out, version, flags), name, out, version, flags);
}

/// Allocates memory from a pool, or else from the driver by `real`. Invalid arguments go to the driver, which refuses them.
fn allocate(real: impl FnOnce() -> Code, out: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code {
    let Some(out) = NonNull::new(out).filter(|_| bytes > 0) else { return real() };
    context_end::end_unseen(|_| true);
    match buffers::get(bytes, flags) {
        Ok(start) => {
            // SAFETY: preload-I1: the program's out-pointer.
            unsafe { out.write(start) };
            CUDA_SUCCESS
        }
        Err(reason) => {
            log::passed_through(&reason);
            real()
        }
    }
}

fn free_host(real: impl FnOnce(*mut c_void) -> Code, start: *mut c_void) -> Code {
    /// An address that no driver returns. Passing it to the driver makes the driver report a free of unknown memory.
    static NEVER_ALLOCATED: [u8; 64] = [0; 64];
    match buffers::free(start, context_end::detect_unseen) {
        FreeOutcome::Done => CUDA_SUCCESS,
        FreeOutcome::Failed(code) => code,
        FreeOutcome::InsidePoolMemory => real((&raw const NEVER_ALLOCATED).cast_mut().cast()),
        FreeOutcome::NotPoolMemory => real(start),
    }
}

fn begin_capture(stream: usize, real: impl FnOnce() -> Code) -> Code {
    context_end::end_unseen(|_| true);
    captures::begin(stream, contexts::add_context_of(stream), real)
}

/// Counts memory that the program has registered, adds the current context, and records that this process uses contexts.
fn on_registered(bytes: usize) {
    contexts::add_current();
    process::set_uses_contexts();
    registrations::count(bytes);
}

/// Calls the driver's function `real`, which makes `context` current, and adds this context. Programs switch contexts often, so only
/// a known context with this handle is checked for an unseen end.
fn call_then_add_context(real: impl FnOnce() -> Code, context: usize) -> Code {
    let code = real();
    if code == CUDA_SUCCESS && context != 0 && process::may_be_served() {
        context_end::end_unseen(|known| known.handle == context);
        drop(contexts::find_or_add(context));
    }
    code
}

fn call_then_add_result<R>(real: impl FnOnce() -> Code, out: *mut usize, add: fn(usize) -> R) -> Code {
    // SAFETY: preload-I1: the driver wrote the handle there.
    call_then(real, || NonNull::new(out).map(|out| add(unsafe { out.read() })))
}

/// Calls the driver's function `real`, and `then` if it succeeded and the process may be served.
fn call_then<R>(real: impl FnOnce() -> Code, then: impl FnOnce() -> R) -> Code {
    let code = real();
    if code == CUDA_SUCCESS && process::may_be_served() {
        context_end::end_unseen(|_| true);
        drop(then());
    }
    code
}

/// Calls `body` with the driver's function `real`, but in a forked child that may not be served only `real`.
fn if_served<R: Fn() -> Code>(real: R, body: impl FnOnce(R) -> Code) -> Code {
    if process::may_be_served() { body(real) } else { real() }
}

/// Replaces the function that the driver returned for `name` by the hook for it, if there is one.
fn proc_address(code: Code, name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) -> Code {
    let (Some(out), false) = (NonNull::new(out).filter(|_| code == CUDA_SUCCESS), name.is_null()) else { return code };
    // SAFETY: preload-I1: a name that ends in 0.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: preload-I1: the driver wrote an address there.
    let Some(found) = NonNull::new(unsafe { out.read() }) else { return code };
    let of_name = || HOOKS.iter().filter(|hook| hook.requested_name == name);
    if lookup::is_own(found.as_ptr()) || of_name().next().is_none() {
        return code;
    }
    let default_stream = if flags & PER_THREAD_FLAG != 0 { DefaultStream::PerThread } else { DefaultStream::Legacy };
    let fits = |hook: &&Hook| {
        (hook.versions.0..hook.versions.1).contains(&version)
            && (hook.default_stream == DefaultStream::Any || hook.default_stream == default_stream)
    };
    if let Some(hook) = of_name().find(fits) {
        lookup::set_driver_function(found);
        hook.learn(found);
        // SAFETY: as above.
        unsafe { out.write((hook.address)()) };
    } else if version >= FIRST_UNKNOWN_VERSION {
        log::passed_through(&NotServed::Version(version));
    }
    code
}
