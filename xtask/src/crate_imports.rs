//! Checks which crates import which, with the help of `cargo metadata`.
//!
//! Dependencies of every kind count, including those of tests and build scripts. The sans-IO crates
//! may not use packages that would give them a socket, a clock or the system's randomness, except
//! in tests.

use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// The workspace crates that a crate may import.
#[derive(Debug, Clone, Copy)]
enum MayImport {
    Any,
    Only(&'static [&'static str]),
}

/// The workspace crates that each crate and its tests may import. The table of crates in
/// ARCHITECTURE.md summarizes this one. A crate without a row is an error.
const ARROWS: [(&str, MayImport); 19] = [
    ("racksum-proto", MayImport::Only(&[])),
    ("racksum-net", MayImport::Only(&["racksum-proto", "racksum-test-report"])),
    ("racksum-kernels", MayImport::Only(&["racksum-proto"])),
    (
        "racksum-aggregator",
        MayImport::Only(&[
            "racksum-proto",
            "racksum-net",
            "racksum-kernels",
            "racksum-test-report",
        ]),
    ),
    (
        "racksum-worker",
        MayImport::Only(&[
            "racksum-proto",
            "racksum-net",
            "racksum-kernels",
            "racksum-test-report",
        ]),
    ),
    ("racksum", MayImport::Only(&["racksum-proto", "racksum-worker", "racksum-aggregator"])),
    ("racksum-python", MayImport::Only(&["racksum-proto", "racksum-worker"])),
    ("racksum-sim", MayImport::Only(&["racksum-proto", "racksum-test-report"])),
    ("racksum-placer", MayImport::Only(&[])),
    ("racksum-probe", MayImport::Only(&["racksum-proto", "racksum-net", "racksum-placer"])),
    ("racksum-operator", MayImport::Only(&["racksum-placer", "racksum-test-report"])),
    (
        "racksum-cli",
        MayImport::Only(&[
            "racksum-proto",
            "racksum-net",
            "racksum-kernels",
            "racksum-aggregator",
            "racksum-worker",
            "racksum-sim",
            "racksum-placer",
            "racksum-probe",
            "racksum-benches",
            "racksum-preload",
            "racksum-test-report",
        ]),
    ),
    ("racksum-preload", MayImport::Only(&[])),
    ("racksum-test-report", MayImport::Only(&[])),
    (
        "racksum-benches",
        MayImport::Only(&[
            "racksum-proto",
            "racksum-net",
            "racksum-kernels",
            "racksum-aggregator",
            "racksum-worker",
            "racksum-sim",
            "racksum-placer",
        ]),
    ),
    ("racksum-tests", MayImport::Any),
    (
        "racksum-harness",
        MayImport::Only(&[
            "racksum-proto",
            "racksum-placer",
            "racksum-benches",
            "racksum-test-report",
            "racksum-tools",
        ]),
    ),
    ("racksum-xtask", MayImport::Only(&["racksum-test-report", "racksum-tools"])),
    ("racksum-tools", MayImport::Only(&[])),
];

/// The crates that may not own a socket, a clock or the system's randomness (invariant I8).
const SANS_IO: [&str; 3] = ["racksum-proto", "racksum-sim", "racksum-placer"];

/// The packages that a sans-IO crate may use only in its tests.
const IO_PACKAGES: [&str; 8] =
    ["getrandom", "libc", "mio", "quinn", "quinn-udp", "rustix", "socket2", "tokio"];

/// A dependency of one of our crates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Edge {
    from: String,
    to: String,
    only_in_tests: bool,
}

/// The workspace crates and everything that they name as a dependency.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    crates: Vec<String>,
    edges: Vec<Edge>,
}

/// Returns the names of the crates that may be published.
pub(crate) fn published(root: &Path) -> Result<Vec<String>> {
    let metadata = metadata(root)?;
    let packages = metadata.workspace_packages().into_iter();
    let published = packages.filter(|package| package.publish.is_none());
    Ok(published.map(|package| package.name.to_string()).collect())
}

/// Reads the metadata of the workspace at `root` without network access.
fn metadata(root: &Path) -> Result<Metadata> {
    let mut command = MetadataCommand::new();
    command.current_dir(root).no_deps().exec().context("cannot read cargo metadata")
}

impl Graph {
    /// Reads the workspace at `root` without network access.
    pub(crate) fn load(root: &Path) -> Result<Self> {
        let metadata = metadata(root)?;
        let mut graph = Self::default();
        for package in metadata.workspace_packages() {
            graph.crates.push(package.name.to_string());
            graph.edges.extend(package.dependencies.iter().map(|dependency| Edge {
                from: package.name.to_string(),
                to: dependency.name.clone(),
                only_in_tests: dependency.kind == DependencyKind::Development,
            }));
        }
        Ok(graph)
    }

    /// Returns one sentence for each forbidden import and for each crate that the table lacks.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for name in &self.crates {
            let Some((_, may_import)) = ARROWS.iter().find(|(row, _)| row == name) else {
                problems.push(format!("{name} has no row in xtask/src/crate_imports.rs; add one"));
                continue;
            };
            for edge in self.edges.iter().filter(|edge| edge.from == *name) {
                if self.crates.contains(&edge.to) && !may_import.allows(&edge.to) {
                    problems.push(format!("{name} may not import {}", edge.to));
                }
                if SANS_IO.contains(&name.as_str())
                    && IO_PACKAGES.contains(&edge.to.as_str())
                    && !edge.only_in_tests
                {
                    problems.push(format!("{name} is sans-IO and may not import {}", edge.to));
                }
            }
        }
        problems
    }
}

impl MayImport {
    fn allows(self, name: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(names) => names.contains(&name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str, bool)]) -> Graph {
        let mut graph = Graph::default();
        for &(from, to, only_in_tests) in edges {
            for name in [from, to] {
                if name.starts_with("racksum-") && !graph.crates.iter().any(|have| have == name) {
                    graph.crates.push(name.to_owned());
                }
            }
            graph.edges.push(Edge { from: from.to_owned(), to: to.to_owned(), only_in_tests });
        }
        graph
    }

    #[test]
    fn import_arrows_hold() {
        let graph = Graph::load(racksum_tools::root()).unwrap();
        assert!(graph.crates.iter().any(|name| name == "racksum-xtask"));
        assert!(graph.edges.iter().any(|edge| edge.from == "racksum-net"));
        assert_eq!(graph.problems(), [""; 0]);
    }

    #[test]
    fn arrows_in_the_table_are_no_problem() {
        let graph = graph(&[
            ("racksum-worker", "racksum-net", false),
            ("racksum-worker", "tokio", false),
            ("racksum-tests", "racksum-aggregator", true),
            ("racksum-proto", "tokio", true),
        ]);
        assert_eq!(graph.problems(), [""; 0]);
    }

    #[test]
    fn a_forbidden_arrow_is_a_problem_even_in_tests() {
        let graph = graph(&[
            ("racksum-worker", "racksum-aggregator", true),
            ("racksum-proto", "racksum-net", false),
        ]);
        assert_eq!(
            graph.problems(),
            [
                "racksum-worker may not import racksum-aggregator",
                "racksum-proto may not import racksum-net",
            ]
        );
    }

    #[test]
    fn a_sans_io_crate_may_not_import_io() {
        let graph = graph(&[("racksum-sim", "tokio", false)]);
        assert_eq!(graph.problems(), ["racksum-sim is sans-IO and may not import tokio"]);
    }

    #[test]
    fn a_crate_without_a_row_is_a_problem() {
        let graph = graph(&[("racksum-new", "serde", false)]);
        assert_eq!(
            graph.problems(),
            ["racksum-new has no row in xtask/src/crate_imports.rs; add one"]
        );
    }
}
