//! Runs the examples as programs, and checks their output.

use std::path::PathBuf;
use std::process::Command;

/// Runs an example that `cargo test` has built, and returns its output.
fn run(name: &str) -> String {
    let own = std::env::current_exe().expect("a running test has a path");
    let folder: PathBuf =
        own.ancestors().nth(2).expect("the test lies in target/*/deps").join("examples");
    let output =
        Command::new(folder.join(name)).output().expect("`cargo test` has built the example");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn allreduce_sums_the_tensors_of_all_ranks() {
    let output = run("allreduce");
    assert_eq!(output.matches("the sum of 0, 1, 2 and 3 is 6\n").count(), 4, "{output}");
}

#[test]
fn sparse_blocks_gives_all_ranks_the_union() {
    let output = run("sparse_blocks");
    for rank in 0..2 {
        for (row, sum) in [(7, 2), (42, 1), (999_999, 1)] {
            assert!(output.contains(&format!("rank {rank}: row {row} is {sum}\n")), "{output}");
        }
    }
}

#[test]
fn failover_goes_on_at_the_standby() {
    let output = run("failover");
    assert_eq!(output.matches("0.2 before, 0.2 at the standby\n").count(), 2, "{output}");
}
