//! Errors. Every text is one line; [`report`](Error::report) adds the holders of memory.

use std::borrow::Cow;
use std::time::Duration;
use std::{fmt, io};

use pinpool_observe::diagnosis::shortage::{ExplainedRefusal, RefusedBy};
use pinpool_os::format::{Size, Time};

/// Result of this crate's fallible calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a pool call failed.
///
/// The text is for people and may change. Code should branch on the `is_...` methods. The content is boxed so that a
/// `Result<PinnedBuf, Error>` is small.
#[derive(Clone, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<ErrorKind>);

/// Writes the kind and the text, which `unwrap` and a `main` that returns the error print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.name())
    }
}

/// Returns `text` as a sentence, with a capital first letter and a full stop.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_ascii_uppercase(), letters.as_str()))
}

/// A request that found no memory.
#[derive(Debug, Clone)]
pub(crate) struct NoMemory {
    pub(crate) requested_bytes: u64,
    pub(crate) refused: ExplainedRefusal,
    /// Bytes of the pool by state.
    pub(crate) usage: String,
    /// The holders of memory: lines for [`Error::report`].
    pub(crate) report: String,
}

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requested_bytes, refused, usage, .. } = self;
        write!(f, "cannot allocate {}: {}; {usage}", refused.rounded(*requested_bytes), refused.found)?;
        if refused.remedy.is_empty() { Ok(()) } else { write!(f, ". {}", sentence(&refused.remedy)) }
    }
}

#[derive(Debug, Clone, thiserror::Error)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only CUDA has device addresses.
pub(crate) enum ErrorKind {
    #[error("cannot allocate {}: a buffer holds at most {}", Size(*len as u64), Size(*max_len as u64))]
    Length { len: usize, max_len: usize },
    #[error("cannot allocate {} aligned to {align}: the alignment must be a power of two of at most {max_align}", Size(*len as u64))]
    Alignment { len: usize, align: usize, max_align: usize },
    #[error("{0}")]
    Limit(NoMemory),
    #[error("{0}")]
    Timeout(NoMemory),
    #[error("{0}")]
    Backend(NoMemory),
    #[error("{what} is unavailable: {why}")]
    Unavailable { what: String, why: String },
    #[error("{name}={value}: {why}")]
    Setting { name: &'static str, value: String, why: String },
    #[error("unknown setting {name}; {advice}")]
    UnknownSetting { name: String, advice: String },
    #[error("invalid argument: {why}")]
    Argument { why: String },
    #[error("invalid stream or event: {why}")]
    Handle { why: String },
    #[error("cannot copy {len}B: {why}")]
    CopyRefused { len: usize, why: String, code: Option<i64> },
    #[error("no device address for {} of memory: {why}", Size(*len as u64))]
    Unmapped { len: usize, why: String },
    #[error(
        "the pool belongs to process {parent}, and its forked child {child} inherits neither memory nor devices; build a \
         new pool after the fork"
    )]
    Forked { parent: u32, child: u32 },
    #[error("the pool or partition was closed")]
    Closed,
    #[error(
        "cannot allocate {}: a driver call did not return within {}; wait longer (PINPOOL_WAIT) or pin memory in advance \
         (PINPOOL_RESERVE)",
        Size(*requested_bytes), Time(*waited)
    )]
    Late { requested_bytes: u64, waited: Duration },
    #[error("device failure: {why}")]
    DeviceFailed { why: String, code: Option<i64> },
    #[error(
        "the stream is capturing a graph, or the event is part of one, and the pool cannot know when launches use the buffer; copy \
         before the capture begins or after it ends, or return the buffer after the last launch, on the stream of that launch"
    )]
    CapturingStream,
}

macro_rules! predicates {
    ($($(#[$doc:meta])+ $predicate:ident, $name:ident = $($kind:ident)|+;)+) => {
        impl Error {
            $($(#[$doc])+ pub fn $predicate(&self) -> bool { matches!(*self.0, $(ErrorKind::$kind { .. })|+) })+

            fn name(&self) -> &'static str {
                match *self.0 { $($(ErrorKind::$kind { .. })|+ => stringify!($name),)+ }
            }
        }
    };
}
predicates! {
    /// Returns whether the length, alignment, range, element type or handle of the request is invalid.
    is_invalid_request, InvalidRequest = Length | Alignment | Argument | Handle;
    /// Returns whether the request does not fit within the limit of its partition, of the pool (`PINPOOL_MAX_BYTES`), or of
    /// several pools (`auto`, `PINPOOL_LEDGER`), or whether earlier requests are waiting.
    is_limit, Limit = Limit | Timeout;
    /// Returns whether the driver or the kernel refused, the chosen backend is not available, or a driver call for an async
    /// request did not return within its wait.
    is_backend, Backend = Backend | Unavailable | Late;
    /// Returns whether a setting is unknown or invalid, contradicts another, or needs a feature that this build lacks, or
    /// whether a shared limit cannot be joined.
    is_setting, Setting = Setting | UnknownSetting;
    /// Returns whether the target or source of a copy is too small, or the driver refused the copy. Nothing was enqueued. Other
    /// refusals have other predicates, such as [`is_capturing_stream`](Self::is_capturing_stream).
    is_copy_refused, CopyRefused = CopyRefused;
    /// Returns whether the memory has no address on the device, because it was not pinned for that device.
    is_unmapped, Unmapped = Unmapped;
    /// Returns whether the device failed or refused a fence, so that it is unknown whether a copy or other work has completed.
    is_device_failed, DeviceFailed = DeviceFailed;
    /// Returns whether the stream is capturing a graph, or the event was recorded in a capture: a copy was refused, or the end of
    /// other work is unknown.
    is_capturing_stream, CapturingStream = CapturingStream;
    /// Returns whether the pool was created before this process was forked.
    is_forked, Forked = Forked;
    /// Returns whether the pool or the partition was closed ([`Pool::close`](crate::Pool::close),
    /// [`Partition::close`](crate::Partition::close)).
    is_closed, Closed = Closed;
}

impl Error {
    /// Returns whether the machine lacks the backend, or a driver for the stream or event, so that the same call would fail again.
    /// Implies [`is_backend`](Self::is_backend).
    pub fn is_unavailable(&self) -> bool {
        matches!(*self.0, ErrorKind::Unavailable { .. })
    }

    /// Returns whether the request was refused only after its whole wait, so that a longer wait may help. Implies
    /// [`is_limit`](Self::is_limit) or, if a driver call for an async request was late, [`is_backend`](Self::is_backend).
    pub fn is_timeout(&self) -> bool {
        matches!(*self.0, ErrorKind::Timeout(..) | ErrorKind::Late { .. })
    }

    /// Returns whether the driver knows no such stream or event, or no context is current. Implies
    /// [`is_invalid_request`](Self::is_invalid_request).
    pub fn is_invalid_handle(&self) -> bool {
        matches!(*self.0, ErrorKind::Handle { .. })
    }

    /// Returns the error number of the driver or the kernel if it gave one: for refused memory, refused copies and failed devices.
    pub fn code(&self) -> Option<i64> {
        if let ErrorKind::CopyRefused { code, .. } | ErrorKind::DeviceFailed { code, .. } = *self.0 {
            return code;
        }
        if let RefusedBy::Source { code } = self.no_memory()?.refused.by { code } else { None }
    }

    /// Returns the bytes of the request that failed; `None` if the error is not about the size of a request.
    pub fn requested_bytes(&self) -> Option<u64> {
        match *self.0 {
            ErrorKind::Length { len, .. } | ErrorKind::Alignment { len, .. } => Some(len as u64),
            ErrorKind::Late { requested_bytes, .. } => Some(requested_bytes),
            _ => Some(self.no_memory()?.requested_bytes),
        }
    }

    /// Returns the variable of the wrong or unknown setting, such as `PINPOOL_MAX_BYTES`. For a setting without a variable this is
    /// the name of the setting. `None` if the error is about something else.
    pub fn setting(&self) -> Option<&str> {
        match &*self.0 {
            ErrorKind::Setting { name, .. } => Some(name),
            ErrorKind::UnknownSetting { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the error's text; if a request found no memory, also the largest holders, one per line.
    pub fn report(&self) -> String {
        self.no_memory().map_or_else(|| self.to_string(), |no_memory| format!("{self}\n{}", no_memory.report))
    }

    fn no_memory(&self) -> Option<&NoMemory> {
        match &*self.0 {
            ErrorKind::Limit(found) | ErrorKind::Timeout(found) | ErrorKind::Backend(found) => Some(found),
            _ => None,
        }
    }
}

impl Error {
    /// Returns the error of a request that has waited, for its whole wait if it `timed_out`.
    pub(crate) fn after_wait(self, timed_out: bool) -> Self {
        match *self.0 {
            ErrorKind::Limit(no_memory) if timed_out => ErrorKind::Timeout(no_memory).into(),
            other => other.into(),
        }
    }

    /// Returns the first of these setting errors, extended by the names of the other wrong settings; `None` if there are no errors.
    pub(crate) fn first_of(errors: Vec<Self>) -> Option<Self> {
        let mut errors = errors.into_iter();
        let mut first = errors.next()?;
        let names = errors.as_slice().iter().filter_map(Self::setting);
        let mut others: Vec<_> = names.filter(|&name| Some(name) != first.setting()).collect();
        others.dedup();
        if let ErrorKind::Setting { why, .. } | ErrorKind::UnknownSetting { advice: why, .. } = &mut *first.0
            && !others.is_empty()
        {
            *why += &format!("; also wrong: {}", others.join(", "));
        }
        Some(first)
    }

    /// Returns the error of a copy refused before anything was enqueued, with the reason. For implementors of
    /// [`CopyTarget`](crate::copy::CopyTarget).
    pub fn copy_refused(len: usize, why: impl fmt::Display) -> Self {
        ErrorKind::CopyRefused { len, why: why.to_string(), code: None }.into()
    }

    /// Returns the error of a stream that is capturing a graph ([`is_capturing_stream`](Self::is_capturing_stream)). For implementors of
    /// [`CopyStream`](crate::copy::CopyStream).
    pub fn capturing_stream() -> Self {
        ErrorKind::CapturingStream.into()
    }

    /// Returns the error of a stream or event that the driver does not know
    /// ([`is_invalid_handle`](Self::is_invalid_handle)), with the reason. For implementors of [`CopyStream`](crate::copy::CopyStream).
    pub fn invalid_handle(why: impl fmt::Display) -> Self {
        ErrorKind::Handle { why: why.to_string() }.into()
    }

    /// Returns the error of a driver, device or thread that this machine lacks ([`is_unavailable`](Self::is_unavailable)), with
    /// the reason. For implementors of [`CopyStream`](crate::copy::CopyStream).
    pub fn unavailable(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        ErrorKind::Unavailable { what: what.to_string(), why: why.to_string() }.into()
    }

    /// Returns the error of a device failure that leaves the state of a copy unknown. For implementors of
    /// [`Fence`](crate::copy::Fence).
    pub fn device_failed(why: impl fmt::Display) -> Self {
        ErrorKind::DeviceFailed { why: why.to_string(), code: None }.into()
    }

    /// Adds the error number of the driver to a refused copy or failed device.
    #[must_use]
    pub fn with_code(mut self, number: i64) -> Self {
        if let ErrorKind::CopyRefused { code, .. } | ErrorKind::DeviceFailed { code, .. } = &mut *self.0 {
            *code = Some(number);
        }
        self
    }
}

/// Converts the error for code that returns [`std::io`] errors, such as `file.read_exact(buf.wait_slice_mut()?)`. The kind is
/// `TimedOut` after a wait, `QuotaExceeded` for another limit, `OutOfMemory` or `Unsupported` for a backend, `InvalidInput` for
/// invalid requests, settings, refused copies and unmapped memory, and otherwise `Other`. `get_ref` returns the original error.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match *error.0 {
            _ if error.is_timeout() => io::ErrorKind::TimedOut,
            ErrorKind::Limit { .. } => io::ErrorKind::QuotaExceeded,
            ErrorKind::Backend { .. } => io::ErrorKind::OutOfMemory,
            ErrorKind::Unavailable { .. } => io::ErrorKind::Unsupported,
            _ if error.is_invalid_request() || error.is_setting() || error.is_copy_refused() || error.is_unmapped() => {
                io::ErrorKind::InvalidInput
            }
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(kind))
    }
}

/// A refusal by a driver or the kernel: the call, the reason, the error number and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {what}{}{}", code.map(|code| format!(" (code {code})")).unwrap_or_default(),
        remedy.as_ref().map(|remedy| format!("; {remedy}")).unwrap_or_default())]
pub struct SourceError {
    pub(crate) call: &'static str,
    pub(crate) code: Option<i64>,
    pub(crate) what: String,
    pub(crate) remedy: Option<Cow<'static, str>>,
    pub(crate) retry: Retry,
}

/// When a refused call may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retry {
    /// As soon as another call or a stream capture ends.
    Soon,
    /// When memory or quota becomes available again.
    Later,
    /// Never: the arguments or a limit of the process forbid it.
    Never,
}

impl SourceError {
    /// Returns the error of `call`, which failed with `what`.
    pub fn new(call: &'static str, what: impl Into<String>) -> Self {
        Self { call, code: None, what: what.into(), remedy: None, retry: Retry::Later }
    }

    /// Returns the error of `call`, which failed and set the calling thread's `errno`.
    pub(crate) fn last_os(call: &'static str) -> Self {
        let error = std::io::Error::last_os_error();
        let code = error.raw_os_error().map(i64::from);
        Self { code, ..Self::new(call, error.kind().to_string()) }
    }

    /// Adds the error number of the driver or the kernel.
    #[must_use]
    pub fn with_code(self, code: i64) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Sets when the same call may succeed. The default is [`Retry::Later`].
    #[must_use]
    pub fn with_retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    /// Adds the likely cause and what to change.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<Cow<'static, str>>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// Adds the size of the request, and the limit if it is known.
    pub(crate) fn with_bytes(mut self, asked: usize, limit: Option<u64>) -> Self {
        let limit = limit.map_or_else(String::new, |limit| format!(", limit {}", Size(limit)));
        self.what = format!("{} for {}{limit}", self.what, Size(asked as u64));
        self
    }

    /// Appends another refusal.
    #[cfg(feature = "cuda")]
    pub(crate) fn and_also(mut self, other: &Self) -> Self {
        let code = self.code.take().map_or_else(String::new, |code| format!(" (code {code})"));
        self.what = format!("{}{code}; then {other}", self.what);
        self
    }

    /// Splits the error into the failure and the remedy.
    #[doc(hidden)]
    pub fn unstable_split(mut self) -> (String, Option<String>) {
        let remedy = self.remedy.take();
        (self.to_string(), remedy.map(Cow::into_owned))
    }

    /// Returns the call that failed.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the error number of the driver or the kernel, if known.
    pub fn code(&self) -> Option<i64> {
        self.code
    }

    /// Returns when the same call may succeed.
    pub fn retry(&self) -> Retry {
        self.retry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_error_has_request_limit_usage_and_remedy() {
        let usage = "held 490B, in use 400B, idle 90B, in flight 0B".to_owned();
        let remedy = "raise PINPOOL_MAX_BYTES";
        let refused = ExplainedRefusal {
            by: RefusedBy::Limit { could_fit: true },
            needed_bytes: 128,
            found: "exceeds the pool limit of 512B (PINPOOL_MAX_BYTES)".to_owned(),
            remedy: remedy.to_owned(),
        };
        let error =
            Error::from(ErrorKind::Limit(NoMemory { requested_bytes: 64, refused, usage, report: String::new() }));
        assert!(error.is_limit() && !error.is_backend());
        assert_eq!((error.requested_bytes(), error.setting()), (Some(64), None));
        let text = error.to_string();
        assert_eq!([format!("{error:?}"), format!("{error:#?}")], [(); 2].map(|()| format!("Limit: {text}")));
        assert_eq!(
            text,
            "cannot allocate 64B (rounded to 128B): exceeds the pool limit of 512B (PINPOOL_MAX_BYTES); held 490B, in use 400B, \
             idle 90B, in flight 0B. Raise PINPOOL_MAX_BYTES."
        );
    }
}
