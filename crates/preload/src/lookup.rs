//! How this library finds the driver's own functions: by the real `dlsym`, among what the process has loaded.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The driver's names.
const DRIVER: [&CStr; 2] = [c"libcuda.so.1", c"libcuda.so"];

/// The names under which C libraries export `dlsym`: of glibc since 2.34, and before on x86-64 and on aarch64.
const VERSIONS: [&CStr; 3] = [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"];

pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The real `dlsym`; 0 until it is looked up.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// A driver function that a program has received: its library is the driver.
static SEEN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut real = REAL.load(Ordering::Relaxed);
    if real == 0 {
        let find = |version: &&CStr| {
            // SAFETY: names that end in 0; the object behind this one that has `dlsym` is the C library.
            NonNull::new(unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) })
        };
        real = VERSIONS.iter().find_map(find)?.as_ptr().expose_provenance();
        // Relaxed: each thread would find the same.
        REAL.store(real, Ordering::Relaxed);
    }
    let real = ptr::with_exposed_provenance_mut::<c_void>(real);
    // SAFETY: the C library's `dlsym`, of this type.
    Some(unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) })
}

pub(crate) fn look_up(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let real = real_dlsym()?;
    // SAFETY: a handle of the caller's, and a name that ends in 0.
    NonNull::new(unsafe { real(handle, name.as_ptr()) })
}

/// Returns whether the address lies in this library.
pub(crate) fn is_own(address: *const c_void) -> bool {
    let own = image_of(is_own as *const c_void).map(|image| image.dli_fbase);
    own.is_some() && image_of(address).map(|image| image.dli_fbase) == own
}

/// The driver's function of this name, or the function of another library between this one and the driver.
pub(crate) fn own(name: &CStr) -> Option<NonNull<c_void>> {
    let not_a_hook = |found: &NonNull<c_void>| !is_own(found.as_ptr());
    let next = look_up(libc::RTLD_NEXT, name).filter(not_a_hook);
    next.or_else(|| look_up(loaded_driver()?.as_ptr(), name).filter(not_a_hook))
}

/// The driver, if the process has loaded it.
fn loaded_driver() -> Option<NonNull<c_void>> {
    let seen = SEEN.load(Ordering::Relaxed);
    let of_seen = if seen.is_null() { None } else { image_of(seen) };
    let by_name = || DRIVER.into_iter().find_map(|name| open_loaded(name.as_ptr()));
    of_seen.and_then(|library| open_loaded(library.dli_fname)).or_else(by_name)
}

/// Records a driver function that the program has received.
pub(crate) fn record_driver(function: NonNull<c_void>) {
    // Relaxed: an address; what it points to was there before.
    SEEN.store(function.as_ptr(), Ordering::Relaxed);
}

/// The program or library that an address lies in.
pub(crate) fn image_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut facts = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid out-pointer; the address is looked up, not read.
    let known = unsafe { libc::dladdr(address, facts.as_mut_ptr()) } != 0;
    // SAFETY: filled by the call above, and zeros are a value.
    known.then(|| unsafe { facts.assume_init() })
}

/// A library by its name, if the process has loaded it. Loads nothing.
pub(crate) fn open_loaded(name: *const c_char) -> Option<NonNull<c_void>> {
    if name.is_null() {
        return None;
    }
    // SAFETY: a name that ends in 0, of a library that is there already or is not opened. The handle is kept, so the library
    // stays loaded.
    NonNull::new(unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}
