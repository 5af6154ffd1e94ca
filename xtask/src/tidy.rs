//! Checks the rules that rustfmt and clippy do not check, in every Rust file of this repository.
//!
//! Each rule is a function from a file (or the whole tree) to problems. A new rule is one more
//! function and, if it looks at one file, an entry in [`FILE_RULES`].

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::crate_imports::Graph;
use crate::problem::Problem;
use crate::source::{Source, has_word, is_in};
use crate::{english, import_cycles, wire};

/// The findings of a check of the tree.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Violations of rules.
    pub(crate) problems: Vec<Problem>,
    /// Files that are about to break a rule.
    pub(crate) warnings: Vec<Problem>,
    /// Rules that were not applied, each with the reason.
    pub(crate) skipped: Vec<String>,
    /// Number of files checked.
    pub(crate) files: usize,
}

/// Checks the tree at `root` and prints the findings; returns `true` if no rule is broken.
pub(crate) fn report(root: &Path) -> Result<bool> {
    let findings = check(root)?;
    for warning in &findings.warnings {
        println!("warning: {warning}");
    }
    for problem in &findings.problems {
        println!("error: {problem}");
    }
    for skipped in &findings.skipped {
        println!("skipped: {skipped}");
    }
    println!(
        "tidy: {} files, {} errors, {} warnings",
        findings.files,
        findings.problems.len(),
        findings.warnings.len()
    );
    Ok(findings.problems.is_empty())
}

/// Applies every rule to the tree at `root`.
pub(crate) fn check(root: &Path) -> Result<Findings> {
    let sources = sources(root)?;
    let mut findings = Findings { files: sources.len(), ..Findings::default() };
    for source in &sources {
        for rule in FILE_RULES {
            findings.problems.extend(rule(source));
        }
        match file_length(source) {
            Some(Length::NearLimit(warning)) => findings.warnings.push(warning),
            Some(Length::OverLimit(problem)) => findings.problems.push(problem),
            None => {}
        }
    }
    let spec = root.join(wire::SPEC);
    if spec.exists() {
        let spec = read(&spec)?;
        findings.problems.extend(wire::check(&spec, &sources));
    } else {
        findings.skipped.push(format!("wire: {} does not exist", wire::SPEC));
    }
    findings.problems.extend(import_cycles::in_crates(&sources));
    if root.join(PACKAGE).exists() {
        findings.problems.extend(import_cycles::in_package(Path::new(PACKAGE), &package(root)?));
    } else {
        findings.skipped.push(format!("circles: {PACKAGE} does not exist"));
    }
    findings.problems.extend(shared_clippy_keys(root)?);
    let arrows = Graph::load(root)?.problems().into_iter();
    findings
        .problems
        .extend(arrows.map(|message| Problem::new("Cargo.toml", None, "arrows", message)));
    match subjects(root) {
        Some(subjects) => findings.problems.extend(subjects.lines().filter_map(subject_length)),
        None => findings.skipped.push("subject: there is no git history".into()),
    }
    Ok(findings)
}

/// Returns the subjects of the newest commits, each after its hash.
fn subjects(root: &Path) -> Option<String> {
    // If `.git` is missing, git would search the folders above the tree for one.
    root.join(".git").exists().then_some(())?;
    let log = ["log", "-10", "--no-merges", "--format=%h %s"];
    let output = Command::new("git").args(log).current_dir(root).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Checks the length of a commit's subject, which follows its hash.
fn subject_length(commit: &str) -> Option<Problem> {
    let (hash, subject) = commit.split_once(' ')?;
    let length = subject.chars().count();
    let message =
        || format!("the subject of {hash} has {length} characters; shorten it to {MAX_SUBJECT}");
    (length > MAX_SUBJECT).then(|| Problem::new(".git", None, "subject", message()))
}

/// Maximum number of characters in a commit's subject.
const MAX_SUBJECT: usize = 72;

/// The rules that check one file each.
const FILE_RULES: [fn(&Source) -> Vec<Problem>; 7] =
    [line_length, module_doc, leftovers, unsafe_place, timed_assert, peer_text, english::check];

/// The width that rustfmt.toml sets. This rule applies it to comments and strings too.
const MAX_WIDTH: usize = 100;

/// Number of lines that a file may have before it should be split.
const MAX_LINES: usize = 600;

/// Number of lines that no file may exceed. The margin above [`MAX_LINES`] leaves room to finish a
/// change before a split.
const HARD_MAX_LINES: usize = 700;

/// The Python package.
const PACKAGE: &str = "python/lib/racksum";

/// The places that may hold unsafe code, behind safe types or for tests only.
const UNSAFE_ROOMS: [&str; 7] = [
    "net",
    "kernels/src",
    "worker/src/tensor",
    "worker/src/sidecar/lent/copier",
    "cli/tests/cli/tun",
    "tests/preload",
    "python/src/memory",
];

/// The files that define messages from other processes.
const MESSAGES: [&str; 3] =
    ["proto/src/control.rs", "proto/src/status.rs", "worker/src/sidecar/message.rs"];

/// Marks of unfinished work in a comment, split so that this file does not hold them.
const COMMENT_MARKS: [&str; 4] =
    [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X"), concat!("HA", "CK")];

/// Macros that mark unfinished work.
const MACRO_MARKS: [&str; 3] = ["dbg", "todo", "unimplemented"];

fn line_length(source: &Source) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let width = line.chars().count();
        // A URL cannot be broken.
        if width > MAX_WIDTH && !line.contains("://") && !source.is_generated() {
            let message = format!("the line has {width} characters; use at most {MAX_WIDTH}");
            problems.push(Problem::new(&source.path, Some(index + 1), "line-length", message));
        }
    }
    problems
}

fn module_doc(source: &Source) -> Vec<Problem> {
    let exempt = source.is_test_file()
        || source.is_generated()
        || source.path.file_name() == Some(OsStr::new("build.rs"));
    if exempt || source.text.starts_with("//!") {
        return Vec::new();
    }
    let message = "the file does not begin with a `//!` comment that says why it exists";
    vec![Problem::new(&source.path, Some(1), "module-doc", message)]
}

fn leftovers(source: &Source) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, line) in source.lines.iter().enumerate() {
        let comment = COMMENT_MARKS.iter().filter(|mark| has_word(&line.comment, mark));
        let code = MACRO_MARKS
            .iter()
            .filter(|mark| has_word(&line.code, mark) && line.code.contains(&format!("{mark}!")));
        for mark in comment.chain(code) {
            let message = format!("{mark} marks unfinished work; finish it and remove the mark");
            problems.push(Problem::new(&source.path, Some(index + 1), "leftover", message));
        }
    }
    problems
}

fn unsafe_place(source: &Source) -> Vec<Problem> {
    if UNSAFE_ROOMS.iter().any(|room| is_in(&source.path, room)) {
        return Vec::new();
    }
    let lines = source.lines.iter().enumerate();
    lines
        .filter(|(_, line)| has_word(&line.code, "unsafe"))
        .map(|(index, _)| {
            let message = format!("unsafe code belongs in {}", UNSAFE_ROOMS.join(", "));
            Problem::new(&source.path, Some(index + 1), "unsafe", message)
        })
        .collect()
}

/// Patterns of assertions that something was quick. Such assertions fail on a busy machine.
const QUICK: [&str; 4] = ["assert!(ms <", "contains(&ms)", "elapsed() <", "assert!(took <"];

fn timed_assert(source: &Source) -> Vec<Problem> {
    let lines = source.lines.iter().enumerate();
    lines
        .filter(|(_, line)| {
            line.code.contains("assert!(") && QUICK.iter().any(|q| line.code.contains(q))
        })
        .map(|(index, _)| {
            let message = "do not assert on time; record it with racksum_test_report::time";
            Problem::new(&source.path, Some(index + 1), "timed-assert", message)
        })
        .collect()
}

/// Finds text fields of messages that could be shown exactly as another process wrote them.
fn peer_text(source: &Source) -> Vec<Problem> {
    if MESSAGES.iter().all(|path| source.path != Path::new(path)) {
        return Vec::new();
    }
    // A field of a struct or a variant must have its `PeerText` attribute on the line before.
    let mut above = "";
    let mut problems = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let field = line.trim_start();
        let is_field = field.ends_with(',') && !field.starts_with("//") && !field.contains('(');
        // A tuple variant has no line for the attribute. A variant of an error is never
        // deserialised.
        let is_variant = field.ends_with("(String),") && !above.contains("#[error(");
        let is_text = is_variant || is_field && has_word(field, "String") && field.contains(": ");
        if is_text && !above.contains("deserialize_with = \"PeerText::") {
            let message = "a text field of a message must be read with PeerText: put \
                           #[serde(deserialize_with = \"PeerText::string\")] above it, or give \
                           it a type of its own";
            problems.push(Problem::new(&source.path, Some(index + 1), "peer-text", message));
        }
        above = line;
    }
    problems
}

/// A file near its length limit, or over it.
#[derive(Debug, PartialEq, Eq)]
enum Length {
    NearLimit(Problem),
    OverLimit(Problem),
}

fn file_length(source: &Source) -> Option<Length> {
    let count = source.lines.len();
    if count <= MAX_LINES || source.is_generated() {
        return None;
    }
    let message = format!("the file has {count} lines; split it into files of at most {MAX_LINES}");
    let problem = Problem::new(&source.path, None, "file-length", message);
    Some(if count > HARD_MAX_LINES {
        Length::OverLimit(problem)
    } else {
        Length::NearLimit(problem)
    })
}

/// Checks the keys that every clippy.toml must share, because a crate's own file replaces the
/// root's.
fn shared_clippy_keys(root: &Path) -> Result<Vec<Problem>> {
    let shared = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with("allow-")).map(str::to_owned).collect()
    };
    let of_root = shared(&read(&root.join("clippy.toml"))?);
    let mut problems = Vec::new();
    for room in rooms(root)? {
        let path = room.join("clippy.toml");
        if path.exists() && shared(&read(&path)?) != of_root {
            let path = path.strip_prefix(root)?;
            let message = "the `allow-` keys differ from those of the root clippy.toml";
            problems.push(Problem::new(path, None, "clippy-keys", message));
        }
    }
    Ok(problems)
}

/// Reads every Rust file in the source folders of `root`, sorted by path.
pub(crate) fn sources(root: &Path) -> Result<Vec<Source>> {
    let mut paths = Vec::new();
    for room in rooms(root)? {
        files_of(&room, "rs", &mut paths)?;
    }
    paths.sort();
    paths.into_iter().map(|path| Ok(Source::new(path.strip_prefix(root)?, read(&path)?))).collect()
}

/// Reads every file of the Python package.
pub(crate) fn package(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut paths = Vec::new();
    files_of(&root.join(PACKAGE), "py", &mut paths)?;
    paths.sort();
    paths.into_iter().map(|path| Ok((path.strip_prefix(root)?.to_owned(), read(&path)?))).collect()
}

/// Returns the folders of `root` that hold source, without hidden folders and build output.
fn rooms(root: &Path) -> Result<Vec<PathBuf>> {
    let mut rooms: Vec<_> = entries(root)?.into_iter().filter(|path| path.is_dir()).collect();
    rooms.sort();
    Ok(rooms)
}

fn files_of(dir: &Path, extension: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    for path in entries(dir)? {
        if path.is_dir() {
            files_of(&path, extension, found)?;
        } else if path.extension() == Some(OsStr::new(extension)) {
            found.push(path);
        }
    }
    Ok(())
}

/// Returns the entries of `dir`, without links, hidden entries and build output.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    let context = || format!("cannot list {}", dir.display());
    for entry in fs::read_dir(dir).with_context(context)? {
        let entry = entry.with_context(context)?;
        let name = entry.file_name();
        let is_hidden = name.as_encoded_bytes().starts_with(b".");
        let is_link = entry.file_type().with_context(context)?.is_symlink();
        if !is_hidden && !is_link && name != "target" {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(problems: &[Problem]) -> Vec<(Option<usize>, &'static str)> {
        problems.iter().map(|problem| (problem.line, problem.rule)).collect()
    }

    #[test]
    fn a_long_line_is_a_problem_unless_it_holds_an_address() {
        let text = format!("//! D.\n// {}\n// https://{}\n", "é".repeat(98), "a".repeat(100));
        assert_eq!(
            rules(&line_length(&Source::new("a/src/a.rs", text))),
            [(Some(2), "line-length")]
        );
        let fits = format!("// {}\n", "é".repeat(97));
        assert_eq!(line_length(&Source::new("a/src/a.rs", fits)), []);
    }

    #[test]
    fn a_long_subject_is_a_problem() {
        assert_eq!(subject_length(&format!("abc1234 {}", "é".repeat(72))), None);
        let problem = subject_length(&format!("abc1234 {}", "a".repeat(73))).unwrap().to_string();
        assert!(problem.contains("abc1234 has 73 characters"), "{problem}");
    }

    #[test]
    fn a_file_without_a_module_doc_is_a_problem() {
        for text in ["use a;\n", "\n//! D.\n", "/// D.\n", "// D.\n//! D.\n", ""] {
            let problems = module_doc(&Source::new("a/src/a.rs", text));
            assert_eq!(rules(&problems), [(Some(1), "module-doc")], "{text}");
        }
        assert_eq!(module_doc(&Source::new("a/src/a.rs", "//! D.\n")), []);
        for path in ["a/build.rs", "a/src/b/tests.rs", "a/tests/b.rs"] {
            assert_eq!(module_doc(&Source::new(path, "use a;\n")), [], "{path}");
        }
    }

    #[test]
    fn unfinished_work_is_a_problem() {
        for mark in COMMENT_MARKS {
            let text = format!("//! D.\nfn a() {{}} // {mark}: later\n");
            let problems = leftovers(&Source::new("a/src/a.rs", text));
            assert_eq!(rules(&problems), [(Some(2), "leftover")], "{mark}");
        }
        for mark in MACRO_MARKS {
            let text = format!("fn a() {{\n    {mark}!();\n}}\n");
            let problems = leftovers(&Source::new("a/tests/a.rs", text));
            assert_eq!(rules(&problems), [(Some(2), "leftover")], "{mark}");
        }
        let fine = "// a list of dbg names\nlet todo = !dbg(\"todo!\"); // METHOD\n";
        assert_eq!(leftovers(&Source::new("a/src/a.rs", fine)), []);
    }

    #[test]
    fn unsafe_outside_its_rooms_is_a_problem() {
        let text = "//! Not unsafe.\n#![forbid(unsafe_code)]\nunsafe fn a() {}\n";
        for path in ["proto/src/a.rs", "worker/src/lib.rs", "aggregator/src/kernels.rs"] {
            let problems = unsafe_place(&Source::new(path, text));
            assert_eq!(rules(&problems), [(Some(3), "unsafe")], "{path}");
        }
        for path in ["net/src/gso.rs", "worker/src/tensor.rs", "kernels/src/x86.rs"] {
            assert_eq!(unsafe_place(&Source::new(path, text)), [], "{path}");
        }
    }

    #[test]
    fn a_test_that_asserts_on_time_is_a_problem() {
        for text in ["assert!(ms < 3_000);", "assert!((1..9).contains(&ms));"] {
            let problems = timed_assert(&Source::new("a/tests/a.rs", text));
            assert_eq!(rules(&problems), [(Some(1), "timed-assert")], "{text}");
        }
        let fine = "assert!(ms >= 700);\nif start.elapsed() < limit {}\n";
        assert_eq!(timed_assert(&Source::new("a/tests/a.rs", fine)), []);
    }

    #[test]
    fn a_text_of_a_message_that_is_not_read_with_peer_text_is_a_problem() {
        let bare = "//! D.\npub struct A {\n    pub b: Option<String>,\n}\n";
        let variant = "//! D.\npub enum A {\n    B { c: u32, d: String },\n}\n";
        let alone = "//! D.\npub enum A {\n    B(String),\n}\n";
        for text in [bare, variant, alone] {
            for path in MESSAGES {
                let problems = peer_text(&Source::new(path, text));
                assert_eq!(rules(&problems), [(Some(3), "peer-text")], "{text}");
            }
            assert_eq!(peer_text(&Source::new("proto/src/error.rs", text)), []);
        }
        let read = "#[serde(deserialize_with = \"PeerText::string\")]\n    pub a: String,\n";
        let code = "    fn a(b: String,\n";
        assert_eq!(peer_text(&Source::new(MESSAGES[0], format!("{read}{code}"))), []);
    }

    #[test]
    fn a_long_file_is_a_warning_and_then_a_problem() {
        let of = |lines: usize| file_length(&Source::new("a/src/a.rs", "//! D.\n".repeat(lines)));
        assert_eq!(of(MAX_LINES), None);
        assert!(matches!(of(MAX_LINES + 1), Some(Length::NearLimit(_))));
        assert!(matches!(of(HARD_MAX_LINES), Some(Length::NearLimit(_))));
        assert!(matches!(of(HARD_MAX_LINES + 1), Some(Length::OverLimit(_))));
        let generated = format!("// @generated by x\n{}", "// l\n".repeat(2 * HARD_MAX_LINES));
        assert_eq!(file_length(&Source::new("a/src/a.rs", generated)), None);
    }

    /// Creates a workspace with one crate whose file holds `text`; everything else obeys the rules.
    fn workspace(text: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"proto\"]\n");
        put("proto/Cargo.toml", "[package]\nname = \"racksum-proto\"\nedition = \"2024\"\n");
        put("proto/src/lib.rs", text);
        put("target/debug/out.rs", "unsafe fn built() {}");
        put(".venv/hidden.rs", "unsafe fn hidden() {}");
        put("clippy.toml", "allow-unwrap-in-tests = true\n");
        dir
    }

    #[test]
    fn a_tidy_tree_passes_and_what_is_not_ours_is_not_read() {
        let dir = workspace("//! D.\n");
        let findings = check(dir.path()).unwrap();
        assert_eq!(findings.problems, []);
        assert_eq!(findings.files, 1);
        assert_eq!(
            findings.skipped,
            [
                "wire: docs/wire.md does not exist",
                "circles: python/lib/racksum does not exist",
                "subject: there is no git history"
            ]
        );
        assert!(report(dir.path()).unwrap());
    }

    #[test]
    fn every_kind_of_rule_is_applied_to_the_tree() {
        let dir = workspace("unsafe fn a() {}\n");
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("proto/src/one.rs", "//! D.\nuse crate::other::O;\n");
        put("proto/src/other.rs", "//! D.\nuse crate::one::O;\n");
        put("python/lib/racksum/one.py", "from .other import o\n");
        put("python/lib/racksum/other.py", "from .one import o\n");
        put("docs/wire.md", "W-1 MUST\n");
        put("proto/clippy.toml", "");
        put("proto/Cargo.toml", "[package]\nname = \"racksum-odd\"\nedition = \"2024\"\n");
        let mut found: Vec<_> =
            check(dir.path()).unwrap().problems.iter().map(|problem| problem.rule).collect();
        assert_eq!(found.iter().filter(|rule| **rule == "circles").count(), 2);
        found.dedup();
        assert_eq!(found, ["module-doc", "unsafe", "wire", "circles", "clippy-keys", "arrows"]);
        assert!(!report(dir.path()).unwrap());
    }
}
