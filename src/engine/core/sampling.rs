//! Which gets keep their call stack (`call_stacks`).
//!
//! A pool that samples takes the slow paths, as one that records: so a hit of any other does nothing for it.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::{Block, Core, Wanted};
use pinpool_observe::record::Event;
use pinpool_os::call_stack::CallStack;

/// By chance one of `every`. A count would always show the same get of a loop whose number of gets divides it.
fn is_drawn(every: u64) -> bool {
    thread_local! {
        static RANDOM: Cell<u64> = const { Cell::new(0) };
    }
    if every == 0 {
        return false;
    }
    let before = RANDOM.get();
    // Zero is the state that it never leaves, and where a thread begins.
    let mut random = if before == 0 { RandomState::new().hash_one(0) | 1 } else { before };
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    RANDOM.set(random);
    (u128::from(random) * u128::from(every)) >> 64 == 0
}

impl Core {
    /// The user of `block` is the one that `wanted` it, which is noted under its tag, and if this get is drawn with its call stack.
    pub(crate) fn note_holder(&self, block: &mut Block, wanted: &Wanted) {
        let is_sampled = is_drawn(self.config.code.call_stacks);
        let ledger = wanted.ledger.as_ref().or_else(|| is_sampled.then_some(&self.owners.untagged));
        let Some(ledger) = ledger else { return };
        block.set_holder(ledger.hold(wanted.len as u64, block.held_bytes(), self.time.coarse_us()));
        if is_sampled {
            self.note_stack(block, CallStack::here());
        }
    }

    /// The get of `block`, which has a holder, came from `stack`.
    fn note_stack(&self, block: &Block, stack: CallStack) {
        let stack = Arc::new(stack);
        if let Some((recorder, id)) = self.recorder().zip(block.recorded_id())
            && let Some(stack) = recorder.number_stack(&stack)
        {
            recorder.record(Event::Sampled { id, stack });
        }
        block.set_stack(stack);
    }
}

impl Block {
    /// Its get came from `stack`, which is asked for only if the get was sampled.
    pub(crate) fn describe_caller(&self, stack: impl FnOnce() -> CallStack) {
        if !self.is_plain() && self.owner().config.code.call_stacks > 0 && !self.is_forked() && self.is_sampled() {
            self.owner().note_stack(self, stack());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_get_in_so_many_is_drawn() {
        let drawn = |every| (0..100_000).filter(|_| is_drawn(every)).count();
        assert_eq!((drawn(0), drawn(1)), (0, 100_000));
        assert!((800..1_200).contains(&drawn(100)));
    }
}
