//! Text that another process wrote, made safe to show: on a terminal, in a log, in an error.
//!
//! Every text field of a message is read through [`PeerText::string`] or its siblings, which `cargo
//! xtask tidy` checks, and every error that may quote a peer is shown through [`PeerText::of`]. So
//! nothing that comes in from outside can be shown as it came.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::{self, Write as _};
use core::ops::Deref;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Text of a peer: one line of printable characters, at most [`PeerText::MAX`] bytes of them.
///
/// Control characters, line ends, and the characters that reorder or hide text are written as Rust
/// escapes them (`\n`, `\u{1b}`). What is cut off is counted at the end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerText(String);

impl PeerText {
    /// Most bytes of a text.
    pub const MAX: usize = 4096;

    /// Makes a text of what a peer said, or of an error that may quote it.
    #[must_use]
    pub fn of(what: impl fmt::Display) -> Self {
        let mut plain = Plain::default();
        let whole = write!(plain, "{what}").is_ok();
        debug_assert!(whole, "a `Plain` takes all that is written");
        Self(plain.finish())
    }

    /// Whether a text is shown as it is.
    #[must_use]
    pub fn is_plain(text: &str) -> bool {
        *Self::of(text) == *text
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads the text of a message's field, for `#[serde(deserialize_with)]`.
    ///
    /// # Errors
    ///
    /// The deserializer's, when there is no text.
    pub fn string<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        Self::deserialize(from).map(String::from)
    }

    /// Writes the text of a message's field as it will be read, for `#[serde(serialize_with)]`: one
    /// that is long, since it quotes others, makes no message that is too long to be sent.
    ///
    /// # Errors
    ///
    /// The serializer's.
    pub fn write<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&Self::of(text))
    }

    /// Reads a text that may be missing, likewise.
    ///
    /// # Errors
    ///
    /// The deserializer's, when there is something else.
    pub fn option<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
        Ok(Option::<Self>::deserialize(from)?.map(String::from))
    }

    /// Reads several texts, likewise.
    ///
    /// # Errors
    ///
    /// The deserializer's, when there is something else.
    pub fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(Vec::<Self>::deserialize(from)?.into_iter().map(String::from).collect())
    }

    /// Reads counts by what they count, likewise.
    ///
    /// # Errors
    ///
    /// The deserializer's, when there is something else.
    pub fn counts<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u64>, D::Error> {
        let counts = BTreeMap::<Self, u64>::deserialize(from)?;
        Ok(counts.into_iter().map(|(what, count)| (what.into(), count)).collect())
    }
}

/// Text of a peer that is parsed and never shown. Its `Debug` tells only its length.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Unshown(pub String);

impl fmt::Debug for Unshown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Deref for PeerText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PeerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for PeerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl From<PeerText> for String {
    fn from(text: PeerText) -> Self {
        text.0
    }
}

impl PartialEq<str> for PeerText {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for PeerText {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl<'de> Deserialize<'de> for PeerText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = PeerText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E>(self, text: &str) -> Result<PeerText, E> {
                Ok(PeerText::of(text))
            }
        }

        from.deserialize_str(Reader)
    }
}

/// A writer that keeps what may be shown, and counts what it cuts off.
#[derive(Default)]
struct Plain {
    text: String,
    /// Bytes of `text` that stay if something is cut off.
    kept: usize,
    /// Bytes as they came, of what is behind `kept`.
    behind: usize,
    cut: bool,
}

impl Plain {
    fn push(&mut self, c: char) {
        let mut bytes = [0; 4];
        let escaped = match c {
            '\'' | '"' | '\\' => None,
            c => Some(c.escape_debug()),
        };
        let len = escaped.as_ref().map_or(1, |escaped| escaped.clone().count().max(c.len_utf8()));
        let end = self.text.len() + len;
        if self.behind > 0 || end > ROOM {
            self.behind += c.len_utf8();
            self.cut |= end > PeerText::MAX;
        }
        if self.cut {
            return;
        }
        match escaped {
            None => self.text.push_str(c.encode_utf8(&mut bytes)),
            Some(escaped) => self.text.extend(escaped),
        }
        if self.behind == 0 {
            self.kept = self.text.len();
        }
    }

    fn finish(mut self) -> String {
        if self.cut {
            self.text.truncate(self.kept);
            self.text.push_str(" [and ");
            self.text.push_str(&self.behind.to_string());
            self.text.push_str(" bytes more]");
        }
        self.text
    }
}

impl fmt::Write for Plain {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        piece.chars().for_each(|c| self.push(c));
        Ok(())
    }
}

/// Bytes that stay of a text that is cut: the count behind it fits what is left of the most, so
/// that a text which was cut is not cut again.
const ROOM: usize = PeerText::MAX - 48;

#[cfg(test)]
mod tests {
    use std::format;
    use std::string::ToString;

    use super::*;

    #[test]
    fn what_a_terminal_or_a_log_would_obey_is_escaped() {
        let evil =
            "a\n\r\t\0\x1b[31m\x07\x7f\u{9b}1m\u{202e}\u{200b}\u{2028}\u{feff}\u{e0041}é\"'\\b";
        let text = PeerText::of(evil);
        assert_eq!(
            text,
            "a\\n\\r\\t\\0\\u{1b}[31m\\u{7}\\u{7f}\\u{9b}1m\\u{202e}\\u{200b}\\u{2028}\\u{feff}\
             \\u{e0041}é\"'\\b"
        );
        assert!(!PeerText::is_plain(evil));
        assert!(PeerText::is_plain("job \"ä\\b\" of 10.0.0.1:7177"));
        assert_eq!(PeerText::of(&*text), text, "what is plain stays as it is");
    }

    #[test]
    fn a_long_text_is_cut_and_says_by_how_much() {
        let fits = "x".repeat(PeerText::MAX);
        assert_eq!(PeerText::of(&fits), *fits);
        for unit in ["x", "\u{1b}", "ä", "\u{1f600}"] {
            let long = unit.repeat((1 << 20) / unit.len());
            let text = PeerText::of(&long);
            assert!(text.len() <= PeerText::MAX, "{}", text.len());
            assert_eq!(PeerText::of(&*text), text, "what was cut is not cut again");
            let (kept, rest) = text.split_once(" [and ").unwrap();
            let more: usize = rest.strip_suffix(" bytes more]").unwrap().parse().unwrap();
            let shown = if unit == "\u{1b}" { kept.len() / "\\u{1b}".len() } else { kept.len() };
            assert_eq!(shown + more, long.len());
        }
    }

    #[test]
    fn it_is_shown_as_the_text_that_it_is() {
        let text = PeerText::of("a\nb");
        assert_eq!((text.to_string(), format!("{text:?}")), ("a\\nb".into(), "\"a\\\\nb\"".into()));
        assert_eq!(format!("{:>6}|", PeerText::of("ab")), "    ab|");
        assert_eq!(String::from(text), "a\\nb");
    }
}
