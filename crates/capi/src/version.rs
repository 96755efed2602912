//! The version.

use std::ffi::c_char;

/// The version of the library: "0.1.0", as PP_VERSION of the header that belongs to it. Static.
#[unsafe(no_mangle)]
pub extern "C" fn pp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
