//! Records of a test run: skipped tests with their reasons, and times that users wait for.
//!
//! A busy machine must not make a test fail, so no test asserts on time. Tests record times here
//! instead. `cargo xtask bench failures` runs these tests one at a time and judges the times. The
//! test run collects skips and lists them in its summary. Both read the file that the environment
//! variable [`FILE`] names; each line is a JSON object. If the variable is not set, skips go to
//! standard error only and times are dropped.
//!
//! The Python tests append to the same file (`python/tests/report.py`). A test that counts log
//! lines uses [`lines_logged`].

mod lines;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

pub use lines::lines_logged;
use serde::{Deserialize, Serialize};

/// Environment variable that holds the path of the report file.
pub const FILE: &str = "RACKSUM_TEST_REPORT";

/// Environment variable that overrides the test's name, for a test that runs in a process of its
/// own.
pub const TEST: &str = "RACKSUM_TEST_NAME";

/// One line of the report file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Entry {
    /// A test or another part of the run was skipped, in whole or in part.
    Skip {
        /// The test's path, as libtest or pytest names it, or the name of the other part.
        test: String,
        /// The reason.
        why: String,
    },
    /// A test measured something.
    Time {
        /// The test's path, as libtest or pytest names it.
        test: String,
        /// Name of the measurement.
        what: String,
        /// Measured time in milliseconds.
        ms: u64,
        /// Limit on an otherwise idle machine, in milliseconds.
        most: u64,
    },
}

/// Records and prints that the calling test cannot run here, and the reason.
///
/// ```no_run
/// racksum_test_report::skip("raw sockets need root");
/// ```
#[expect(clippy::print_stderr, reason = "a person who runs one test wants to see it")]
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
    skipped(&test_name(), why);
}

/// Records that `what` was skipped, and the reason. `what` names a test or another part of the run.
pub fn skipped(what: &str, why: &str) {
    append(&Entry::Skip { test: what.to_owned(), why: why.to_owned() });
}

/// Records that `what` took `ms` milliseconds; `most` is the limit on an otherwise idle machine.
pub fn time(what: &str, ms: u64, most: u64) {
    append(&Entry::Time { test: test_name(), what: what.to_owned(), ms, most });
}

/// Reads the entries of a report file; returns no entries if the file does not exist.
///
/// # Errors
/// Returns a message if the file cannot be read or a line is not an entry.
pub fn read(file: &Path) -> Result<Vec<Entry>, String> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let entry = |line| {
        serde_json::from_str(line).map_err(|error| {
            format!("{}: not a line of a test report: {error}: {line}", file.display())
        })
    };
    text.lines().map(entry).collect()
}

/// Returns the name of the test that the current thread runs.
#[must_use]
pub fn test_name() -> String {
    std::env::var(TEST).unwrap_or_else(|_| {
        std::thread::current().name().unwrap_or("a thread without a name").to_owned()
    })
}

/// Appends a line in one write, so that several processes can share the file.
fn append(entry: &Entry) {
    let Some(file) = std::env::var_os(FILE) else { return };
    let line =
        serde_json::to_string(entry).expect("strings and numbers can be encoded as JSON") + "\n";
    let opened = OpenOptions::new().create(true).append(true).open(&file);
    opened
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", Path::new(&file).display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_reads_as_it_was_written() {
        let (test, what) = ("missing::a_rank".to_owned(), "a rank is missed".to_owned());
        for entry in [
            Entry::Skip { test: test.clone(), why: "no root".to_owned() },
            Entry::Time { test, what, ms: 5, most: 3000 },
        ] {
            let line = serde_json::to_string(&entry).unwrap();
            assert_eq!(serde_json::from_str::<Entry>(&line).unwrap(), entry);
        }
        assert!(serde_json::from_str::<Entry>(r#"{"skip":{"test":"t"}}"#).is_err());
    }

    #[test]
    fn a_test_is_named_by_its_thread() {
        assert_eq!(test_name(), "tests::a_test_is_named_by_its_thread");
    }

    #[test]
    fn a_file_that_does_not_exist_has_no_entries_and_a_spoilt_one_says_where() {
        assert_eq!(read(Path::new("/nonexistent/report")), Ok(Vec::new()));
        let spoilt = std::env::temp_dir().join(format!("racksum-report-{}", std::process::id()));
        std::fs::write(&spoilt, "{}\n").unwrap();
        let error = read(&spoilt).unwrap_err();
        std::fs::remove_file(&spoilt).unwrap();
        assert!(error.starts_with(&spoilt.display().to_string()), "{error}");
    }
}
