//! The rules of plain English that a program can check in comments.
//!
//! `CONTRIBUTING.md` says how we write. Two of its rules are mechanical: a doc comment's first
//! sentence stands alone, and no sentence is longer than 40 words.

use crate::problem::Problem;
use crate::source::Source;

/// First words of sentences that do not stand alone, or that do not name their subject.
const UNCLEAR_STARTS: [&str; 13] = [
    "The same", "As", "Of", "What", "Who", "Whose", "That", "One that", "Those", "It", "Its",
    "Them", "So",
];

/// Maximum number of words in a sentence.
const MAX_WORDS: usize = 40;

/// Checks the comments of a file.
pub(crate) fn check(source: &Source) -> Vec<Problem> {
    blocks(source).into_iter().flat_map(|block| block.problems(source)).collect()
}

/// Returns the text of each comment, with the number of its first line.
pub(crate) fn comments(source: &Source) -> Vec<(usize, String)> {
    blocks(source).into_iter().map(|block| (block.line, block.text.join("\n"))).collect()
}

/// Consecutive comment lines of one kind.
#[derive(Debug, Default)]
struct Block {
    /// The number of the block's first line, from 1.
    line: usize,
    /// The mark that starts each line: `//`, `///` or `//!`.
    mark: String,
    text: Vec<String>,
}

fn blocks(source: &Source) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut next_line = 0;
    for (index, line) in source.lines.iter().enumerate() {
        let comment = line.comment.trim();
        if !comment.starts_with("//") || !line.code.trim().is_empty() {
            continue;
        }
        let mark: String = comment.chars().take_while(|c| matches!(c, '/' | '!')).collect();
        let text = comment[mark.len()..].trim_end().to_owned();
        match blocks.last_mut() {
            Some(block) if index == next_line && block.mark == mark => block.text.push(text),
            _ => blocks.push(Block { line: index + 1, mark, text: vec![text] }),
        }
        next_line = index + 1;
    }
    blocks
}

impl Block {
    fn problems(&self, source: &Source) -> Vec<Problem> {
        let problem =
            |message: String| Problem::new(&source.path, Some(self.line), "english", message);
        let first = self.text.first().map_or("", |line| line.trim());
        let begins = |start: &&&str| {
            first.strip_prefix(**start).is_some_and(|rest| rest.starts_with([' ', ',']))
        };
        let is_doc = self.mark != "//";
        let unclear = UNCLEAR_STARTS.iter().find(begins).filter(|_| is_doc).map(|start| {
            problem(format!(
                "a doc comment that begins with {start:?} does not stand alone; begin with a verb \
                 or a noun phrase"
            ))
        });
        let long = self.sentences().into_iter().find(|words| *words > MAX_WORDS);
        let long = long
            .map(|words| problem(format!("a sentence has {words} words; use at most {MAX_WORDS}")));
        unclear.into_iter().chain(long).collect()
    }

    /// Returns the number of words in each sentence. Code, tables and headings contain no
    /// sentences; each list item begins one.
    fn sentences(&self) -> Vec<usize> {
        let (mut sentences, mut words, mut is_code) = (Vec::new(), 0, false);
        for line in &self.text {
            let line = line.trim();
            is_code ^= line.starts_with("```");
            let is_break =
                is_code || line.is_empty() || line.starts_with(['|', '#', '`', '-', '*']);
            if is_break {
                sentences.push(std::mem::take(&mut words));
            }
            if is_code || line.starts_with(['|', '#']) || line.starts_with("```") {
                continue;
            }
            for word in line.split_whitespace() {
                words += 1;
                if word.ends_with(['.', '!', '?', ':', ';']) || word.ends_with(".)") {
                    sentences.push(std::mem::take(&mut words));
                }
            }
        }
        sentences.push(words);
        sentences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        check(&Source::new("net/src/a.rs", text)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_doc_comment_that_does_not_stand_alone_is_a_problem() {
        for start in ["The same of one rank.", "What it holds.", "It has none.", "Of all."] {
            let problems = found(&format!("//! Docs.\n\n/// {start}\nfn f() {{}}\n"));
            assert_eq!(problems.len(), 1, "{start}");
            assert!(problems[0].starts_with("net/src/a.rs:3: [english]"), "{problems:?}");
        }
    }

    #[test]
    fn other_lines_and_other_comments_may_begin_as_they_like() {
        let text =
            "/// Returns the ranks.\n/// It is empty at first.\nfn f() {\n    // It may fail.\n}\n";
        assert_eq!(found(text), [""; 0]);
        assert_eq!(found("/// Items, whose order counts.\nfn f() {}\n"), [""; 0]);
    }

    #[test]
    fn a_sentence_of_more_than_forty_words_is_a_problem() {
        let words = |count: usize| "word ".repeat(count);
        assert_eq!(found(&format!("// {}end.\n", words(39))), [""; 0]);
        let long = format!("// {}\n// {}end.\n", words(20), words(20));
        assert_eq!(
            found(&long),
            ["net/src/a.rs:1: [english] a sentence has 41 words; use at most 40"]
        );
        // Neither a list nor code is a sentence.
        let list = format!("//! - {}\n//! - {}\n", words(30), words(30));
        assert_eq!(found(&list), [""; 0]);
        let code = format!("/// ```\n/// {}\n/// ```\n", words(60));
        assert_eq!(found(&code), [""; 0]);
    }
}
