//! Findings about this machine and what to do about them, for warnings and `pinpool doctor`.

use std::fmt;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// Nothing is wrong.
    Ok,
    /// Information without a disadvantage.
    Note,
    /// It works, but worse than requested or than the machine allows.
    Warning,
    /// The request cannot be fulfilled.
    Error,
}

impl Level {
    /// Name in reports: `ok`, `note`, `warning` or `error`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One thing that was checked.
///
/// Displays as one sentence: what was found, then, after a semicolon, what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What was checked, such as `gpu`, `pinning` or `cgroup`.
    pub check: &'static str,
    /// How much it matters.
    pub level: Level,
    /// What was found, with its numbers.
    pub found: String,
    /// What to do about it, in one sentence; `None` if there is nothing to do.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding about `check`, of this level, without a remedy.
    pub fn new(check: &'static str, level: Level, found: impl Into<String>) -> Self {
        Self { check, level, found: found.into(), remedy: None }
    }

    /// A finding of [`Level::Ok`].
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Ok, found)
    }

    /// A finding of [`Level::Note`].
    pub fn note(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Note, found)
    }

    /// A finding of [`Level::Warning`].
    pub fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Warning, found)
    }

    /// A finding of [`Level::Error`].
    pub fn error(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Error, found)
    }

    /// Adds what to do about it, in one sentence.
    #[must_use]
    pub fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.found)?;
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}
