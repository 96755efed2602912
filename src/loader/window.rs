//! How far the workers may run ahead of the copies: the one bound on how much memory a run asks for.
//!
//! Owns three counters and the waiting on them. Never sees a batch or a buffer.
//!
//! ```text
//!   landed <= sent <= claimed <= sent + prefetch
//!   |         |        '- batches a worker has taken from the plan
//!   |         '- batches that left for the destination (or turned out to have nothing to send)
//!   '- batches whose buffer has gone back to the pool
//! ```
//!
//! I1. Every batch claimed is sent and landed in the end, unless the window was closed.
//! I2. A closed window lets nobody through and keeps nobody waiting.

use crate::sync::plain::{Condvar, Mutex};

#[derive(Debug)]
pub(super) struct Window {
    prefetch: u64,
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    claimed: u64,
    sent: u64,
    landed: u64,
    closed: bool,
}

impl Window {
    pub(super) fn new(prefetch: u64) -> Window {
        Window { prefetch, counts: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until one more batch may be begun. `false`: the window is closed.
    pub(super) fn claim(&self) -> bool {
        let mut counts = self.counts.lock();
        while !counts.closed && counts.claimed - counts.sent >= self.prefetch {
            self.changed.wait(&mut counts);
        }
        if !counts.closed {
            counts.claimed += 1;
        }
        !counts.closed
    }

    pub(super) fn sent(&self) {
        self.counts.lock().sent += 1;
        self.changed.notify_all();
    }

    pub(super) fn landed(&self) {
        self.counts.lock().landed += 1;
        self.changed.notify_all();
    }

    pub(super) fn close(&self) {
        self.counts.lock().closed = true;
        self.changed.notify_all();
    }

    /// Batches landed so far: what to hand to [`Window::wait_past`].
    pub(super) fn landings(&self) -> u64 {
        self.counts.lock().landed
    }

    /// For a worker whose batch found no memory: waits until more than `landings` batches have landed. `false`: no other
    /// batch is under way, or the window is closed, so waiting would bring nothing.
    pub(super) fn wait_past(&self, landings: u64) -> bool {
        let mut counts = self.counts.lock();
        // The purpose's own batch is claimed and has not landed.
        while !counts.closed && counts.landed == landings && counts.claimed > counts.landed + 1 {
            self.changed.wait(&mut counts);
        }
        !counts.closed && counts.landed > landings
    }
}

/// Closes the window when the last thing that can happen to a thread has happened to it, a panic included: a worker that
/// died with a batch would otherwise leave the others waiting for it for ever.
#[derive(Debug)]
pub(super) struct CloseAtExit<'a>(pub(super) &'a Window);

impl Drop for CloseAtExit<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn no_more_than_prefetch_batches_are_ahead() {
        let window = Window::new(3);
        let (claims, claimed) = channel();
        thread::scope(|scope| {
            let _close = CloseAtExit(&window);
            for _ in 0..4 {
                let claims = claims.clone();
                let window = &window;
                scope.spawn(move || while window.claim() && claims.send(()).is_ok() {});
            }
            for sent in 0..1000 {
                claimed.recv().unwrap();
                let ahead = window.counts.lock().claimed - sent;
                assert!((1..=3).contains(&ahead), "{ahead}");
                window.sent();
            }
        });
    }

    #[test]
    fn closing_lets_the_waiting_go_with_nothing() {
        let window = Window::new(1);
        assert!(window.claim());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| window.claim());
            drop(CloseAtExit(&window));
            assert!(!waiting.join().unwrap());
        });
        assert_eq!(window.counts.lock().claimed, 1);
        assert!(!window.wait_past(0));
    }

    #[test]
    fn waiting_for_memory_ends_when_there_is_nothing_to_wait_for() {
        let window = Window::new(4);
        assert!(window.claim());
        assert!(!window.wait_past(0), "alone");
        assert!(window.claim());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| window.wait_past(0));
            window.sent();
            window.landed();
            assert!(waiting.join().unwrap(), "the other one landed");
        });
        assert!(!window.wait_past(1), "alone again");
        assert!(window.wait_past(0), "landed between the look and the wait");
    }
}
