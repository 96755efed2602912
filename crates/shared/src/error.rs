//! What can go wrong, in numbers.

use std::io;
use std::time::Duration;

/// Result of the fallible calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. Its text is for people, its predicates are for code that branches.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<ErrorKind>);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ErrorKind {
    #[error(transparent)]
    Pool(pinpool::Error),
    #[error(
        "no shared buffer was free within {waited:?}: of {buffers}, {filling} are being filled, {sent} are sent and not \
         received, {held} are held by the trainer; wait longer, release received buffers earlier, or make more buffers"
    )]
    NoBuffer { waited: Duration, buffers: usize, filling: usize, sent: usize, held: usize },
    #[error("asked {len} B: a shared buffer holds {buffer_bytes} B; ask for less, or make larger buffers")]
    BufferLength { len: usize, buffer_bytes: usize },
    #[error("ticket of buffer {index}, generation {generation}: {why}")]
    Ticket { index: u32, generation: u64, why: String },
    #[error("{what}: {why}")]
    Peer { what: &'static str, why: String },
    #[error("{what}: {why}")]
    Shared { what: &'static str, why: String },
    #[error("{what}: a parent of this process made them, not this process {child}: make them anew")]
    Forked { what: &'static str, child: u32 },
}

impl Error {
    /// The error of the pool, if it is one.
    pub fn of_pool(&self) -> Option<&pinpool::Error> {
        match &*self.0 {
            ErrorKind::Pool(error) => Some(error),
            _ => None,
        }
    }

    /// The length of the request is wrong.
    pub fn is_request(&self) -> bool {
        matches!(*self.0, ErrorKind::BufferLength { .. }) || self.of_pool().is_some_and(pinpool::Error::is_request)
    }

    /// No buffer was free in time, or the memory does not fit under the limit of the pool.
    pub fn is_limit(&self) -> bool {
        matches!(*self.0, ErrorKind::NoBuffer { .. }) || self.of_pool().is_some_and(pinpool::Error::is_limit)
    }

    /// A ticket represents no buffer that waits to be received: it was received before, its buffer was taken back, or it is of
    /// other buffers.
    pub fn is_ticket(&self) -> bool {
        matches!(*self.0, ErrorKind::Ticket { .. })
    }

    /// The process at the other end is gone, or was never there.
    pub fn is_peer(&self) -> bool {
        matches!(*self.0, ErrorKind::Peer { .. })
    }

    /// Memory of another process is not what is expected, or cannot be had.
    pub fn is_shared(&self) -> bool {
        matches!(*self.0, ErrorKind::Shared { .. }) || self.of_pool().is_some_and(pinpool::Error::is_backend)
    }

    /// This process is a child of the one that made the buffers or the pool.
    pub fn is_forked(&self) -> bool {
        matches!(*self.0, ErrorKind::Forked { .. }) || self.of_pool().is_some_and(pinpool::Error::is_forked)
    }
}

impl From<pinpool::Error> for Error {
    fn from(error: pinpool::Error) -> Self {
        ErrorKind::Pool(error).into()
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self(Box::new(kind))
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match *error.0 {
            ErrorKind::Pool(error) => return error.into(),
            ErrorKind::NoBuffer { .. } => io::ErrorKind::TimedOut,
            ErrorKind::BufferLength { .. } | ErrorKind::Ticket { .. } => io::ErrorKind::InvalidInput,
            ErrorKind::Peer { .. } => io::ErrorKind::ConnectionReset,
            ErrorKind::Shared { .. } => io::ErrorKind::InvalidData,
            ErrorKind::Forked { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
