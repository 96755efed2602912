//! What owners share, read without attaching: by a tool that looks.

use std::io;
use std::path::Path;

use super::header::{Layout, Verdict};
use super::segment::Segment;
use super::{LockFile, SharedFileError, failed, memory_of, open, text_of, verdict};
use pinpool_os::fork;
use pinpool_os::sync::process::Ordering;

/// A snapshot of words that change all the time is taken so often.
const READINGS: u32 = 64;

/// The words of all owners at one moment.
#[derive(Debug)]
pub struct Snapshot {
    layout: Layout,
    words: Vec<u64>,
    owned: Vec<usize>,
}

impl Snapshot {
    /// Reads the words of the file at `path`; `None` if there is none, or nobody is attached.
    pub fn read(path: &Path, layout: &Layout) -> Result<Option<Self>, SharedFileError> {
        let no_fork = fork::hold_off();
        let (file, _) = match open(path, false) {
            Err(SharedFileError::System { error, .. }) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let locks = LockFile::over(file, &no_fork).map_err(|error| failed("watch", path, error))?;
        drop(no_fork);
        if verdict(path, layout, &locks)? == Verdict::Empty {
            return Ok(None);
        }
        let memory = memory_of(path, layout, &locks)?;
        let Some(segment) = Segment::attach(memory.id, layout.words(), memory.cookie, true) else {
            // It goes with its last owner.
            let is_owned = locks.has_owner().map_err(|error| failed("lock", path, error))?;
            return if is_owned { Err(SharedFileError::Elsewhere { place: text_of(path) }) } else { Ok(None) };
        };
        // Before their words: those of an owner that ends later are still its own.
        let owned = (0..layout.slots).filter(|&index| locks.is_slot_marked(index).unwrap_or(false)).collect();
        let read = || segment.words().iter().map(|word| word.load(Ordering::SeqCst)).collect::<Vec<_>>();
        let mut words = read();
        // Words that change while they are read may not belong together: two equal readings do.
        for _ in 0..READINGS {
            let again = read();
            if again == words {
                break;
            }
            words = again;
        }
        Ok(Some(Self { layout: *layout, words, owned }))
    }

    pub fn common(&self) -> &[u64] {
        &self.words[self.layout.common_words()]
    }

    /// The words of the slots whose owners live.
    pub fn owned_slots(&self) -> Vec<Vec<u64>> {
        self.owned.iter().map(|&index| self.words[self.layout.slot_words(index)].to_vec()).collect()
    }
}
