//! All checks together, and what they found.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::{docs, edges, files, modules};

/// One thing that is not as it should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The file, below the repository's root.
    pub file: PathBuf,
    /// The line, from 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// What is wrong, and what would be right.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// What the checks found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What must be put right.
    pub errors: Vec<Finding>,
    /// What should be.
    pub warnings: Vec<Finding>,
    /// How many files were read.
    pub file_count: usize,
}

impl Report {
    /// Whether nothing must be put right.
    pub fn is_clean(&self) -> bool {
        self.errors.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for warning in &self.warnings {
            writeln!(f, "tidy: warning: {warning}")?;
        }
        for error in &self.errors {
            writeln!(f, "tidy: error: {error}")?;
        }
        writeln!(
            f,
            "tidy: {} files, {} errors, {} warnings",
            self.file_count,
            self.errors.len(),
            self.warnings.len()
        )
    }
}

/// A file of the repository that holds text.
pub(crate) struct SourceFile {
    /// Below the root.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Checks the repository at `root`.
///
/// # Errors
/// If its files cannot be read.
pub fn tidy(root: &Path) -> io::Result<Report> {
    let sources = files::tracked(root)?;
    let mut report = Report { file_count: sources.len(), ..Report::default() };
    edges::check(&sources, &mut report);
    modules::check(&sources, &mut report);
    files::check(&sources, &mut report);
    docs::check(&sources, &mut report);
    Ok(report)
}
