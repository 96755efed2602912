//! The limit that the pools of all processes of a host share (`pinpool_shm::ledger`), and its name (`name`).

mod name;

pub use self::name::LedgerName;
use crate::error::{ErrorKind, Result};
pub(crate) use pinpool_shm::ledger::{HostLedger, Loss, Want, problem_of};
pub use pinpool_shm::ledger::{LedgerOwner, LedgerReport, names};

/// The contents of this user's shared limit `name`; `None` if there is none. Attaches nothing.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting): `name` is invalid, or the file cannot be read, has another version or is
/// not a shared limit.
pub fn report(name: &str) -> Result<Option<LedgerReport>> {
    pinpool_shm::ledger::report(name)
        .map_err(|why| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into())
}
