//! Why a fold has no result.

/// What has spoilt a fold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FoldError {
    /// This rank has handed a list that cannot be.
    By(u16),
    /// There is no memory for the sums, and why.
    NoMemory(String),
}
