//! The words of a host ledger.

use crate::file::Layout;

/// Raise the version with each change of the words below.
pub(super) const LAYOUT: Layout =
    Layout { kind: *b"ledger  ", version: 3, common_words: 8, slots: 256, slot_words: 20 };

/// The words of all owners: the ceiling; a number that rises when something changes that others wait for; one more than the
/// highest slot that was ever taken.
pub(super) const MAX_BYTES: usize = 0;
pub(super) const EVENTS: usize = 1;
pub(super) const USED: usize = 2;

/// The words of a slot: bytes by state, the process and its namespace, a number that no other owner has, what the get needs
/// that wants, since which event it wants, the first bytes of the pool's name.
pub(super) const HELD: usize = 0;
pub(super) const CLAIMING: usize = 1;
pub(super) const WANTED: usize = 2;
pub(super) const IDLE: usize = 3;
pub(super) const PROCESS: usize = 4;
pub(super) const NAMESPACE: usize = 5;
pub(super) const OWNER: usize = 6;
pub(super) const NEEDED: usize = 7;
pub(super) const SINCE: usize = 8;
pub(super) const NAME: usize = 9;
/// Words for the name of a pool: 64 bytes.
pub(super) const NAME_WORDS: usize = 8;
