//! Findings about this machine and what to do about them, for warnings and `pinpool doctor`.

use std::fmt;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Nothing is wrong.
    Ok,
    /// Information without a disadvantage.
    Note,
    /// It works, but worse than requested or than the machine allows.
    Warning,
    /// The request cannot be fulfilled.
    Error,
}

impl Severity {
    /// Returns the name in reports: `ok`, `note`, `warning` or `error`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
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
    /// The subject of the check, such as `gpu`, `pinning` or `cgroup`.
    pub check: &'static str,
    /// The severity.
    pub severity: Severity,
    /// The result, with its numbers.
    pub found: String,
    /// The recommendation, in one sentence, if there is one.
    pub remedy: Option<String>,
}

impl Finding {
    /// Returns a finding about `check`, of this severity, without a remedy.
    pub fn new(check: &'static str, severity: Severity, found: impl Into<String>) -> Self {
        Self { check, severity, found: found.into(), remedy: None }
    }

    /// Returns a finding of [`Severity::Ok`].
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Ok, found)
    }

    /// Returns a finding of [`Severity::Note`].
    pub fn note(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Note, found)
    }

    /// Returns a finding of [`Severity::Warning`].
    pub fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Warning, found)
    }

    /// Returns a finding of [`Severity::Error`].
    pub fn error(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Severity::Error, found)
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
