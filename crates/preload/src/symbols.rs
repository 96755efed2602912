//! How a program finds the driver's functions.
//!
//! | look-up | answer |
//! | --- | --- |
//! | linked to libcuda | the hooks are exported under the driver's names, and `LD_PRELOAD` puts them first |
//! | `dlsym` with a handle or `RTLD_DEFAULT` | the hook, if there is a function of that name behind it |
//! | the same from a library that defines a function of that name | the real answer: such a library is behind the hook, as the driver is |
//! | `dlsym(RTLD_NEXT)` | the real answer for the caller: such a caller is between a program and the driver, as this library is |
//! | `dlvsym` | not replaced: the symbols of libcuda have no versions |
//! | `cuGetProcAddress` | itself a hook: the driver answers, and the hook replaces a function of the table (`hooks`) |
//!
//! The real `dlsym` derives its caller from its return address, and `RTLD_NEXT` and `RTLD_DEFAULT` have a different meaning
//! for each caller. So the replacement leaves no frame behind: it checks the name, and jumps to the real `dlsym` with the
//! stack and the arguments unchanged. The replacement itself looks up only names of the table. With a handle, the result does
//! not depend on the caller. With `RTLD_DEFAULT`, the exports of this library come first for every caller.
//!
//! The first call looks up the real `dlsym` (`dlvsym` takes the loader's lock). Otherwise nothing here allocates or takes a lock
//! unless the name is in the table, since allocators call `dlsym` before they are ready.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};

use crate::hooks;
use crate::lookup::{image_of, is_own, look_up, open_loaded, real_dlsym, real_function, set_driver_function};

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
    let jump_to_real = Decision { answer: ptr::null_mut(), jump: real as usize };
    if name.is_null() || handle == libc::RTLD_NEXT {
        return jump_to_real;
    }
    // SAFETY: the name ends in 0, as `dlsym` requires.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(hook) = hooks::exported(name) else { return jump_to_real };
    if is_behind_hooks(caller, name) {
        return jump_to_real;
    }
    let is_default = handle == libc::RTLD_DEFAULT;
    let found = if is_default { None } else { look_up(handle, name) };
    match found {
        Some(found) if !is_own(found.as_ptr()) => {
            hook.learn(found);
            set_driver_function(found);
            Decision::answer(hook.function())
        }
        None if !is_default => Decision::answer(None),
        // The real look-up would find the export of this library, so this searches for a driver's function behind it. If
        // there is none, a look-up that fails sets the text for `dlerror`.
        _ => Decision::answer(real_function(name).map_or_else(|| look_up(libc::RTLD_NEXT, name), |_| hook.function())),
    }
}

/// Returns whether the caller must get the real answer. The caller is then this library, or a library that defines a function
/// of this name itself: the driver, or another library between the program and the driver. Such a function is behind the
/// hook, so it must find the next function and not the hook.
fn is_behind_hooks(caller: *const c_void, name: &CStr) -> bool {
    let Some(library) = image_of(caller) else { return false };
    let defines = || {
        let handle = open_loaded(library.dli_fname)?.as_ptr();
        let found = look_up(handle, name);
        // SAFETY: the handle from above. The caller's code runs now, so its library stays loaded meanwhile.
        let _closed = unsafe { libc::dlclose(handle) };
        Some(image_of(found?.as_ptr())?.dli_fbase == library.dli_fbase)
    };
    is_own(caller) || defines().unwrap_or(false)
}

/// Replaces `dlsym`: calls `decide`, which also receives the return address, and returns its answer or jumps to the real
/// `dlsym`.
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

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("`dlsym` can be replaced on x86-64 and aarch64 only");

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
