//! The errors of this crate.

use std::io;
use std::time::Duration;

/// Result of the fallible calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a call failed: text for people, and predicates for code that branches.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<ErrorKind>);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ErrorKind {
    #[error(transparent)]
    Pool(pinpool::Error),
    #[error(
        "no shared buffer was free within {waited:?}: of {buffers}, {filling} are being filled, {sent} are sent and not \
         received, {received} are held by the trainer; wait longer, release received buffers earlier, or create more buffers"
    )]
    NoBuffer { waited: Duration, buffers: usize, filling: usize, sent: usize, received: usize },
    #[error(
        "cannot allocate {len} bytes: a shared buffer holds at most {buffer_bytes} bytes; request fewer or create larger buffers"
    )]
    TooLong { len: usize, buffer_bytes: usize },
    #[error("shared buffers: {0}")]
    OutOfRange(String),
    #[error("ticket of buffer {index}, generation {generation}: {why}")]
    Ticket { index: u32, generation: u64, why: String },
    #[error("shared buffers: {0}")]
    TrainerUnavailable(String),
    #[error("shared buffers: {0}")]
    Backend(String),
    #[error("shared buffers: opened before process {0} was forked: open them again in this process")]
    Forked(u32),
}

impl Error {
    /// Returns the pool's error, if the pool failed.
    pub fn pool_error(&self) -> Option<&pinpool::Error> {
        match &*self.0 {
            ErrorKind::Pool(error) => Some(error),
            _ => None,
        }
    }

    /// Returns whether the length of the request exceeds a shared buffer or is invalid for the pool, or the number or size of
    /// the buffers is out of range.
    pub fn is_invalid_request(&self) -> bool {
        matches!(*self.0, ErrorKind::TooLong { .. } | ErrorKind::OutOfRange(_))
            || self.pool_error().is_some_and(pinpool::Error::is_invalid_request)
    }

    /// Returns whether no buffer was free in time, or the memory does not fit within the pool's limit.
    pub fn is_limit(&self) -> bool {
        matches!(*self.0, ErrorKind::NoBuffer { .. }) || self.pool_error().is_some_and(pinpool::Error::is_limit)
    }

    /// Returns whether the pool was [closed](pinpool::Pool::close).
    pub fn is_closed(&self) -> bool {
        self.pool_error().is_some_and(pinpool::Error::is_closed)
    }

    /// Returns whether the ticket is invalid: its buffer was received before or freed, or belongs to other shared buffers.
    pub fn is_invalid_ticket(&self) -> bool {
        matches!(*self.0, ErrorKind::Ticket { .. })
    }

    /// Returns whether the trainer has exited, or refuses its workers.
    pub fn is_trainer_unavailable(&self) -> bool {
        matches!(*self.0, ErrorKind::TrainerUnavailable(_))
    }

    /// Returns whether the kernel or the driver refused a call, or the shared memory is invalid.
    pub fn is_backend(&self) -> bool {
        matches!(*self.0, ErrorKind::Backend(_)) || self.pool_error().is_some_and(pinpool::Error::is_backend)
    }

    /// Returns whether the buffers or the pool were created before this process was forked.
    pub fn is_forked(&self) -> bool {
        matches!(*self.0, ErrorKind::Forked(_)) || self.pool_error().is_some_and(pinpool::Error::is_forked)
    }
}

impl From<pinpool::Error> for Error {
    fn from(error: pinpool::Error) -> Self {
        ErrorKind::Pool(error).into()
    }
}

impl From<pinpool::source::SourceError> for Error {
    fn from(error: pinpool::source::SourceError) -> Self {
        ErrorKind::Backend(error.to_string()).into()
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
            ErrorKind::TooLong { .. } | ErrorKind::OutOfRange(_) | ErrorKind::Ticket { .. } => {
                io::ErrorKind::InvalidInput
            }
            ErrorKind::TrainerUnavailable(_) => io::ErrorKind::ConnectionReset,
            ErrorKind::Backend(_) => io::ErrorKind::InvalidData,
            ErrorKind::Forked(_) => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
