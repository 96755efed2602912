//! The message that identifies a sent buffer.

use crate::error::{ErrorKind, Result};

/// Identifies a buffer that a worker has sent. It contains numbers only; pass it through any channel, as
/// [bytes](Ticket::to_bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(super) id: u64,
    pub(super) index: u32,
    pub(super) generation: u64,
    pub(super) len: u64,
    pub(super) user_data: u64,
}

/// The first bytes of a ticket.
const MAGIC: [u8; 4] = *b"pint";

impl Ticket {
    /// Length of a ticket as bytes.
    pub const BYTES: usize = 40;

    /// Returns the number of the buffer, from 0.
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// Returns the generation of the buffer, which increases with each use. A ticket of an earlier use is refused.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the bytes that the worker has filled.
    pub fn len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }

    /// Returns whether the worker has filled no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number that the worker sent with the buffer.
    pub fn user_data(&self) -> u64 {
        self.user_data
    }

    /// Writes the ticket as bytes, for a pipe or a socket.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.index.to_le_bytes());
        for (field, value) in [self.id, self.generation, self.len, self.user_data].into_iter().enumerate() {
            bytes[8 * (field + 1)..8 * (field + 2)].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads a ticket from its bytes.
    ///
    /// # Errors
    ///
    /// [`is_invalid_ticket`](crate::Error::is_invalid_ticket): the bytes are not a whole ticket.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = |why: String| ErrorKind::Ticket { index: 0, generation: 0, why };
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| {
            wrong(format!(
                "it has {} bytes, and a ticket has {}: pass the bytes of the ticket that `send` returned",
                bytes.len(),
                Self::BYTES
            ))
        })?;
        if bytes[..4] != MAGIC {
            return Err(
                wrong("these bytes are not a ticket: pass the bytes of the ticket from `send`".to_owned()).into()
            );
        }
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let index = u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 + byte]));
        Ok(Self { id: long(8), index, generation: long(16), len: long(24), user_data: long(32) })
    }

    pub(super) fn error(&self, why: impl Into<String>) -> crate::Error {
        ErrorKind::Ticket { index: self.index, generation: self.generation, why: why.into() }.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_comes_back_from_its_bytes_and_other_bytes_are_refused() {
        let ticket = Ticket { id: u64::MAX - 1, index: 7, generation: 1 << 40, len: 12345, user_data: 99 };
        assert_eq!(Ticket::from_bytes(&ticket.to_bytes()).unwrap(), ticket);
        for bytes in [&ticket.to_bytes()[1..], &[], &[0; Ticket::BYTES], &[1; 100]] {
            assert!(Ticket::from_bytes(bytes).unwrap_err().is_invalid_ticket());
        }
    }
}
