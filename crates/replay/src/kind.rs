//! The kinds of memory that a replay simulates.

/// How the simulated source hands out memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SourceKind {
    /// One virtual range: a buffer may span granules that were pinned by different calls.
    #[default]
    #[value(name = "span")]
    Virtual,
    /// Discrete regions: a buffer lies within one.
    #[value(name = "walls")]
    Discrete,
}

impl SourceKind {
    /// Name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtual => "span",
            Self::Discrete => "walls",
        }
    }
}
