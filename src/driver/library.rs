//! Finds the library that is the driver of this process, and the functions in it by name.
#![allow(unsafe_code)] // Loads the driver.

use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};

use pinpool_os::sync::unmodeled::{AtomicPtr, Ordering};

/// Returns whether a driver can be loaded. Unlike cudarc's own check, it never panics and exists with every linking feature.
pub(crate) fn is_present() -> bool {
    library().is_some()
}

/// Returns the function with this name, if the driver has it.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    symbol_of(library()?, name)
}

/// The names of the driver's library with flags for `dlopen`, in the order in which they are tried. A library that is already loaded
/// is the driver of this process, as for the CUDA runtime. Of the two names, the one without a version comes last, because toolkits
/// have a stub for linking under it.
const LIBRARIES: [(&CStr, c_int); 4] = [
    (c"libcuda.so.1", libc::RTLD_NOLOAD),
    (c"libcuda.so", libc::RTLD_NOLOAD),
    (c"libcuda.so.1", 0),
    (c"libcuda.so", 0),
];

type Library = NonNull<c_void>;

/// The handle of the driver. It is never closed, so that its symbols stay valid, and chosen once, so that all functions come from
/// one library.
static CHOSEN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Returns the driver, which the first call opens; `None` if there is none.
fn library() -> Option<Library> {
    // Relaxed: only the loader accesses the memory behind a handle.
    NonNull::new(CHOSEN.load(Ordering::Relaxed)).or_else(|| {
        let chosen = choose()?;
        let first = CHOSEN.compare_exchange(ptr::null_mut(), chosen.as_ptr(), Ordering::Relaxed, Ordering::Relaxed);
        first.map_or_else(NonNull::new, |_| Some(chosen))
    })
}

/// Opens the libraries and returns the first one that is not a stub; the first one if all are stubs.
fn choose() -> Option<Library> {
    let mut opened = LIBRARIES.into_iter().filter_map(|(library, flag)| open(library, flag));
    let first = opened.next()?;
    std::iter::once(first).chain(opened).find(|&library| !is_stub(library)).or(Some(first))
}

/// Returns whether this library is a toolkit's stub for linking. Unlike a stub, a driver reports its version even before it is
/// started.
fn is_stub(library: Library) -> bool {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    let Some(found) = symbol_of(library, c"cuDriverGetVersion") else { return true };
    // SAFETY: the driver exports this name with this argument, and so do its stubs.
    let get_version = unsafe { mem::transmute::<NonNull<c_void>, GetVersion>(found) };
    let mut version = 0;
    // SAFETY: a valid out-pointer; the call starts nothing.
    unsafe { get_version(&raw mut version) != 0 }
}

fn open(library: &CStr, flag: c_int) -> Option<Library> {
    // SAFETY: loading the driver runs its initializers, as the first CUDA call of any program does.
    NonNull::new(unsafe { libc::dlopen(library.as_ptr(), flag | libc::RTLD_LAZY | libc::RTLD_LOCAL) })
}

fn symbol_of(library: Library, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a handle that is never closed, and a name that ends in 0.
    NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) })
}

/// Returns the function with this name in the library that `dlopen("libcuda.so")` finds, if that library is not the
/// driver in use. cudarc and other programs try this library name first. Loads the library.
pub(crate) fn symbol_before(name: &CStr) -> Option<NonNull<c_void>> {
    let own = symbol(name)?;
    symbol_of(open(c"libcuda.so", 0)?, name).filter(|&found| found != own)
}

/// Returns whether a driver is loaded in this process. Does not load one.
pub(crate) fn is_loaded() -> bool {
    // The handle is never closed, like the handle that `library` returns.
    LIBRARIES.into_iter().any(|(library, _)| open(library, libc::RTLD_NOLOAD).is_some())
}

/// Returns whether a driver is mapped in this process. Background threads use this because they must not call `dlopen`: a child that
/// is forked during `dlopen` inherits the loader's lock and its pointer to the unmapped `ld.so.cache`, and crashes when it loads a
/// library.
pub(crate) fn is_mapped() -> bool {
    let name = b"/libcuda.so";
    let holds_name = |maps: Vec<u8>| maps.windows(name.len()).any(|window| window == name);
    !CHOSEN.load(Ordering::Relaxed).is_null() || std::fs::read("/proc/self/maps").is_ok_and(holds_name)
}
