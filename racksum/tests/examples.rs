//! Runs the examples as programs, and checks what they print.

use std::path::PathBuf;
use std::process::Command;

/// Runs an example that `cargo test` has built, and returns its output.
fn run(name: &str) -> String {
    let own = std::env::current_exe().expect("this test is a file");
    let folder: PathBuf = own.ancestors().nth(2).expect("in target/*/deps").join("examples");
    let output = Command::new(folder.join(name)).output().expect("cargo test builds examples");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn allreduce_sums_the_tensors_of_all_ranks() {
    let told = run("allreduce");
    assert_eq!(told.matches("the sum of 0, 1, 2 and 3 is 6\n").count(), 4, "{told}");
}

#[test]
fn sparse_blocks_gives_all_ranks_the_union() {
    let told = run("sparse_blocks");
    for rank in 0..2 {
        for (row, sum) in [(7, 2), (42, 1), (999_999, 1)] {
            assert!(told.contains(&format!("rank {rank}: row {row} is {sum}\n")), "{told}");
        }
    }
}

#[test]
fn failover_goes_on_at_the_standby() {
    let told = run("failover");
    assert_eq!(told.matches("0.2 before, 0.2 at the standby\n").count(), 2, "{told}");
}
