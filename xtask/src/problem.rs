//! Problems that `cargo xtask tidy` reports.

use std::fmt;
use std::path::{Path, PathBuf};

/// A violation of one rule at one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    path: PathBuf,
    pub(crate) line: Option<usize>,
    pub(crate) rule: &'static str,
    message: String,
}

impl Problem {
    /// Creates a problem in `path`, at `line` (counted from 1) if it concerns a single line.
    pub(crate) fn new(
        path: impl AsRef<Path>,
        line: Option<usize>,
        rule: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self { path: path.as_ref().to_owned(), line, rule, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": [{}] {}", self.rule, self.message)
    }
}
