//! Text from another process, made safe to show on a terminal, in a log or in an error.
//!
//! Every text field of a message is read with [`PeerText::string`] or a similar function. The
//! command `cargo xtask tidy` checks this. Every error that may quote a peer is shown with
//! [`PeerText::of`]. So no text from outside is shown unescaped.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::{self, Write as _};
use core::ops::Deref;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Text from a peer: one line of printable characters, at most [`PeerText::MAX`] bytes.
///
/// Control characters, line ends, and characters that reorder or hide text are written as Rust
/// escapes (`\n`, `\u{1b}`). If the text was cut, its end says how many bytes are missing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerText(String);

impl PeerText {
    /// The maximum length of a text, in bytes.
    pub const MAX: usize = 4096;

    /// Escapes and shortens text from a peer's message, or from an error that may quote a peer.
    #[must_use]
    pub fn of(what: impl fmt::Display) -> Self {
        let mut plain = Plain::default();
        let whole = write!(plain, "{what}").is_ok();
        debug_assert!(whole, "a `Plain` accepts any text");
        Self(plain.finish())
    }

    /// Returns whether [`Self::of`] leaves `text` unchanged.
    #[must_use]
    pub fn is_plain(text: &str) -> bool {
        *Self::of(text) == *text
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads a text field of a message, for `#[serde(deserialize_with)]`.
    ///
    /// # Errors
    ///
    /// Returns the deserializer's error if the field is not a string.
    pub fn string<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        Self::deserialize(from).map(String::from)
    }

    /// Writes a text field of a message as its reader will show it, for `#[serde(serialize_with)]`.
    /// The length limit keeps the message short enough to send, even if the text quotes other
    /// texts.
    ///
    /// # Errors
    ///
    /// Returns the serializer's error.
    pub fn write<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&Self::of(text))
    }

    /// Reads an optional text field of a message, for `#[serde(deserialize_with)]`.
    ///
    /// # Errors
    ///
    /// Returns the deserializer's error if the field is neither a string nor null.
    pub fn option<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
        Ok(Option::<Self>::deserialize(from)?.map(String::from))
    }

    /// Reads a list of strings from a message, for `#[serde(deserialize_with)]`.
    ///
    /// # Errors
    ///
    /// Returns the deserializer's error if the field is not a list of strings.
    pub fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(Vec::<Self>::deserialize(from)?.into_iter().map(String::from).collect())
    }

    /// Reads named counts from a message, for `#[serde(deserialize_with)]`.
    ///
    /// # Errors
    ///
    /// Returns the deserializer's error if the field is not a map from strings to counts.
    pub fn counts<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u64>, D::Error> {
        let counts = BTreeMap::<Self, u64>::deserialize(from)?;
        Ok(counts.into_iter().map(|(what, count)| (what.into(), count)).collect())
    }
}

/// Text from a peer that is parsed and never shown. Its `Debug` output shows only the length.
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
                f.write_str("a string")
            }

            fn visit_str<E>(self, text: &str) -> Result<PeerText, E> {
                Ok(PeerText::of(text))
            }
        }

        from.deserialize_str(Reader)
    }
}

/// A writer that escapes unprintable characters and counts the bytes that it cuts off.
#[derive(Default)]
struct Plain {
    text: String,
    /// The number of bytes of `text` that stay if the text is cut.
    kept: usize,
    /// The number of bytes of the original text that the kept part leaves out.
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
            self.text.push_str(" more bytes]");
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

/// The maximum length of the kept part of a cut text, in bytes. The note about the missing bytes
/// fits in the rest of [`PeerText::MAX`], so a cut text is not cut again.
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
        assert_eq!(PeerText::of(&*text), text, "plain text stays unchanged");
    }

    #[test]
    fn a_long_text_is_cut_and_says_by_how_much() {
        let fits = "x".repeat(PeerText::MAX);
        assert_eq!(PeerText::of(&fits), *fits);
        for unit in ["x", "\u{1b}", "ä", "\u{1f600}"] {
            let long = unit.repeat((1 << 20) / unit.len());
            let text = PeerText::of(&long);
            assert!(text.len() <= PeerText::MAX, "{}", text.len());
            assert_eq!(PeerText::of(&*text), text, "a cut text is not cut again");
            let (kept, rest) = text.split_once(" [and ").unwrap();
            let more: usize = rest.strip_suffix(" more bytes]").unwrap().parse().unwrap();
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
