//! Which host ledger a pool belongs to.

/// Which host ledger a pool belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LedgerName {
    /// None: the pool has its own ceiling alone.
    #[default]
    None,
    /// The one called `auto`, if the environment shows that this process is one of several on the host: a rank of torchrun
    /// (`LOCAL_WORLD_SIZE` above 1, else `RANK`, `LOCAL_RANK` or `TORCHELASTIC_RUN_ID`), or a process of Ray (`RAY_...`).
    Auto,
    /// The one of this name: up to 64 letters, digits, `.`, `_` and `-`, of which the first is a letter or a digit.
    Named(String),
}

impl From<&str> for LedgerName {
    fn from(name: &str) -> Self {
        // In any case, as in the variable.
        match name.to_ascii_lowercase().as_str() {
            "none" => Self::None,
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
        assert_eq!(["none", "NONE"].map(LedgerName::from), [LedgerName::None, LedgerName::None]);
        assert_eq!(LedgerName::from("Auto".to_owned()), LedgerName::Auto);
        assert_eq!(LedgerName::from("Job7"), LedgerName::Named("Job7".to_owned()));
    }
}
