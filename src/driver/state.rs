//! Checks for a driver and a device. If one is missing, reports the known cause and a remedy.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;

use super::calls;
use super::code::{Code, FailedCall};
use crate::report::Finding;
use pinpool_os::host::limits;

/// The subject of this module's findings.
const CHECK: &str = "gpu";

/// Starts the driver (`cuInit`). On failure returns the meaning and the driver's code.
pub(crate) fn init() -> Result<(), (&'static str, Code)> {
    // SAFETY: may be called at any time, any number of times; 0 is the only valid flag.
    unsafe { calls::init(0) }.map_err(|FailedCall { code, .. }| (meaning(code), code))
}

/// Returns the meaning of an error code of `cuInit`.
fn meaning(code: Code) -> &'static str {
    match code {
        Code::NOT_INITIALIZED => {
            "CUDA_ERROR_NOT_INITIALIZED: the parent of this forked process used CUDA: spawn the process instead"
        }
        Code::STUB_LIBRARY => {
            "CUDA_ERROR_STUB_LIBRARY: this libcuda is the toolkit's stub for linking, not the driver's"
        }
        Code::DEVICE_UNAVAILABLE => "CUDA_ERROR_DEVICE_UNAVAILABLE: another process uses the device exclusively",
        Code::NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
        Code(101) => "CUDA_ERROR_INVALID_DEVICE",
        Code(304) => "CUDA_ERROR_OPERATING_SYSTEM",
        Code::NOT_FOUND => "the library has no cuInit",
        Code::SYSTEM_NOT_READY => "CUDA_ERROR_SYSTEM_NOT_READY",
        Code::SYSTEM_DRIVER_MISMATCH => {
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: the driver library and the kernel module have different versions"
        }
        Code::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: this GPU does not support the forward-compatible driver (cuda-compat)"
        }
        Code(999) => "CUDA_ERROR_UNKNOWN",
        _ => "the driver refused to start",
    }
}

/// Returns the remedy for an error code of `cuInit`. `library` is the path of the driver's library, `visible` is the value of
/// `CUDA_VISIBLE_DEVICES`, and `closed` is a device file that this user may not open.
fn remedy(code: Code, library: &str, visible: Option<&str>, closed: Option<&str>) -> String {
    match (code, visible, closed) {
        (Code::NOT_INITIALIZED, ..) => {
            "spawn the process instead of forking it (multiprocessing's method spawn, a DataLoader's multiprocessing_context), or use \
             CUDA in its parent only after the fork"
                .to_owned()
        }
        (Code::STUB_LIBRARY, ..) => {
            format!(
                "remove {library} from the library search path (LD_LIBRARY_PATH, ldconfig) and install the driver: the stub hides \
                 the driver of the same name"
            )
        }
        (Code::DEVICE_UNAVAILABLE, ..) => "end the other process, or set the device's compute mode to DEFAULT (nvidia-smi -c 0)".to_owned(),
        (Code::NO_DEVICE, Some(visible), _) => {
            format!("CUDA_VISIBLE_DEVICES={visible} hides every GPU: unset it, or name an existing GPU")
        }
        (Code::SYSTEM_NOT_READY, ..) => "start nvidia-fabricmanager and wait until it is ready".to_owned(),
        (Code::SYSTEM_DRIVER_MISMATCH, ..) => {
            "reboot, or reload the nvidia kernel modules: the driver was updated while they stayed loaded".to_owned()
        }
        (Code::COMPAT_NOT_SUPPORTED_ON_DEVICE, ..) => format!("take {library} out of LD_LIBRARY_PATH, or update the driver"),
        (_, _, Some(closed)) => {
            format!("this user may not open {closed}: allow the user's group, or pass it to the container")
        }
        _ => "check that nvidia-smi works; start a container with --gpus all".to_owned(),
    }
}

/// Returns the finding about the GPU with this ordinal: `Ok` if the driver provides the GPU, `Note` if there is neither GPU nor
/// driver, else `Warning`.
pub(crate) fn find(ordinal: u32) -> Finding {
    let signs = limits::nvidia_devices(Path::new("/"));
    if !super::is_present() {
        return absent(&dlopen_error(), signs.first().map(String::as_str));
    }
    let library = super::symbol(c"cuInit").map_or_else(|| "libcuda".to_owned(), file_of);
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let visible = visible.as_deref();
    if let Err((what, code)) = init() {
        let closed = closed_device(&signs);
        let found = format!("the driver ({library}) does not start: {what} ({})", code.number());
        return Finding::warning(CHECK, found).remedy(remedy(code, &library, visible, closed.as_deref()));
    }
    let devices = calls::device_count().unwrap_or(0);
    if devices == 0 {
        let found = format!("the driver ({library}) lists no device");
        return Finding::warning(CHECK, found).remedy(remedy(Code::NO_DEVICE, &library, visible, None));
    }
    let version = calls::driver_version().unwrap_or(0);
    let version = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    if i64::from(ordinal) >= i64::from(devices) {
        let what = if devices == 1 { "1 device".to_owned() } else { format!("{devices} devices") };
        let found = format!("no GPU {ordinal}: the driver ({library}, {version}) lists {what}");
        return Finding::warning(CHECK, found).remedy("set another PINPOOL_DEVICE, or check CUDA_VISIBLE_DEVICES");
    }
    let name = name(ordinal).unwrap_or_else(|| "without a name".to_owned());
    let other = super::library::symbol_before(c"cuInit").map_or_else(String::new, |stub| {
        format!("; cudarc and other programs that ask for libcuda.so get {} instead", file_of(stub))
    });
    Finding::ok(CHECK, format!("GPU {ordinal} of {devices}, {name}, {version}, {library}{other}"))
}

/// Returns the finding about a driver library that is missing or cannot be loaded. `why` is the loader's message, and `sign` is a
/// path at which the kernel shows a GPU.
fn absent(why: &str, sign: Option<&str>) -> Finding {
    // The loader's message for a missing library contains this text. Any other message is about a library that cannot be loaded.
    let is_broken = !why.is_empty() && !why.contains("No such file");
    match sign {
        _ if is_broken => Finding::warning(CHECK, format!("the driver's library cannot be loaded: {why}")).remedy(
            "install the driver's library for this system, or remove the broken one from the library search path",
        ),
        Some(sign) => {
            Finding::warning(CHECK, format!("a GPU is present ({sign}), but no driver library (libcuda.so.1)"))
                .remedy("install the driver's user libraries; in a container start it with --gpus all")
        }
        None => Finding::note(CHECK, "no GPU and no CUDA driver (libcuda.so.1)"),
    }
}

/// Returns the loader's message for a driver that cannot be loaded, or an empty text.
fn dlopen_error() -> String {
    // SAFETY: loads nothing that `is_present` did not try to load; sets this thread's error.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return String::new();
    }
    // SAFETY: this thread's own error; null if there is none.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: a C string that lives until this thread's next call to the loader.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the file of the library that contains this function.
fn file_of(function: NonNull<c_void>) -> String {
    // SAFETY: null is a valid value of its pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address and a valid out-pointer.
    let known = unsafe { libc::dladdr(function.as_ptr(), &raw mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return "libcuda".to_owned();
    }
    // SAFETY: the name of a library that is never unloaded.
    unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned()
}

/// Returns a device file that exists but that this user may not read and write.
fn closed_device(signs: &[String]) -> Option<String> {
    let nodes = signs.iter().filter(|sign| sign.starts_with("/dev/")).cloned();
    let may_open = |path: &str| {
        let Ok(path) = CString::new(path) else { return false };
        // SAFETY: `path` is a C string; the call checks permissions and changes nothing.
        unsafe { libc::access(path.as_ptr(), libc::R_OK | libc::W_OK) == 0 }
    };
    let control = Some("/dev/nvidiactl".to_owned()).filter(|path| Path::new(path).exists());
    control.into_iter().chain(nodes).find(|path| !may_open(path))
}

fn name(ordinal: u32) -> Option<String> {
    const BYTES: usize = 128;
    let mut text: [c_char; BYTES] = [0; BYTES];
    let (room, device) = (c_int::try_from(BYTES - 1).ok()?, c_int::try_from(ordinal).ok()?);
    // SAFETY: the buffer is one byte longer than the call may write, so it ends in 0.
    unsafe { calls::device_name(text.as_mut_ptr(), room, device) }.ok()?;
    // SAFETY: within the buffer, and the last byte is 0.
    Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Severity;

    #[test]
    fn each_known_cause_has_its_remedy() {
        let library = "/usr/local/cuda/lib64/stubs/libcuda.so";
        for (code, visible, closed, word) in [
            (3, None, None, "spawn"),
            (34, None, None, library),
            (46, None, None, "compute mode"),
            (100, Some(""), None, "CUDA_VISIBLE_DEVICES= hides"),
            (100, Some("7"), None, "CUDA_VISIBLE_DEVICES=7 hides"),
            (100, None, None, "--gpus all"),
            (100, None, Some("/dev/nvidia0"), "may not open /dev/nvidia0"),
            (304, None, Some("/dev/nvidiactl"), "may not open /dev/nvidiactl"),
            (802, None, None, "fabricmanager"),
            (803, None, None, "reload the nvidia kernel modules"),
            (804, None, None, library),
            (999, None, None, "nvidia-smi"),
            (12345, None, None, "nvidia-smi"),
        ] {
            let text = remedy(Code(code), library, visible, closed);
            assert!(text.contains(word), "{code}: {text}");
            assert!(!meaning(Code(code)).is_empty());
        }
    }

    #[test]
    fn without_a_library_the_signs_of_a_gpu_make_the_difference() {
        let missing = "libcuda.so.1: cannot open shared object file: No such file or directory";
        for (why, sign, severity, word) in [
            (missing, None, Severity::Note, "no GPU and no CUDA driver"),
            (missing, Some("/dev/nvidia0"), Severity::Warning, "a GPU is present (/dev/nvidia0)"),
            ("libcuda.so.1: file too short", None, Severity::Warning, "file too short"),
        ] {
            let found = absent(why, sign);
            assert_eq!(found.severity, severity, "{found:?}");
            assert_eq!(found.remedy.is_some(), severity == Severity::Warning, "{found:?}");
            assert!(found.found.contains(word), "{found:?}");
        }
    }
}
