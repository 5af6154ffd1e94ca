//! `cargo xtask sanitize` looks for races and bad pointers in the code for memory that processes
//! share.
//!
//! ThreadSanitizer runs the tests in which a thread overwrites shared memory while others fold and
//! copy it. It sees that thread's atomic stores, but not the copies by inline assembly. It
//! therefore reports any other access to the memory, such as one through a reference that should
//! not exist. Miri checks the pointers of copies and kernels. Both need a nightly toolchain.

use std::path::Path;

use anyhow::{Context, Result, bail};

use racksum_tools::shell::{Cmd, path, target};

/// Runs the tests with ThreadSanitizer, then with Miri; returns `true` if all pass.
pub(crate) fn run(root: &Path) -> Result<bool> {
    check_toolchain(root)?;
    let host = host(&Cmd::line("rustc +nightly -vV").output(root)?)?;
    let checks = [threads(root, &host)?, pointers(root)?];
    let mut passed = true;
    for check in checks {
        if let Err(error) = check.run(root) {
            println!("failed: {error:#}");
            passed = false;
        }
    }
    Ok(passed)
}

/// Returns the command that runs the tests of shared memory with ThreadSanitizer.
fn threads(root: &Path, host: &str) -> Result<Cmd> {
    let build = ["+nightly", "test", "--locked", "-Zbuild-std", "--target", host];
    let tests = ["-p", "racksum-kernels", "-p", "racksum-worker", "--lib", "--"];
    let command = Cmd::cargo(&[&build[..], &tests, &THREADS].concat());
    let folder = target(root).join("sanitize");
    Ok(command
        .env("CARGO_TARGET_DIR", path(&folder)?)
        .env("RUSTFLAGS", "-Zsanitizer=thread")
        // A report needs the history of both accesses.
        .env("TSAN_OPTIONS", "halt_on_error=1:history_size=7"))
}

/// Returns the command that runs the tests of shared bytes under Miri.
fn pointers(root: &Path) -> Result<Cmd> {
    let args = ["+nightly", "miri", "test", "--locked", "-p", "racksum-kernels", "--lib", "--"];
    let folder = target(root).join("miri");
    Ok(Cmd::cargo(&[&args[..], &[POINTERS]].concat()).env("CARGO_TARGET_DIR", path(&folder)?))
}

/// Checks that the nightly toolchain is complete. The error names the command that installs the
/// missing parts.
fn check_toolchain(root: &Path) -> Result<()> {
    if !Cmd::line("cargo +nightly --version").succeeds(root) {
        bail!("no nightly toolchain is installed; run `{INSTALL}`");
    }
    if !Cmd::line("cargo +nightly miri --version").succeeds(root) {
        bail!("the nightly toolchain has no Miri; run `{INSTALL}`");
    }
    let sysroot = Cmd::line("rustc +nightly --print sysroot").output(root)?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    if !library.exists() {
        bail!("the nightly toolchain lacks the standard library's source; run `{INSTALL}`");
    }
    Ok(())
}

/// Returns the host's target from the output of `rustc -vV`.
fn host(version: &str) -> Result<String> {
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("`rustc -vV` printed no line that starts with `host: `")
}

/// The command that installs the toolchain.
const INSTALL: &str =
    "rustup toolchain install nightly --profile minimal --component rust-src --component miri";

/// The modules whose tests run with ThreadSanitizer.
const THREADS: [&str; 4] = ["shared::", "sidecar::", "payload::", "tensor::"];

/// The module whose tests run under Miri.
const POINTERS: &str = "shared::";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_found_among_what_rustc_says() {
        let printed = "rustc 1.97.0-nightly\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n";
        assert_eq!(host(printed).unwrap(), "x86_64-unknown-linux-gnu");
        assert!(host("rustc 1.97.0").is_err());
    }

    #[test]
    fn the_sanitizer_runs_the_tests_of_shared_memory() {
        let command = threads(Path::new("/root"), "a-b-c").unwrap().to_string();
        assert!(command.contains("RUSTFLAGS=-Zsanitizer=thread"), "{command}");
        assert!(command.contains("-- shared:: sidecar:: "), "{command}");
    }
}
