//! The holders of a shared limit, for people and programs.

use std::fmt;
use std::os::unix::fs::MetadataExt;

use super::name::{path_of, problem_of};
use super::segment::{SLOT_WORDS, SLOTS};
use super::slots::{HELD, IDLE, NAME, NAMESPACE, PROCESS, Slots, WANTED};
use pinpool_os::format::Size;

/// Words for the name of a pool: 72 bytes.
const NAME_WORDS: usize = SLOT_WORDS - NAME;

/// Maximum number of members that a text lists one by one.
pub const LISTED: usize = 8;

/// The contents of a shared limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SharedLimitReport {
    /// The name.
    pub name: String,
    /// The limit in bytes, as the first member set it; `None` for no limit.
    pub max_bytes: Option<u64>,
    /// Bytes that all members hold.
    pub held_bytes: u64,
    /// The living members, the largest first.
    #[cfg_attr(feature = "serde", serde(rename = "owners"))]
    pub members: Vec<SharedLimitMember>,
}

/// A pool under a shared limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SharedLimitMember {
    /// The process ID, valid only in the namespace of that process.
    pub pid: u32,
    /// Whether this member is the pool that made the report.
    pub is_own: bool,
    /// Whether the process is in another PID namespace.
    pub is_in_other_namespace: bool,
    /// Name of the pool; empty if it has none.
    pub pool: String,
    /// Bytes that the pool holds, including bytes that it is pinning or releasing.
    pub held_bytes: u64,
    /// The part of `held_bytes` that was idle at the pool's last maintenance tick.
    pub idle_bytes: u64,
    /// Bytes that the pool's waiting requests and reserves want in addition.
    pub wanted_bytes: u64,
}

impl SharedLimitReport {
    /// Reads the words of the living members. The slot of the caller, if it has one, is `own`.
    pub(super) fn of(name: &str, slots: &Slots, own: Option<usize>) -> Self {
        // A member that is just attaching has not stored its process ID yet.
        let is_member =
            |index: &usize| slots.get(*index, PROCESS) > 0 && (Some(*index) == own || slots.is_owned(*index));
        let read =
            || (0..SLOTS).filter(is_member).map(|index| SharedLimitMember::of(slots, index, own)).collect::<Vec<_>>();
        // Under the lock no member claims memory, so the sum is never above the limit.
        let mut members = slots.locked(read).unwrap_or_else(read);
        members.sort_by(|one, other| other.held_bytes.cmp(&one.held_bytes).then_with(|| one.pid.cmp(&other.pid)));
        let held_bytes = members.iter().map(|member| member.held_bytes).fold(0, u64::saturating_add);
        let max_bytes = Some(slots.max_bytes()).filter(|&max_bytes| max_bytes != u64::MAX);
        Self { name: name.to_owned(), max_bytes, held_bytes, members }
    }

    /// Describes the other members and what they hold, for an error text.
    pub fn describe_others(&self) -> String {
        let others: Vec<_> = self.members.iter().filter(|member| !member.is_own).collect();
        let mut texts: Vec<_> = others.iter().take(LISTED).map(ToString::to_string).collect();
        texts.extend((others.len() > LISTED).then(|| format!("and {} more", others.len() - LISTED)));
        if texts.is_empty() { "no other process is attached".to_owned() } else { texts.join(", ") }
    }
}

impl fmt::Display for SharedLimitMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, pool, held_bytes, idle_bytes, wanted_bytes, .. } = self;
        let namespace = if self.is_in_other_namespace { " in another namespace" } else { "" };
        let pool = if pool.is_empty() { "unnamed" } else { pool };
        write!(f, "process {pid}{namespace} ({pool}) holds {}, {} idle", Size(*held_bytes), Size(*idle_bytes))?;
        if *wanted_bytes > 0 { write!(f, ", and waits for {}", Size(*wanted_bytes)) } else { Ok(()) }
    }
}

/// Returns the number of this process's PID namespace; 0 if unknown.
pub(super) fn namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

/// Returns the first bytes of `name` as words.
pub(super) fn words_of(name: &str) -> [u64; NAME_WORDS] {
    let end = (0..=name.len().min(NAME_WORDS * 8)).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    let mut bytes = [0; NAME_WORDS * 8];
    bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    std::array::from_fn(word)
}

impl SharedLimitMember {
    fn of(slots: &Slots, index: usize, own: Option<usize>) -> Self {
        let get = |word| slots.get(index, word);
        let name = (NAME..SLOT_WORDS).flat_map(|word| get(word).to_ne_bytes()).collect::<Vec<_>>();
        Self {
            pid: u32::try_from(get(PROCESS)).unwrap_or_default(),
            is_in_other_namespace: get(NAMESPACE) != namespace(),
            pool: String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned(),
            held_bytes: get(HELD),
            idle_bytes: get(IDLE).min(get(HELD)),
            wanted_bytes: get(WANTED),
            is_own: Some(index) == own,
        }
    }
}

/// Reads the contents of this user's shared limit `name`; `None` if it has no member. Takes no slot.
///
/// # Errors
///
/// An invalid name, or a file that cannot be read, has another format or is not a shared limit.
pub fn report(name: &str) -> Result<Option<SharedLimitReport>, String> {
    problem_of(name).map_or(Ok(()), |problem| Err(problem.to_owned()))?;
    Ok(Slots::view(&path_of(name))?.map(|slots| SharedLimitReport::of(name, &slots, None)))
}
