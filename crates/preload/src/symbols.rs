//! How a program finds the driver's functions.
//!
//! | look-up | answer |
//! | --- | --- |
//! | linked to libcuda | the hooks are exported under the driver's names, and `LD_PRELOAD` puts them first |
//! | `dlsym` of a handle, or of `RTLD_DEFAULT` | answered with the hook, if there is such a function behind it |
//! | the same from a library that has a function of that name | the real answer: it is behind the hook, as the driver is |
//! | `dlsym(RTLD_NEXT)` | the real answer for the caller: such a caller is between a program and the driver, as this library is |
//! | `dlvsym` | not checked: libcuda has no versions of symbols |
//! | `cuGetProcAddress` | a hook itself: the driver answers, and a function of the table is replaced (`hooks`) |
//!
//! The real `dlsym` finds out by its return address who calls it, and means by `RTLD_NEXT` and `RTLD_DEFAULT` something else
//! for each caller. So its replacement leaves no frame behind: it checks the name, and jumps to the real
//! one with the stack and the arguments as they were. Only a name of the table with a handle is looked up from here, because
//! the result does not depend on the caller.
//!
//! Nothing here allocates or takes a lock unless the name is in the table: allocators call `dlsym` before they work.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};

use crate::hooks;
use crate::lookup::{image_of, is_own, look_up, open_loaded, own, real_dlsym, record_driver};

/// How `dlsym` continues: it returns `answer`, or jumps to `jump` if that is not 0.
#[repr(C)]
#[derive(Debug)]
struct Decision {
    answer: *mut c_void,
    jump: usize,
}

impl Decision {
    fn answer(answer: Option<NonNull<c_void>>) -> Self {
        Self { answer: answer.map_or(ptr::null_mut(), NonNull::as_ptr), jump: 0 }
    }
}

extern "C" fn decide(handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Decision {
    let Some(real) = real_dlsym() else { return Decision::answer(None) };
    let go_on = Decision { answer: ptr::null_mut(), jump: real as usize };
    if name.is_null() || handle == libc::RTLD_NEXT {
        return go_on;
    }
    // SAFETY: a name that ends in 0, as `dlsym` requires.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(hook) = hooks::exported(name) else { return go_on };
    if is_behind_hooks(caller, name) {
        return go_on;
    }
    let is_default = handle == libc::RTLD_DEFAULT;
    let found = if is_default { None } else { look_up(handle, name) };
    match found {
        Some(found) if !is_own(found.as_ptr()) => {
            hook.learn(found);
            record_driver(found);
            Decision::answer(Some(hook.function()))
        }
        None if !is_default => Decision::answer(None),
        // What is found is the export of this library: is there a function of the driver behind it? If not, a look-up that fails
        // leaves the text for `dlerror`.
        _ => Decision::answer(own(name).map(|_| hook.function()).or_else(|| look_up(libc::RTLD_NEXT, name))),
    }
}

/// Returns whether the caller is to get the real answer: this library, or one that has a function of this name itself. That is
/// the driver, or a library that is before the driver as this one does: its function is behind the hook, and must find what is
/// behind it, not the hook.
fn is_behind_hooks(caller: *const c_void, name: &CStr) -> bool {
    let Some(library) = image_of(caller) else { return false };
    let defines = || {
        let found = look_up(open_loaded(library.dli_fname)?.as_ptr(), name)?;
        Some(image_of(found.as_ptr())?.dli_fbase == library.dli_fbase)
    };
    is_own(caller) || defines().unwrap_or(false)
}

/// Replaces `dlsym`: calls `decide`, which gets the return address too, and returns its answer or jumps on.
///
/// # Safety
///
/// The contract of `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov rdx, [rsp + 24]",
        "call {decide}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jnz 2f",
        "ret",
        "2:",
        "jmp rdx",
        decide = sym decide,
    )
}

/// Replaces `dlsym` as on x86-64.
///
/// # Safety
///
/// The contract of `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "mov x29, sp",
        "mov x2, x30",
        "bl {decide}",
        "mov x16, x1",
        "mov x17, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbnz x16, 2f",
        "mov x0, x17",
        "ret",
        "2:",
        "br x16",
        decide = sym decide,
    )
}
