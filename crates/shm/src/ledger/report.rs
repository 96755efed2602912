//! Who holds what in a host ledger, for people and programs that look.

use std::fmt;
use std::os::unix::fs::MetadataExt;

use super::layout::{HELD, IDLE, LAYOUT, MAX_BYTES, NAME, NAME_WORDS, NAMESPACE, PROCESS, WANTED};
use super::name::{path_of, prefix, problem_of};
use crate::file::{DIRECTORY, Snapshot};

/// Owners that a text lists one by one.
pub const LISTED: usize = 8;

/// What a host ledger says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LedgerReport {
    /// Its name.
    pub name: String,
    /// Its ceiling in bytes, set by its first owner; `None` without one.
    pub max_bytes: Option<u64>,
    /// Bytes that all owners hold.
    pub held_bytes: u64,
    /// The living owners, the largest first.
    pub owners: Vec<LedgerOwner>,
}

/// A pool in a host ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LedgerOwner {
    /// Number of its process, as that process knows it: another one outside of its namespace.
    pub pid: u32,
    /// Whether it is the pool that made this report.
    pub is_own: bool,
    /// Whether that process is in another namespace than this one.
    pub is_elsewhere: bool,
    /// Name of the pool; empty if it has none.
    pub pool: String,
    /// Bytes that it holds, those that it is pinning and releasing included.
    pub held_bytes: u64,
    /// Bytes that it holds and that were idle when its maintenance thread looked last.
    pub idle_bytes: u64,
    /// Bytes that its waiting gets want beyond that.
    pub wanted_bytes: u64,
}

impl LedgerReport {
    /// Makes the report from the words of the living owners, each with whether it is the one that asks.
    pub(super) fn of(name: &str, max_bytes: u64, slots: &[(bool, Vec<u64>)]) -> Self {
        let namespace = namespace();
        let owners = slots.iter().map(|(is_own, slot)| owner_of(slot, *is_own, namespace));
        // One that is just attaching has not written who it is.
        let mut owners: Vec<_> = owners.filter(|owner| owner.pid > 0).collect();
        owners.sort_by(|one, other| other.held_bytes.cmp(&one.held_bytes).then_with(|| one.pid.cmp(&other.pid)));
        let held_bytes = owners.iter().map(|owner| owner.held_bytes).fold(0, u64::saturating_add);
        let max_bytes = Some(max_bytes).filter(|&max_bytes| max_bytes != u64::MAX);
        Self { name: name.to_owned(), max_bytes, held_bytes, owners }
    }

    /// The owners but the one that asked.
    pub fn others(&self) -> impl Iterator<Item = &LedgerOwner> {
        self.owners.iter().filter(|owner| !owner.is_own)
    }

    /// What the others hold, in words; for an error.
    pub fn others_in_words(&self) -> String {
        let others: Vec<_> = self.others().collect();
        if others.is_empty() {
            return "nobody else is attached".to_owned();
        }
        let (listed, rest) = others.split_at(others.len().min(LISTED));
        let mut texts: Vec<_> = listed.iter().map(ToString::to_string).collect();
        if !rest.is_empty() {
            let bytes: u64 = rest.iter().map(|owner| owner.held_bytes).fold(0, u64::saturating_add);
            texts.push(format!("{} others hold {bytes} B", rest.len()));
        }
        texts.join(", ")
    }
}

/// The ledger, and a line for each owner.
impl fmt::Display for LedgerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ceiling = self.max_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} B"));
        write!(f, "ledger {}: ceiling {ceiling}, held {} B", self.name, self.held_bytes)?;
        self.owners.iter().try_for_each(|owner| write!(f, "\n  {owner}"))
    }
}

impl fmt::Display for LedgerOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, pool, held_bytes, idle_bytes, wanted_bytes, .. } = self;
        write!(f, "process {pid}")?;
        if self.is_elsewhere {
            f.write_str(" of another namespace")?;
        }
        if !pool.is_empty() {
            write!(f, " ({pool})")?;
        }
        write!(f, " holds {held_bytes} B")?;
        if *idle_bytes > 0 {
            write!(f, ", {idle_bytes} of them idle")?;
        }
        if *wanted_bytes > 0 {
            write!(f, ", and wants {wanted_bytes} B")?;
        }
        Ok(())
    }
}

/// Number of this process's namespace of processes; 0 where it has none.
pub(super) fn namespace() -> u64 {
    // Miri isolates programs from the files of the machine.
    if cfg!(miri) { 0 } else { std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino()) }
}

/// The first bytes of `name` as words.
pub(super) fn words_of(name: &str) -> [u64; NAME_WORDS] {
    let end = (0..=name.len().min(NAME_WORDS * 8)).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
    let mut bytes = [0; NAME_WORDS * 8];
    bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    std::array::from_fn(word)
}

fn owner_of(slot: &[u64], is_own: bool, own_namespace: u64) -> LedgerOwner {
    let word = |index: usize| slot.get(index).copied().unwrap_or_default();
    let name: Vec<u8> = (NAME..NAME + NAME_WORDS).flat_map(|index| word(index).to_ne_bytes()).collect();
    let name = String::from_utf8_lossy(&name);
    LedgerOwner {
        pid: u32::try_from(word(PROCESS)).unwrap_or_default(),
        is_elsewhere: word(NAMESPACE) != own_namespace,
        pool: name.trim_end_matches('\0').to_owned(),
        held_bytes: word(HELD),
        idle_bytes: word(IDLE).min(word(HELD)),
        wanted_bytes: word(WANTED),
        is_own,
    }
}

/// What the ledger `name` of this user says; `None` if there is none. Attaches nothing.
///
/// # Errors
///
/// Why not, as a text: `name` is no name of a ledger, or the file cannot be read, has another version or is not a ledger's.
pub fn report(name: &str) -> Result<Option<LedgerReport>, String> {
    if let Some(problem) = problem_of(name) {
        return Err(problem.to_owned());
    }
    let snapshot = Snapshot::read(&path_of(name), &LAYOUT).map_err(|error| error.to_string())?;
    Ok(snapshot.map(|snapshot| {
        let slots: Vec<_> = snapshot.owned_slots().into_iter().map(|slot| (false, slot)).collect();
        LedgerReport::of(name, snapshot.common().get(MAX_BYTES).copied().unwrap_or(u64::MAX), &slots)
    }))
}

/// The names of this user's ledgers, sorted. The file of one whose last owner was killed is among them, until it is used again.
pub fn names() -> Vec<String> {
    let prefix = prefix();
    let entries = std::fs::read_dir(DIRECTORY).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix(&prefix)?.to_owned());
    let mut names: Vec<_> = entries.filter_map(name).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_between_two_letters() {
        let read = |name: &str| {
            let mut slot = vec![0; LAYOUT.slot_words];
            slot[NAME..NAME + NAME_WORDS].copy_from_slice(&words_of(name));
            owner_of(&slot, false, 0).pool
        };
        assert_eq!((read(""), read("loader")), (String::new(), "loader".to_owned()));
        assert_eq!(read(&"x".repeat(70)), "x".repeat(64));
        assert_eq!(read(&"ä".repeat(40)), "ä".repeat(32));
        assert_eq!(read(&format!("x{}", "ä".repeat(40))), format!("x{}", "ä".repeat(31)));
    }

    #[test]
    fn the_largest_owners_come_first_and_the_others_are_summed() {
        let slot = |held: u64, wanted: u64| {
            let mut slot = vec![0; LAYOUT.slot_words];
            (slot[HELD], slot[IDLE], slot[WANTED], slot[PROCESS]) = (held, held / 2, wanted, 100 + held);
            slot
        };
        let slots: Vec<_> = (0..12).map(|held| (held == 3, slot(held, u64::from(held == 11)))).collect();
        let report = LedgerReport { owners: Vec::new(), ..LedgerReport::of("job", 100, &slots) };
        assert_eq!(report.to_string(), "ledger job: ceiling 100 B, held 66 B");
        let words = LedgerReport::of("job", u64::MAX, &slots).others_in_words();
        let away = if namespace() == 0 { "" } else { " of another namespace" };
        assert!(
            words.starts_with(&format!("process 111{away} holds 11 B, 5 of them idle, and wants 1 B, process 110"))
        );
        assert!(words.ends_with("3 others hold 3 B"), "{words}");
        assert_eq!(LedgerReport::of("job", 1, &[]).others_in_words(), "nobody else is attached");
    }
}
