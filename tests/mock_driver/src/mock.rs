//! The handle by which a test loads and controls the mock driver.
//!
//! A process has one driver, and all tests of a binary share it, so a [`MockDriver`] is exclusive: the next [`MockDriver::load`]
//! waits until it is dropped. Each begins with a reset. Memory that an earlier test left allocated stays; tests that
//! count compare with the counts at their start.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{env, fmt, fs};

use crate::adversarial::Deviation;
use crate::code::Code;
use crate::control::Controls;
use crate::ledger::Counts;
use crate::sync::lock;

/// The name that cargo gives the `cdylib`.
const FILE: &str = concat!("lib", env!("CARGO_CRATE_NAME"), ".so");

/// The gate of all streams.
const ALL_STREAMS: usize = 0;

static CONTROLS: OnceLock<Controls> = OnceLock::new();
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// Whether a test has lost the device since the last [`MockDriver::load`].
static HAS_LOST_DEVICE: AtomicBool = AtomicBool::new(false);

/// The driver of this process, for as long as this lives.
pub struct MockDriver {
    controls: &'static Controls,
    _turn: MutexGuard<'static, ()>,
}

impl MockDriver {
    /// Loads the mock driver in place of libcuda and resets it. Must come before the first driver call of the process.
    ///
    /// # Panics
    ///
    /// If the library is neither alongside the test's executable nor in the folder of its profile, or is of another build.
    #[must_use]
    pub fn load() -> Self {
        let turn = lock(&EXCLUSIVE);
        let controls =
            CONTROLS.get_or_init(|| Controls::find(load_library()).expect("a control call that the mock driver lacks"));
        let double = MockDriver { controls, _turn: turn };
        double.reset();
        // As on a real device: a lost context never works again, and what learnt of the loss remembers it.
        if HAS_LOST_DEVICE.swap(false, Ordering::Relaxed) {
            double.renew_contexts();
        }
        double
    }

    /// The library's file: a program finds it under the name `libcuda.so` in a folder that the loader searches.
    ///
    /// # Panics
    ///
    /// If the library is neither alongside the test's executable nor in the folder of its profile.
    #[must_use]
    pub fn library() -> PathBuf {
        candidates()
            .find(|file| file.exists())
            .unwrap_or_else(|| panic!("no {FILE} next to the test's executable, nor in the folder of its profile"))
    }

    /// Opens every gate, removes scripts and counts, repairs the device.
    pub fn reset(&self) {
        (self.controls.double_reset)();
    }

    /// Removes what was scripted of single calls: failures, delays, gates and counts.
    pub fn reset_scripts(&self) {
        (self.controls.double_reset_scripts)();
    }

    /// Live objects, and events since the last reset.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        (self.controls.double_counts)(&mut counts);
        counts
    }

    /// How often a driver function was called.
    #[must_use]
    pub fn calls(&self, name: &str) -> u64 {
        by_name(name, |name| (self.controls.double_calls)(name))
    }

    /// The `nth` call from now (1 is the next) fails.
    pub fn fail(&self, name: &str, nth: u64, code: Code) {
        by_name(name, |name| (self.controls.double_fail)(name, nth, 1, code.0));
    }

    /// The `nth` call from now and all after it fail.
    pub fn fail_from(&self, name: &str, nth: u64, code: Code) {
        by_name(name, |name| (self.controls.double_fail)(name, nth, u64::MAX, code.0));
    }

    /// Holds calls of this name until the result is dropped.
    pub fn hold_call<'a>(&'a self, name: &'a str) -> HeldCall<'a> {
        by_name(name, |name| (self.controls.double_hold_call)(name, 1));
        HeldCall { double: self, name }
    }

    /// Holds the work of one stream (its raw handle) until the result is dropped. The default streams have no handle of
    /// their own: null holds all streams.
    pub fn hold<T>(&self, stream: *mut T) -> HeldStream<'_> {
        HeldStream::new(self, stream.addr())
    }

    /// Holds the work of all streams until the result is dropped.
    pub fn hold_all(&self) -> HeldStream<'_> {
        HeldStream::new(self, ALL_STREAMS)
    }

    /// More pinned bytes than this are refused as out of memory.
    pub fn limit_pinned(&self, bytes: u64) {
        (self.controls.double_limit_pinned)(bytes);
    }

    /// Gives no access to memory to these devices, a bit each.
    pub fn refuse_access(&self, devices: u64) {
        (self.controls.double_refuse_access)(devices);
    }

    /// New pinned memory gets pages only when it is written to, so that a test may hold a terabyte; until then it is zero.
    pub fn set_sparse(&self, is_sparse: bool) {
        (self.controls.double_set_sparse)(i32::from(is_sparse));
    }

    /// Sets the number of devices; with none, `cuInit` fails.
    pub fn set_device_count(&self, count: usize) {
        (self.controls.double_set_device_count)(count);
    }

    /// Sets the answer of every device for this attribute.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        (self.controls.double_set_attribute)(attribute, value);
    }

    /// Destroys all primary contexts with their streams and events, as `cuDevicePrimaryCtxReset` does.
    pub fn renew_contexts(&self) {
        (self.controls.double_renew_contexts)();
    }

    /// Turns these switches on and all others off, until the next reset.
    pub fn set_deviations(&self, switches: &[Deviation]) {
        (self.controls.double_set_deviations)(switches.iter().fold(0, |bits, deviation| bits | deviation.bit()));
    }

    /// Loses the device: work stops, and every later call fails with this code.
    pub fn lose_device(&self, code: Code) {
        // Relaxed: `load` reads it under the lock that this value holds.
        HAS_LOST_DEVICE.store(true, Ordering::Relaxed);
        (self.controls.double_lose_device)(code.0);
    }

    /// Every call fails with `DEINITIALIZED`, as at the end of a process.
    pub fn shut_down(&self) {
        (self.controls.double_shut_down)();
    }

    /// Makes this function impossible to find, as in an older driver; returns whether it could be found. A caller that has
    /// looked it up keeps it: cudarc looks each function up at its first call.
    #[must_use]
    pub fn hide(&self, name: &str) -> bool {
        by_name(name, |name| (self.controls.double_hide)(name)) != 0
    }

    /// Each misuse by the program, in words.
    #[must_use]
    pub fn wrong_uses(&self) -> Vec<String> {
        texts(|index, space| (self.controls.double_wrong_use)(index, space))
    }

    /// The driver functions called since the last reset, and how often, by name.
    #[must_use]
    pub fn all_calls(&self) -> Vec<(String, u64)> {
        let names = texts(|index, space| (self.controls.double_called)(index, space));
        names.into_iter().map(|name| (name.clone(), self.calls(&name))).filter(|&(_, calls)| calls > 0).collect()
    }
}

impl Drop for MockDriver {
    /// Opens the gates that a test left closed.
    fn drop(&mut self) {
        self.reset();
    }
}

impl fmt::Debug for MockDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MockDriver").field(&self.counts()).finish()
    }
}

/// Holds a stream until it is dropped. Declared after the values that wait for the work when they are dropped, it lets a
/// failing test end.
#[derive(Debug)]
#[must_use = "the stream continues when this is dropped"]
pub struct HeldStream<'a> {
    double: &'a MockDriver,
    number: usize,
}

impl<'a> HeldStream<'a> {
    fn new(double: &'a MockDriver, handle: usize) -> Self {
        let number = (double.controls.double_hold_stream)(handle, 1);
        Self { double, number }
    }
}

impl Drop for HeldStream<'_> {
    fn drop(&mut self) {
        (self.double.controls.double_hold_stream)(self.number, 0);
    }
}

/// Holds a driver function until it is dropped.
#[derive(Debug)]
#[must_use = "the call continues when this is dropped"]
pub struct HeldCall<'a> {
    double: &'a MockDriver,
    name: &'a str,
}

impl HeldCall<'_> {
    /// Returns once this many threads wait in the call.
    pub fn wait_for(&self, callers: u64) {
        by_name(self.name, |name| (self.double.controls.double_wait_for_held)(name, callers));
    }
}

impl Drop for HeldCall<'_> {
    fn drop(&mut self) {
        by_name(self.name, |name| (self.double.controls.double_hold_call)(name, 0));
    }
}

/// The texts that a control call writes, until it returns `usize::MAX`.
fn texts(mut write: impl FnMut(usize, &mut [u8; 256]) -> usize) -> Vec<String> {
    let text = |index| {
        let mut space = [0; 256];
        let length = write(index, &mut space);
        space.get(..length).map(|text| String::from_utf8_lossy(text).into_owned())
    };
    (0..).map_while(text).collect()
}

fn by_name<R>(name: &str, control: impl FnOnce(*const c_char) -> R) -> R {
    let name = CString::new(name).expect("a function's name without a zero in it");
    control(name.as_ptr())
}

/// Where cargo puts the library, relative to a test, a bench, an example or a binary; then, as its folders differ between
/// versions, with and without a target, wherever it is in the folder of the profile, the newest first.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let here = env::current_exe().unwrap_or_default();
    let folder = here.parent().map(PathBuf::from).unwrap_or_default();
    let usual = [folder.join(FILE), folder.join("deps").join(FILE), folder.join("../deps").join(FILE)];
    // Cargo locks the folder of a profile by a file in it.
    let profile = folder.ancestors().find(|folder| folder.join(".cargo-lock").exists()).map(Path::to_owned);
    usual.into_iter().chain(profile.into_iter().flat_map(|profile| found_below(&profile)))
}

/// The libraries of the mock driver below a folder of cargo's.
fn found_below(folder: &Path) -> Vec<PathBuf> {
    /// `build/mock_driver/HASH/out` is the deepest.
    const DEPTH: usize = 4;
    let stem = FILE.trim_end_matches(".so");
    let is_it = |name: &str| {
        name.strip_prefix(stem).is_some_and(|rest| rest.ends_with(".so") && matches!(rest.as_bytes()[0], b'.' | b'-'))
    };
    let (mut folders, mut found) = (vec![(folder.to_owned(), 0)], Vec::new());
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < DEPTH {
                folders.push((entry.path(), depth + 1));
            } else if !is_folder && entry.file_name().to_str().is_some_and(is_it) {
                let made = entry.metadata().and_then(|file| file.modified()).ok();
                found.push((made, entry.path()));
            }
        }
    }
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

fn load_library() -> impl FnMut(&CStr) -> *mut c_void {
    let path =
        CString::new(MockDriver::library().into_os_string().into_encoded_bytes()).expect("a path without a zero in it");
    // SAFETY: loads our own library, which does nothing at start-up.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "{} does not load", path.to_string_lossy());
    // SAFETY: the handle is never closed, so it is live, and the name ends in 0.
    move |name| unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_wherever_cargo_puts_it_and_the_newest_first() {
        let profile = env::temp_dir().join(format!("mock-driver-{}", std::process::id()));
        let make = |path: &str| {
            let path = profile.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let older = make("deps/libmock_driver-12ab.so");
        make("deps/libmock_driver.rlib");
        make("deps/libmock_drivers.so");
        let newer = make("build/mock_driver/34cd/out/libmock_driver.so");
        let set = |path: &Path, age: u64| {
            let time = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
            fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
        };
        set(&older, 100);
        set(&newer, 10);
        let found = found_below(&profile);
        fs::remove_dir_all(&profile).unwrap();
        assert_eq!(found, [newer, older]);
    }
}
