//! Events of a pool, as recordings contain them.

/// An event of a pool. Lengths are in bytes, times in nanoseconds. An `id` identifies the memory of a buffer from
/// [`New`](Event::New) to [`Gone`](Event::Gone), `tag` and `stack` are numbers of a holder's tag and of a call stack (0 is none),
/// and `class_bytes` is the size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Event {
    /// A request for `bytes` was served; `took_ns` is 0 for a hit.
    Get { id: u64, bytes: u64, class_bytes: u64, tag: u32, took_ns: u64 },
    /// The call stack of the last request that returned this memory. Later records replace earlier ones.
    Sampled { id: u64, stack: u32 },
    /// The next request of this thread waited in the queue before it was served or refused.
    Waited,
    /// A request for `bytes` failed.
    Refused { bytes: u64, class_bytes: u64, tag: u32, took_ns: u64 },
    /// A buffer was returned. If it is `in_flight`, devices may still use it, and [`Completed`](Event::Completed) follows.
    Put { id: u64, in_flight: bool },
    /// All copies of a returned buffer have completed.
    Completed { id: u64 },
    /// The completion of a buffer's copies cannot be detected, so its memory is never reused.
    Leaked { id: u64 },
    /// Memory for a buffer was carved or acquired; the request that follows is a miss. `from_source` is false for pageable memory
    /// in place of the backend's.
    New { id: u64, address: u64, class_bytes: u64, from_source: bool },
    /// The memory of a buffer returned to the arena or the backend.
    Gone { id: u64 },
    /// The backend acquired or committed memory; `address` is 0 if the call failed.
    Pin { address: u64, bytes: u64, took_ns: u64, failed: bool },
    /// The backend released or decommitted memory.
    Unpin { address: u64, bytes: u64, took_ns: u64, failed: bool },
    /// The backend moved granules to other addresses. `took_ns` is 0 for all pieces of a call except the first.
    Move { from: u64, to: u64, bytes: u64, took_ns: u64 },
    /// The limit on idle buffers changed.
    Limit { from: u64, to: u64 },
    /// The limit of the pool changed; `u64::MAX` means no limit.
    MaxBytes { bytes: u64 },
    /// The pool was cleared.
    Cleared,
    /// This number of records was lost before this one.
    Missing { records: u64 },
    /// The pool ended.
    End,
}

impl Event {
    /// Returns the `id` of the memory that the event is about, if any.
    pub fn buffer(&self) -> Option<u64> {
        match *self {
            Self::Get { id, .. } | Self::Put { id, .. } | Self::New { id, .. } | Self::Sampled { id, .. } => Some(id),
            Self::Completed { id } | Self::Leaked { id } | Self::Gone { id } => Some(id),
            _ => None,
        }
    }
}

/// The fact that lists the settings made in the program's code, as variables separated by spaces.
pub const SET_IN_CODE: &str = "set_in_code";

/// An event with its time and thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
pub struct Record {
    /// Nanoseconds since the recording began.
    pub time_ns: u64,
    /// Number of the thread. Reading a recording renumbers the threads from 0, in order of their first records.
    pub thread: u32,
    /// Number of the pool.
    pub pool: u32,
    /// The event.
    pub event: Event,
}

/// A pool of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "io", derive(serde::Serialize, serde::Deserialize))]
pub struct PoolDescription {
    /// The number in the recording, from 0.
    pub number: u32,
    /// Properties: `name`, `backend`, `pinned`, `process`, `version`, `time` (seconds since 1970 at time 0 of the recording), each
    /// `PINPOOL_*` variable with its value, and [`SET_IN_CODE`].
    pub facts: Vec<(String, String)>,
}

impl PoolDescription {
    /// Returns the pool's name, or `pool` and its number.
    pub fn name(&self) -> String {
        self.fact("name").map_or_else(|| format!("pool {}", self.number), str::to_owned)
    }

    /// Returns the value of a fact.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.facts.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}
