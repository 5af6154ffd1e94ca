//! Commands that can be run and shown: a failure prints the line that repeats it.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// A program, its arguments and the environment it needs on top of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cmd {
    program: &'static str,
    args: Vec<&'static str>,
    env: Vec<(&'static str, &'static str)>,
}

impl Cmd {
    /// A program and its arguments.
    pub(crate) fn new(program: &'static str, args: &[&'static str]) -> Self {
        Self { program, args: args.to_vec(), env: Vec::new() }
    }

    /// A cargo command.
    pub(crate) fn cargo(args: &[&'static str]) -> Self {
        Self::new("cargo", args)
    }

    /// The same command with `key` set to `value`.
    pub(crate) fn env(mut self, key: &'static str, value: &'static str) -> Self {
        self.env.push((key, value));
        self
    }

    /// Runs the command in `dir` with its output passed on; an exit status other than 0 is an
    /// error that carries the line to copy.
    pub(crate) fn run(&self, dir: &Path) -> Result<()> {
        println!("$ {self}");
        let status = self
            .command(dir)
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot start: {self}"))?;
        if !status.success() {
            bail!("{self}\n({status})");
        }
        Ok(())
    }

    /// Whether the command starts and ends well; its output is dropped.
    pub(crate) fn succeeds(&self, dir: &Path) -> bool {
        self.command(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    fn command(&self, dir: &Path) -> Command {
        let mut command = Command::new(self.program);
        command.args(&self.args).envs(self.env.iter().copied()).current_dir(dir);
        command
    }
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.env {
            write!(f, "{key}={} ", quoted(value))?;
        }
        f.write_str(self.program)?;
        for arg in &self.args {
            write!(f, " {}", quoted(arg))?;
        }
        Ok(())
    }
}

/// `word` as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_a_shell_reads_it() {
        let cmd = Cmd::cargo(&["doc", "--bench", "*", "it's"]).env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(cmd.to_string(), r"RUSTDOCFLAGS='-D warnings' cargo doc --bench '*' 'it'\''s'");
    }

    #[test]
    fn a_failing_command_is_an_error_that_repeats_the_line() {
        let cmd = Cmd::new("sh", &["-c", "exit 3"]);
        let error = cmd.run(Path::new(".")).unwrap_err().to_string();
        assert!(error.starts_with("sh -c 'exit 3'\n"), "{error}");
        assert!(error.contains('3'), "{error}");
    }

    #[test]
    fn a_missing_program_is_an_error_and_no_success() {
        let cmd = Cmd::new("racksum-no-such-program", &[]);
        assert!(cmd.run(Path::new(".")).is_err());
        assert!(!cmd.succeeds(Path::new(".")));
    }
}
