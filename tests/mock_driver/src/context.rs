//! Start and end of the driver, primary contexts, and the current context of each thread.
//!
//! ```text
//!   NotInitialized ──cuInit──► Initialized ──shut_down──► ShutDown (every call returns 4)
//! ```
//!
//! The handle of a context is made of the ordinal of its device and a generation, which changes when the context ends (not under
//! [`Deviation::RecurringHandles`]); its id (`cuCtxGetId`) is never reused. A context lives while it is retained. Its memory outlives
//! it, so that a leak shows in the counts (not under [`Deviation::ResetUnmaps`]).
//!
//! In a forked child every call returns 3, except look-ups of names and versions, as with a real driver once the parent has
//! called `cuInit`.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, OnceLock};

use crate::adversarial::{self, Deviation};
use crate::call::{self, In, Out, Outcome, driver_call};
use crate::code::Code;
use crate::sync::lock;
use crate::{capture, event, memory, settings, stream};

const HANDLE_BASE: usize = 0xC0DE_0000;
const GENERATION_STEP: usize = 0x1_0000_0000;
const MOST_DEVICES: usize = 8;

struct Driver {
    /// The error of calls before `cuInit` and after the shutdown.
    state: Outcome,
    device_count: usize,
    /// The primary contexts by ordinal, and after them one more context of each device ([`create`]).
    primaries: [Primary; 2 * MOST_DEVICES],
    /// Contexts created so far.
    created: u64,
}

/// The primary context of a device.
#[derive(Clone, Copy)]
struct Primary {
    retained: u64,
    /// Part of its handle.
    generation: usize,
    /// Id of the current or last context.
    id: u64,
}

static DRIVER: Mutex<Driver> = Mutex::new(Driver {
    state: Err(Code::NOT_INITIALIZED),
    device_count: 1,
    primaries: [Primary { retained: 0, generation: 0, id: 0 }; 2 * MOST_DEVICES],
    created: 0,
});

/// Set in a forked child.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

impl Driver {
    /// Retains the primary context of this device; returns its handle.
    fn retain(&mut self, ordinal: usize) -> usize {
        let primary = &mut self.primaries[ordinal];
        if primary.retained == 0 {
            self.created += 1;
            primary.id = self.created;
        }
        primary.retained += 1;
        handle(ordinal, primary.generation)
    }

    /// Ends the primary context of this device; returns its handle if there was one.
    fn end(&mut self, ordinal: usize) -> Option<usize> {
        let primary = &mut self.primaries[ordinal];
        let ended = handle(ordinal, primary.generation);
        let was_there = std::mem::take(&mut primary.retained) > 0;
        if was_there && !adversarial::is_on(Deviation::RecurringHandles) {
            primary.generation += 1;
        }
        was_there.then_some(ended)
    }
}

fn handle(ordinal: usize, generation: usize) -> usize {
    HANDLE_BASE + generation * GENERATION_STEP + ordinal
}

fn index_of(context: usize) -> usize {
    (context - HANDLE_BASE) % GENERATION_STEP
}

/// Destroys the streams and events of a context, and its memory under [`Deviation::ResetUnmaps`].
fn end_with(context: usize) {
    let ends_memory = adversarial::is_on(Deviation::ResetUnmaps);
    stream::close_of(context, ends_memory);
    event::forget_of(context);
    if ends_memory {
        memory::end_of(context);
    }
}

thread_local! {
    /// The contexts of a thread, the current one first; unused places are 0. Programs push one or two. The array has no
    /// destructor, so that a program's own thread-locals may call the driver when they are destroyed.
    static STACK: Cell<[usize; 64]> = const { Cell::new([0; 64]) };
}

fn push(context: usize) {
    let mut stack = STACK.get();
    stack.rotate_right(1);
    stack[0] = context;
    STACK.set(stack);
}

/// Removes and returns the current context; 0 if there is none.
fn pop() -> usize {
    let mut stack = STACK.get();
    let popped = std::mem::take(&mut stack[0]);
    stack.rotate_left(1);
    STACK.set(stack);
    popped
}

/// Returns whether this is a forked child.
pub(crate) fn is_child() -> bool {
    // Relaxed: the only thread that a child begins with has set the flag.
    IS_CHILD.load(Ordering::Relaxed)
}

/// Refuses calls before `cuInit` and after the shutdown.
pub(crate) fn check_initialized() -> Outcome {
    lock(&DRIVER).state
}

/// Returns the ordinal, if there is such a device.
pub(crate) fn check_device(device: c_int) -> Result<usize, Code> {
    let ordinal = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    if ordinal < lock(&DRIVER).device_count { Ok(ordinal) } else { Err(Code::INVALID_DEVICE) }
}

fn check_context(context: usize) -> Result<usize, Code> {
    let driver = lock(&DRIVER);
    let in_order = context.checked_sub(HANDLE_BASE).ok_or(Code::INVALID_CONTEXT)?;
    match driver.primaries.get(in_order % GENERATION_STEP) {
        None => Err(Code::INVALID_CONTEXT),
        Some(primary) if primary.retained > 0 && primary.generation == in_order / GENERATION_STEP => Ok(context),
        Some(_) => Err(Code::CONTEXT_IS_DESTROYED),
    }
}

/// Returns the calling thread's context. Fails if there is none, or if it has ended.
pub(crate) fn current() -> Result<usize, Code> {
    check_context(STACK.get()[0])
}

/// Returns the ordinal of the device of the calling thread's context.
pub(crate) fn current_device() -> Result<usize, Code> {
    current().map(|context| index_of(context) % MOST_DEVICES)
}

/// Returns the number of retained contexts.
pub(crate) fn live() -> u64 {
    lock(&DRIVER).primaries.iter().filter(|primary| primary.retained > 0).count() as u64
}

/// Ends all primary contexts, as a reset of each device does.
pub(crate) fn renew() {
    let ended: Vec<_> = {
        let mut driver = lock(&DRIVER);
        (0..MOST_DEVICES).filter_map(|ordinal| driver.end(ordinal)).collect()
    };
    ended.into_iter().for_each(end_with);
}

/// Retains another context of this device; returns its handle.
pub(crate) fn create(ordinal: usize) -> usize {
    lock(&DRIVER).retain(MOST_DEVICES + ordinal)
}

/// Sets the number of devices.
pub(crate) fn set_device_count(count: usize) {
    lock(&DRIVER).device_count = count;
}

/// Fails every later call, as in a process that has left `main`.
pub(crate) fn shut_down() {
    lock(&DRIVER).state = Err(Code::DEINITIALIZED);
}

/// Restores one device and a working driver; contexts stay retained.
pub(crate) fn reset() {
    let mut driver = lock(&DRIVER);
    driver.device_count = 1;
    if driver.state == Err(Code::DEINITIALIZED) {
        driver.state = Ok(());
    }
}

extern "C" fn record_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

driver_call! { Lookup fn cuInit(flags: u32) {
    static WATCHES_FORKS: Once = Once::new();
    if is_child() {
        return Err(Code::NOT_INITIALIZED);
    }
    WATCHES_FORKS.call_once(|| {
        // SAFETY: a plain function that lives as long as the process: a driver is never unloaded.
        let _refused_without_memory = unsafe { libc::pthread_atfork(None, None, Some(record_child)) };
    });
    let mut driver = lock(&DRIVER);
    match driver.state {
        _ if flags != 0 => Err(Code::INVALID_VALUE),
        Err(Code::DEINITIALIZED) => driver.state,
        _ if driver.device_count == 0 => Err(Code::NO_DEVICE),
        _ => {
            settings::read()?;
            driver.state = Ok(());
            Ok(())
        }
    }
}}

driver_call! { Process fn cuDeviceGetCount(out: Out<c_int>) {
    out.put(lock(&DRIVER).device_count as c_int)
}}

driver_call! { Process fn cuDeviceGet(out: Out<c_int>, ordinal: c_int) {
    check_device(ordinal)?;
    out.put(ordinal)
}}

fn retain(out: Out<usize>, device: c_int) -> Outcome {
    let ordinal = check_device(device)?;
    out.put(lock(&DRIVER).retain(ordinal))
}

driver_call! { Device fn cuDevicePrimaryCtxRetain(out: Out<usize>, device: c_int) {
    retain(out, device)
}}

/// Id of the private table through which the CUDA runtime retains a primary context.
const RUNTIME_TABLE: [u8; 16] =
    [0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9];

extern "C" fn retain_by_table(out: Out<usize>, device: c_int) -> c_int {
    call::run("retain_by_table", call::Kind::Process, || retain(out, device))
}

driver_call! { Lookup fn cuGetExportTable(out: Out<*const usize>, id: In<[u8; 16]>) {
    // A length in bytes, and functions. Only the third entry is known.
    static TABLE: OnceLock<[usize; 10]> = OnceLock::new();
    if id.get()? != RUNTIME_TABLE {
        return Err(Code::NOT_FOUND);
    }
    let retain = retain_by_table as *const () as usize;
    out.put(TABLE.get_or_init(|| [size_of::<[usize; 10]>(), 0, retain, 0, 0, 0, 0, 0, 0, 0]).as_ptr())
}}

// The last release ends the context.
driver_call! { Process fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
    let ordinal = check_device(device)?;
    let ended = {
        let mut driver = lock(&DRIVER);
        match &mut driver.primaries[ordinal].retained {
            0 => return Err(Code::INVALID_CONTEXT),
            1 => driver.end(ordinal),
            more => {
                *more -= 1;
                None
            }
        }
    };
    ended.into_iter().for_each(end_with);
    Ok(())
}}

driver_call! { Process fn cuDevicePrimaryCtxReset_v2(device: c_int) {
    let ordinal = check_device(device)?;
    let ended = lock(&DRIVER).end(ordinal);
    ended.into_iter().for_each(end_with);
    Ok(())
}}

driver_call! { Process fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<u32>, active: Out<c_int>) {
    let ordinal = check_device(device)?;
    flags.put(0)?;
    active.put(c_int::from(lock(&DRIVER).primaries[ordinal].retained > 0))
}}

driver_call! { Process fn cuCtxGetId(context: usize, out: Out<u64>) {
    let context = check_context(if context == 0 { current()? } else { context })?;
    out.put(lock(&DRIVER).primaries[index_of(context)].id)
}}

driver_call! { Process fn cuCtxGetCurrent(out: Out<usize>) {
    out.put(STACK.get()[0])
}}

driver_call! { Process fn cuCtxSetCurrent(context: usize) {
    if context != 0 {
        check_context(context)?;
    }
    pop();
    if context != 0 {
        push(context);
    }
    Ok(())
}}

driver_call! { Process fn cuCtxPushCurrent_v2(context: usize) {
    check_context(context)?;
    push(context);
    Ok(())
}}

driver_call! { Process fn cuCtxPopCurrent_v2(out: Out<usize>) {
    match pop() {
        0 => Err(Code::INVALID_CONTEXT),
        popped => {
            out.put_if_wanted(popped);
            Ok(())
        }
    }
}}

driver_call! { Process fn cuCtxGetDevice(out: Out<c_int>) {
    out.put(current_device()? as c_int)
}}

driver_call! { Device fn cuCtxSynchronize() {
    capture::forbid_unsafe_call()?;
    let context = current()?;
    // Fails in every capture mode if a stream of the context captures.
    stream::tickets_of(context)?;
    stream::wait_for_idle(Some(context))
}}
