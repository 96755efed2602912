//! Looks functions up by name, and hides them to imitate an older driver.
//!
//! A hidden function is missing for `dlsym` too: its entry in the symbol table of the library is made undefined until [`show_all`]
//! restores it. A caller that has looked a function up keeps the address, as cudarc does: hide a name before its first use in the
//! process.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Mutex;

use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::sync::lock;

/// Makes `dladdr1` return the entry of the symbol.
const RTLD_DL_SYMENT: c_int = 1;
/// Since this version a name without a suffix means the newer function.
const NEWER_BY_DEFAULT: c_int = 12000;

unsafe extern "C" {
    fn dladdr1(address: *const c_void, info: *mut libc::Dl_info, extra: *mut *mut c_void, flags: c_int) -> c_int;
}

/// Hidden entries and their former values.
static HIDDEN: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());

fn find(name: &CStr) -> *mut c_void {
    let mut own = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: space for the result.
    if unsafe { libc::dladdr(find as *const c_void, own.as_mut_ptr()) } == 0 {
        return ptr::null_mut();
    }
    // SAFETY: filled by the call above.
    let own = unsafe { own.assume_init() }.dli_fname;
    // SAFETY: this code is in the library, so it is loaded already.
    let library = unsafe { libc::dlopen(own, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: a live handle and a name that ends in 0.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: the handle was taken above; the library stays loaded by its first user.
    unsafe { libc::dlclose(library) };
    found
}

/// The entry of a function in the symbol table.
fn entry(function: *const c_void) -> Option<*mut libc::Elf64_Sym> {
    let mut entry = ptr::null_mut();
    let mut info = std::mem::MaybeUninit::uninit();
    // SAFETY: both pointers are valid and have the size that the flag requires.
    let known = unsafe { dladdr1(function, info.as_mut_ptr(), &raw mut entry, RTLD_DL_SYMENT) };
    (known != 0 && !entry.is_null()).then_some(entry.cast())
}

fn overwrite(entry: *mut libc::Elf64_Sym, value: u64) -> bool {
    const PAGE: usize = 4096;
    let first = entry.addr() & !(PAGE - 1);
    let bytes = entry.addr() + size_of::<libc::Elf64_Sym>() - first;
    // SAFETY: the symbol table is a private mapping of a file; making it writable changes this process only.
    let failed = unsafe { libc::mprotect(entry.with_addr(first).cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
    if failed != 0 {
        return false;
    }
    // SAFETY: the entry is live as long as this library, and writable since the call above.
    let place = unsafe { &raw mut (*entry).st_value };
    // SAFETY: as above; a lookup at this very moment sees the old value or the new one.
    unsafe { place.write_volatile(value) };
    true
}

/// Hides a function. Returns whether it could be found before.
pub(crate) fn hide(name: &str) -> bool {
    let function = CString::new(name).map_or(ptr::null_mut(), |name| find(&name));
    let Some(entry) = entry(function).filter(|_| !function.is_null()) else { return false };
    // SAFETY: `dladdr1` returned this entry.
    let value = unsafe { (*entry).st_value };
    lock(&HIDDEN).push((entry.expose_provenance(), value));
    overwrite(entry, 0)
}

/// Restores every hidden function.
pub(crate) fn show_all() {
    for (entry, value) in lock(&HIDDEN).drain(..) {
        overwrite(ptr::with_exposed_provenance_mut(entry), value);
    }
}

/// The function of this name in the newest form that a program of this version knows.
fn proc_address(symbol: *const c_char, out: Out<*mut c_void>, version: c_int) -> Outcome {
    if symbol.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: (call-I1) not null, so the caller guarantees a string.
    let name = unsafe { CStr::from_ptr(symbol) };
    let versioned = [name.to_bytes(), b"_v2"].concat();
    let versioned = CString::new(versioned).map_err(|_| Code::INVALID_VALUE)?;
    let always_new = version >= NEWER_BY_DEFAULT || !name.to_bytes().starts_with(b"cuGetProcAddress");
    let candidates = [always_new.then_some(versioned.as_c_str()), Some(name)];
    let found = candidates.into_iter().flatten().map(find).find(|function| !function.is_null());
    found.ok_or(Code::NOT_FOUND).and_then(|function| out.put(function))
}

driver_call! { Lookup fn cuGetProcAddress(symbol: *const c_char, out: Out<*mut c_void>, version: c_int, _flags: u64) {
    proc_address(symbol, out, version)
}}

driver_call! { Lookup fn cuGetProcAddress_v2(
    symbol: *const c_char, out: Out<*mut c_void>, version: c_int, _flags: u64, status: Out<c_int>,
) {
    let outcome = proc_address(symbol, out, version);
    // 0: found; 1: no such symbol.
    status.put_if_wanted(c_int::from(outcome.is_err()));
    outcome
}}
