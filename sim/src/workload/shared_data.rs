//! Public traces and measurements next to the checkout, for tests. The repository has no copies.

use std::path::PathBuf;

/// Returns the path of a file or folder, or records that the test is skipped.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data")).join(name);
    if path.exists() {
        return Some(path);
    }
    racksum_test_report::skip(&format!("there is no ../shared/data/{name}"));
    None
}

/// Reads a text file, or records that the test is skipped.
pub(crate) fn text(name: &str) -> Option<String> {
    path(name).map(|path| std::fs::read_to_string(path).unwrap())
}
