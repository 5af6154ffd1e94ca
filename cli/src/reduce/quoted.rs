//! Text from a file, quoted for an error message.

use std::fmt;

/// Formats text from a file for use in a sentence: quoted, without control characters, and cut so
/// that the rest of the sentence stays visible.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.0.char_indices().nth(MAX_QUOTED).map_or(self.0.len(), |(at, _)| at);
        let (start, rest) = self.0.split_at(at);
        write!(f, "{start:?}")?;
        if rest.is_empty() { Ok(()) } else { write!(f, " [and {} more bytes]", rest.len()) }
    }
}

/// Maximum number of characters to quote from a text.
const MAX_QUOTED: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_quoted_in_one_line_and_cut() {
        assert_eq!(Quoted("w\n").to_string(), "\"w\\n\"");
        let cut = Quoted(&"ä".repeat(MAX_QUOTED + 1)).to_string();
        assert_eq!(cut, format!("\"{}\" [and 2 more bytes]", "ä".repeat(MAX_QUOTED)));
    }
}
