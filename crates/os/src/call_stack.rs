//! Call stacks: return addresses are collected immediately, names are resolved on request.
//!
//! Collecting addresses takes microseconds and never waits for a thread that resolves names. Resolving names reads the debug
//! information of files, which may take a second the first time, so no request waits for it.

use std::fmt;

/// Maximum number of frames that are named.
const FRAMES_MAX: usize = 32;

/// One call: the calling function, and its source location. An unknown file is empty, and an unknown line is 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Frame {
    pub name: String,
    pub file: String,
    pub line: u32,
}

/// Prints `loader.rs:212 collate`, or only the name if the file is unknown.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, file, line } = self;
        let file = file.rsplit('/').next().unwrap_or(file);
        if file.is_empty() { f.write_str(name) } else { write!(f, "{file}:{line} {name}") }
    }
}

/// The return addresses of the calls in progress, the innermost first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallStack(Vec<usize>);

impl CallStack {
    /// Collects the return addresses of the calls in progress; none without the feature `call-stacks`.
    pub fn here() -> Self {
        Self(native::calls())
    }

    /// Returns the frames of the program, the innermost first, without frames of the pool and the runtime.
    pub fn frames(&self) -> Vec<Frame> {
        self.first(FRAMES_MAX)
    }

    /// Returns the innermost frame of the program as text.
    pub fn place(&self) -> Option<String> {
        self.first(1).first().map(Frame::to_string)
    }

    fn first(&self, most: usize) -> Vec<Frame> {
        let mut frames = Vec::new();
        let mut left = self.0.iter();
        while let Some(&call) = left.next().filter(|_| frames.len() < most) {
            native::name(call, &mut frames);
        }
        frames.truncate(most);
        frames
    }
}

#[cfg(feature = "call-stacks")]
mod native {
    use std::ptr;

    use super::Frame;

    /// Maximum number of return addresses that are collected.
    const CALLS_MAX: usize = 48;
    /// Name prefixes of functions that are left out: functions of the pool, of its entry points for other languages, and of the
    /// runtime.
    const LEFT_OUT: &str = "pinpool:: pinpool_ _pinpool backtrace:: std:: core:: alloc:: __rust __libc_start cuMem";

    #[allow(unsafe_code)]
    pub(super) fn calls() -> Vec<usize> {
        let mut calls = Vec::with_capacity(CALLS_MAX);
        let add = |frame: &backtrace::Frame| {
            calls.push(frame.ip().addr());
            calls.len() < CALLS_MAX
        };
        // SAFETY: the unwinders of Linux and macOS can run in several threads at once. The synchronized function would wait for a
        // lock that threads hold while they resolve names.
        unsafe { backtrace::trace_unsynchronized(add) };
        calls
    }

    /// Adds the functions that contain the return address `call`: several if functions are inlined, none if the program has no
    /// symbols.
    pub(super) fn name(call: usize, frames: &mut Vec<Frame>) {
        backtrace::resolve(ptr::without_provenance_mut(call), |symbol| {
            let Some(name) = symbol.name().map(|name| format!("{name:#}")) else { return };
            if LEFT_OUT.split(' ').any(|own| name.trim_start_matches(['<', '&']).starts_with(own)) {
                return;
            }
            let file = symbol.filename().map(|file| file.display().to_string()).unwrap_or_default();
            frames.push(Frame { name, file, line: symbol.lineno().unwrap_or(0) });
        });
    }
}

/// Without the feature there are no addresses.
#[cfg(not(feature = "call-stacks"))]
mod native {
    use super::Frame;

    pub(super) fn calls() -> Vec<usize> {
        Vec::new()
    }

    pub(super) fn name(_: usize, _: &mut Vec<Frame>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_named_by_the_last_part_of_its_file_if_it_has_one() {
        let frame = |file: &str| Frame { name: "collate".to_owned(), file: file.to_owned(), line: 212 };
        assert_eq!(frame("/home/me/loader.rs").to_string(), "loader.rs:212 collate");
        assert_eq!(frame("").to_string(), "collate");
    }
}
