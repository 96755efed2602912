//! The limit that the pools of several processes share (`PINPOOL_LEDGER`); `pinpool_shm::shared_limit` implements it.

use crate::error::{ErrorKind, Result};
pub(crate) use pinpool_shm::shared_limit::{SharedLimit, Want, problem_of};
pub use pinpool_shm::shared_limit::{SharedLimitOwner, SharedLimitReport, names};

/// The limit that a pool shares with other processes of this host (`PINPOOL_LEDGER`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SharedLimitName {
    /// No shared limit.
    #[default]
    Disabled,
    /// The shared limit named `auto`, if the environment shows that this process is one of several on the host: a torchrun rank
    /// (`LOCAL_WORLD_SIZE` above 1, otherwise `RANK`, `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`), or a Ray process (`RAY_...`).
    Auto,
    /// The shared limit with this name: up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    Named(String),
}

impl From<&str> for SharedLimitName {
    fn from(name: &str) -> Self {
        // In any case, as in the variable.
        match name.to_ascii_lowercase().as_str() {
            "none" => Self::Disabled,
            "auto" => Self::Auto,
            _ => Self::Named(name.to_owned()),
        }
    }
}

impl From<String> for SharedLimitName {
    fn from(name: String) -> Self {
        Self::from(name.as_str())
    }
}

/// The contents of this user's shared limit `name`; `None` if there is none. Attaches nothing.
///
/// # Errors
///
/// [`Error::is_setting`](crate::Error::is_setting): `name` is invalid, or the file cannot be read, has another version or is
/// not a shared limit.
pub fn report(name: &str) -> Result<Option<SharedLimitReport>> {
    pinpool_shm::shared_limit::report(name)
        .map_err(|why| ErrorKind::Setting { name: "PINPOOL_LEDGER", value: name.to_owned(), why }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_words_are_read_in_any_case_and_a_name_as_it_is() {
        assert_eq!(["none", "NONE"].map(SharedLimitName::from), [SharedLimitName::Disabled, SharedLimitName::Disabled]);
        assert_eq!(SharedLimitName::from("Auto".to_owned()), SharedLimitName::Auto);
        assert_eq!(SharedLimitName::from("Job7"), SharedLimitName::Named("Job7".to_owned()));
    }
}
