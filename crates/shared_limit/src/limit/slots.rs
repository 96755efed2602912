//! The words that the members of a shared limit share, and the file that locates them.
//!
//! ```text
//!   file:   [header: magic, kind, version, segment]                    removed by its last member
//!   memory: [cookie] [words of all members] [slot 0] [slot 1] ... [slot 255]        freed with its last member
//!   locks:  one byte for the file as a whole, one for each slot; far beyond the end of the file
//! ```
//!
//! - **shared-limit-slots-I1**: the memory is created only under the lock of the file while no slot is locked.
//! - **shared-limit-slots-I2**: a slot's words are written only by its member, or, while no member has the slot locked, under
//!   the lock of the file.

use std::fs::{Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::name::user;
use super::segment::{SLOTS, Segment};
use super::shares::Demand;
use crate::file::{LockFile, random, wake};
use pinpool_os::fork;
use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

/// Magic, kind, version, number of the segment, its cookie.
type Header = [u64; 5];
const MAGIC: u64 = u64::from_ne_bytes(*b"pinpool\x01");
const KIND: u64 = u64::from_ne_bytes(*b"limit   ");
/// Increase it with each change of the words below.
const VERSION: u64 = 4;

/// Words that all members share: the limit; a number that increases with each change that other members wait for.
const LIMIT_WORD: usize = 1;
const EVENTS_WORD: usize = 2;
/// Words of a slot: the bytes held, wanted and idle; the bytes that the waiting request needs, and the number of the event since
/// which it waits; the process and its namespace; the first bytes of the pool's name, up to the end of the slot.
pub(super) const HELD: usize = 0;
pub(super) const WANTED: usize = 1;
pub(super) const IDLE: usize = 2;
pub(super) const NEEDED: usize = 3;
pub(super) const SINCE: usize = 4;
pub(super) const PROCESS: usize = 5;
pub(super) const NAMESPACE: usize = 6;
pub(super) const NAME: usize = 7;

/// The longest waits for the file's lock: to attach, and for all other uses. Other processes have the lock for microseconds.
const ATTACH_PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_millis(50);

/// Why a member can no longer claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The file was removed, so new processes use another file with the same name.
    Removed,
    /// Other code has closed the descriptor, and with it the lock of the slot.
    Closed,
}

#[derive(Debug)]
pub(super) struct Slots {
    path: PathBuf,
    segment: Segment,
    locks: LockFile,
}

impl Slots {
    /// Attaches to the file at `path`, which is created if necessary, and takes a free slot. Sets the limit to `max_bytes` if no
    /// other member is attached. Also returns the number of the slot.
    pub(super) fn attach(path: &Path, max_bytes: u64) -> Result<(Self, usize), String> {
        loop {
            let Some((locks, opened)) = open(path, true)? else { continue };
            let failed = |error| failed("lock", path, &error);
            let attach = || {
                // The last member may have removed the file after this process opened it and before this process locked it.
                if !is_still(path, &opened) {
                    return Ok(None);
                }
                let header = read_header(path, &locks)?;
                let is_used = locks.has_member().map_err(failed)?;
                let segment = if is_used { find(path, &header, false)? } else { create(path, &locks, max_bytes)? };
                let own = (0..SLOTS).find(|&index| !locks.is_slot_locked(index).unwrap_or(true)).ok_or_else(|| {
                    format!("all {SLOTS} slots of {} are taken: stop some pools, or use another name", path.display())
                })?;
                segment.zero(own);
                locks.try_lock_slot(own).map_err(failed)?;
                Ok(Some((segment, own)))
            };
            let attached = locks.locked(ATTACH_PATIENCE, attach).map_err(failed)?.unwrap_or_else(|| {
                let path = path.display();
                Err(format!("{path} stays locked by another process: is it stopped (SIGSTOP) or in a debugger?"))
            });
            if let Some((segment, own)) = attached? {
                return Ok((Self { path: path.to_owned(), segment, locks }, own));
            }
        }
    }

    /// Attaches read-only. Returns `None` if there is no such file, or if the file has no member.
    pub(super) fn view(path: &Path) -> Result<Option<Self>, String> {
        let Some((locks, _)) = open(path, false)? else { return Ok(None) };
        let find = || {
            let header = read_header(path, &locks)?;
            let found = find(path, &header, true);
            // Without a member there is no memory either: it was freed with its last member. So an error of `find` does not matter.
            if locks.has_member().map_err(|error| failed("lock", path, &error))? { found.map(Some) } else { Ok(None) }
        };
        // Under the lock no pool attaches, so a file with members has a complete header.
        let found = locks.locked(PATIENCE, find).unwrap_or_default().unwrap_or_else(find)?;
        Ok(found.map(|segment| Self { path: path.to_owned(), segment, locks }))
    }

    pub(super) fn slot(&self, index: usize) -> &[AtomicU64] {
        self.segment.slot(index)
    }

    pub(super) fn get(&self, index: usize, word: usize) -> u64 {
        self.slot(index)[word].load(Ordering::SeqCst)
    }

    pub(super) fn max_bytes(&self) -> u64 {
        self.segment.word(LIMIT_WORD).load(Ordering::SeqCst)
    }

    pub(super) fn events(&self) -> &AtomicU64 {
        self.segment.word(EVENTS_WORD)
    }

    /// Wakes the threads of all members.
    pub(super) fn notify_members(&self) {
        self.events().fetch_add(1, Ordering::SeqCst);
        wake(self.events(), i32::MAX);
    }

    /// Returns whether another living member has slot `index`, or true if the system cannot tell.
    pub(super) fn is_owned(&self, index: usize) -> bool {
        self.locks.is_slot_locked(index).unwrap_or(true)
    }

    fn sum(&self, word: usize, slots: impl Iterator<Item = usize>) -> u64 {
        slots.map(|index| self.get(index, word)).fold(0, u64::saturating_add)
    }

    pub(super) fn room_bytes(&self) -> u64 {
        self.max_bytes().saturating_sub(self.sum(HELD, 0..SLOTS))
    }

    /// Returns the bytes that all members except `own` want.
    pub(super) fn wanted_by_others(&self, own: usize) -> u64 {
        self.sum(WANTED, (0..SLOTS).filter(|&index| index != own))
    }

    /// Returns the demand of each member except `own` that holds or wants memory.
    pub(super) fn demands_of_others(&self, own: usize) -> Vec<Demand> {
        let demand = |index| {
            let [held_bytes, wanted_bytes, needed_bytes] = [HELD, WANTED, NEEDED].map(|word| self.get(index, word));
            Demand { held_bytes, wanted_bytes, needed_bytes, since: (self.get(index, SINCE), index) }
        };
        let others = (0..SLOTS).filter(|&index| index != own).map(demand);
        others.filter(|demand| demand.held_bytes > 0 || demand.wanted_bytes > 0).collect()
    }

    /// Returns why the member can no longer claim, if it cannot. Truncating the file has no effect, since the words are in the
    /// segment.
    pub(super) fn loss(&self) -> Option<Loss> {
        match self.locks.metadata() {
            None => Some(Loss::Closed),
            Some(found) => (found.nlink() == 0).then_some(Loss::Removed),
        }
    }

    #[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))]
    pub(super) fn locks(&self) -> &LockFile {
        &self.locks
    }

    /// Runs `act` under the file's lock, so that no other member claims or attaches at the same time. Returns `None` without running it
    /// if the lock is not available in time.
    pub(super) fn locked<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        self.locks.locked(PATIENCE, act).unwrap_or_default()
    }

    /// Reclaims the bytes of dead members. Returns whether there were any.
    pub(super) fn clear_dead(&self, own: usize) -> bool {
        let has_words = |index| self.get(index, HELD) > 0 || self.get(index, WANTED) > 0;
        let is_dead = |index: &usize| *index != own && has_words(*index) && !self.is_owned(*index);
        let clear = || (0..SLOTS).filter(is_dead).map(|index| self.segment.zero(index)).count() > 0;
        (0..SLOTS).any(|index| is_dead(&index)) && self.locked(clear).unwrap_or(false)
    }

    /// Frees slot `own`. The last member removes the file.
    pub(super) fn leave(&self, own: usize) {
        let end = || {
            self.segment.zero(own);
            self.locks.unlock_slot(own);
        };
        let end_under_lock = || {
            end();
            let is_this = self.locks.metadata().is_some_and(|opened| is_still(&self.path, &opened));
            if is_this && !self.locks.has_member().unwrap_or(true) {
                // If the file cannot be removed, the next member uses it.
                let _ = std::fs::remove_file(&self.path);
            }
        };
        self.locked(end_under_lock).unwrap_or_else(end);
    }
}

fn failed(action: &str, path: &Path, error: &io::Error) -> String {
    let remedy = match error.raw_os_error() {
        Some(libc::ENOSPC) => " (make room there: `df -h /dev/shm`; in a container raise --shm-size)",
        Some(libc::EACCES | libc::EPERM) => " (it belongs to another user, or is read-only: use another name)",
        Some(libc::ELOOP) => " (it is a symbolic link: remove it)",
        _ => "",
    };
    format!("cannot {action} {}: {error}{remedy}", path.display())
}

/// Opens the file for its locks. If there is none, creates it if `is_created`, or returns `None`. Fails unless this user owns the
/// file and only this user may access it.
fn open(path: &Path, is_created: bool) -> Result<Option<(LockFile, Metadata)>, String> {
    let no_fork = fork::delay_forks();
    let mut options = OpenOptions::new();
    // The file is opened for writing even to view it: a report locks the file while it reads the slots, and the kernel grants a
    // write lock only through a descriptor that is open for writing.
    options.read(true).write(true).create(is_created).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let opened = options.open(path).and_then(|file| file.metadata().map(|metadata| (file, metadata)));
    let (file, metadata) = match opened {
        Err(error) if !is_created && error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| failed("open", path, &error))?,
    };
    let (owner, user, mode) = (metadata.uid(), user(), metadata.mode() & 0o777);
    if !metadata.is_file() || owner != user || mode & 0o077 != 0 {
        return Err(format!(
            "{} is not a file that only user {user} may use (owner {owner}, mode {mode:o}); remove it, or use another name",
            path.display()
        ));
    }
    let locks = LockFile::new(file, &no_fork).map_err(|error| failed("watch", path, &error))?;
    Ok(Some((locks, metadata)))
}

/// Returns whether `path` still refers to the file that was opened.
fn is_still(path: &Path, opened: &Metadata) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()))
}

/// Reads the header of the file. Words past the end of the file are zero. Fails if the file has another kind of header.
fn read_header(path: &Path, locks: &LockFile) -> Result<Header, String> {
    let mut bytes = [0; size_of::<Header>()];
    locks.file().read_at(&mut bytes, 0).map_err(|error| failed("read", path, &error))?;
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]));
    let header: Header = std::array::from_fn(word);
    if ![0, MAGIC].contains(&header[0]) || ![0, KIND].contains(&header[1]) {
        return Err(format!("{} is not a pinpool shared limit; remove it, or use another name", path.display()));
    }
    Ok(header)
}

/// Attaches the segment of the living members, which the header names.
fn find(path: &Path, header: &Header, is_read_only: bool) -> Result<Segment, String> {
    let (path, [magic, _, version, id, cookie]) = (path.display(), *header);
    if magic == 0 || version == 0 {
        return Err(format!("{path} was truncated while other processes use it: stop them, or use another name"));
    }
    if version != VERSION {
        return Err(format!(
            "{path} has format {version}, and this release of pinpool uses format {VERSION}: use the same release in all processes \
             that share it, or another name"
        ));
    }
    let segment = i32::try_from(id).ok().and_then(|id| Segment::attach(id, cookie, is_read_only));
    segment.ok_or_else(|| {
        format!(
            "{path} is used in another IPC namespace: share that too (docker --ipc, Kubernetes hostIPC), or use another name"
        )
    })
}

/// Creates a segment, and writes its header over whatever a killed member has left in the file.
fn create(path: &Path, locks: &LockFile, max_bytes: u64) -> Result<Segment, String> {
    let cookie = random();
    let segment = Segment::create(cookie)
        .map_err(|error| format!("cannot share memory for {}: {error} (`ipcs -l` shows the limits)", path.display()))?;
    segment.word(LIMIT_WORD).store(max_bytes, Ordering::SeqCst);
    let header: Header = [MAGIC, KIND, VERSION, u64::from(segment.id.cast_unsigned()), cookie];
    let bytes = header.map(u64::to_ne_bytes).concat();
    let written = locks.file().write_all_at(&bytes, 0).and_then(|()| locks.file().set_len(bytes.len() as u64));
    written.map(|()| segment).map_err(|error| failed("write", path, &error))
}
