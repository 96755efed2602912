//! Which library is the driver of this process, and its functions by name.
#![allow(unsafe_code)] // Loads the driver.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

/// Whether there is a driver to load. Never panics, and exists under every linking feature, unlike cudarc's own check.
pub(crate) fn is_present() -> bool {
    library().is_some()
}

/// The function of this name, if the driver has it.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(library()?.as_ptr(), name.as_ptr()) })
}

/// The names of the driver's library, and what else `dlopen` is asked: the one that is loaded is the driver of this process, as
/// for the runtime. The name without a version comes last: toolkits have a stub for linking under it.
const LIBRARIES: [(&CStr, c_int); 4] = [
    (c"libcuda.so.1", libc::RTLD_NOLOAD),
    (c"libcuda.so", libc::RTLD_NOLOAD),
    (c"libcuda.so.1", 0),
    (c"libcuda.so", 0),
];

/// A handle of the driver, never closed, so that its symbols stay valid.
fn library() -> Option<NonNull<c_void>> {
    LIBRARIES.into_iter().find_map(|(library, flag)| {
        // SAFETY: loading the driver runs its initialisers, as the first CUDA call of any program does.
        NonNull::new(unsafe { libc::dlopen(library.as_ptr(), flag | libc::RTLD_LAZY | libc::RTLD_LOCAL) })
    })
}

/// The function of this name in another library that programs take for the driver which ask for the name without a version first, as
/// cudarc does; `None` if they get the driver. Loads that library.
pub(crate) fn symbol_before(name: &CStr) -> Option<NonNull<c_void>> {
    let own = symbol(name)?;
    // SAFETY: as in `library`.
    let first = NonNull::new(unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) })?;
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(first.as_ptr(), name.as_ptr()) }).filter(|&found| found != own)
}

/// Whether a driver is loaded in this process; loads none.
pub(crate) fn is_loaded() -> bool {
    LIBRARIES.into_iter().any(|(library, _)| {
        // SAFETY: loads nothing; the handle stays open, as that of `library` does.
        !unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY | libc::RTLD_LOCAL) }.is_null()
    })
}
