//! Start and end of the driver, primary contexts, and which context a thread works in.
//!
//! ```text
//!   NotInitialized ──cuInit──► Initialized ──shut_down──► ShutDown (every call answers 4)
//! ```
//!
//! A context's handle is its device's ordinal above [`HANDLE_BASE`], in a generation of its own after each reset of the
//! devices. It lives while it is retained. Memory allocated in it stays, so that a leak shows in the counts instead of as a
//! crash.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::Mutex;

use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::sync::lock;
use crate::{capture, event, settings, stream};

const HANDLE_BASE: usize = 0xC0DE_0000;
const GENERATION_STEP: usize = 0x1_0000_0000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum DriverState {
    NotInitialized,
    Initialized,
    ShutDown,
}

struct Driver {
    state: DriverState,
    device_count: usize,
    /// By ordinal.
    retained: Vec<u64>,
    /// How often the devices were reset.
    generation: usize,
}

static DRIVER: Mutex<Driver> =
    Mutex::new(Driver { state: DriverState::NotInitialized, device_count: 1, retained: Vec::new(), generation: 0 });

/// Contexts that one thread may push; programs push one or two.
const STACK_MAX: usize = 64;

/// The contexts of a thread. Without a destructor, so that a program's own thread-locals may call the driver when they are
/// destroyed.
#[derive(Clone, Copy)]
struct Stack {
    contexts: [usize; STACK_MAX],
    len: usize,
}

impl Stack {
    /// 0 stands for none.
    fn top(&self) -> usize {
        self.len.checked_sub(1).map_or(0, |top| self.contexts[top])
    }

    fn push(&mut self, context: usize) -> Outcome {
        *self.contexts.get_mut(self.len).ok_or(Code::OUT_OF_MEMORY)? = context;
        self.len += 1;
        Ok(())
    }

    fn pop(&mut self) -> Option<usize> {
        let top = self.len.checked_sub(1)?;
        self.len = top;
        Some(self.contexts[top])
    }
}

thread_local! {
    static CURRENT: Cell<Stack> = const { Cell::new(Stack { contexts: [0; STACK_MAX], len: 0 }) };
}

fn with_stack<R>(change: impl FnOnce(&mut Stack) -> R) -> R {
    let mut stack = CURRENT.get();
    let result = change(&mut stack);
    CURRENT.set(stack);
    result
}

/// Refuses calls before the start and after the end.
pub(crate) fn check_initialised() -> Outcome {
    match lock(&DRIVER).state {
        DriverState::NotInitialized => Err(Code::NOT_INITIALIZED),
        DriverState::Initialized => Ok(()),
        DriverState::ShutDown => Err(Code::DEINITIALIZED),
    }
}

/// The ordinal, if there is such a device.
pub(crate) fn check_device(device: c_int) -> Result<usize, Code> {
    let ordinal = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    if ordinal < lock(&DRIVER).device_count { Ok(ordinal) } else { Err(Code::INVALID_DEVICE) }
}

fn check_context(context: usize) -> Result<usize, Code> {
    let driver = lock(&DRIVER);
    let in_order = context.checked_sub(HANDLE_BASE).ok_or(Code::INVALID_CONTEXT)?;
    if in_order / GENERATION_STEP < driver.generation {
        return Err(Code::CONTEXT_IS_DESTROYED);
    }
    match driver.retained.get(in_order % GENERATION_STEP) {
        None => Err(Code::INVALID_CONTEXT),
        Some(0) => Err(Code::CONTEXT_IS_DESTROYED),
        Some(_) => Ok(context),
    }
}

/// The calling thread's context.
pub(crate) fn current() -> Result<usize, Code> {
    let top = CURRENT.get().top();
    if top == 0 { Err(Code::INVALID_CONTEXT) } else { check_context(top) }
}

/// The ordinal of the device of the calling thread's context.
pub(crate) fn current_device() -> Result<usize, Code> {
    current().map(|context| (context - HANDLE_BASE) % GENERATION_STEP)
}

fn set_current(context: usize) -> Outcome {
    with_stack(|stack| {
        stack.pop();
        stack.push(context)
    })
}

/// Retained contexts.
pub(crate) fn live() -> u64 {
    lock(&DRIVER).retained.iter().filter(|&&count| count > 0).count() as u64
}

/// Destroys all primary contexts, as a reset of each device does; the next ones have other handles.
pub(crate) fn renew() {
    let mut driver = lock(&DRIVER);
    driver.generation += 1;
    driver.retained.clear();
}

/// Sets the number of devices.
pub(crate) fn set_device_count(count: usize) {
    lock(&DRIVER).device_count = count;
}

/// Answers as in a process that has left `main`.
pub(crate) fn shut_down() {
    lock(&DRIVER).state = DriverState::ShutDown;
}

/// One device, and a driver that answers again; contexts stay retained.
pub(crate) fn reset() {
    let mut driver = lock(&DRIVER);
    driver.device_count = 1;
    if driver.state == DriverState::ShutDown {
        driver.state = DriverState::Initialized;
    }
}

driver_call! { Lookup fn cuInit(flags: u32) {
    let mut driver = lock(&DRIVER);
    match driver.state {
        _ if flags != 0 => Err(Code::INVALID_VALUE),
        DriverState::ShutDown => Err(Code::DEINITIALIZED),
        _ if driver.device_count == 0 => Err(Code::NO_DEVICE),
        _ => {
            settings::read()?;
            driver.state = DriverState::Initialized;
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

driver_call! { Device fn cuDevicePrimaryCtxRetain(out: Out<usize>, device: c_int) {
    let ordinal = check_device(device)?;
    let mut driver = lock(&DRIVER);
    if driver.retained.len() <= ordinal {
        driver.retained.resize(ordinal + 1, 0);
    }
    driver.retained[ordinal] += 1;
    out.put(HANDLE_BASE + driver.generation * GENERATION_STEP + ordinal)
}}

driver_call! { Process fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
    let ordinal = check_device(device)?;
    match lock(&DRIVER).retained.get_mut(ordinal) {
        Some(count) if *count > 0 => {
            *count -= 1;
            Ok(())
        }
        _ => Err(Code::INVALID_CONTEXT),
    }
}}

// The one reset that there is: of all devices.
driver_call! { Process fn cuDevicePrimaryCtxReset_v2(device: c_int) {
    check_device(device)?;
    renew();
    stream::close_all();
    event::forget_all();
    Ok(())
}}

driver_call! { Process fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<u32>, active: Out<c_int>) {
    let ordinal = check_device(device)?;
    flags.put(0)?;
    active.put(c_int::from(lock(&DRIVER).retained.get(ordinal).is_some_and(|&count| count > 0)))
}}

driver_call! { Process fn cuCtxGetCurrent(out: Out<usize>) {
    out.put(CURRENT.get().top())
}}

driver_call! { Process fn cuCtxSetCurrent(context: usize) {
    if context != 0 {
        check_context(context)?;
    }
    set_current(context)
}}

driver_call! { Process fn cuCtxPushCurrent_v2(context: usize) {
    check_context(context)?;
    with_stack(|stack| stack.push(context))
}}

driver_call! { Process fn cuCtxPopCurrent_v2(out: Out<usize>) {
    let popped = with_stack(Stack::pop).ok_or(Code::INVALID_CONTEXT)?;
    out.put_if_wanted(popped);
    Ok(())
}}

driver_call! { Process fn cuCtxGetDevice(out: Out<c_int>) {
    out.put(((current()? - HANDLE_BASE) % GENERATION_STEP) as c_int)
}}

driver_call! { Device fn cuCtxSynchronize() {
    capture::forbid_unsafe_call()?;
    stream::wait_for_idle(Some(current()?))
}}
