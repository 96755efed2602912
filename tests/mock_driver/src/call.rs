//! The entry point of every driver call: counts the call, takes the enqueue lock, and may hold or fail the call.
//!
//! | kind | fails when | holds the enqueue lock |
//! | --- | --- | --- |
//! | `Lookup` | never | no |
//! | `Process` | the driver is not initialized or has shut down | no |
//! | `Device` | also: the device is lost | no |
//! | `Enqueue` | as `Device` | yes, gates included |
//!
//! As on a real device, copies, records, launches, pinning and freeing share one lock: a free that waits for the device
//! holds it, so the enqueues of all threads wait too. Virtual memory, event queries and waits do not take the lock.
//!
//! - **call-I1**: a non-null [`Out`] points to space for a value and a non-null [`In`] to a value, as the real driver requires
//!   of its callers.

use std::ffi::c_int;
use std::sync::Mutex;

use crate::code::Code;
use crate::sync::lock;
use crate::{context, faults, settings, stream};

/// The result of a driver call.
pub(crate) type Outcome = Result<(), Code>;

/// The kind of a call, as the module's table describes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Lookup,
    Process,
    Device,
    Enqueue,
}

/// The enqueue lock, which each call of kind `Enqueue` holds.
static ENQUEUES: Mutex<()> = Mutex::new(());

/// Runs one driver call.
pub(crate) fn run(name: &str, kind: Kind, body: impl FnOnce() -> Outcome) -> c_int {
    let outcome = match (context::is_child(), kind) {
        (false, _) => run_counted(name, kind, body),
        // A child takes no lock of its parent, since a thread that does not exist in the child may hold the lock.
        (true, Kind::Lookup) => body(),
        (true, _) => Err(Code::NOT_INITIALIZED),
    };
    outcome.map_or_else(|code| code.0, |()| 0)
}

fn run_counted(name: &str, kind: Kind, body: impl FnOnce() -> Outcome) -> Outcome {
    if kind == Kind::Lookup {
        // The first call of a program is of this kind, so scripted failures count from here. `cuInit` reports errors.
        let _reported_later = settings::read();
    }
    if settings::get().abort.as_deref() == Some(name) {
        std::process::abort();
    }
    let scripted = faults::count_call(name);
    let _turn = (kind == Kind::Enqueue).then(|| lock(&ENQUEUES));
    faults::wait_at_gate(name);
    if kind != Kind::Lookup {
        context::check_initialized()?;
    }
    if matches!(kind, Kind::Device | Kind::Enqueue) {
        stream::check_alive()?;
    }
    scripted.map_or_else(body, Err)
}

/// A caller's pointer to space for a result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result.
    pub(crate) fn put(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: (call-I1) not null, so the caller guarantees the space.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Returns the place of one of several results; the caller's count bounds the index.
    pub(crate) fn at(first: *mut T, index: usize) -> Self {
        Out(if first.is_null() { first } else { first.wrapping_add(index) })
    }

    /// Writes the result unless the pointer is null.
    pub(crate) fn put_if_wanted(self, value: T) {
        let _unwanted = self.put(value);
    }

    /// Swaps the caller's value for another.
    pub(crate) fn swap(self, other: impl FnOnce(T) -> Result<T, Code>) -> Outcome
    where
        T: Copy,
    {
        let old = In(self.0.cast_const()).get()?;
        self.put(other(old)?)
    }
}

/// A caller's pointer to a value, or to the first of several.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads the value.
    pub(crate) fn get(&self) -> Result<T, Code> {
        self.at(0)
    }

    /// Reads one of the values; the caller's count bounds the index.
    pub(crate) fn at(&self, index: usize) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let place = self.0.wrapping_add(index);
        // SAFETY: (call-I1) not null, and the caller's own count covers the index.
        Ok(unsafe { place.read() })
    }
}

/// Exports one driver function under its own name.
macro_rules! driver_call {
    ($kind:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the driver's own name")]
        extern "C" fn $name($($arg: $type),*) -> ::std::ffi::c_int {
            $crate::call::run(stringify!($name), $crate::call::Kind::$kind, || $body)
        }
    };
}
pub(crate) use driver_call;
