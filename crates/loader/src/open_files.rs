//! The files that the workers have open, and the order in which they read a compressed file.
//!
//! A worker that gets no descriptor waits until another worker closes a file: under a low limit on open files fewer workers
//! read at once, and every file is loaded. Compressed data has one order, so the batches of a compressed file take turns in
//! the order of the plan: each continues where the previous one ended.
//!
//! ```text
//!   batch 7   turn 0 of a.tar.gz ─────▶ turn 0 of b.tar.gz ─────▶
//!   batch 8                      turn 1 of a.tar.gz ─────▶ turn 1 of b.tar.gz ─────▶
//! ```
//!
//! - **open-I1**: a worker that waits has no file open, so the file that it waits for is eventually closed.
//! - **turn-I1**: turns are numbered in the order of the batches (worker-I1), and each is ended by its [`Turns`] on every
//!   path. A worker waits only for turns of earlier batches, so the first batch in progress never waits.
//! - **turn-I2**: a decoder that is not in use has no file open.
//! - **turn-I3**: the decoder is dropped after the last turn of an epoch, so at most as many decoders exist as files are open
//!   in the plan.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use pinpool_os::sync::plain::{Condvar, Mutex};

use super::compressed::Decoder;

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
    /// If no descriptor is left, waits until another worker has closed its file, and tries again. An error means that
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

/// The use of a compressed file by one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    /// Index into [`Catalog::files`](super::Catalog::files).
    pub(super) file: usize,
    /// Counted over the whole run, from 0.
    pub(super) number: u64,
    /// Whether the epoch reads no more of the file.
    pub(super) is_last: bool,
}

#[derive(Debug, Default)]
pub(super) struct Decoders {
    files: Mutex<HashMap<usize, Slot>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Slot {
    /// All turns before this one have ended.
    next: u64,
    /// Later ones that have ended.
    ended: BTreeSet<u64>,
    decoder: Option<Decoder>,
}

/// The turns of one batch, which end with it at the latest.
#[derive(Debug)]
pub(super) struct Turns<'a> {
    decoders: &'a Decoders,
    left: Vec<Turn>,
}

impl Decoders {
    /// The turns of a batch.
    pub(super) fn turns(&self, turns: &[Turn]) -> Turns<'_> {
        Turns { decoders: self, left: turns.to_vec() }
    }

    fn end(&self, turn: Turn, decoder: Option<Decoder>) {
        let mut files = self.files.lock();
        let slot = files.entry(turn.file).or_default();
        slot.ended.insert(turn.number);
        while slot.ended.remove(&slot.next) {
            slot.next += 1;
        }
        let ended = match turn.is_last {
            true => (slot.decoder.take(), decoder),
            false => (None, decoder.and_then(|decoder| slot.decoder.replace(decoder))),
        };
        drop(files);
        self.changed.notify_all();
        // Outside the lock, because a window of many megabytes is freed.
        drop(ended);
    }
}

impl Turns<'_> {
    /// Waits for the turn at `file`. Returns the decoder that an earlier turn left, if any. The caller has no file open.
    pub(super) fn take(&mut self, file: usize) -> Option<Decoder> {
        let turn = self.left.iter().find(|turn| turn.file == file)?;
        let mut files = self.decoders.files.lock();
        loop {
            let slot = files.entry(file).or_default();
            if slot.next >= turn.number {
                return slot.decoder.take();
            }
            files = self.decoders.changed.wait(files);
        }
    }

    /// Ends the turn at `file`, and leaves `decoder` to the next one.
    pub(super) fn end(&mut self, file: usize, mut decoder: Option<Decoder>) {
        if let Some(decoder) = &mut decoder {
            decoder.close();
        }
        if let Some(at) = self.left.iter().position(|turn| turn.file == file) {
            self.decoders.end(self.left.remove(at), decoder);
        }
    }
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        for turn in self.left.drain(..) {
            self.decoders.end(turn, None);
        }
    }
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

    fn turn(file: usize, number: u64) -> Turn {
        Turn { file, number, is_last: false }
    }

    #[test]
    fn turns_come_in_their_order_however_their_batches_end() {
        let decoders = Decoders::default();
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for number in (0..6).rev() {
                let (decoders, order) = (&decoders, &order);
                scope.spawn(move || {
                    let mut turns = decoders.turns(&[turn(3, number), turn(4, number)]);
                    // Every other batch gives up before it takes a turn.
                    if number % 2 == 0 {
                        for file in [3, 4] {
                            assert!(turns.take(file).is_none());
                            order.lock().push((file, number));
                            turns.end(file, None);
                        }
                    }
                });
            }
        });
        let of =
            |file| order.lock().iter().filter(|(of, _)| *of == file).map(|(_, number)| *number).collect::<Vec<_>>();
        assert_eq!((of(3), of(4)), (vec![0, 2, 4], vec![0, 2, 4]));
    }
}
