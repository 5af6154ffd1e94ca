//! Checks that docs/status.md lists every word that `racksum status` prints.

use std::collections::BTreeSet;

use racksum_proto::reject::Reject;
use racksum_proto::status::{JobState, SidecarJobState};
use serde_json::{Value, to_value};

use super::{sidecar, tests, text};

const DOCUMENT: &str = include_str!("../../../docs/status.md");

/// Returns the rows of the table under a heading, each as a list of cells.
fn rows(heading: &str) -> Vec<Vec<&'static str>> {
    let (_, below) = DOCUMENT.split_once(&format!("# {heading}\n")).unwrap();
    let table = below.lines().skip_while(|line| !line.starts_with('|'));
    let rows = table.take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// Returns the code spans in one cell of each row.
fn names(heading: &str, cell: usize) -> Vec<&'static str> {
    let cells = rows(heading).into_iter().map(|row| row[cell]);
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

/// Checks that a table lists exactly the keys of an object.
fn check_keys(heading: &str, object: &Value) {
    let listed: BTreeSet<_> = names(heading, 1).into_iter().collect();
    let there: BTreeSet<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(listed, there, "{heading}");
}

/// Checks that the document's tables contain every printed word.
fn check_words(printed: &str) {
    let first_cell = |row: &'static str| row.strip_prefix('|')?.split('|').next();
    let words = |text: &'static str| text.split(|c: char| !c.is_alphabetic());
    let listed: BTreeSet<_> = DOCUMENT.lines().filter_map(first_cell).flat_map(words).collect();
    for word in printed.split(|c: char| !c.is_alphabetic()) {
        assert!(listed.contains(word), "docs/status.md lacks {word:?}, a word in:\n{printed}");
    }
}

#[test]
fn the_document_of_the_status_lists_every_word_of_an_aggregator() {
    let status = tests::status("0");
    check_words(&text(&status));
    let json = to_value(&status).unwrap();
    check_keys("An aggregator", &json);
    check_keys("A job", &json["jobs"][0]);
    check_keys("A rank", &json["jobs"][0]["ranks"][0]);
    check_keys("A shard", &json["shards"][0]);
}

#[test]
fn the_document_of_the_status_lists_every_word_of_a_sidecar() {
    let status = sidecar::tests::status();
    check_words(&sidecar::text(&status));
    let json = to_value(&status).unwrap();
    check_keys("A sidecar", &json);
    check_keys("A sidecar's job", &json["jobs"][0]);
    check_keys("A sidecar's rank", &json["jobs"][0]["ranks"][0]);
}

#[test]
fn the_document_of_the_status_lists_every_state_and_every_reason() {
    assert_eq!(names("States of a job", 0), JobState::ALL.map(JobState::name));
    assert_eq!(
        names("States of a sidecar's job", 0),
        SidecarJobState::ALL.map(SidecarJobState::name)
    );
    assert_eq!(names("Reasons of rejects", 0), Reject::ALL.map(Reject::name));
}
