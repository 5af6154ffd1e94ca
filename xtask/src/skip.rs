//! What a test run leaves out.

/// Something that was left out, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    /// A test, or what a step would have done.
    pub(crate) what: String,
    pub(crate) why: String,
}
