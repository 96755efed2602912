//! The version.

use std::ffi::c_char;

/// The version of the library, such as "0.1.0": PP_VERSION in the matching header. Static.
#[unsafe(no_mangle)]
pub extern "C" fn pp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
