//! Who holds the buffers: a ledger for each tag of a pool.
//!
//! ```text
//!   Pool::tagged ─▶ Ledger ◀── Holder (in the block, from the get until the buffer is idle again)
//!                     └── one row for each buffer: bytes asked, bytes held, time of the get
//! ```
//!
//! A buffer that was got without a tag has no holder, so its hit and its put do nothing here. One with a holder is not plain
//! (block-I2): its put takes the slow path, which ends the row.
//!
//! So has one whose get was sampled; without a tag it is in a ledger that counts in no sum, since those of no tag are what remains.
//!
//! Owns the ledgers and their rows. Reads no clock: times are arguments.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::dump::{HeldBuffer, Owner};
use pinpool_observe::judge::largest;
use pinpool_os::call_stack::CallStack;
use pinpool_os::sync::plain::Mutex;

/// Most tags that a pool tells apart; further ones share [`OTHERS`].
const TAGS_MAX: usize = 1024;
/// Longer tags are cut.
const TAG_BYTES_MAX: usize = 128;
/// The buffers without a tag.
pub(super) const UNTAGGED: &str = "(untagged)";
/// The tag of the buffers whose own tag is one too many.
const OTHERS: &str = "(other tags)";
/// Rows that a ledger without buffers keeps room for.
const SPARE_ROWS: usize = 64;

/// The ledgers of one pool, by tag.
#[derive(Debug)]
pub(super) struct Owners {
    tagged: Mutex<BTreeMap<Box<str>, Arc<Ledger>>>,
    /// Those without a tag whose get was sampled.
    pub(super) untagged: Arc<Ledger>,
}

impl Default for Owners {
    fn default() -> Self {
        Self { tagged: Mutex::default(), untagged: Ledger::new(UNTAGGED) }
    }
}

/// The buffers of one tag.
#[derive(Debug)]
pub(crate) struct Ledger {
    tag: Box<str>,
    rows: Mutex<Rows>,
    /// Its number in a recording.
    recorded: OnceLock<u32>,
}

#[derive(Debug, Default)]
struct Rows {
    rows: Vec<Option<Row>>,
    /// Indices of rows without a buffer.
    free: Vec<usize>,
}

#[derive(Debug)]
struct Row {
    asked_bytes: u64,
    held_bytes: u64,
    since_us: u64,
    /// Where it was got, if that was sampled.
    stack: Option<Arc<CallStack>>,
}

/// A row of a ledger, with the buffer that it stands for. Its drop ends the row.
#[derive(Debug)]
pub(super) struct Holder {
    ledger: Arc<Ledger>,
    row: usize,
}

impl Owners {
    /// The ledger of `tag`; `None` for an empty tag, whose buffers are those of nobody.
    pub(super) fn ledger(&self, tag: &str) -> Option<Arc<Ledger>> {
        let tag = readable(tag);
        if tag.is_empty() {
            return None;
        }
        let mut ledgers = self.tagged.lock();
        if let Some(ledger) = ledgers.get(&*tag) {
            return Some(ledger.clone());
        }
        if ledgers.len() >= TAGS_MAX {
            // Without a handle and without a buffer: no other thread can get a reference but by this lock.
            ledgers.retain(|_, ledger| Arc::strong_count(ledger) > 1);
        }
        let tag: Box<str> = if ledgers.len() >= TAGS_MAX { OTHERS.into() } else { tag.into() };
        Some(ledgers.entry(tag).or_insert_with_key(|tag| Ledger::new(tag)).clone())
    }

    /// What each tag holds at `now_us`. Sums, since each get that finds no memory asks, and gets and puts of the tag wait.
    pub(super) fn sums(&self, now_us: u64) -> Vec<Owner> {
        let sum = |ledger: Arc<Ledger>| {
            let mut owner = Owner::new(&ledger.tag);
            for row in ledger.rows.lock().rows.iter().flatten() {
                owner.add(row.asked_bytes, row.held_bytes, now_us.saturating_sub(row.since_us));
            }
            (owner.buffers > 0).then_some(owner)
        };
        self.ledgers().into_iter().filter_map(sum).collect()
    }

    /// Where most of the bytes under `tag` were got that were sampled, in words. Reads files, under no lock.
    pub(super) fn place(&self, tag: &str) -> Option<String> {
        let of_tag = self.ledgers().into_iter().chain([self.untagged.clone()]).find(|ledger| &*ledger.tag == tag)?;
        let sampled = |row: &Row| row.stack.clone().map(|stack| (stack, row.held_bytes));
        let sampled: Vec<_> = of_tag.rows.lock().rows.iter().flatten().filter_map(sampled).collect();
        largest(sampled)?.place()
    }

    /// Each buffer that is held under a tag at `now_us`, or whose get was sampled, the oldest first.
    pub(super) fn buffers(&self, now_us: u64) -> Vec<HeldBuffer> {
        let mut buffers = Vec::new();
        for ledger in self.ledgers().into_iter().chain([self.untagged.clone()]) {
            let rows = ledger.rows.lock();
            let held = |row: &Row| {
                let age = Duration::from_micros(now_us.saturating_sub(row.since_us));
                HeldBuffer { tag: ledger.tag.to_string(), bytes: row.held_bytes, age, stack: row.stack.clone() }
            };
            buffers.extend(rows.rows.iter().flatten().map(held));
        }
        buffers.sort_by(|one, other| other.age.cmp(&one.age).then_with(|| other.bytes.cmp(&one.bytes)));
        buffers
    }

    fn ledgers(&self) -> Vec<Arc<Ledger>> {
        self.tagged.lock().values().cloned().collect()
    }
}

impl Ledger {
    fn new(tag: &str) -> Arc<Self> {
        Arc::new(Self { tag: tag.into(), rows: Mutex::default(), recorded: OnceLock::new() })
    }

    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    /// Its number in a recording, which `name` gives it once.
    pub(super) fn recorded_number(&self, name: impl FnOnce(&str) -> u32) -> u32 {
        *self.recorded.get_or_init(|| name(&self.tag))
    }

    /// A buffer of `held_bytes`, of which `asked_bytes` were asked for, is got at `now_us`.
    pub(super) fn hold(self: &Arc<Self>, asked_bytes: u64, held_bytes: u64, now_us: u64) -> Holder {
        let new = Some(Row { asked_bytes, held_bytes, since_us: now_us, stack: None });
        let mut rows = self.rows.lock();
        let row = match rows.free.pop() {
            Some(row) => row,
            None => {
                rows.rows.push(None);
                rows.rows.len() - 1
            }
        };
        if let Some(row) = rows.rows.get_mut(row) {
            *row = new;
        }
        drop(rows);
        Holder { ledger: self.clone(), row }
    }
}

impl Holder {
    pub(super) fn is_sampled(&self) -> bool {
        self.ledger.rows.lock().rows.get(self.row).into_iter().flatten().any(|row| row.stack.is_some())
    }

    pub(super) fn set_stack(&self, stack: Arc<CallStack>) {
        let mut rows = self.ledger.rows.lock();
        if let Some(Some(row)) = rows.rows.get_mut(self.row) {
            row.stack = Some(stack);
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let mut rows = self.ledger.rows.lock();
        rows.rows.get_mut(self.row).into_iter().for_each(|row| *row = None);
        rows.free.push(self.row);
        if rows.free.len() == rows.rows.len() {
            rows.rows.clear();
            rows.free.clear();
            rows.rows.shrink_to(SPARE_ROWS);
            rows.free.shrink_to(SPARE_ROWS);
        }
    }
}

/// The tag as it is kept: cut to its first bytes, without characters that would break a line of a log.
fn readable(tag: &str) -> String {
    let mut end = tag.len().min(TAG_BYTES_MAX);
    while !tag.is_char_boundary(end) {
        end -= 1;
    }
    let mut text: String = tag[..end].chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect();
    if end < tag.len() {
        text.push('…');
    }
    text
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_row_lives_as_long_as_its_holder_and_rows_are_used_again() {
        let owners = Owners::default();
        let ledger = owners.ledger("a").unwrap();
        let holders: Vec<_> = (0..100).map(|n| ledger.hold(10, 16, n * 1_000_000)).collect();
        let (all, buffers) = (owners.sums(100_000_000), owners.buffers(100_000_000));
        assert_eq!((all.len(), all[0].buffers, all[0].bytes, all[0].asked_bytes), (1, 100, 1600, 1000));
        assert_eq!(all[0].oldest, Some(buffers[0].age));
        assert_eq!((buffers.len(), buffers[0].age.as_secs(), buffers[99].age.as_secs()), (100, 100, 1));
        let kept: Vec<_> = holders.into_iter().skip(50).collect();
        let _again = ledger.hold(1, 1, 0);
        let rows = || {
            let rows = ledger.rows.lock();
            (rows.rows.len(), rows.free.len(), rows.rows.capacity())
        };
        assert_eq!((rows().0, rows().1), (100, 49));
        drop((kept, _again));
        assert_eq!(rows(), (0, 0, SPARE_ROWS));
        assert!(owners.sums(0).is_empty() && owners.buffers(0).is_empty(), "a tag without buffers is not shown");
    }

    #[test]
    fn there_are_as_many_tags_as_are_told_apart_and_one_more() {
        let owners = Owners::default();
        let handles: Vec<_> = (0..TAGS_MAX + 10).map(|n| owners.ledger(&format!("tag {n}")).unwrap()).collect();
        assert_eq!(owners.tagged.lock().len(), TAGS_MAX + 1);
        assert_eq!((handles[TAGS_MAX - 1].tag(), handles[TAGS_MAX].tag()), ("tag 1023", OTHERS));
        assert!(Arc::ptr_eq(&handles[TAGS_MAX + 9], &handles[TAGS_MAX]));
        drop(handles);
        assert_eq!(owners.ledger("later").unwrap().tag(), "later", "tags that nobody uses make room");
    }

    #[test]
    fn tags_are_cut_and_have_no_characters_that_break_a_line() {
        let owners = Owners::default();
        assert!(owners.ledger("").is_none());
        assert_eq!(owners.ledger("a\nb\u{7}").unwrap().tag(), "a?b?");
        let long = owners.ledger(&"ä".repeat(1 << 19)).unwrap();
        assert_eq!(long.tag(), format!("{}…", "ä".repeat(64)));
        let odd = owners.ledger(&format!("x{}", "ä".repeat(100))).unwrap();
        assert_eq!(odd.tag().chars().count(), 1 + 63 + 1);
    }
}
