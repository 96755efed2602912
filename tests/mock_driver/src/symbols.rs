//! Looks functions up by name, as the driver does for its callers.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;

/// In programs of this CUDA version or later, a name without a suffix means the newer function.
const NEWER_BY_DEFAULT: c_int = 12000;

fn find(name: &CStr) -> *mut c_void {
    let mut own = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: space for the result.
    unsafe { libc::dladdr(find as *const c_void, own.as_mut_ptr()) };
    // SAFETY: filled by the call above, or zero, which is valid.
    let own = unsafe { own.assume_init() }.dli_fname;
    // SAFETY: this code is in the library, so it is loaded already. The handle is never closed.
    let library = unsafe { libc::dlopen(own, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // SAFETY: a live handle and a name that ends in 0.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

/// Stores the function of this name, in the newest form that a program of this version knows.
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
