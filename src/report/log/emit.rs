//! Passes lines to the logger while the thread holds no lock of the pool.
//!
//! ```text
//!   no deferral:  line ──▶ the logger
//!   deferral:     line ──▶ this thread's queue ──the last deferral ends──▶ the logger
//! ```
//!
//! Loggers and listeners are user code: they may call the pool, take locks, or panic. A thread that holds a lock of the pool
//! across slow calls [defers](defer) its lines and listener calls until it has released the lock. Panics of user code are
//! [caught](pinpool_os::unwind).

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use pinpool_os::unwind::catch_panic;

type Call = Box<dyn FnOnce()>;

thread_local! {
    static DEFERRED: RefCell<Deferred> = const { RefCell::new(Deferred { deferrals: 0, calls: Vec::new() }) };
}

struct Deferred {
    deferrals: usize,
    calls: Vec<Call>,
}

/// While a deferral exists, the log lines and listener calls of its thread are queued. Dropping the last deferral of the thread makes
/// the queued calls in order.
#[must_use = "what was deferred is called when this is dropped"]
pub(crate) struct Deferral {
    /// A deferral must end on the thread on which it began.
    _not_send: PhantomData<*const ()>,
}

/// Queues this thread's log lines and listener calls until the result is dropped. Drop the result after releasing the lock.
pub(crate) fn defer() -> Deferral {
    // An exiting thread has no queue, and makes its calls immediately.
    let _ = DEFERRED.try_with(|deferred| deferred.borrow_mut().deferrals += 1);
    Deferral { _not_send: PhantomData }
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let end = |deferred: &RefCell<Deferred>| {
            let mut deferred = deferred.borrow_mut();
            deferred.deferrals = deferred.deferrals.saturating_sub(1);
            if deferred.deferrals == 0 { std::mem::take(&mut deferred.calls) } else { Vec::new() }
        };
        for call in DEFERRED.try_with(end).unwrap_or_default() {
            catch_panic(call);
        }
    }
}

fn is_deferring() -> bool {
    DEFERRED.try_with(|deferred| deferred.borrow().deferrals > 0).unwrap_or(false)
}

/// Calls a user's code now, or when the thread's last deferral ends.
pub(super) fn call(call: impl FnOnce() + 'static) {
    if is_deferring() {
        let _ = DEFERRED.try_with(|deferred| deferred.borrow_mut().calls.push(Box::new(call)));
    } else {
        catch_panic(call);
    }
}

/// Passes a line to the logger, now or when the thread's last deferral ends. The record has the file and line of the caller.
#[track_caller]
pub(super) fn line(target: &'static str, level: log::Level, line: fmt::Arguments<'_>) {
    let (file, number) = (Location::caller().file(), Location::caller().line());
    let emit = move |line: fmt::Arguments<'_>| {
        let mut record = log::Record::builder();
        record.level(level).target(target).module_path_static(Some(target)).file_static(Some(file)).line(Some(number));
        log::logger().log(&record.args(line).build());
    };
    if is_deferring() {
        let line = line.to_string();
        call(move || emit(format_args!("{line}")));
    } else {
        catch_panic(|| emit(line));
    }
}

/// Returns whether the program logs lines of this level.
#[inline]
pub(super) fn is_wanted(level: log::Level) -> bool {
    level <= log::STATIC_MAX_LEVEL && level <= log::max_level()
}

/// The logger of the unit tests, which keeps the lines of each thread.
#[cfg(test)]
pub(crate) mod captured {
    use std::cell::RefCell;

    thread_local! {
        static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }

    #[derive(Debug)]
    pub(crate) struct Line {
        pub(crate) level: log::Level,
        pub(crate) target: &'static str,
        pub(crate) text: String,
    }

    struct LinesByThread;

    impl log::Log for LinesByThread {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            // The target is the module path of each record.
            let (level, target, text) = (record.level(), record.module_path_static(), record.args().to_string());
            LINES.with_borrow_mut(|lines| lines.push(Line { level, target: target.unwrap_or_default(), text }));
        }
        fn flush(&self) {}
    }

    /// Returns the lines that `call` logs on this thread.
    pub(crate) fn lines_of(call: impl FnOnce()) -> Vec<Line> {
        let _ = log::set_logger(&LinesByThread).map(|()| log::set_max_level(log::LevelFilter::Trace));
        LINES.take();
        call();
        LINES.take()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn calls_wait_for_the_end_of_the_last_deferral_and_keep_their_order() {
        let made = Rc::new(RefCell::new(Vec::new()));
        let make = |number: u32| {
            let made = made.clone();
            call(move || made.borrow_mut().push(number));
        };
        let (outer, inner) = (defer(), defer());
        make(1);
        drop(outer);
        make(2);
        assert!(made.borrow().is_empty());
        drop(inner);
        make(3);
        assert_eq!(*made.borrow(), [1, 2, 3]);
    }

    #[test]
    fn a_call_that_panics_keeps_no_other_and_a_call_may_call() {
        let made = Rc::new(Cell::new(0));
        let deferral = defer();
        call(|| panic!("the listener panics"));
        let counted = made.clone();
        call(move || {
            let again = counted.clone();
            call(move || again.set(again.get() + 1));
        });
        drop(deferral);
        assert_eq!(made.get(), 1);
    }
}
