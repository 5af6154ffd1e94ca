//! Positions in texts, for errors.

/// Returns the number of the line that holds the byte at `offset`, from 1.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}
