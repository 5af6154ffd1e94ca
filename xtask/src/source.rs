//! A Rust source file as the tidy rules see it. Each line's code is kept apart from its comments;
//! neither holds the text of literals.
//!
//! This is a scanner, not a parser. It recognizes only comments, strings, raw strings, characters
//! and lifetimes.

use std::path::{Path, PathBuf};

/// The code and the comments of one line, without literals. Blanks stand for everything else, so
/// columns stay the same.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// The line's code.
    pub(crate) code: String,
    /// The line's comments.
    pub(crate) comment: String,
}

/// A Rust source file of this repository.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path, from the workspace root.
    pub(crate) path: PathBuf,
    /// The text as it is on disk.
    pub(crate) text: String,
    /// The lines of the text, each split into code and comments.
    pub(crate) lines: Vec<Line>,
}

impl Source {
    /// Scans `text`.
    pub(crate) fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { path: path.into(), lines: split(&text), text }
    }

    /// Returns whether the first line says that a program generated the file.
    pub(crate) fn is_generated(&self) -> bool {
        self.text.lines().next().is_some_and(|line| line.contains("@generated"))
    }

    /// Returns whether the whole file consists of tests, judging by its name and its folder.
    pub(crate) fn is_test_file(&self) -> bool {
        let stem = self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        stem == "tests"
            || stem.ends_with("_tests")
            || self.path.parent().is_some_and(|dir| dir.iter().any(|part| part == "tests"))
    }

    /// Returns the index of the first line of the test module at the file's end, or the number of
    /// lines if the file has no such module.
    pub(crate) fn tests_start(&self) -> usize {
        let mut attribute = None;
        for (index, line) in self.lines.iter().enumerate() {
            let code = line.code.trim();
            if code.starts_with("#[cfg(test)]") {
                attribute = Some(index);
            } else if code.is_empty() || code.starts_with("#[") {
                continue;
            } else if let Some(start) = attribute.take()
                && code.starts_with("mod ")
                && code.ends_with('{')
            {
                return start;
            }
        }
        self.lines.len()
    }
}

/// Returns whether `text` contains `word` as a whole word.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(inside) && !text[at + word.len()..].starts_with(inside)
    })
}

/// Returns whether `path` is `room`, the module file `room.rs` or a path inside `room`.
pub(crate) fn is_in(path: &Path, room: &str) -> bool {
    path.starts_with(room) || path == Path::new(room).with_extension("rs")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

fn split(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let kinds = kinds(&chars);
    let mut lines = Vec::new();
    let mut line = Line::default();
    for (&c, kind) in chars.iter().zip(kinds) {
        if c == '\n' {
            lines.push(std::mem::take(&mut line));
            continue;
        }
        line.code.push(if kind == Kind::Code { c } else { ' ' });
        line.comment.push(if kind == Kind::Comment { c } else { ' ' });
    }
    if line != Line::default() {
        lines.push(line);
    }
    lines
}

fn kinds(chars: &[char]) -> Vec<Kind> {
    let mut kinds = Vec::with_capacity(chars.len());
    while kinds.len() < chars.len() {
        let at = kinds.len();
        let (kind, end) = token(chars, at);
        kinds.resize(end.clamp(at + 1, chars.len()), kind);
    }
    kinds
}

/// Returns the kind of the token that starts at `at`, and where the token ends.
fn token(chars: &[char], at: usize) -> (Kind, usize) {
    let rest = &chars[at..];
    match rest {
        ['/', '/', ..] => {
            let len = rest.iter().position(|&c| c == '\n').unwrap_or(rest.len());
            (Kind::Comment, at + len)
        }
        ['/', '*', ..] => (Kind::Comment, at + block_comment_len(rest)),
        ['"', ..] => (Kind::Literal, at + quoted_len(rest, '"')),
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => (Kind::Literal, at + quoted_len(rest, '\'')),
        ['r', '"' | '#', ..] if starts_word(chars, at) => match raw_len(rest) {
            Some(len) => (Kind::Literal, at + len),
            None => (Kind::Code, at + 1),
        },
        _ => (Kind::Code, at + 1),
    }
}

/// Returns whether a word starts at `at`. The prefix `b` or `c` of a raw byte or C string may
/// precede it.
fn starts_word(chars: &[char], at: usize) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    match &chars[..at] {
        [] => true,
        ['b' | 'c'] => true,
        [.., before, 'b' | 'c'] => !inside(*before),
        [.., before] => !inside(*before),
    }
}

fn block_comment_len(rest: &[char]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => {
                depth += 1;
                at += 2;
            }
            ['*', '/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn quoted_len(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    at
}

/// Returns the length of the raw string at the start of `rest`, or `None` for a raw identifier.
fn raw_len(rest: &[char]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|&&c| c == '#').count();
    let body = 1 + hashes + 1;
    if rest.get(body - 1) != Some(&'"') {
        return None;
    }
    let closes = |at: &usize| {
        rest[*at] == '"'
            && rest[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
    };
    Some((body..rest.len()).find(closes).map_or(rest.len(), |at| at + 1 + hashes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        let lines: Vec<_> = split(text).into_iter().map(|line| line.code).collect();
        lines.join("\n").split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn comments(text: &str) -> String {
        let lines: Vec<_> = split(text).into_iter().map(|line| line.comment).collect();
        lines.join("\n").split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_are_taken_apart_from_code() {
        assert_eq!(code("a // b\nc"), "a c");
        assert_eq!(comments("a // b\nc"), "// b");
        assert_eq!(code("a /* b /* c */ d */ e"), "a e");
        assert_eq!(comments("a /* b\n */ e"), "/* b */");
    }

    #[test]
    fn literals_are_neither_code_nor_comment() {
        for text in [
            r#"x("// b \" y", z)"#,
            r##"x(r#"// " y"#, z)"##,
            "x(\"two\n// lines\", z)",
            r#"x(r"\", z)"#,
        ] {
            assert_eq!(code(text), "x( , z)", "{text}");
            assert_eq!(comments(text), "", "{text}");
        }
        assert_eq!(code(r##"x(br#"// " y"#, z)"##), "x(b , z)");
    }

    #[test]
    fn characters_lifetimes_and_raw_identifiers_do_not_open_strings() {
        assert_eq!(code(r#"f('"', b'\'', '\\', '\u{e9}') // c"#), "f( , b , , )");
        assert_eq!(code("fn f<'a>(x: &'a str) {} // c"), "fn f<'a>(x: &'a str) {}");
        assert_eq!(code("r#type r#\"s\"# // c"), "r#type");
    }

    #[test]
    fn an_unclosed_literal_or_comment_ends_with_the_file() {
        for text in ["\"a", "\"a\\", "r#\"a\"", "/* a", "'\\", "'"] {
            let line = split(text).remove(0);
            assert_eq!(line.code.chars().count(), text.chars().count(), "{text}");
        }
    }

    #[test]
    fn lines_are_counted_as_an_editor_counts_them() {
        assert_eq!(split("").len(), 0);
        assert_eq!(split("\n").len(), 1);
        assert_eq!(split("a\n\nb").len(), 3);
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("a word.", "word"));
        assert!(!has_word("sword words word_ _word", "word"));
    }

    #[test]
    fn a_room_is_a_folder_or_a_module_file() {
        assert!(is_in(Path::new("a/src/kernel.rs"), "a/src/kernel"));
        assert!(is_in(Path::new("a/src/kernel/x.rs"), "a/src/kernel"));
        assert!(is_in(Path::new("net/src/x.rs"), "net"));
        assert!(!is_in(Path::new("a/src/kernels.rs"), "a/src/kernel"));
        assert!(!is_in(Path::new("network/src/x.rs"), "net"));
    }

    #[test]
    fn the_test_module_at_the_end_is_found() {
        let text =
            "//! D.\n#[cfg(test)]\nextern crate std;\nfn a() {}\n\n#[cfg(test)]\nmod t {\n}\n";
        assert_eq!(Source::new("a.rs", text).tests_start(), 5);
        assert_eq!(Source::new("a.rs", "#[cfg(test)]\nmod tests;\nfn a() {}\n").tests_start(), 3);
    }

    #[test]
    fn test_files_are_known_by_name_and_folder() {
        for path in ["tests/src/lib.rs", "proto/src/a/tests.rs", "net/tests/x.rs"] {
            assert!(Source::new(path, "").is_test_file(), "{path}");
        }
        assert!(!Source::new("proto/src/contests/a.rs", "").is_test_file());
    }
}
