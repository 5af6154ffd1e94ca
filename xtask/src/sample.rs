//! Draws sentences from comments and messages at random, for a reader who judges their English.
//!
//! `CONTRIBUTING.md` says how we write. A program checks little of it, so a reader takes a sample:
//! the same seed draws the same sentences from the same tree.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use proc_macro2::{TokenStream, TokenTree};

use crate::english::comments;
use crate::source::Source;
use crate::tidy;

/// Minimum number of words in a sentence that is worth reading.
const MIN_WORDS: usize = 5;

/// The sentences to draw.
#[derive(Debug, Args)]
pub(crate) struct SampleArgs {
    /// Seed of the draw; another seed draws other sentences.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of sentences to draw from comments and docstrings.
    #[arg(long, default_value_t = 90)]
    comments: usize,
    /// Number of sentences to draw from messages: errors, log lines and other output.
    #[arg(long, default_value_t = 40)]
    messages: usize,
}

/// The number of a line and the text that begins there.
type Text = (usize, String);

/// A sentence and its place.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sentence {
    path: PathBuf,
    line: usize,
    text: String,
}

/// Prints randomly drawn sentences from the tree at `root`.
pub(crate) fn run(root: &Path, args: &SampleArgs) -> Result<()> {
    let (mut of_comments, mut of_messages) = (Vec::new(), Vec::new());
    for source in tidy::sources(root)? {
        of_comments.extend(sentences(&source.path, comments(&source)));
        of_messages.extend(sentences(&source.path, messages(&source)));
    }
    for (path, text) in tidy::package(root)? {
        let (comments, messages) = python(&text);
        of_comments.extend(sentences(&path, comments));
        of_messages.extend(sentences(&path, messages));
    }
    for (kind, all, count) in
        [("comments", of_comments, args.comments), ("messages", of_messages, args.messages)]
    {
        println!("{count} of {} sentences from {kind}, seed {}:", all.len(), args.seed);
        for Sentence { path, line, text } in draw(all, count, args.seed) {
            println!("{}:{line}: {text}", path.display());
        }
    }
    Ok(())
}

/// Draws `count` sentences.
fn draw(mut all: Vec<Sentence>, count: usize, seed: u64) -> Vec<Sentence> {
    all.sort_by_cached_key(|sentence| {
        // This hasher has a fixed key, so every run has the same order.
        let mut hasher = DefaultHasher::new();
        (seed, sentence).hash(&mut hasher);
        hasher.finish()
    });
    all.truncate(count);
    all
}

/// Splits texts, each with its line, into the sentences that are worth reading.
fn sentences(path: &Path, texts: Vec<Text>) -> Vec<Sentence> {
    let mut found = Vec::new();
    for (line, text) in texts {
        let words: Vec<_> = text.split_whitespace().collect();
        let ends = |word: &&str| word.ends_with(['.', '!', '?']) || word.ends_with(".)");
        for words in words.split_inclusive(ends).filter(|words| words.len() >= MIN_WORDS) {
            found.push(Sentence { path: path.to_owned(), line, text: words.join(" ") });
        }
    }
    found
}

/// Returns the string literals of a file's code, without those of its tests and docs.
fn messages(source: &Source) -> Vec<Text> {
    let mut found = Vec::new();
    // Ignore a file that does not parse, because the build reports a better error.
    if let (false, Ok(tokens)) = (source.is_test_file(), source.text.parse()) {
        literals(tokens, &mut found);
    }
    let tests = source.tests_start();
    found.retain(|(line, _)| *line <= tests);
    found
}

/// Collects the string literals of `tokens`. The text of a doc comment follows `doc =` and is left
/// out.
fn literals(tokens: TokenStream, found: &mut Vec<Text>) {
    let mut before = [String::new(), String::new()];
    for token in tokens {
        let text = match &token {
            TokenTree::Group(group) => {
                literals(group.stream(), found);
                String::new()
            }
            other => other.to_string(),
        };
        let is_doc = before[0] == "doc" && before[1] == "=";
        if let (TokenTree::Literal(literal), false) = (&token, is_doc)
            && let Some(inside) = text.strip_prefix('"').and_then(|it| it.strip_suffix('"'))
        {
            found.push((literal.span().start().line, inside.replace("\\\n", "")));
        }
        before = [std::mem::take(&mut before[1]), text];
    }
}

/// Returns the comments and docstrings of a Python file, and its other strings. Recognises only the
/// layout that the formatter writes.
fn python(text: &str) -> (Vec<Text>, Vec<Text>) {
    let (mut comments, mut messages) = (Vec::new(), Vec::new());
    let mut docstring: Option<Text> = None;
    let mut is_example = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if let Some((_, open)) = &mut docstring {
            let closed = line.split_once("\"\"\"");
            let text = closed.map_or(line, |(last, _)| last);
            // An example and its output last until an empty line.
            is_example = line.starts_with(">>> ") || is_example && !line.is_empty();
            if !is_example {
                *open += &format!(" {text}");
            }
            if closed.is_some() {
                is_example = false;
                comments.extend(docstring.take());
            }
        } else if let Some(rest) = line.strip_prefix("\"\"\"") {
            match rest.split_once("\"\"\"") {
                Some((whole, _)) => comments.push((number, whole.to_owned())),
                None => docstring = Some((number, rest.to_owned())),
            }
        } else if let Some(comment) = line.strip_prefix('#') {
            comments.push((number, comment.trim_start_matches(':').to_owned()));
        } else {
            let quote = if line.contains('"') { '"' } else { '\'' };
            let inside = line.split(quote).skip(1).step_by(2);
            messages.extend(inside.map(|text| (number, text.to_owned())));
        }
    }
    (comments, messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_the_literals_that_are_no_docs_and_no_tests() {
        let text = "//! Docs of this file.\n/// Docs.\nfn a() { b(\"the peer has gone away\"); }\n\
                    #[cfg(test)]\nmod tests {\n    fn t() { b(\"a text of tests\"); }\n}\n";
        let source = Source::new("net/src/a.rs", text);
        assert_eq!(messages(&source), [(3, "the peer has gone away".to_owned())]);
    }

    #[test]
    fn docstrings_comments_and_messages_of_python_are_told_apart() {
        let text = "\"\"\"Sums tensors.\n\n>>> a_sum_of(1, 2)\n3\n\nSecond line.\n\"\"\"\n\
                    # Why it is so.\nraise E('it is bad')\n";
        let (comments, messages) = python(text);
        let comments: Vec<_> = comments.iter().map(|(line, text)| (*line, text.trim())).collect();
        assert_eq!(comments, [(1, "Sums tensors.   Second line."), (8, "Why it is so.")]);
        assert_eq!(messages, [(9, "it is bad".to_owned())]);
    }

    #[test]
    fn a_seed_draws_the_same_sentences_again_and_another_seed_draws_others() {
        let texts =
            (0..100).map(|line| (line, format!("This is the sentence with number {line}.")));
        let all = sentences(Path::new("a.rs"), texts.collect());
        assert_eq!(draw(all.clone(), 10, 1), draw(all.clone(), 10, 1));
        assert_ne!(draw(all.clone(), 10, 1), draw(all, 10, 2));
    }
}
