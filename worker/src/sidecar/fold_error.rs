//! Errors of folds.

/// Why a fold has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FoldError {
    /// This rank handed an invalid list.
    By(u16),
    /// There is no memory for the sums; the text says why.
    NoMemory(String),
}
