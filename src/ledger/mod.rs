//! One ceiling for several pools: those of all processes of a host (`pinpool_shm::ledger`), or those of this process.
//!
//! | file | owns |
//! | --- | --- |
//! | `name` | which host ledger a pool belongs to |
//! | `process_ceiling` | one ceiling for the pools of this process |
//! | `shared_ceiling` | the one of the two that a pool is under |

mod name;
mod process_ceiling;
mod shared_ceiling;

pub use self::name::LedgerName;
pub(crate) use self::process_ceiling::ProcessCeiling;
pub(crate) use self::shared_ceiling::SharedCeiling;
use crate::error::{ErrorKind, Result};
pub(crate) use pinpool_shm::ledger::{HostLedger, Loss, Want, problem_of};
pub use pinpool_shm::ledger::{LedgerOwner, LedgerReport, names};

/// What the ledger `name` of this user says; `None` if there is none. Attaches nothing.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting): `name` is no name of a ledger, or the file cannot be read, has another
/// version or is not a ledger's.
pub fn report(name: &str) -> Result<Option<LedgerReport>> {
    pinpool_shm::ledger::report(name)
        .map_err(|why| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into())
}
