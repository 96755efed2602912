//! The settings under which a recording was made.

use pinpool_observe::record::{PoolDescription, SET_IN_CODE};

const LIMIT: &str = "PINPOOL_MAX_BYTES";
/// Each of both implies the other.
const RULES: [&str; 2] = ["PINPOOL_PRESET", "PINPOOL_ROUNDING"];

#[derive(Debug, Clone, Default)]
pub(super) struct RecordedSettings {
    /// Each variable with its effective value, and the last limit.
    values: Vec<(String, String)>,
    /// Variables that had no effect because the program's code set them.
    in_code: Vec<String>,
}

impl RecordedSettings {
    /// Records a limit of `bytes`; `u64::MAX` is no limit.
    pub(super) fn set_limit(&mut self, bytes: u64) {
        let limit = if bytes == u64::MAX { "none".to_owned() } else { bytes.to_string() };
        self.values.retain(|(name, _)| name != LIMIT);
        self.values.push((LIMIT.to_owned(), limit));
    }

    pub(super) fn add(&mut self, pool: &PoolDescription) {
        let in_code = pool.fact(SET_IN_CODE).unwrap_or_default();
        self.in_code.extend(in_code.split_whitespace().map(str::to_owned));
        let values = pool.facts.iter().filter(|(name, _)| name.starts_with("PINPOOL_") && name != LIMIT);
        self.values.extend(values.cloned());
    }

    pub(super) fn values(&self) -> &[(String, String)] {
        &self.values
    }

    pub(super) fn is_in_code(&self, name: &str) -> bool {
        let is_set = |name: &str| self.in_code.iter().any(|set| set == name);
        is_set(name) || RULES.contains(&name) && RULES.into_iter().any(is_set)
    }
}
