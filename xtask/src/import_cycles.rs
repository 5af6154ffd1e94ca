//! Finds modules that import each other in a cycle, in the Rust crates and in the Python package.
//!
//! The rule holds at each level of the module tree: sibling modules, each with all its descendants,
//! may not import each other in a cycle. A parent module and its own children may.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::problem::Problem;
use crate::source::Source;

/// A module's path in its crate or package; the root's path is empty.
type Module = Vec<String>;

/// An import of one module by another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Import {
    from: Module,
    to: Module,
    path: PathBuf,
    line: usize,
}

/// Finds the import cycles in each Rust crate.
pub(crate) fn in_crates(sources: &[Source]) -> Vec<Problem> {
    let mut crates: BTreeMap<&Path, BTreeMap<Module, &Source>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !source.is_test_file()) {
        if let Some((root, module)) = module_of(&source.path) {
            crates.entry(root).or_default().insert(module, source);
        }
    }
    crates.values().flat_map(|files| circles(&rust_imports(files))).collect()
}

/// Finds the import cycles in the Python package at `package`. `files` holds its files and their
/// texts.
pub(crate) fn in_package(package: &Path, files: &[(PathBuf, String)]) -> Vec<Problem> {
    let modules: BTreeMap<Module, &(PathBuf, String)> = files
        .iter()
        .filter_map(|file| Some((python_module(file.0.strip_prefix(package).ok()?)?, file)))
        .collect();
    let name = package.file_name().unwrap_or_default().to_string_lossy();
    circles(&python_imports(&name, &modules))
}

/// Returns the `src` folder of the file's crate and the module that the file holds.
fn module_of(path: &Path) -> Option<(&Path, Module)> {
    let root = path.ancestors().find(|dir| dir.ends_with("src"))?;
    let mut module = parts(&path.strip_prefix(root).ok()?.with_extension(""));
    let is_folder = module.last().is_some_and(|last| last == "mod");
    let is_root = module == ["lib"] || module == ["main"];
    if is_folder || is_root {
        module.pop();
    }
    Some((root, module))
}

/// Returns the module that a file of a Python package holds, or `None` for another file type.
fn python_module(path: &Path) -> Option<Module> {
    let is_python = path.extension().is_some_and(|extension| extension == "py");
    let mut module = parts(&path.with_extension(""));
    if module.last().is_some_and(|last| last == "__init__") {
        module.pop();
    }
    is_python.then_some(module)
}

fn parts(path: &Path) -> Module {
    path.iter().map(|part| part.to_string_lossy().into_owned()).collect()
}

/// Returns the longest prefix of `path` that names a module with a file.
fn file_of<T>(modules: &BTreeMap<Module, T>, path: &[String]) -> Module {
    let lengths = (0..=path.len()).rev();
    let found = lengths.map(|length| &path[..length]).find(|part| modules.contains_key(*part));
    found.unwrap_or_default().to_vec()
}

fn rust_imports(files: &BTreeMap<Module, &Source>) -> Vec<Import> {
    let mut imports = Vec::new();
    for (module, source) in files {
        let tested = source.text.lines().take(source.tests_start()).collect::<Vec<_>>().join("\n");
        // Ignore a file that does not tokenise, because the compiler reports it.
        let tokens: TokenStream = tested.parse().unwrap_or_default();
        let mut paths = Vec::new();
        walk(tokens, module, &mut paths);
        imports.extend(paths.into_iter().map(|(path, line)| Import {
            from: module.clone(),
            to: file_of(files, &path),
            path: source.path.clone(),
            line,
        }));
    }
    imports
}

/// Collects the paths that begin with `crate`, `super` or `self`, in full and with their lines.
fn walk(tokens: TokenStream, module: &Module, paths: &mut Vec<(Module, usize)>) {
    let mut tokens = tokens.into_iter().peekable();
    let mut before: Option<String> = None;
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(ident) => {
                let (name, line) = (ident.to_string(), ident.span().start().line);
                let start = match name.as_str() {
                    "crate" => Some(Module::new()),
                    "self" => Some(module.clone()),
                    "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
                    _ => None,
                };
                if let Some(start) = start {
                    follow(&mut tokens, start, line, paths);
                    before = None;
                } else if before.as_deref() == Some("mod") {
                    let inner = module.iter().cloned().chain([name]).collect();
                    if let Some(TokenTree::Group(group)) = tokens.peek() {
                        walk(group.stream(), &inner, paths);
                        tokens.next();
                    }
                    before = None;
                } else {
                    before = Some(name);
                }
            }
            TokenTree::Group(group) => walk(group.stream(), module, paths),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Follows a path, and each branch of a path that ends in braces.
fn follow(
    tokens: &mut std::iter::Peekable<impl Iterator<Item = TokenTree>>,
    mut path: Module,
    line: usize,
    paths: &mut Vec<(Module, usize)>,
) {
    let mut colons = 0;
    while let Some(token) = tokens.peek() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ':' && colons < 2 => colons += 1,
            TokenTree::Ident(ident) if colons == 2 => {
                match ident.to_string().as_str() {
                    "super" => _ = path.pop(),
                    "self" => {}
                    name => path.push(name.to_owned()),
                }
                colons = 0;
            }
            TokenTree::Group(group) if colons == 2 && group.delimiter() == Delimiter::Brace => {
                let mut branches = group.stream().into_iter().peekable();
                while let Some(TokenTree::Ident(first)) = branches.next() {
                    let mut branch = path.clone();
                    if first != "self" {
                        branch.push(first.to_string());
                    }
                    follow(&mut branches, branch, first.span().start().line, paths);
                    // The rest of the branch, such as `as NAME`, names no module.
                    for token in branches.by_ref() {
                        if matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ',') {
                            break;
                        }
                    }
                }
                tokens.next();
                return;
            }
            _ => break,
        }
        tokens.next();
    }
    paths.push((path, line));
}

/// Returns the imports of Python files, from their `import` and `from … import` statements.
fn python_imports(package: &str, modules: &BTreeMap<Module, &(PathBuf, String)>) -> Vec<Import> {
    let mut imports = Vec::new();
    for (module, (path, text)) in modules {
        let is_package = path.ends_with("__init__.py");
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let is_open = line.contains('(') && !line.contains(')');
            let more = if is_open { &lines[index + 1..] } else { &[] };
            let more = more.iter().take_while(|line| !line.contains(')')).copied();
            let statement = std::iter::once(*line).chain(more).collect::<Vec<_>>().join(" ");
            let Some((from, names)) = python_import(&statement) else { continue };
            let depth = from.chars().take_while(|c| *c == '.').count();
            let start = match depth {
                0 => Module::new(),
                _ => module[..(module.len() + usize::from(is_package)).saturating_sub(depth)]
                    .to_vec(),
            };
            let mut whole: Module = from[depth..]
                .split('.')
                .filter(|part| !part.is_empty())
                .map(str::to_owned)
                .collect();
            if depth == 0 {
                if whole.first().is_none_or(|first| first != package) {
                    continue;
                }
                whole.remove(0);
            }
            let whole: Module = start.into_iter().chain(whole).collect();
            for name in names {
                let named = whole.iter().cloned().chain([name]).collect::<Module>();
                let to = file_of(modules, &named);
                imports.push(Import {
                    from: module.clone(),
                    to,
                    path: path.clone(),
                    line: index + 1,
                });
            }
        }
    }
    imports
}

/// Returns the module that a line imports, and the names that it imports from the module.
fn python_import(line: &str) -> Option<(&str, Vec<String>)> {
    let line = line.trim_start();
    if let Some(rest) = line.strip_prefix("from ") {
        let (from, names) = rest.split_once(" import ")?;
        let names = names.trim_start_matches('(').split(',');
        let names = names.filter_map(|name| name.split_whitespace().next()).map(str::to_owned);
        return Some((from.trim(), names.collect()));
    }
    let whole = line.strip_prefix("import ")?.split_whitespace().next()?;
    Some((whole.trim_end_matches(','), vec![String::new()]))
}

/// Returns one problem for each import cycle.
fn circles(imports: &[Import]) -> Vec<Problem> {
    let mut levels: BTreeMap<&[String], BTreeMap<(&str, &str), &Import>> = BTreeMap::new();
    for import in imports {
        let (from, to) = (&import.from, &import.to);
        let shared = from.iter().zip(to).take_while(|(one, other)| one == other).count();
        if let (Some(one), Some(other)) = (from.get(shared), to.get(shared)) {
            let level = levels.entry(&from[..shared]).or_default();
            level.entry((one, other)).or_insert(import);
        }
    }
    levels.values().flat_map(circles_of_level).collect()
}

fn circles_of_level(arrows: &BTreeMap<(&str, &str), &Import>) -> Vec<Problem> {
    let mut reached: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for &(from, to) in arrows.keys() {
        reached.entry(from).or_default().insert(to);
    }
    loop {
        let more: Vec<(&str, &str)> = reached
            .iter()
            .flat_map(|(from, via)| {
                via.iter().filter_map(|via| reached.get(via)).flatten().map(|to| (*from, *to))
            })
            .filter(|(from, to)| !reached[from].contains(to))
            .collect();
        if more.is_empty() {
            break;
        }
        for (from, to) in more {
            reached.entry(from).or_default().insert(to);
        }
    }
    let reaches = |from: &str, to: &str| reached.get(from).is_some_and(|all| all.contains(to));
    let mut done = BTreeSet::new();
    let mut problems = Vec::new();
    for &first in reached.keys().filter(|name| reaches(name, name)) {
        if !done.insert(first) {
            continue;
        }
        let is_in = |name: &str| reaches(first, name) && reaches(name, first);
        let inside: Vec<_> =
            arrows.iter().filter(|((from, to), _)| is_in(from) && is_in(to)).collect();
        done.extend(inside.iter().map(|((from, _), _)| *from));
        let listed: Vec<String> = inside
            .iter()
            .map(|((from, to), import)| {
                format!("{from} -> {to} ({}:{})", import.path.display(), import.line)
            })
            .collect();
        let message = format!("modules import each other in a cycle: {}", listed.join(", "));
        problems.push(Problem::new(&inside[0].1.path, None, "circles", message));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Vec<Source> {
        files.iter().map(|(path, text)| Source::new(*path, *text)).collect()
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        in_crates(&sources(files)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn two_files_that_import_each_other_are_a_circle() {
        assert_eq!(
            found(&[
                ("net/src/a.rs", "//! A.\nuse crate::b::B;\n"),
                ("net/src/b.rs", "//! B.\nfn f() { super::a::g(); }\n"),
                ("net/src/lib.rs", "mod a;\nmod b;\n"),
            ]),
            ["net/src/a.rs: [circles] modules import each other in a cycle: \
                 a -> b (net/src/a.rs:2), b -> a (net/src/b.rs:2)"]
        );
    }

    #[test]
    fn a_circle_through_a_child_and_through_braces_and_macros_is_found() {
        let a = "use crate::{c::C, b::{self, D}};\n";
        let child = "fn f() { assert!(matches!(x, crate::a::X)); }\n";
        let problems =
            found(&[("net/src/a.rs", a), ("net/src/b/child.rs", child), ("net/src/b.rs", "")]);
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn a_parent_and_its_children_may_import_each_other() {
        assert_eq!(
            found(&[
                ("net/src/a.rs", "mod child;\nuse self::child::C;\n"),
                ("net/src/a/child.rs", "use super::A;\nuse crate::a::B;\n"),
            ]),
            [""; 0]
        );
    }

    #[test]
    fn children_side_by_side_are_a_circle_by_themselves() {
        let problems = found(&[
            ("net/src/a.rs", ""),
            ("net/src/a/b.rs", "use super::c::C;\n"),
            ("net/src/a/c.rs", "mod inner { use super::super::b::B; }\n"),
        ]);
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn tests_and_other_crates_make_no_circle() {
        let a = "use crate::b::B;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n";
        let b = "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n";
        assert_eq!(found(&[("net/src/a.rs", a), ("net/src/b.rs", b)]), [""; 0]);
        let other = "use crate::a::A;\n";
        assert_eq!(found(&[("net/src/a.rs", a), ("worker/src/b.rs", other)]), [""; 0]);
    }

    #[test]
    fn circles_of_a_python_package_are_found_too() {
        let package = Path::new("python/lib/racksum");
        let file = |name: &str, text: &str| (package.join(name), text.to_owned());
        let problems = in_package(
            package,
            &[
                file("__init__.py", "from .session import Session\n"),
                file("session.py", "def f():\n    from racksum.torch.work import Work\n"),
                file("torch/__init__.py", "from .work import (\n    Work,\n)\n"),
                file("torch/work.py", "from ..session import Session\nimport os\n"),
            ],
        );
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            problems,
            ["python/lib/racksum/session.py: [circles] modules import each other in a cycle: \
              session -> torch (python/lib/racksum/session.py:2), \
              torch -> session (python/lib/racksum/torch/work.py:1)"]
        );
    }
}
