//! The compressed files that are being read: their decoders, and whose turn it is to use one.
//!
//! Owns the decoders between batches. Compressed data has one order, so the batches of a file take turns, in the order of
//! the plan: each goes on where the one before has ended.
//!
//! ```text
//!   batch 7   turn 0 of a.tar.gz ─────▶ turn 0 of b.tar.gz ─────▶
//!   batch 8                      turn 1 of a.tar.gz ─────▶ turn 1 of b.tar.gz ─────▶
//! ```
//!
//! - **turn-I1**: turns are numbered in the order of the batches (worker-I1), and each is ended by its [`Turns`], on every
//!   path. A worker waits for turns of earlier batches only, so the first batch under way waits for none.
//! - **turn-I2**: a decoder that is not in use has no file open.
//! - **turn-I3**: after the last turn of an epoch the decoder is gone, so as many are kept as files are open in the plan.

use std::collections::{BTreeSet, HashMap};

use pinpool_os::sync::plain::{Condvar, Mutex};

use super::compressed::Decoder;

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
    /// Turns that have ended, all before this one.
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
        // Outside the lock: a window of many megabytes is given back.
        drop(ended);
    }
}

impl Turns<'_> {
    /// Waits for the turn at `file`; its decoder, if an earlier turn has left one. The caller has no file open.
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
    use std::thread;

    use super::*;

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
