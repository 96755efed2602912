//! Items with a fence that failed: whether their copies are over is unknown until the fence answers again.
//!
//! A driver that refuses one call may be well at the next one. So such an item is kept with its fences, which are asked again
//! from time to time; the item leaves when all of them say that their copies are over (in-flight-I1). Fences are asked under
//! no lock.

use std::collections::VecDeque;

use super::fence::{Fences, discard, state_of};
use pinpool_os::lost;
use pinpool_os::sync::atomic::{AtomicU64, Ordering};
use pinpool_os::sync::plain::Mutex;

/// The items, and how many they are, those that a thread is asking included.
#[derive(Debug)]
pub(super) struct Unanswered<T> {
    count: AtomicU64,
    kept: Mutex<Kept<T>>,
}

#[derive(Debug)]
struct Kept<T> {
    /// The lost items; those that were asked longest ago come first.
    items: VecDeque<(T, Fences)>,
    /// The pool has ended, and nothing is asked again.
    has_ended: bool,
}

impl<T> Unanswered<T> {
    pub(super) fn new() -> Self {
        let kept = Kept { items: VecDeque::new(), has_ended: false };
        Self { count: AtomicU64::new(0), kept: Mutex::new(kept) }
    }

    pub(super) fn count(&self) -> u64 {
        // Relaxed: a hint and a figure.
        self.count.load(Ordering::Relaxed)
    }
}

impl<T: Send + 'static> Unanswered<T> {
    pub(super) fn add(&self, item: T, fences: Fences) {
        // Counted before it is visible, so that no thread subtracts an item that is not yet counted.
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.kept.lock();
        if kept.has_ended {
            drop(kept);
            return lose([(item, fences)]);
        }
        kept.items.push_back((item, fences));
    }

    /// Asks the fences of at most that many items. Returns the items that are over. Items that another thread is asking are
    /// passed over.
    pub(super) fn ask(&self, most: usize) -> Vec<T> {
        let mut kept = self.kept.lock();
        let asked = most.min(kept.items.len());
        let asked: Vec<_> = kept.items.drain(..asked).collect();
        drop(kept);
        let (mut over, mut unknown, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        for (item, fences) in asked {
            match state_of(&fences) {
                Ok(None) => {
                    discard(fences);
                    over.push(item);
                }
                Err(refusal) if refusal.is_final => lost.push((item, fences)),
                _ => unknown.push((item, fences)),
            }
        }
        // Relaxed, as in `add`.
        self.count.fetch_sub(over.len() as u64, Ordering::Relaxed);
        let mut kept = self.kept.lock();
        kept.items.extend(unknown);
        let ended = if kept.has_ended { std::mem::take(&mut kept.items) } else { VecDeque::new() };
        drop(kept);
        lose(ended);
        lose(lost);
        over
    }

    /// Asks a last time, and returns the items that are over. The others are lost: nothing uses or frees them.
    pub(super) fn end(&self) -> Vec<T> {
        let over = self.ask(usize::MAX);
        let mut kept = self.kept.lock();
        kept.has_ended = true;
        let ended = std::mem::take(&mut kept.items);
        drop(kept);
        lose(ended);
        over
    }
}

/// Keeps the items for good. Their fences are asked no more.
fn lose<T: Send + 'static>(items: impl IntoIterator<Item = (T, Fences)>) {
    for (item, fences) in items {
        discard(fences);
        lost::keep(item);
    }
}
