//! Who holds the buffers: one `Tag` for each tag of a pool.
//!
//! ```text
//!   Pool::tagged ─▶ Tag ◀── TagRow (in the block, from the request until the buffer is idle again)
//!                     └── one row for each buffer: requested bytes, held bytes, request time
//! ```
//!
//! An untagged buffer has no holder, so its hit and its return do nothing here. A block with a holder is not a fast-path block
//! (block-I2): its return takes the slow path, which removes the row.
//!
//! The buffer of a sampled request has a holder even if it is untagged. Such a holder belongs to the tag `untagged`, which no
//! sum includes, since the sum of untagged buffers is computed as the remainder.
//!
//! This module owns the tags and their rows. It reads no clock: times are arguments.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::report::{HeldBuffer, Holder};
use pinpool_os::call_stack::CallStack;
use pinpool_os::sync::unmodeled::Mutex;

/// Maximum number of tags that a pool distinguishes. All further tags share the tag [`OTHERS`].
const TAGS_MAX: usize = 1024;
/// Maximum length of a tag in bytes. A longer tag is truncated.
const TAG_BYTES_MAX: usize = 128;
/// The name under which untagged buffers are listed.
pub(crate) const UNTAGGED: &str = "(untagged)";
/// The name of the tag that all tags beyond [`TAGS_MAX`] share.
const OTHERS: &str = "(other tags)";

/// The tags of one pool, by name.
#[derive(Debug)]
pub(crate) struct Holders {
    tagged: Mutex<BTreeMap<Box<str>, Arc<Tag>>>,
    /// The tag of untagged buffers with a sampled request.
    pub(crate) untagged: Arc<Tag>,
}

impl Default for Holders {
    fn default() -> Self {
        Self { tagged: Mutex::default(), untagged: Tag::new(UNTAGGED) }
    }
}

/// The buffers of one tag.
#[derive(Debug)]
pub(crate) struct Tag {
    name: Box<str>,
    /// One row for each buffer, by the number of the row.
    rows: Mutex<BTreeMap<u64, Row>>,
    /// The number of the tag in a recording.
    recorded: OnceLock<u32>,
}

#[derive(Debug)]
struct Row {
    requested_bytes: u64,
    held_bytes: u64,
    since_us: u64,
    /// The call stack of the buffer's request, if the request was sampled.
    stack: Option<Arc<CallStack>>,
}

/// The row of a buffer in its tag. Dropping this removes the row.
#[derive(Debug)]
pub(crate) struct TagRow {
    tag: Arc<Tag>,
    number: u64,
}

impl Holders {
    /// Returns the tag with this name, or `None` if the name is empty: untagged buffers have no holder.
    pub(crate) fn tag(&self, name: &str) -> Option<Arc<Tag>> {
        let name = readable(name);
        if name.is_empty() {
            return None;
        }
        let mut tags = self.tagged.lock();
        if let Some(tag) = tags.get(&*name) {
            return Some(tag.clone());
        }
        if tags.len() >= TAGS_MAX {
            // The removed tags have no handle and no buffer. Another thread can get a reference to such a tag only under this
            // lock.
            tags.retain(|_, tag| Arc::strong_count(tag) > 1);
        }
        let name: Box<str> = if tags.len() >= TAGS_MAX { OTHERS.into() } else { name.into() };
        Some(tags.entry(name).or_insert_with_key(|name| Tag::new(name)).clone())
    }

    /// Returns the sums of each tag at `now_us`. Does not list the buffers, since each failed request calls this while requests
    /// and returns of the tag wait for the lock.
    pub(crate) fn sums(&self, now_us: u64) -> Vec<Holder> {
        let sum = |tag: Arc<Tag>| {
            let mut holder = Holder::new(&tag.name);
            for row in tag.rows.lock().values() {
                holder.add(row.requested_bytes, row.held_bytes, now_us.saturating_sub(row.since_us));
            }
            (holder.buffers > 0).then_some(holder)
        };
        self.tags().into_iter().filter_map(sum).collect()
    }

    /// Returns a description of the place in the program that requested most of the sampled bytes under `tag`. Reads
    /// files, under no lock.
    pub(crate) fn place(&self, tag: &str) -> Option<String> {
        let account = self.tags().into_iter().chain([self.untagged.clone()]).find(|account| &*account.name == tag)?;
        let mut sums = BTreeMap::new();
        for row in account.rows.lock().values() {
            row.stack.iter().for_each(|stack| *sums.entry(stack.clone()).or_insert(0) += row.held_bytes);
        }
        // If sums are equal, the greatest stack wins.
        sums.into_iter().max_by_key(|(_, bytes)| *bytes)?.0.place()
    }

    /// Returns each buffer that has a holder, with its age at `now_us`, the oldest first.
    pub(crate) fn buffers(&self, now_us: u64) -> Vec<HeldBuffer> {
        let mut buffers = Vec::new();
        for tag in self.tags().into_iter().chain([self.untagged.clone()]) {
            let rows = tag.rows.lock();
            let held = |row: &Row| {
                let age = Duration::from_micros(now_us.saturating_sub(row.since_us));
                HeldBuffer { tag: tag.name.to_string(), bytes: row.held_bytes, age, stack: row.stack.clone() }
            };
            buffers.extend(rows.values().map(held));
        }
        buffers.sort_by(|one, other| other.age.cmp(&one.age).then_with(|| other.bytes.cmp(&one.bytes)));
        buffers
    }

    fn tags(&self) -> Vec<Arc<Tag>> {
        self.tagged.lock().values().cloned().collect()
    }
}

impl Tag {
    fn new(name: &str) -> Arc<Self> {
        Arc::new(Self { name: name.into(), rows: Mutex::default(), recorded: OnceLock::new() })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the tag in a recording. The first call assigns it by calling `name`.
    pub(crate) fn recorded_number(&self, name: impl FnOnce(&str) -> u32) -> u32 {
        *self.recorded.get_or_init(|| name(&self.name))
    }

    /// Adds a row for a buffer of `held_bytes`, allocated at `now_us` for a request of `requested_bytes`. `stack` is the call stack
    /// of a sampled request.
    pub(crate) fn hold(
        self: &Arc<Self>,
        requested_bytes: u64,
        held_bytes: u64,
        now_us: u64,
        stack: Option<Arc<CallStack>>,
    ) -> TagRow {
        let mut rows = self.rows.lock();
        let number = rows.last_key_value().map_or(0, |(last, _)| last + 1);
        rows.insert(number, Row { requested_bytes, held_bytes, since_us: now_us, stack });
        drop(rows);
        TagRow { tag: self.clone(), number }
    }
}

impl Drop for TagRow {
    fn drop(&mut self) {
        let row = self.tag.rows.lock().remove(&self.number);
        // The row may have the last reference to a call stack, so it is dropped outside the lock.
        drop(row);
    }
}

/// Returns the stored form of a tag: its first bytes, without characters that would break a log line.
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
    fn a_row_lives_as_long_as_its_holder() {
        let holders = Holders::default();
        let tag = holders.tag("a").unwrap();
        let rows: Vec<_> = (0..100).map(|n| tag.hold(10, 16, n * 1_000_000, None)).collect();
        let (all, buffers) = (holders.sums(100_000_000), holders.buffers(100_000_000));
        assert_eq!((all.len(), all[0].buffers, all[0].bytes, all[0].requested_bytes), (1, 100, 1600, 1000));
        assert_eq!(all[0].oldest_age, Some(buffers[0].age));
        assert_eq!((buffers.len(), buffers[0].age.as_secs(), buffers[99].age.as_secs()), (100, 100, 1));
        let kept: Vec<_> = rows.into_iter().skip(50).collect();
        assert_eq!((holders.sums(0)[0].buffers, kept.len()), (50, 50));
        drop(kept);
        assert!(holders.sums(0).is_empty() && holders.buffers(0).is_empty(), "a tag without buffers is not shown");
    }

    #[test]
    fn there_are_as_many_tags_as_are_told_apart_and_one_more() {
        let holders = Holders::default();
        let handles: Vec<_> = (0..TAGS_MAX + 10).map(|n| holders.tag(&format!("tag {n}")).unwrap()).collect();
        assert_eq!(holders.tagged.lock().len(), TAGS_MAX + 1);
        assert_eq!((handles[TAGS_MAX - 1].name(), handles[TAGS_MAX].name()), ("tag 1023", OTHERS));
        assert!(Arc::ptr_eq(&handles[TAGS_MAX + 9], &handles[TAGS_MAX]));
        drop(handles);
        assert_eq!(holders.tag("later").unwrap().name(), "later", "unused tags make room");
    }

    #[test]
    fn tags_are_cut_and_have_no_characters_that_break_a_line() {
        let holders = Holders::default();
        assert!(holders.tag("").is_none());
        assert_eq!(holders.tag("a\nb\u{7}").unwrap().name(), "a?b?");
        let long = holders.tag(&"ä".repeat(1 << 19)).unwrap();
        assert_eq!(long.name(), format!("{}…", "ä".repeat(64)));
        let odd = holders.tag(&format!("x{}", "ä".repeat(100))).unwrap();
        assert_eq!(odd.name().chars().count(), 1 + 63 + 1);
    }
}
