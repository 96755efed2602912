//! The limit that a pool shares with other processes.

/// The limit that a pool shares with other processes of this host (`PINPOOL_LEDGER`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LedgerName {
    /// No shared limit.
    #[default]
    Disabled,
    /// The shared limit named `auto`, if the environment shows that this process is one of several on the host: a torchrun rank
    /// (`LOCAL_WORLD_SIZE` above 1, otherwise `RANK`, `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`), or a Ray process (`RAY_...`).
    Auto,
    /// The shared limit with this name: up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    Named(String),
}

impl From<&str> for LedgerName {
    fn from(name: &str) -> Self {
        // In any case, as in the variable.
        match name.to_ascii_lowercase().as_str() {
            "none" => Self::Disabled,
            "auto" => Self::Auto,
            _ => Self::Named(name.to_owned()),
        }
    }
}

impl From<String> for LedgerName {
    fn from(name: String) -> Self {
        Self::from(name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_words_are_read_in_any_case_and_a_name_as_it_is() {
        assert_eq!(["none", "NONE"].map(LedgerName::from), [LedgerName::Disabled, LedgerName::Disabled]);
        assert_eq!(LedgerName::from("Auto".to_owned()), LedgerName::Auto);
        assert_eq!(LedgerName::from("Job7"), LedgerName::Named("Job7".to_owned()));
    }
}
