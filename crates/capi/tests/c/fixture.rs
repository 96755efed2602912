//! Calls of the functions with Rust's types around them.

use std::ffi::{CStr, CString, c_void};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::{io, ptr};

use pinpool_c::*;

/// A handle that may be sent to threads, as C's are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) *mut pp_pool);

// SAFETY: a handle is a number; the header allows its use from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The address of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Address(pub(crate) *mut c_void);

// SAFETY: an address; each test says who uses the memory.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A pool of ordinary memory, so that the tests need no right to lock any.
pub(crate) const HEAP: &str = "backend=heap; max_bytes=64MiB";

/// How often tests of many threads or pools repeat.
pub(crate) const ROUNDS: usize = if cfg!(miri) { 4 } else { 50 };

pub(crate) fn open(config: &str) -> Handle {
    try_open(config).unwrap_or_else(|error| panic!("{error:?}"))
}

pub(crate) fn try_open(config: &str) -> Result<Handle, (pp_status, String)> {
    let config = CString::new(config).unwrap();
    let mut pool = ptr::null_mut();
    // SAFETY: a C string and a place for the handle.
    let status = unsafe { pp_pool_open(config.as_ptr(), &raw mut pool) };
    outcome(status, Handle(pool))
}

pub(crate) fn close(pool: Handle) {
    assert_eq!(pp_pool_close(pool.0), pp_status::PP_OK, "{:?}", last_error());
}

pub(crate) fn get(pool: Handle, bytes: usize) -> Result<Address, (pp_status, String)> {
    let mut ptr = ptr::dangling_mut();
    // SAFETY: a place for the address.
    let status = unsafe { pp_get(pool.0, bytes, &raw mut ptr) };
    assert!(status == pp_status::PP_OK || ptr.is_null(), "a failed get stores NULL");
    outcome(status, Address(ptr))
}

/// The options of PP_GET_OPTIONS_INIT.
pub(crate) const OPTIONS: pp_get_options = pp_get_options {
    struct_size: size_of::<pp_get_options>(),
    alignment: 1,
    timeout_ms: PP_DEFAULT_WAIT,
    tag: ptr::null(),
};

pub(crate) fn get_with(pool: Handle, bytes: usize, options: pp_get_options) -> Result<Address, (pp_status, String)> {
    let mut ptr = ptr::dangling_mut();
    // SAFETY: a place for the address; a tag ends in 0.
    let status = unsafe { pp_get_with(pool.0, bytes, &raw const options, &raw mut ptr) };
    assert!(status == pp_status::PP_OK || ptr.is_null(), "a failed get stores NULL");
    outcome(status, Address(ptr))
}

pub(crate) fn try_get(pool: Handle, bytes: usize) -> (pp_status, Address) {
    let mut ptr = ptr::dangling_mut();
    // SAFETY: a place for the address.
    let status = unsafe { pp_try_get(pool.0, bytes, &raw mut ptr) };
    (status, Address(ptr))
}

pub(crate) fn put(pool: Handle, ptr: Address) -> Result<(), (pp_status, String)> {
    outcome(pp_put(pool.0, ptr.0), ())
}

pub(crate) fn outcome<T>(status: pp_status, value: T) -> Result<T, (pp_status, String)> {
    if status == pp_status::PP_OK { Ok(value) } else { Err((status, last_error().1)) }
}

pub(crate) fn last_error() -> (pp_status, String) {
    let mut status = pp_status::PP_OK;
    // SAFETY: a place for the code.
    let text = unsafe { pp_last_error(&raw mut status) };
    // SAFETY: never null, and ends in 0.
    (status, unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned())
}

pub(crate) fn is_pinned(pool: Handle, ptr: Address) -> Result<i32, (pp_status, String)> {
    let mut is_pinned = 7;
    // SAFETY: a place for the answer.
    let status = unsafe { pp_is_pinned(pool.0, ptr.0, &raw mut is_pinned) };
    outcome(status, is_pinned)
}

/// The statistics.
pub(crate) fn stats(pool: Handle) -> serde_json::Value {
    let mut json = ptr::null_mut();
    // SAFETY: a place for the text.
    let status = unsafe { pp_stats_json(pool.0, &raw mut json) };
    assert_eq!(status, pp_status::PP_OK, "{:?}", last_error());
    // SAFETY: not null after PP_OK, and ends in 0.
    let value = serde_json::from_slice(unsafe { CStr::from_ptr(json) }.to_bytes()).unwrap();
    // SAFETY: the text of above, once.
    unsafe { pp_string_free(json) };
    value
}

/// The bytes of a buffer that this thread holds.
pub(crate) fn bytes<'a>(ptr: Address, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller holds the buffer, of at least `len` bytes.
    unsafe { std::slice::from_raw_parts_mut(ptr.0.cast(), len) }
}

/// Reports a skipped check on stderr, even if the output of tests is captured.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// Whether a program can be run; says so if not.
pub(crate) fn is_installed(program: &str) -> bool {
    let is_installed = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !is_installed {
        skipped(&format!("no {program} on this machine"));
    }
    is_installed
}

/// The compiler for a program, and the standard that it is written in.
pub(crate) fn language(source: &str) -> (&'static str, &'static str) {
    if source.ends_with(".cpp") { ("c++", "-std=c++17") } else { ("cc", "-std=c99") }
}

/// A compiler with the strictest warnings.
pub(crate) fn compiler(name: &str) -> Command {
    let mut command = Command::new(name);
    command.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-O1"]);
    command
}

/// The folder of this crate.
pub(crate) fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command that must succeed, and returns what it printed.
pub(crate) fn run_to_success(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

pub(crate) const SANITIZERS: &str = "-fsanitize=address,undefined";

/// Whether this compiler links programs with the sanitizers; says so if not.
pub(crate) fn has_sanitizers(compiler: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("empty.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut command = Command::new(compiler);
    let command = command.arg(SANITIZERS).args(["-x", "c"]).arg(&source).arg("-o").arg(folder.path().join("empty"));
    let has = command.output().is_ok_and(|output| output.status.success());
    if !has {
        skipped(&format!("{compiler} cannot link with {SANITIZERS}"));
    }
    has
}
