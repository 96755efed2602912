//! The handle by which a test loads and controls the mock driver.
//!
//! A process has one driver, and all tests of a binary share it, so a [`MockDriver`] is exclusive: the next [`MockDriver::load`]
//! waits until it is dropped. Each begins with a reset. Memory that an earlier test has leaked stays, so tests compare counts with
//! the counts at their start.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{env, fs};

use crate::code::Code;
use crate::control::{Controls, TABLE};
use crate::sync::lock;

/// The name that cargo gives the `cdylib`.
const FILE: &str = concat!("lib", env!("CARGO_CRATE_NAME"), ".so");

static CONTROLS: OnceLock<&'static Controls> = OnceLock::new();
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// Set if a test has lost the device since the last [`MockDriver::load`].
static HAS_LOST_DEVICE: AtomicBool = AtomicBool::new(false);

/// The driver of this process, while this value lives.
pub struct MockDriver {
    pub(crate) controls: &'static Controls,
    _exclusive: MutexGuard<'static, ()>,
}

impl MockDriver {
    /// Loads the mock driver in place of libcuda and resets it. Must come before the first driver call of the process.
    ///
    /// # Panics
    ///
    /// If the library is neither alongside the test's executable nor in the folder of its profile, or is of another build.
    pub fn load() -> Self {
        let exclusive = lock(&EXCLUSIVE);
        let controls = *CONTROLS.get_or_init(|| load_library(&Self::library()));
        let driver = MockDriver { controls, _exclusive: exclusive };
        driver.reset();
        // As on a real device, a lost context never works again.
        if HAS_LOST_DEVICE.swap(false, Ordering::Relaxed) {
            driver.renew_contexts();
        }
        driver
    }

    /// Loads the mock driver as [`Self::load`] does, but without these functions, as an older driver lacks them. Must be the
    /// first load of the process.
    ///
    /// # Panics
    ///
    /// The panics of [`Self::load`], or if there is no such function.
    pub fn load_without(functions: &[&str]) -> Self {
        let mut bytes = fs::read(Self::library()).expect("the library can be read");
        for function in functions {
            // The name is changed in the library's table of names, so that `dlsym` does not find the function.
            let name = [b"\0", function.as_bytes(), b"\0"].concat();
            let at = bytes.windows(name.len()).position(|window| window == name);
            bytes[at.expect("a function of the library") + 1] = b'X';
        }
        let path = env::temp_dir().join(format!("{FILE}-{}", std::process::id()));
        fs::write(&path, bytes).expect("the library can be copied");
        assert!(CONTROLS.set(load_library(&path)).is_ok(), "the library is loaded already");
        fs::remove_file(path).expect("the copy can be removed");
        Self::load()
    }

    /// Returns the library's file. A program finds it under the name `libcuda.so` in a folder that the loader searches.
    ///
    /// # Panics
    ///
    /// If the library is neither alongside the test's executable nor in the folder of its profile.
    pub fn library() -> PathBuf {
        candidates()
            .find(|file| file.exists())
            .unwrap_or_else(|| panic!("no {FILE} next to the test's executable, nor in the folder of its profile"))
    }

    /// Holds calls of this function until the result is dropped.
    pub fn hold_call<'a>(&'a self, name: &'a str) -> HeldCall<'a> {
        self.set_call_gate(name, true);
        HeldCall { driver: self, name }
    }

    /// Holds the work of one stream (its raw handle) until the result is dropped. The default streams have no handle;
    /// null holds all streams.
    pub fn hold<T>(&self, stream: *mut T) -> HeldStream<'_> {
        HeldStream { driver: self, number: self.set_stream_gate(stream.addr(), true) }
    }

    /// Holds the work of all streams until the result is dropped.
    pub fn hold_all(&self) -> HeldStream<'_> {
        self.hold(std::ptr::null_mut::<()>())
    }

    /// Loses the device: work stops, and every later call fails with this code.
    pub fn lose_device(&self, code: Code) {
        // Relaxed: `load` reads the flag under the lock that this `MockDriver` holds.
        HAS_LOST_DEVICE.store(true, Ordering::Relaxed);
        self.lose(code);
    }
}

impl Drop for MockDriver {
    /// Opens the gates that a test left closed. Fails if the driver was used wrongly since the last reset.
    fn drop(&mut self) {
        let wrong_uses = self.wrong_uses();
        self.reset();
        assert!(std::thread::panicking() || wrong_uses.is_empty(), "{wrong_uses:?}");
    }
}

/// Holds a stream until it is dropped. Declare it after values that wait for the stream when they are dropped, so that a failing test
/// ends.
#[must_use = "the stream continues when this is dropped"]
pub struct HeldStream<'a> {
    driver: &'a MockDriver,
    number: usize,
}

impl Drop for HeldStream<'_> {
    fn drop(&mut self) {
        self.driver.set_stream_gate(self.number, false);
    }
}

/// Holds a driver function until it is dropped.
#[must_use = "the call continues when this is dropped"]
pub struct HeldCall<'a> {
    driver: &'a MockDriver,
    name: &'a str,
}

impl HeldCall<'_> {
    /// Waits until this many threads are in the call.
    pub fn wait_for(&self, callers: u64) {
        self.driver.wait_for_held(self.name, callers);
    }
}

impl Drop for HeldCall<'_> {
    fn drop(&mut self) {
        self.driver.set_call_gate(self.name, false);
    }
}

/// Returns the places at which the library may be, relative to a test, a bench, an example or a binary. The layout of cargo's
/// folders differs between versions and targets, so all libraries in the folder of the profile follow, the newest first.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let folder = env::current_exe().unwrap_or_default().parent().map(PathBuf::from).unwrap_or_default();
    let usual = [folder.join(FILE), folder.join("deps").join(FILE), folder.join("../deps").join(FILE)];
    // Cargo locks the folder of a profile by a file in it.
    let profile = folder.ancestors().find(|folder| folder.join(".cargo-lock").exists()).map(Path::to_owned);
    usual.into_iter().chain(profile.into_iter().flat_map(|profile| found_below(&profile)))
}

/// Returns the libraries of the mock driver below one of cargo's folders, the newest first.
fn found_below(folder: &Path) -> Vec<PathBuf> {
    /// `build/mock_driver/HASH/out` is the deepest.
    const DEPTH: usize = 4;
    let stem = FILE.trim_end_matches(".so");
    let is_library = |name: &str| {
        name.strip_prefix(stem).is_some_and(|rest| rest.ends_with(".so") && matches!(rest.as_bytes()[0], b'.' | b'-'))
    };
    let (mut folders, mut found) = (vec![(folder.to_owned(), 0)], Vec::new());
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < DEPTH {
                folders.push((entry.path(), depth + 1));
            } else if !is_folder && entry.file_name().to_str().is_some_and(is_library) {
                found.push((entry.metadata().and_then(|file| file.modified()).ok(), entry.path()));
            }
        }
    }
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

fn load_library(path: &Path) -> &'static Controls {
    let name = CString::new(path.as_os_str().as_encoded_bytes()).expect("a path without a zero in it");
    // SAFETY: loads our own library, which does nothing at start-up.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "{} cannot be loaded", path.display());
    // SAFETY: the handle is never closed, so it is live.
    let table = unsafe { libc::dlsym(library, TABLE.as_ptr()) }.cast::<Controls>();
    // SAFETY: cargo compiles this handle and the library together, so the table has this type. It lives as long as the library.
    let table = unsafe { table.as_ref() };
    let is_same_build = |table: &&Controls| table.bytes == size_of::<Controls>();
    table.filter(is_same_build).unwrap_or_else(|| panic!("{} is from another build", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_library_in_cargos_folders_comes_first() {
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
