//! How a program finds the driver's functions, and how this library finds the driver's own.
//!
//! | a program's way | what happens |
//! | --- | --- |
//! | linked to libcuda | the hooks are exported under the driver's names, and `LD_PRELOAD` puts them first |
//! | `dlsym` of a handle, or of `RTLD_DEFAULT` | answered with the hook, if there is such a function behind it |
//! | the same from a library that has a function of that name | the real answer: it stands behind the hook, as the driver does |
//! | `dlsym(RTLD_NEXT)` | the real answer for the caller: whoever asks so stands between a program and the driver as this library does |
//! | `dlvsym` | not looked at: libcuda has no versions of symbols |
//! | `cuGetProcAddress` | a hook itself: the driver answers, and a function of the table is replaced (`hooks`) |
//!
//! The real `dlsym` finds out by its return address who calls it, and means by `RTLD_NEXT` and `RTLD_DEFAULT` something else
//! for each caller. So the function that stands in for it leaves no frame behind: it looks at the name, and jumps to the real
//! one with the stack and the arguments as they were. Only a name of the table with a handle is looked up from here, where the
//! caller plays no part.
//!
//! Nothing here allocates or takes a lock before a name of the table is met: allocators call `dlsym` before they can serve.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::hooks;

/// The driver's names.
const DRIVER: [&CStr; 2] = [c"libcuda.so.1", c"libcuda.so"];

/// The names under which C libraries export `dlsym`: of glibc since 2.34, and before on x86-64 and on aarch64.
const VERSIONS: [&CStr; 3] = [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"];

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The real `dlsym`; 0 until it is looked up.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// A function of the driver that a program was given: it tells in which library the driver's functions are.
static SEEN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

fn real_dlsym() -> Option<Dlsym> {
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

fn look_up(handle: *mut c_void, name: &CStr) -> Option<NonNull<c_void>> {
    let real = real_dlsym()?;
    // SAFETY: a handle of the caller's, and a name that ends in 0.
    NonNull::new(unsafe { real(handle, name.as_ptr()) })
}

/// The driver's own function of this name, or that of another library that stands between this one and the driver.
pub(crate) fn own(name: &CStr) -> Option<NonNull<c_void>> {
    let not_a_hook = |found: &NonNull<c_void>| !hooks::is_hook(found.as_ptr());
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

/// Notes a function of the driver that the program was given.
pub(crate) fn saw(function: NonNull<c_void>) {
    // Relaxed: an address; what it points to was there before.
    SEEN.store(function.as_ptr(), Ordering::Relaxed);
}

/// What `dlsym` is to do: return `answer`, or if `jump` is not 0 go on there.
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
    // SAFETY: a name that ends in 0, as `dlsym` asks for.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(hook) = hooks::exported(name) else { return go_on };
    if stands_behind(caller, name) {
        return go_on;
    }
    let is_default = handle == libc::RTLD_DEFAULT;
    let found = if is_default { None } else { look_up(handle, name) };
    match found {
        Some(found) if !hooks::is_hook(found.as_ptr()) => {
            hook.learn(found);
            saw(found);
            Decision::answer(Some(hook.function()))
        }
        None if !is_default => Decision::answer(None),
        // What is found is the export of this library: is there a function of the driver behind it? If not, a look-up that fails
        // leaves the text for `dlerror`.
        _ => Decision::answer(own(name).map(|_| hook.function()).or_else(|| look_up(libc::RTLD_NEXT, name))),
    }
}

/// Whether the caller is to get the real answer: this library, or one that has a function of this name itself. That is the
/// driver, or a library that stands before the driver as this one does: its function is behind the hook, and must find what is
/// behind it, not the hook.
fn stands_behind(caller: *const c_void, name: &CStr) -> bool {
    let Some(library) = image_of(caller) else { return false };
    let is_own = image_of(decide as *const c_void).is_some_and(|own| own.dli_fbase == library.dli_fbase);
    let defines = || {
        let found = look_up(open_loaded(library.dli_fname)?.as_ptr(), name)?;
        Some(image_of(found.as_ptr())?.dli_fbase == library.dli_fbase)
    };
    is_own || defines().unwrap_or(false)
}

/// The program or library that an address lies in.
fn image_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut facts = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a place for the answer; the address is looked up, not read.
    let known = unsafe { libc::dladdr(address, facts.as_mut_ptr()) } != 0;
    // SAFETY: filled by the call above, and zeros are a value.
    known.then(|| unsafe { facts.assume_init() })
}

/// A library by its name, if the process has loaded it. Loads nothing.
fn open_loaded(name: *const c_char) -> Option<NonNull<c_void>> {
    if name.is_null() {
        return None;
    }
    // SAFETY: a name that ends in 0, of a library that is there already or is not opened. The handle is kept: nobody unloads
    // what this library looks into.
    NonNull::new(unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) })
}

/// Stands in for `dlsym`: asks `decide`, which gets the return address too, and returns its answer or jumps on.
///
/// # Safety
///
/// As `dlsym`.
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

/// As on x86-64.
///
/// # Safety
///
/// As `dlsym`.
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
