//! A toolkit's libcuda stub precedes the driver in the loader's path as `libcuda.so`, and its `cuInit` returns 34; or the
//! program has loaded the driver already. Each test runs in a separate process, in which the mock driver has the SONAME
//! `libcuda.so.1`.
#![allow(unsafe_code)] // Calls the driver by name.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, mem, ptr};

use cudarc::driver::{result, sys};
use mock_driver::MockDriver;
use pinpool::unstable::{Severity, backend::gpu_finding};
use pinpool::{Backend, PinnedBy, Pool};

use crate::child::alone_with;
use crate::fixture::{MIB, builder};

/// The SONAME of drivers and of toolkit stubs.
const DRIVER: &str = "libcuda.so.1";

/// A folder with the stub, and one with the driver.
struct Folders {
    root: tempfile::TempDir,
}

impl Folders {
    /// Returns `None` without a C compiler. The stub's files are named `stub_folder`, and its SONAME is `soname`.
    fn new(stub_folder: &[&str], soname: &str) -> Option<Self> {
        let folders = Self { root: tempfile::tempdir().unwrap() };
        fs::create_dir(folders.stub_folder()).unwrap();
        fs::create_dir(folders.driver_folder()).unwrap();
        let source = folders.root.path().join("stub.c");
        fs::write(&source, "int cuInit(unsigned flags) { return flags == 0 ? 34 : 1; }\n").unwrap();
        for name in stub_folder {
            let mut command = Command::new("cc");
            command.args(["-shared", "-fPIC", &format!("-Wl,-soname,{soname}"), "-o"]);
            let compiled = command.arg(folders.stub_folder().join(name)).arg(&source).status();
            if !compiled.is_ok_and(|status| status.success()) {
                let _ = writeln!(std::io::stderr(), "skipped: no C compiler");
                return None;
            }
        }
        write_with_soname(&MockDriver::library(), &folders.driver());
        Some(folders)
    }

    fn stub_folder(&self) -> PathBuf {
        self.root.path().join("stub")
    }

    fn driver_folder(&self) -> PathBuf {
        self.root.path().join("driver")
    }

    fn driver(&self) -> PathBuf {
        self.driver_folder().join("libcuda.so.1")
    }

    fn path(&self) -> Vec<(&'static str, String)> {
        vec![("LD_LIBRARY_PATH", format!("{}:{}", self.stub_folder().display(), self.driver_folder().display()))]
    }
}

/// Copies the mock driver and gives it the SONAME of a driver. The string table has no room for a longer SONAME, so the new
/// SONAME overwrites the name of a control function that these tests do not call.
fn write_with_soname(library: &Path, to: &Path) {
    const HEADER_BYTES: usize = 56;
    const LOADED: u64 = 1;
    const DYNAMIC: u64 = 2;
    let mut bytes = fs::read(library).unwrap();
    let number = |bytes: &[u8], at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
    };
    let place = |bytes: &[u8], at: usize| usize::try_from(number(bytes, at, 8)).unwrap();
    let headers: Vec<usize> =
        (0..number(&bytes, 56, 2)).zip((place(&bytes, 32)..).step_by(HEADER_BYTES)).map(|(_, at)| at).collect();
    let dynamic = *headers.iter().find(|&&at| number(&bytes, at, 4) == DYNAMIC).unwrap();
    let (start, len) = (place(&bytes, dynamic + 8), place(&bytes, dynamic + 32));
    let entry =
        |bytes: &[u8], tag: u64| (start..start + len).step_by(16).find(|&at| number(bytes, at, 8) == tag).unwrap() + 8;
    let (names, soname) = (entry(&bytes, 5), entry(&bytes, 14));
    let names = place(&bytes, names);
    let holds = |&&at: &&usize| {
        let (address, len) = (place(&bytes, at + 16), place(&bytes, at + 32));
        number(&bytes, at, 4) == LOADED && (address..address + len).contains(&names)
    };
    let segment = *headers.iter().find(holds).unwrap();
    let names = names - place(&bytes, segment + 16) + place(&bytes, segment + 8);
    let (unused, name) = (b"\0mock_driver_set_device_count\0", b"libcuda.so.1\0");
    let found = bytes[names..].windows(unused.len()).position(|window| window == unused).unwrap() + 1;
    bytes[names + found..names + found + name.len()].copy_from_slice(name);
    bytes[soname..soname + 8].copy_from_slice(&(found as u64).to_le_bytes());
    fs::write(to, bytes).unwrap();
}

/// The library that is loaded under this name or path.
fn open(name: &Path) -> *mut c_void {
    let name = CString::new(name.as_os_str().as_bytes()).unwrap();
    // SAFETY: loads a library of this test, which does nothing when it is loaded.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{name:?}");
    library
}

fn function(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// The driver's function of this name, as a function pointer of type `F`.
fn typed<F>(driver: *mut c_void, name: &CStr) -> F {
    let found = function(driver, name);
    // SAFETY: each caller passes the type of the function.
    unsafe { mem::transmute_copy(&found) }
}

/// How often the driver's function was called.
fn calls(driver: *mut c_void, name: &CStr) -> u64 {
    let calls: unsafe extern "C" fn(*const c_char) -> u64 = typed(driver, c"mock_driver_calls");
    // SAFETY: a name that ends in 0.
    unsafe { calls(name.as_ptr()) }
}

/// A driver stream, as another framework creates it, in the primary context, which is made current.
fn stream_of(driver: *mut c_void) -> sys::CUstream {
    let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
    let retain: unsafe extern "C" fn(*mut sys::CUcontext, c_int) -> c_int = typed(driver, c"cuDevicePrimaryCtxRetain");
    // SAFETY: a place for the context.
    assert_eq!(unsafe { retain(&raw mut context, 0) }, 0);
    let set: unsafe extern "C" fn(sys::CUcontext) -> c_int = typed(driver, c"cuCtxSetCurrent");
    // SAFETY: retained above.
    assert_eq!(unsafe { set(context) }, 0);
    let create: unsafe extern "C" fn(*mut sys::CUstream, c_uint) -> c_int = typed(driver, c"cuStreamCreate");
    // SAFETY: a place for the stream.
    assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
    stream
}

/// A pool of each backend pins through the driver, and reuses memory after the work of a stream.
fn check_pools(driver: *mut c_void) {
    for (backend, call) in [
        (Backend::Vmm, c"cuMemCreate"),
        (Backend::Register, c"cuMemHostRegister_v2"),
        (Backend::Cuda, c"cuMemHostAlloc"),
    ] {
        let before = calls(driver, call);
        let pool = builder(backend).build().unwrap();
        let mut buf = pool.get(4 * MIB).unwrap();
        assert!(buf.pinned_by() == Some(PinnedBy::Driver) && calls(driver, call) > before, "{call:?}");
        buf.wait_slice_mut().unwrap().fill(7);
        let stream = stream_of(driver);
        // SAFETY: the stream is alive.
        unsafe { buf.unstable_record_stream(stream.cast()) }.unwrap();
        drop(buf);
        let wait: unsafe extern "C" fn(sys::CUstream) -> c_int = typed(driver, c"cuStreamSynchronize");
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { wait(stream) }, 0);
        pool.maintain();
        assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0), "{call:?}");
    }
    assert_eq!(Pool::builder().without_env().build().unwrap().stats().backend, "vmm", "what auto takes");
}

/// Checks that cudarc loads the stub in place of the driver.
fn check_that_cudarc_gets_the_stub() {
    assert_eq!(result::init().unwrap_err().0, sys::CUresult::CUDA_ERROR_STUB_LIBRARY);
}

#[test]
fn pools_use_the_driver_despite_a_stub_before_it_in_the_path() {
    let Some(folders) = Folders::new(&["libcuda.so"], DRIVER) else { return };
    alone_with(folders.path(), || {
        let found = gpu_finding(0);
        assert_eq!(found.severity, Severity::Ok, "{found}");
        for words in ["GPU 0 of 1", "/driver/libcuda.so.1", "/stub/libcuda.so instead"] {
            assert!(found.found.contains(words), "no {words} in: {found}");
        }
        check_pools(open(Path::new("libcuda.so.1")));
        check_that_cudarc_gets_the_stub();
    });
}

#[test]
fn an_already_loaded_driver_is_used() {
    let Some(folders) = Folders::new(&["libcuda.so", "libcuda.so.1"], DRIVER) else { return };
    alone_with(folders.path(), || {
        check_pools(open(&folders.driver()));
        check_that_cudarc_gets_the_stub();
    });
}

/// The stub's file for [`check_that_a_loaded_stub_is_passed_over`], and the path.
fn with_the_stub(folders: &Folders, name: &str) -> Vec<(&'static str, String)> {
    let mut variables = folders.path();
    variables.push(("STUB", folders.stub_folder().join(name).display().to_string()));
    variables
}

/// The driver is found although the program has loaded a stub by its path, under the stub's SONAME.
fn check_that_a_loaded_stub_is_passed_over(soname: &CStr) {
    let stub = open(Path::new(&std::env::var_os("STUB").unwrap()));
    // SAFETY: loads nothing.
    assert_eq!(unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) }, stub);
    let found = gpu_finding(0);
    assert!(found.severity == Severity::Ok && found.found.contains("/driver/libcuda.so"), "{found}");
}

#[test]
fn an_already_loaded_stub_is_skipped() {
    let Some(folders) = Folders::new(&["libcuda.so"], "libcuda.so") else { return };
    alone_with(with_the_stub(&folders, "libcuda.so"), || check_that_a_loaded_stub_is_passed_over(c"libcuda.so"));
}

#[test]
fn a_stub_with_the_name_of_the_driver_is_skipped() {
    let Some(folders) = Folders::new(&["libcuda.so.1"], DRIVER) else { return };
    fs::rename(folders.driver(), folders.driver_folder().join("libcuda.so")).unwrap();
    alone_with(with_the_stub(&folders, "libcuda.so.1"), || check_that_a_loaded_stub_is_passed_over(c"libcuda.so.1"));
}

#[test]
fn a_stub_without_a_driver_is_named() {
    let Some(folders) = Folders::new(&["libcuda.so", "libcuda.so.1"], DRIVER) else { return };
    alone_with(folders.path(), || {
        let found = gpu_finding(0);
        assert_eq!(found.severity, Severity::Warning, "{found}");
        assert!(found.found.contains("stub") && found.found.contains("(34)"), "{found}");
        assert!(found.to_string().contains("hides the driver of the same name"), "{found}");
    });
}
