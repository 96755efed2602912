//! What is recorded.

/// One thing that a pool did. Lengths are in bytes, times in nanoseconds; `id` is that of a buffer's memory, from [`New`](Event::New) to
/// [`Gone`](Event::Gone).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Event {
    /// A get was served.
    Get {
        /// The memory that serves it.
        id: u64,
        /// Bytes as requested.
        bytes: u64,
        /// The size class.
        class_bytes: u64,
        /// Number of the owner's tag; 0 is none.
        tag: u32,
        /// How long it took; 0 of a hit.
        took_ns: u64,
    },
    /// The last get of this memory was sampled: where it came from is known. Of several the last one counts.
    Sampled {
        /// The memory that serves it.
        id: u64,
        /// Number of the call stack.
        stack: u32,
    },
    /// The next get of this thread was served, or refused, after it stood in the wait queue.
    Waited,
    /// A get failed.
    Refused {
        /// Bytes as requested.
        bytes: u64,
        /// The size class.
        class_bytes: u64,
        /// Number of the owner's tag; 0 is none.
        tag: u32,
        /// How long it took.
        took_ns: u64,
    },
    /// A user is done with a buffer.
    Put {
        /// The buffer's memory.
        id: u64,
        /// Whether devices may still use it: then [`Completed`](Event::Completed) follows.
        in_flight: bool,
    },
    /// The copies of a buffer that was put are seen to be over.
    Completed {
        /// The buffer's memory.
        id: u64,
    },
    /// The end of a buffer's copies cannot be known, so its memory is never used again.
    Leaked {
        /// The buffer's memory.
        id: u64,
    },
    /// Memory for a buffer was carved or acquired: the get that follows is a miss.
    New {
        /// The memory.
        id: u64,
        /// Its first byte.
        address: u64,
        /// Its length.
        class_bytes: u64,
        /// False of memory that replaces the back-end's under a ceiling.
        from_source: bool,
    },
    /// Memory of a buffer went back to the arena or the back-end.
    Gone {
        /// The memory.
        id: u64,
    },
    /// The back-end acquired or committed memory.
    Pin {
        /// Its first byte; 0 if it failed.
        address: u64,
        /// Its length.
        bytes: u64,
        /// How long the call took.
        took_ns: u64,
        /// Whether the back-end refused.
        failed: bool,
    },
    /// The back-end released or decommitted memory.
    Unpin {
        /// Its first byte.
        address: u64,
        /// Its length.
        bytes: u64,
        /// How long the call took.
        took_ns: u64,
        /// Whether the back-end refused.
        failed: bool,
    },
    /// The back-end moved granules to other addresses.
    Move {
        /// First byte of the old addresses.
        from: u64,
        /// First byte of the new ones.
        to: u64,
        /// Length.
        bytes: u64,
        /// How long the call took; 0 of all pieces of a call but the first.
        took_ns: u64,
    },
    /// The limit on idle buffers changed.
    Limit {
        /// Before.
        from: u64,
        /// After.
        to: u64,
    },
    /// The ceiling is this from now on; `u64::MAX` is none.
    Ceiling {
        /// Bytes.
        bytes: u64,
    },
    /// The pool was cleared.
    Cleared,
    /// So many records of this thread were lost just before this one.
    Missing {
        /// Their number.
        records: u64,
    },
    /// The pool ended.
    End,
}

impl Event {
    /// The buffer's memory, if it is about one.
    pub fn buffer(&self) -> Option<u64> {
        match *self {
            Self::Get { id, .. }
            | Self::Sampled { id, .. }
            | Self::Put { id, .. }
            | Self::Completed { id }
            | Self::Leaked { id }
            | Self::New { id, .. }
            | Self::Gone { id } => Some(id),
            _ => None,
        }
    }
}

/// The fact that names the variables whose settings the program set in its code, which goes before variables, apart by spaces.
pub const SET_IN_CODE: &str = "set_in_code";

/// One thing that a pool did, when, and on which thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
pub struct Record {
    /// Nanoseconds since the recording began.
    pub time_ns: u64,
    /// Number of the thread; of a recording that was read, from 0 in order of their first records.
    pub thread: u32,
    /// Number of the pool.
    pub pool: u32,
    /// What it did.
    pub event: Event,
}

/// A pool of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
pub struct PoolDescription {
    /// Its number in the recording, from 0.
    pub number: u32,
    /// What is known of it: `name`, `backend`, `process`, `version`, `time` (seconds since 1970 at time 0 of the recording), each
    /// `PINPOOL_*` variable with the value that holds, and [`SET_IN_CODE`].
    pub facts: Vec<(String, String)>,
}

impl PoolDescription {
    /// The value of a fact.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.facts.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}
