//! Annotations for AddressSanitizer, if the program uses it. The bytes of a buffer in use are addressable; bytes beyond the
//! length of the buffer, and the bytes of a returned buffer, are not.
//!
//! - **asan-I1**: bytes are poisoned only within the capacity of a buffer, and the next request that hands out these bytes
//!   unpoisons them first. The sanitizer itself tracks memory that returns to the system, in its `mmap` and `free`.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use pinpool::PinnedBuf;

type MarkRegion = unsafe extern "C" fn(*const c_void, usize);

struct Sanitizer {
    poison: MarkRegion,
    unpoison: MarkRegion,
}

/// Returns the functions of the sanitizer, or `None` if the program does not use it.
fn sanitizer() -> Option<&'static Sanitizer> {
    static FOUND: OnceLock<Option<Sanitizer>> = OnceLock::new();
    let find = || {
        let [poison, unpoison] = [c"__asan_poison_memory_region", c"__asan_unpoison_memory_region"].map(function);
        Some(Sanitizer { poison: poison?, unpoison: unpoison? })
    };
    FOUND.get_or_init(find).as_ref()
}

fn function(name: &CStr) -> Option<MarkRegion> {
    // SAFETY: `name` ends in 0.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: `found` is null, which becomes `None`, or one of the two functions, which have this type in every version of the
    // sanitizer.
    unsafe { std::mem::transmute::<*mut c_void, Option<MarkRegion>>(found) }
}

/// Returns whether the program uses the sanitizer.
pub(crate) fn is_present() -> bool {
    sanitizer().is_some()
}

/// Marks the length of a buffer in use as addressable, and the rest of its capacity as not addressable.
pub(crate) fn unpoison(buf: &PinnedBuf) {
    if let Some(sanitizer) = sanitizer() {
        let (start, len) = (buf.as_ptr(), buf.len());
        // SAFETY: these bytes belong to the buffer, and the call changes only the state of the sanitizer.
        unsafe { (sanitizer.unpoison)(start.cast(), len) };
        let end = start.wrapping_add(len);
        // SAFETY: as above: the bytes up to the capacity belong to the buffer.
        unsafe { (sanitizer.poison)(end.cast(), buf.capacity() - len) };
    }
}

/// Marks the whole capacity of a returned buffer as not addressable.
pub(crate) fn poison(buf: &PinnedBuf) {
    if let Some(sanitizer) = sanitizer() {
        // SAFETY: as in `unpoison`.
        unsafe { (sanitizer.poison)(buf.as_ptr().cast(), buf.capacity()) };
    }
}
