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

/// The sanitizer of this program.
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
    // SAFETY: null, which is `None`, or a function of these names, which is of this type in every version of the sanitizer.
    unsafe { std::mem::transmute::<*mut c_void, Option<MarkRegion>>(found) }
}

/// Returns whether the program uses the sanitizer.
pub(crate) fn is_present() -> bool {
    sanitizer().is_some()
}

/// The buffer is in use: its length may be accessed.
pub(crate) fn begin(buf: &PinnedBuf) {
    if let Some(sanitizer) = sanitizer() {
        let (start, len) = (buf.as_ptr(), buf.len());
        // SAFETY: bytes of the buffer; the call only changes state of the sanitizer.
        unsafe { (sanitizer.unpoison)(start.cast(), len) };
        let end = start.wrapping_add(len);
        // SAFETY: as above: the buffer has its capacity.
        unsafe { (sanitizer.poison)(end.cast(), buf.capacity() - len) };
    }
}

/// The buffer was returned: none of it may be accessed.
pub(crate) fn end(buf: &PinnedBuf) {
    if let Some(sanitizer) = sanitizer() {
        // SAFETY: as in `begin`.
        unsafe { (sanitizer.poison)(buf.as_ptr().cast(), buf.capacity()) };
    }
}
