//! The files that the workers have open: a worker that gets no descriptor waits for one of another worker.
//!
//! Owns the count. Under a low limit on open files fewer workers read at once, and every file is loaded.
//!
//! - **open-I1**: a worker that waits has no file open, so the file that it waits for is closed in the end.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use pinpool_os::sync::plain::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    /// Files that are open or being opened.
    open: u64,
    /// Files that were closed so far.
    closed: u64,
}

/// An open file; counted until it is closed.
#[derive(Debug)]
pub(super) struct OpenFile<'a> {
    // The order of the fields matters: closed first, because a waiting worker tries again as soon as it is counted.
    file: Arc<File>,
    _counted: Counted<'a>,
}

impl OpenFile<'_> {
    /// The file for a decoder, which leaves it before this ends.
    pub(super) fn share(&self) -> Arc<File> {
        self.file.clone()
    }
}

#[derive(Debug)]
struct Counted<'a>(&'a OpenFiles);

impl OpenFiles {
    /// Opens the file at `path`. The caller has no other file open (open-I1).
    ///
    /// Where no descriptor is left, waits until another worker has closed its file, and tries again. An error means that
    /// no other worker has one open.
    pub(super) fn open(&self, path: &Path) -> io::Result<OpenFile<'_>> {
        let file = self.open_by(|| File::open(path))?;
        Ok(OpenFile { file: Arc::new(file), _counted: Counted(self) })
    }

    fn open_by<T>(&self, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
        loop {
            let closed_before = {
                let mut counts = self.counts.lock();
                counts.open += 1;
                counts.closed
            };
            let error = match open() {
                Ok(file) => return Ok(file),
                Err(error) => error,
            };
            let mut counts = self.counts.lock();
            counts.open -= 1;
            // Others that wait for this attempt look again.
            self.changed.notify_all();
            if !is_out_of_descriptors(&error) {
                return Err(error);
            }
            while counts.open > 0 && counts.closed == closed_before {
                counts = self.changed.wait(counts);
            }
            if counts.closed == closed_before {
                return Err(error);
            }
        }
    }
}

impl Deref for OpenFile<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut counts = self.0.counts.lock();
        counts.open -= 1;
        counts.closed += 1;
        self.0.changed.notify_all();
    }
}

/// Whether the process or the system has no descriptor left.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    fn out_of_descriptors() -> io::Error {
        io::Error::from_raw_os_error(libc::EMFILE)
    }

    /// A limit on what is open at once, as the system has one.
    struct Descriptors(AtomicUsize);

    impl Descriptors {
        fn open(&self) -> io::Result<()> {
            let take = |left: usize| left.checked_sub(1);
            let taken = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
            taken.map(drop).map_err(|_| out_of_descriptors())
        }
    }

    #[test]
    fn workers_take_turns_when_there_are_fewer_descriptors_than_workers() {
        let (files, descriptors) = (OpenFiles::default(), Descriptors(AtomicUsize::new(2)));
        let opened = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        files.open_by(|| descriptors.open()).unwrap();
                        opened.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        descriptors.0.fetch_add(1, Ordering::SeqCst);
                        drop(Counted(&files));
                    }
                });
            }
        });
        assert_eq!((opened.into_inner(), files.counts.into_inner().open), (1600, 0));
    }

    #[test]
    fn without_any_descriptor_every_worker_gets_the_error() {
        let files = OpenFiles::default();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let error = files.open_by(|| Err::<(), _>(out_of_descriptors())).unwrap_err();
                        assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
                    }
                });
            }
        });
    }

    #[test]
    fn another_error_is_returned_at_once() {
        let files = OpenFiles::default();
        files.open_by(|| Ok(())).unwrap();
        let error = files.open_by(|| Err::<(), _>(io::ErrorKind::NotFound.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(files.counts.lock().open, 1);
    }
}
