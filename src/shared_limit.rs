//! The limit that the pools of several processes share (`PINPOOL_LEDGER`); `pinpool_shared_limit` implements it.

use crate::error::{ErrorKind, Result};
pub(crate) use pinpool_shared_limit::{Loss, SharedLimit, Want, problem_of};
pub use pinpool_shared_limit::{SharedLimitOwner, SharedLimitReport, names};

/// The limit that a pool shares with other processes of this host (`PINPOOL_LEDGER`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SharedLimitName {
    /// No shared limit.
    #[default]
    Disabled,
    /// The shared limit named `auto`, if the environment shows that this process is one of several on the host: a torchrun rank
    /// (`LOCAL_WORLD_SIZE` above 1, otherwise `RANK`, `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`), or a Ray process (`RAY_JOB_ID` or
    /// `RAY_RAYLET_PID`).
    Auto,
    /// The shared limit with this name: up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    Named(String),
}

/// Returns the contents of this user's shared limit `name`; `None` if it has no owner. Does not join the shared limit.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting): `name` is invalid, or the file is unreadable, has another version or is not a
/// shared limit.
pub fn report(name: &str) -> Result<Option<SharedLimitReport>> {
    pinpool_shared_limit::report(name)
        .map_err(|why| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into())
}

/// Returns why a pool can no longer grow under its shared limit, as text.
pub(crate) fn describe_loss(loss: Loss) -> &'static str {
    match loss {
        Loss::Removed => "its file in /dev/shm was removed",
        Loss::Closed => "this process has closed its descriptor",
    }
}
