//! Streams of the device memory that copies went to, while they exist, and work that memory was lent to: a release that would wait for
//! them is put off.
//!
//! Streams are held weakly, so that one ends with its owners. A reset of the device destroys the streams of its context under
//! their owners, so none is asked whose context has another number by now, or where the driver has no numbers.
//!
//! A stream that is known by its handle alone is never asked: nothing tells when that handle is gone, and a driver may crash on one
//! that is. The fence of the last loan to it is asked instead, so work that is enqueued there later is not seen.
#![allow(unsafe_code)] // Calls the driver.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use cudarc::driver::{CudaStream, sys};

use super::calls;
use super::code::Code;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::Mutex;

/// Of more, the one that was noted first is forgotten.
const KNOWN_MAX: usize = 64;

static KNOWN: OfProcess<Mutex<Vec<Known>>> = OfProcess::new(Mutex::default);

struct Known {
    stream: Weak<CudaStream>,
    /// The number of its context.
    context: u64,
}

std::thread_local! {
    /// The one that this thread noted last. Held, so that no other stream has its place.
    static LAST: RefCell<Weak<CudaStream>> = const { RefCell::new(Weak::new()) };
}

/// Remembers the stream of the device memory of a copy.
pub(crate) fn note(stream: &Arc<CudaStream>) {
    let place = Arc::as_ptr(stream);
    // A thread that is ending has no thread-local left, and looks each time.
    if LAST.try_with(|last| last.borrow().as_ptr() == place).unwrap_or(false) {
        return;
    }
    let Some(context) = number_of_context(stream) else { return };
    let _no_last = LAST.try_with(|last| last.replace(Arc::downgrade(stream)));
    let mut known = KNOWN.get().lock();
    // No other stream has the place of one that is known: what is held weakly keeps it.
    if known.iter().any(|other| other.stream.as_ptr() == place) {
        return;
    }
    known.retain(|other| other.stream.strong_count() > 0);
    if known.len() == KNOWN_MAX {
        known.remove(0);
    }
    known.push(Known { stream: Arc::downgrade(stream), context });
}

/// What memory was lent to, on one stream.
#[derive(Clone)]
struct Loan {
    /// The stream's number in statistics. Where a later stream has it, that one's work counts.
    stream: u64,
    device: usize,
    /// Asked under no lock: it may call the driver.
    is_under_way: Arc<dyn Fn() -> bool + Send + Sync>,
}

static LOANS: OfProcess<Mutex<Vec<Loan>>> = OfProcess::new(Mutex::default);

/// Remembers the work of a stream that memory was lent to, in the place of what was lent to that stream before.
pub(crate) fn note_loan(stream: u64, device: usize, is_under_way: impl Fn() -> bool + Send + Sync + 'static) {
    let loan = Loan { stream, device, is_under_way: Arc::new(is_under_way) };
    let mut loans = LOANS.get().lock();
    let place = loans.iter().position(|other| other.stream == stream);
    let place = place.or_else(|| (loans.len() == KNOWN_MAX).then_some(0));
    let _dropped_last = place.map(|place| loans.remove(place));
    loans.push(loan);
    drop(loans);
}

/// Whether work of `device` that memory was lent to is under way. Forgets what is over.
fn are_loans_under_way(device: usize) -> bool {
    let loans: Vec<_> = LOANS.get().lock().iter().filter(|loan| loan.device == device).cloned().collect();
    let is_over = |loan: &&Loan| !(loan.is_under_way)();
    let over: Vec<_> = loans.iter().take_while(is_over).collect();
    let is_one_of = |loan: &mut Loan| over.iter().any(|other| Arc::ptr_eq(&other.is_under_way, &loan.is_under_way));
    LOANS.get().lock().retain_mut(|loan| !is_one_of(loan));
    over.len() < loans.len()
}

/// Whether one of `device` has work. A context of the device is current.
pub(super) fn are_busy(device: sys::CUdevice) -> bool {
    if usize::try_from(device).is_ok_and(are_loans_under_way) {
        return true;
    }
    // Asked under no lock, and dropped there: this may be the last reference.
    let upgrade = |known: &Known| Some((known.stream.upgrade()?, known.context));
    let known: Vec<_> = KNOWN.get().lock().iter().filter_map(upgrade).collect();
    known.iter().any(|(stream, context)| {
        let is_there = || number_of_context(stream) == Some(*context);
        stream.context().cu_device() == device && is_there() && is_busy(stream)
    })
}

fn number_of_context(stream: &CudaStream) -> Option<u64> {
    super::context_id(stream.context().cu_ctx())?.ok()
}

fn is_busy(stream: &CudaStream) -> bool {
    // SAFETY: a stream that is alive.
    let captures = unsafe { calls::is_capturing(stream.cu_stream()) };
    let asked = match captures {
        // It runs nothing, and a release in relaxed mode leaves the capture valid; a query would not.
        Ok(true) => return false,
        // SAFETY: as above.
        Ok(false) => unsafe { calls::stream_query(stream.cu_stream()) },
        Err(code) => Err(code),
    };
    asked == Err(Code::NOT_READY)
}
