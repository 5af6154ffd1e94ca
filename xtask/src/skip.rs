//! The parts of a test run that were skipped.

/// A skipped part, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    /// A test, or another part of a step.
    pub(crate) what: String,
    pub(crate) why: String,
}
