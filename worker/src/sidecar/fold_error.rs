//! Errors of folds.

/// The reason why a fold has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FoldError {
    /// The rank with this number passed an invalid list.
    By(u16),
    /// The sums cannot be stored; the text says why.
    NoMemory(String),
}
