//! Checks the citations of the wire spec. `docs/wire.md` must define every id that the source
//! cites, and both code and a test must cite every MUST of the spec.
//!
//! An item of the spec is a list item, a table row, a paragraph or a heading that starts with an id
//! (`W-<n>`, in bold or not). A heading's item runs to the next heading or id, and any other item
//! to the next blank line or id. A citation in source is a comment with `wire:` and one or more
//! ids.

use crate::problem::Problem;
use crate::source::{Line, Source, has_word};

/// The spec's path from the workspace root.
pub(crate) const SPEC: &str = "docs/wire.md";

const RULE: &str = "wire";

/// A numbered item of the spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    id: u32,
    /// The first line of the item, from 1.
    line: usize,
    must: bool,
}

/// Returns the problems of `spec` and of the citations in `sources`.
pub(crate) fn check(spec: &str, sources: &[Source]) -> Vec<Problem> {
    let items = items(spec);
    let mut problems = Vec::new();
    if items.is_empty() {
        problems.push(Problem::new(SPEC, None, RULE, "defines no item W-<n>"));
    }
    for (index, item) in items.iter().enumerate() {
        if let Some(first) = items[..index].iter().find(|first| first.id == item.id) {
            let message = format!("W-{} is already defined on line {}", item.id, first.line);
            problems.push(Problem::new(SPEC, Some(item.line), RULE, message));
        }
    }

    let mut in_code = Vec::new();
    let mut in_tests = Vec::new();
    for source in sources {
        let tests_start = if source.is_test_file() { 0 } else { source.tests_start() };
        for (index, line) in source.lines.iter().enumerate() {
            for id in citations(line) {
                if !items.iter().any(|item| item.id == id) {
                    let message = format!("W-{id} is not in {SPEC}");
                    problems.push(Problem::new(&source.path, Some(index + 1), RULE, message));
                }
                if index < tests_start { &mut in_code } else { &mut in_tests }.push(id);
            }
        }
    }
    for item in items.iter().filter(|item| item.must) {
        for (cited, place) in [(&in_code, "code"), (&in_tests, "test")] {
            if !cited.contains(&item.id) {
                let message = format!("W-{} is a MUST that no {place} cites", item.id);
                problems.push(Problem::new(SPEC, Some(item.line), RULE, message));
            }
        }
    }
    problems
}

fn items(spec: &str) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    // The item the current line belongs to, and whether a heading opened it.
    let mut open: Option<(Item, bool)> = None;
    for (index, text) in spec.lines().enumerate() {
        let is_heading = text.starts_with('#');
        let opened = leading_id(text);
        let ends = opened.is_some()
            || open.is_some_and(
                |(_, by_heading)| {
                    if by_heading { is_heading } else { text.trim().is_empty() }
                },
            );
        if ends {
            items.extend(open.take().map(|(item, _)| item));
        }
        if let Some(id) = opened {
            open = Some((Item { id, line: index + 1, must: false }, is_heading));
        }
        if let Some((item, _)) = &mut open {
            item.must |= has_word(text, "MUST");
        }
    }
    items.extend(open.map(|(item, _)| item));
    items
}

/// Returns the id that a line of the spec starts with, after any Markdown.
fn leading_id(text: &str) -> Option<u32> {
    id_at_start(text.trim_start_matches([' ', '#', '-', '*', '|', '[', '`', '>']))
}

/// Returns the ids that a line's comment cites.
fn citations(line: &Line) -> Vec<u32> {
    let Some((_, after)) = line.comment.split_once("wire:") else { return Vec::new() };
    after.match_indices("W-").filter_map(|(at, _)| id_at_start(&after[at..])).collect()
}

fn id_at_start(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("W-")?;
    let len = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..len].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: &str = "- **W-1** A sender MUST.\n- W-2 It may.\n";

    fn messages(spec: &str, sources: &[Source]) -> Vec<String> {
        check(spec, sources).iter().map(ToString::to_string).collect()
    }

    fn cited(code: &str, tests: &str) -> Source {
        let text = format!("//! D.\n{code}\n#[cfg(test)]\nmod tests {{\n{tests}\n}}\n");
        Source::new("proto/src/a.rs", text)
    }

    #[test]
    fn a_must_cited_in_code_and_tests_is_no_problem() {
        assert_eq!(messages(SENT, &[cited("// wire: W-1", "// wire: W-1, W-2")]), [""; 0]);
        let apart = [
            Source::new("proto/src/a.rs", "/// x (wire: W-1)\n"),
            Source::new("tests/src/a.rs", "// wire: W-2 W-1\n"),
        ];
        assert_eq!(messages(SENT, &apart), [""; 0]);
    }

    #[test]
    fn a_must_that_nothing_cites_is_a_problem() {
        assert_eq!(
            messages(SENT, &[cited("// wire: W-2", "let s = \"// wire: W-1\";")]),
            [
                "docs/wire.md:1: [wire] W-1 is a MUST that no code cites",
                "docs/wire.md:1: [wire] W-1 is a MUST that no test cites",
            ]
        );
    }

    #[test]
    fn a_citation_of_nothing_is_a_problem() {
        assert_eq!(
            messages("W-2 may.\n", &[cited("// wire: W-21", "")]),
            ["proto/src/a.rs:2: [wire] W-21 is not in docs/wire.md"]
        );
    }

    #[test]
    fn a_second_definition_is_a_problem() {
        assert_eq!(
            messages("W-2 may.\n\nW-2 may too.\n", &[]),
            ["docs/wire.md:3: [wire] W-2 is already defined on line 1"]
        );
        assert_eq!(messages("", &[]), ["docs/wire.md: [wire] defines no item W-<n>"]);
    }

    #[test]
    fn items_end_where_markdown_ends_them() {
        let spec = "# Wire\n\nMUST means must.\n\n| W-1 | a |\n| W-2 | MUST NOT |\n\nMUST\n\n\
                    ### W-3 Title\n\nIt MUST.\n\n### Other\n\nMUST\n\nW-4 and\nW-5 it\nMUST.\n";
        let found: Vec<_> = items(spec).iter().map(|item| (item.id, item.must)).collect();
        assert_eq!(found, [(1, false), (2, true), (3, true), (4, false), (5, true)]);
    }
}
