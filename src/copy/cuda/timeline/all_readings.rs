//! Readings next to every wrap of the low half, every 4096th reading that a word can hold, and all sequences of a few
//! steps of a stream.

#![allow(clippy::cast_possible_truncation)] // The low half is meant.
#![allow(clippy::print_stdout)] // The number of runs.

use super::*;

/// Numbers next to the multiples of 2^31, which are the wraps of the low half and the points between them.
fn numbers_at_wraps() -> impl Iterator<Item = u64> {
    (0..8).flat_map(|half| (0..7).map(move |at| (half * SEQUENCE_WINDOW + at).saturating_sub(3))).chain([FIRST_NUMBER])
}

/// The result of `update` for a word that holds the low half of `number`.
fn read(seen: u64, number: u64) -> u64 {
    let sequence = Sequence::new(seen);
    let reached = sequence.update(|| number as u32);
    assert_eq!(sequence.seen(), reached, "{seen} {number}");
    reached
}

#[test]
fn a_reading_up_to_the_window_ahead_is_taken_and_any_other_ignored() {
    let edges = [0, 1 << 16, 1 << 30, SEQUENCE_WINDOW].into_iter();
    let next_to_edges = edges.flat_map(|edge: u64| (0..7).map(move |step| (edge + step).saturating_sub(3)));
    let evenly = (0..if cfg!(miri) { 0 } else { SEQUENCE_WINDOW / 4096 }).map(|step| step * 4096);
    for seen in numbers_at_wraps() {
        // Only from the number that every stream starts at.
        let evenly = evenly.clone().filter(|_| seen == FIRST_NUMBER);
        for by in next_to_edges.clone().chain(evenly).filter(|&by| by < SEQUENCE_WINDOW) {
            assert_eq!(read(seen, seen + by), seen + by, "{seen}, {by} ahead");
            // 2^31 ahead and 2^31 behind are the same word, which counts as behind.
            if let Some(behind) = seen.checked_sub(by + 1) {
                assert_eq!(read(seen, behind), seen, "{seen}, {by} behind");
            }
        }
    }
}

#[test]
fn a_number_that_is_given_out_is_told_from_every_reading_before_it() {
    for seen in numbers_at_wraps() {
        for ahead in [0, 1, 2, 1 << 30, SEQUENCE_WINDOW - 2, SEQUENCE_WINDOW - 1, SEQUENCE_WINDOW] {
            for progress in [0, 1, 2, ahead / 2, ahead].into_iter().filter(|&by| by <= ahead && by < SEQUENCE_WINDOW) {
                let sequence = Sequence::new(seen);
                let next = sequence.next(seen + ahead, || (seen + progress) as u32);
                let is_near = ahead + 1 - progress < SEQUENCE_WINDOW;
                assert_eq!(next, is_near.then_some(seen + ahead + 1), "{seen}, {ahead} ahead, {progress} done");
                if let Some(next) = next {
                    assert_eq!(sequence.update(|| next as u32), next);
                }
            }
        }
    }
}

/// A stream with its word, and readings of it.
#[derive(Clone, Copy)]
struct Stream {
    seen: u64,
    given_out: u64,
    done: u64,
    /// An older reading, which a slow thread still has.
    old: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Assigns the number this far after the last one, and before it every number in between.
    GiveOut(u64),
    DoOne,
    DoHalf,
    DoAll,
    Read,
    ReadOld,
    /// From now on, the present word is the older reading.
    KeepReading,
}

const STEPS: [Step; 9] = [
    Step::GiveOut(1),
    Step::GiveOut(1 << 30),
    Step::GiveOut(SEQUENCE_WINDOW - 1),
    Step::DoOne,
    Step::DoHalf,
    Step::DoAll,
    Step::Read,
    Step::ReadOld,
    Step::KeepReading,
];

impl Stream {
    fn apply(mut self, step: Step) -> Self {
        let sequence = Sequence::new(self.seen);
        match step {
            Step::GiveOut(by) => {
                let next = sequence.next(self.given_out + by - 1, || self.done as u32);
                assert_eq!(next.is_some(), self.given_out + by - self.done < SEQUENCE_WINDOW, "{step:?}");
                self.given_out = next.unwrap_or(self.given_out);
            }
            Step::DoOne => self.done = (self.done + 1).min(self.given_out),
            Step::DoHalf => self.done += (self.given_out - self.done) / 2,
            Step::DoAll => self.done = self.given_out,
            Step::Read => assert_eq!(sequence.update(|| self.done as u32), self.done),
            Step::ReadOld => {
                assert_eq!(sequence.update(|| self.old as u32), self.seen.max(self.old), "{step:?}");
            }
            Step::KeepReading => self.old = self.done,
        }
        self.seen = sequence.seen();
        assert!(self.seen <= self.done, "a copy that is not complete counts as complete");
        self
    }

    fn all_sequences(self, steps: u32) -> u32 {
        if steps == 0 {
            return 1;
        }
        // An older reading is ignored while it is less than the window behind.
        let applied = STEPS.into_iter().map(|step| self.apply(step));
        applied.filter(|next| next.done - next.old < SEQUENCE_WINDOW).map(|next| next.all_sequences(steps - 1)).sum()
    }
}

#[test]
fn all_short_sequences_of_a_stream_through_the_wrap_are_read_exactly() {
    let steps = if cfg!(miri) { 3 } else { 6 };
    let mut sequences = 0;
    for first in [0, FIRST_NUMBER, u64::from(u32::MAX), (1 << 32) + SEQUENCE_WINDOW - 1] {
        sequences += Stream { seen: first, given_out: first, done: first, old: first }.all_sequences(steps);
    }
    println!("{sequences} sequences of {steps} steps");
}
