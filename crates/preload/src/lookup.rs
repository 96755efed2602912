//! Finds the driver's own functions with the real `dlsym`, in the libraries that the process has loaded.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The names of the driver's library.
const DRIVER_FILES: [&CStr; 2] = [c"libcuda.so.1", c"libcuda.so"];

/// The versions under which the C library exports `dlsym`: glibc since 2.34, and older glibc on x86-64 and on aarch64.
const DLSYM_VERSIONS: [&CStr; 3] = [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"];

pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The real `dlsym`; 0 until it is looked up.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);

/// A driver function that the program has received. The library that contains it is the driver.
static DRIVER_FUNCTION: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut real = REAL_DLSYM.load(Ordering::Relaxed);
    if real == 0 {
        let find = |version: &&CStr| {
            // SAFETY: the names end in 0; the next object after this library that exports `dlsym` is the C library.
            NonNull::new(unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) })
        };
        real = DLSYM_VERSIONS.iter().find_map(find)?.as_ptr().expose_provenance();
        // Relaxed: each thread finds the same address.
        REAL_DLSYM.store(real, Ordering::Relaxed);
    }
    let real = ptr::with_exposed_provenance_mut::<c_void>(real);
    // SAFETY: `real` is the C library's `dlsym`, which has this type.
    Some(unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) })
}

pub(crate) fn look_up(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let real = real_dlsym()?;
    // SAFETY: the caller passes a valid handle, and the name ends in 0.
    NonNull::new(unsafe { real(handle, name.as_ptr()) })
}

/// Returns whether the address lies in this library.
pub(crate) fn is_own(address: *const c_void) -> bool {
    let own = image_of(is_own as *const c_void).map(|image| image.dli_fbase);
    own.is_some() && image_of(address).map(|image| image.dli_fbase) == own
}

/// Returns the driver's function of this name, or the function of another library between this library and the driver.
pub(crate) fn real_function(name: &CStr) -> Option<NonNull<c_void>> {
    let not_a_hook = |found: &NonNull<c_void>| !is_own(found.as_ptr());
    let next = look_up(libc::RTLD_NEXT, name).filter(not_a_hook);
    next.or_else(|| look_up(loaded_driver()?.as_ptr(), name).filter(not_a_hook))
}

/// Returns the driver, if the process has loaded it. The handle is never closed, so that the driver stays loaded.
fn loaded_driver() -> Option<NonNull<c_void>> {
    let of_seen = image_of(DRIVER_FUNCTION.load(Ordering::Relaxed)); // `None` for a null address.
    let by_name = || DRIVER_FILES.into_iter().find_map(|name| open_loaded(name.as_ptr()));
    of_seen.and_then(|library| open_loaded(library.dli_fname)).or_else(by_name)
}

/// Stores a driver function that the program has received.
pub(crate) fn set_driver_function(function: NonNull<c_void>) {
    // Relaxed: the function existed before its address is stored.
    DRIVER_FUNCTION.store(function.as_ptr(), Ordering::Relaxed);
}

/// Returns the program or the library that contains an address.
pub(crate) fn image_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut facts = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid out-pointer; the address is looked up, not read.
    let known = unsafe { libc::dladdr(address, facts.as_mut_ptr()) } != 0;
    // SAFETY: the call above filled the value, and zeros are a valid value too.
    known.then(|| unsafe { facts.assume_init() })
}

/// Returns the library with this name, if the process has loaded it. Loads nothing. The library stays loaded until
/// the handle is closed.
pub(crate) fn open_loaded(name: *const c_char) -> Option<NonNull<c_void>> {
    if name.is_null() {
        return None;
    }
    // SAFETY: the name ends in 0, and with RTLD_NOLOAD no library is loaded.
    NonNull::new(unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}
