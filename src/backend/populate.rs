//! Brings the pages of a fresh region into memory, by many threads at once.
//!
//! One thread faults in 4 to 10 GB/s of huge pages, sixteen about 30: a reserve of gigabytes is made this way.
#![allow(unsafe_code)] // Asks the kernel for the pages of memory that is ours.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};

use parking_lot::RwLock;

use super::pages;
use super::placement::Placement;
use super::{PAGE_BYTES, RANGE_ALIGN_BYTES, Region, SourceError};

/// Most bytes that a thread asks for at once: what one report of progress is about.
const MOST_CHUNK_BYTES: usize = 64 << 20;

/// Chunks that each thread gets at least, so that none waits long for the last one.
const CHUNKS_PER_THREAD: usize = 4;

/// Most bytes that the kernel is asked for in one call: while it brings them, it lets nobody else change the address
/// space, neither a thread that starts nor a driver that maps.
const ASK_BYTES: usize = 2 << 20;

/// Makes every page of `region` present and zero, with `threads` threads that run where `placement` says; `progress` hears,
/// on this thread, the bytes done so far.
///
/// # Safety
///
/// `region` was just mapped: it reads as zero, and nobody else uses it.
pub(super) unsafe fn populate(
    region: &Region,
    threads: usize,
    placement: Option<&Placement>,
    progress: &dyn Fn(usize),
) -> Result<(), SourceError> {
    if let Some(placement) = placement {
        placement.place(region.start(), pages::mapped_bytes(region.len_bytes())?);
    }
    let chunks = Chunks::of(region, threads);
    let (report, reports) = mpsc::channel();
    // All are there before the first begins: a thread that starts waits for the pages that others have asked for.
    let (here, arrivals) = mpsc::channel();
    let start = RwLock::new(());
    std::thread::scope(|scope| {
        let not_yet = start.write();
        let spawn = |_: &usize| {
            let (chunks, report, here, start) = (&chunks, report.clone(), here.clone(), &start);
            let fill = move || {
                placement.iter().for_each(|placement| placement.settle());
                // Whoever spawned us listens.
                let _ = here.send(());
                drop(start.read());
                chunks.fill(&report);
            };
            std::thread::Builder::new().name("pinpool-populate".to_owned()).spawn_scoped(scope, fill).is_ok()
        };
        // As many as the system lets us have; with none at all the work is done here, and progress heard afterwards.
        let spawned = (0..threads.clamp(1, chunks.count())).filter(spawn).count();
        arrivals.iter().take(spawned).for_each(drop);
        drop(not_yet);
        if spawned == 0 {
            chunks.fill(&report);
        }
        drop(report);
        let mut done_bytes = 0;
        reports.into_iter().try_for_each(|filled| {
            done_bytes += filled?;
            progress(done_bytes);
            Ok(())
        })
    })
}

/// A region in pieces, each for whoever comes first.
#[derive(Debug)]
struct Chunks<'region> {
    region: &'region Region,
    chunk_bytes: usize,
    next_offset: AtomicUsize,
}

impl<'region> Chunks<'region> {
    fn of(region: &'region Region, threads: usize) -> Self {
        let share_bytes = region.len_bytes() / threads.max(1).saturating_mul(CHUNKS_PER_THREAD);
        let chunk_bytes = share_bytes.next_multiple_of(RANGE_ALIGN_BYTES).clamp(RANGE_ALIGN_BYTES, MOST_CHUNK_BYTES);
        Self { region, chunk_bytes, next_offset: AtomicUsize::new(0) }
    }

    fn count(&self) -> usize {
        self.region.len_bytes().div_ceil(self.chunk_bytes)
    }

    /// Fills chunk after chunk and reports each; a refusal ends the work of all.
    fn fill(&self, report: &Sender<Result<usize, SourceError>>) {
        let len_bytes = self.region.len_bytes();
        loop {
            // Relaxed: only that no chunk is taken twice matters; the end of the scope orders the writes.
            let offset = self.next_offset.fetch_add(self.chunk_bytes, Ordering::Relaxed);
            if offset >= len_bytes {
                return;
            }
            let bytes = self.chunk_bytes.min(len_bytes - offset);
            // SAFETY: inside the region, checked above.
            let start = unsafe { self.region.start().add(offset) };
            let pieces = (0..bytes).step_by(ASK_BYTES);
            let filled = pieces.map(|done| {
                // SAFETY: inside the chunk, by the bound of the loop.
                make_present(unsafe { start.add(done) }, ASK_BYTES.min(bytes - done))
            });
            let filled = filled.collect::<Result<(), _>>().map(|()| bytes).inspect_err(|_| {
                // Relaxed, as above: a chunk begun too many does no harm.
                self.next_offset.store(len_bytes, Ordering::Relaxed);
            });
            // Nobody listens any more: the caller heard of a refusal, or its `progress` unwinds.
            if report.send(filled).is_err() {
                return;
            }
        }
    }
}

#[cfg(not(miri))]
fn make_present(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    loop {
        // SAFETY: brings in pages of a mapping of ours, with what they hold.
        if unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let refusal = SourceError::last_os("madvise");
        match refusal.code().and_then(|code| i32::try_from(code).ok()) {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Linux before 5.14 does not know this advice.
            Some(libc::EINVAL) => {
                touch(start, bytes);
                return Ok(());
            }
            _ => return Err(refusal.with_remedy("the machine or its cgroup is out of memory")),
        }
    }
}

#[cfg(miri)]
fn make_present(start: NonNull<u8>, bytes: usize) -> Result<(), SourceError> {
    touch(start, bytes);
    Ok(())
}

fn touch(start: NonNull<u8>, bytes: usize) {
    for offset in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: inside the chunk, by the bound of the loop.
        let page = unsafe { start.add(offset) };
        // SAFETY: mapped, writable and ours alone; it reads as zero already. Volatile, so that it is not left out.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    #[cfg(not(miri))]
    use crate::backend::mapping;

    #[test]
    fn every_chunk_is_filled_once_and_heard_of_in_order() {
        const BYTES: usize = (9 << 20) + 5;
        for threads in [0, 1, 3, 100] {
            let region = pages::map_huge(BYTES, 0).unwrap();
            let heard = RefCell::new(Vec::new());
            // SAFETY: just mapped.
            unsafe { populate(&region, threads, None, &|bytes| heard.borrow_mut().push(bytes)) }.unwrap();
            let heard = heard.into_inner();
            assert!(heard.is_sorted_by(|before, after| before < after), "{heard:?}");
            assert_eq!((heard.len(), heard.last()), (Chunks::of(&region, threads).count(), Some(&BYTES)));
            #[cfg(not(miri))]
            assert!(mapping::present_pages(&region) == BYTES.div_ceil(PAGE_BYTES));
            // SAFETY: mapped above, no reference into it was made.
            unsafe { pages::unmap(region) }.unwrap();
        }
    }

    #[cfg(not(miri))]
    #[test]
    fn a_refusal_ends_the_work_of_all_threads() {
        const BYTES: usize = 16 << 20;
        let region = pages::map_huge(BYTES, 0).unwrap();
        let lost = NonNull::new(region.start().as_ptr().wrapping_add(PAGE_BYTES)).unwrap();
        let empty_file = tempfile::tempfile().unwrap();
        // SAFETY: a page of the region made above, used by nobody.
        unsafe { mapping::replace_page(lost, &empty_file, pages::READ_WRITE) };
        let heard = std::cell::Cell::new(0);
        // SAFETY: just mapped, but for a page beyond the end of its file, which the kernel refuses to bring.
        let refusal = unsafe { populate(&region, 1, None, &|bytes| heard.set(bytes)) }.unwrap_err();
        assert_eq!((refusal.code(), heard.get()), (Some(libc::EFAULT.into()), 0));
        // SAFETY: mapped above, no reference into it was made.
        unsafe { pages::unmap(region) }.unwrap();
    }

    #[test]
    fn chunks_are_huge_pages_and_enough_for_all_threads() {
        for (len_bytes, threads, chunk_bytes) in [(1, 1, 2 << 20), (64 << 20, 4, 4 << 20), (2 << 30, 2, 64 << 20)] {
            let region = Region::new(NonNull::dangling(), len_bytes, 0);
            assert_eq!(Chunks::of(&region, threads).chunk_bytes, chunk_bytes);
        }
    }
}
