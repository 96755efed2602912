//! The callback that receives the log lines.
//!
//! A line is passed on without a lock, so a callback may log, use pools, and set another callback. Setting another callback waits
//! until the previous one has returned in all threads.
//!
//! - **log-I1**: a sink is never freed, and is reused for the same callback and data. A thread increments the sink's counter
//!   before it checks again whether the sink is current, and a setter replaces the current sink before it reads the counter.
//!   So the thread sees the new sink, or the setter sees the thread in the counter.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering, fence};
use std::thread;
use std::time::Duration;

use log::{LevelFilter, Log, Metadata, Record};

use crate::call::{Failure, guarded, text_for_c};
use crate::status::pp_status;

/// Levels of log lines. Each level includes those above it in this list.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum pp_log_level {
    /// No lines.
    PP_LOG_OFF = 0,
    /// Failures that the library cannot recover from.
    PP_LOG_ERROR = 1,
    /// Conditions that need a change of settings or of the machine.
    PP_LOG_WARN = 2,
    /// Creation and end of pools, each doubling of their memory, TensorFlow's lines.
    PP_LOG_INFO = 3,
    /// Each request that takes memory from the system, each end of a wait, and each release for another pool.
    PP_LOG_DEBUG = 4,
    /// Everything.
    PP_LOG_TRACE = 5,
}

/// Receives a log line: its level (pp_log_level), its text in UTF-8 without a final line break, valid during the call, and the
/// `user_data` of pp_set_log.
///
/// Called from any thread, possibly from several at once, while the library holds no lock, so it may call any function of the
/// library. But it must not return or record the buffer that the interrupted call of this thread records: that would wait for
/// the interrupted call. It must not throw or longjmp.
pub type pp_log_fn = Option<unsafe extern "C" fn(level: c_int, text: *const c_char, user_data: *mut c_void)>;

type Callback = unsafe extern "C" fn(c_int, *const c_char, *mut c_void);

/// A callback with its data, its latest level, and the number of threads that may be running it.
#[derive(Debug)]
struct Sink {
    callback: Callback,
    user_data: *mut c_void,
    level: AtomicI32,
    running: AtomicUsize,
    process_id: u32,
    /// The sink created before this one.
    earlier: AtomicPtr<Sink>,
}

impl Sink {
    fn filter(&self) -> LevelFilter {
        filter_of_level(self.level.load(Ordering::SeqCst)).unwrap_or(LevelFilter::Off)
    }
}

static CURRENT: AtomicPtr<Sink> = AtomicPtr::new(ptr::null_mut());
static NEWEST: AtomicPtr<Sink> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// Number of callbacks that this thread is running.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

struct CallbackLogger;

impl Log for CallbackLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // SAFETY: null or never freed (log-I1).
        unsafe { CURRENT.load(Ordering::SeqCst).as_ref() }.is_some_and(|sink| metadata.level() <= sink.filter())
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = text_for_c(&record.args().to_string());
        // SAFETY: null or never freed (log-I1).
        while let Some(sink) = unsafe { CURRENT.load(Ordering::SeqCst).as_ref() } {
            let _running = RunningCallback::begin(sink);
            if ptr::eq(CURRENT.load(Ordering::SeqCst), sink) {
                if record.level() <= sink.filter() {
                    // SAFETY: the caller of pp_set_log permits calls while the sink is current, and permits them to end
                    // afterwards: the setter of the next sink waits for them (log-I1).
                    unsafe { (sink.callback)(record.level() as c_int, text.as_ptr(), sink.user_data) };
                }
                return;
            }
        }
    }

    fn flush(&self) {}
}

/// Counts the current thread as one that may be running the callback of a sink, until this is dropped.
struct RunningCallback<'a>(&'a Sink);

impl<'a> RunningCallback<'a> {
    fn begin(sink: &'a Sink) -> Self {
        sink.running.fetch_add(1, Ordering::SeqCst);
        let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
        Self(sink)
    }
}

impl Drop for RunningCallback<'_> {
    fn drop(&mut self) {
        let _ = DEPTH.try_with(|depth| depth.set(depth.get() - 1));
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

fn filter_of_level(level: c_int) -> Option<LevelFilter> {
    LevelFilter::iter().nth(usize::try_from(level).ok()?)
}

/// Passes the log lines of all pools up to `level` (pp_log_level) to `callback`, replacing an earlier one; NULL disables it.
/// Without a callback, or with PP_LOG_OFF, log lines are dropped, but each kind of warning about settings or the machine is
/// written once to standard error.
///
/// When this function returns, the earlier callback has returned in all threads and is not called again, so its `user_data` may
/// be freed. The caller must not hold a lock that the earlier callback takes. A call from inside a callback does not wait. Each
/// new pair of `callback` and `user_data` costs a few bytes, which are never freed.
///
/// - PP_INVALID_ARGUMENT: no such level.
/// - PP_LOGGER_SET: the process has already installed a Rust logger.
///
/// # Safety
///
/// `callback` may be called with `user_data` from any thread until another call has replaced it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pp_set_log(callback: pp_log_fn, user_data: *mut c_void, level: c_int) -> pp_status {
    guarded(|| {
        let why = || format!("the argument `level` is {level}; the levels are 0 (PP_LOG_OFF) to 5 (PP_LOG_TRACE)");
        filter_of_level(level).ok_or_else(|| Failure::argument(why()))?;
        install()?;
        replace(callback.map_or(ptr::null_mut(), |callback| sink_of(callback, user_data, level)));
        Ok(pp_status::PP_OK)
    })
}

/// Installs `CallbackLogger` as the logger of the crate `log`, at the first call. Fails if the process has another logger.
fn install() -> Result<(), Failure> {
    static IS_OURS: OnceLock<bool> = OnceLock::new();
    let text = "another Rust logger already receives the log lines of this process";
    let is_ours = *IS_OURS.get_or_init(|| log::set_logger(&CallbackLogger).is_ok());
    if is_ours { Ok(()) } else { Err(Failure::new(pp_status::PP_LOGGER_SET, text)) }
}

/// Returns the sink of this callback and data, with this level, and creates it at the first call in this process.
fn sink_of(callback: Callback, user_data: *mut c_void, level: c_int) -> *mut Sink {
    let process_id = std::process::id();
    let mut next = NEWEST.load(Ordering::SeqCst);
    // SAFETY: null or never freed (log-I1).
    while let Some(sink) = unsafe { next.as_ref() } {
        let is_same = ptr::fn_addr_eq(sink.callback, callback) && sink.user_data == user_data;
        if is_same && sink.process_id == process_id {
            sink.level.store(level, Ordering::SeqCst);
            return next;
        }
        next = sink.earlier.load(Ordering::SeqCst);
    }
    let (level, running, earlier) = (AtomicI32::new(level), AtomicUsize::new(0), AtomicPtr::new(ptr::null_mut()));
    let sink = Box::into_raw(Box::new(Sink { callback, user_data, level, running, process_id, earlier }));
    let earlier = NEWEST.swap(sink, Ordering::SeqCst);
    // SAFETY: the sink was created above and is never freed. A thread that finds it before this store sees the list end
    // there, and may create another sink for a callback that has one.
    unsafe { &*sink }.earlier.store(earlier, Ordering::SeqCst);
    sink
}

/// Sets the level at which the crate `log` drops lines to the level of the current sink, which also checks it. If other threads
/// replace the sink meanwhile, the last one to set the level sees this and repeats.
fn update_max_level() {
    loop {
        let current = CURRENT.load(Ordering::SeqCst);
        // SAFETY: null or never freed (log-I1).
        let filter = || unsafe { current.as_ref() }.map_or(LevelFilter::Off, Sink::filter);
        let set = filter();
        log::set_max_level(set);
        fence(Ordering::SeqCst);
        if CURRENT.load(Ordering::SeqCst) == current && filter() == set {
            return;
        }
    }
}

/// Makes `sink` the current sink, and waits until no thread runs the callback of the previous sink. Does not wait inside a
/// callback.
fn replace(sink: *mut Sink) {
    let before = CURRENT.swap(sink, Ordering::SeqCst);
    update_max_level();
    if before == sink {
        return;
    }
    // SAFETY: null or never freed (log-I1).
    let Some(before) = (unsafe { before.as_ref() }) else { return };
    let is_inside = DEPTH.try_with(Cell::get).unwrap_or(1) > 0;
    // The threads that were running the previous callback before a fork do not exist in the child.
    let is_this_process = before.process_id == std::process::id();
    while !is_inside && is_this_process && before.running.load(Ordering::SeqCst) > 0 {
        thread::sleep(Duration::from_micros(50));
    }
}
