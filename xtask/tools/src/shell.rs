//! Commands that a program runs and prints. The error of a failed command shows its command line.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

/// A program, its arguments and its environment variables beyond those of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cmd {
    program: String,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
}

impl Cmd {
    /// Creates a command from a program and its arguments.
    #[must_use]
    pub fn new(program: &str, args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self { program: program.to_owned(), args, env: Vec::new() }
    }

    /// Creates a command from one line of words without quotes.
    #[must_use]
    pub fn line(line: &str) -> Self {
        let mut words = line.split_whitespace();
        let program = words.next().unwrap_or_default();
        Self::new(program, &words.collect::<Vec<_>>())
    }

    /// Creates a cargo command.
    #[must_use]
    pub fn cargo(args: &[&str]) -> Self {
        Self::new("cargo", args)
    }

    /// Returns the command with `key` set to `value`.
    #[must_use]
    pub fn env(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.env.push((key, value.into()));
        self
    }

    /// Prints the command line, runs it in `dir` and passes its output on. An exit status other
    /// than 0 is an error that repeats the command line.
    ///
    /// # Errors
    /// Returns an error if the command does not start or does not succeed.
    pub fn run(&self, dir: &Path) -> Result<()> {
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

    /// Runs the command in `dir` and returns its standard output. An error contains the command's
    /// standard error.
    ///
    /// # Errors
    /// Returns an error if the command does not start or does not succeed.
    pub fn output(&self, dir: &Path) -> Result<String> {
        let output = self
            .command(dir)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot start: {self}"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{self}: {} ({})", stderr.trim(), output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns whether the command starts and exits with status 0; its output is dropped.
    pub fn succeeds(&self, dir: &Path) -> bool {
        self.command(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    fn command(&self, dir: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .current_dir(dir);
        command
    }
}

impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.env {
            write!(f, "{key}={} ", quoted(value))?;
        }
        f.write_str(&quoted(&self.program))?;
        for arg in &self.args {
            write!(f, " {}", quoted(arg))?;
        }
        Ok(())
    }
}

/// Returns a path as the text of a command's argument.
///
/// # Errors
/// Returns an error if the path is not UTF-8.
pub fn path(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Returns the folder of cargo's build output.
#[must_use]
pub fn target(root: &Path) -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    root.join(target)
}

/// Asks a process to end (SIGTERM). Returns false if the process is gone.
pub fn terminate(child: &Child) -> bool {
    Cmd::new("kill", &["-TERM", &child.id().to_string()]).succeeds(Path::new("."))
}

/// Quotes `word` for a shell.
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
    fn a_line_is_split_into_words() {
        assert_eq!(Cmd::line("ip  link add"), Cmd::new("ip", &["link", "add"]));
    }

    #[test]
    fn output_is_what_was_printed_or_an_error_with_what_was_printed_as_errors() {
        let sh = |script| Cmd::new("sh", &["-c", script]).output(Path::new("."));
        assert_eq!(sh("echo out; echo err >&2").unwrap(), "out\n");
        let error = sh("echo out; echo err >&2; exit 3").unwrap_err().to_string();
        assert!(error.contains(": err (") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_missing_program_is_an_error_and_no_success() {
        let cmd = Cmd::new("racksum-no-such-program", &[]);
        assert!(cmd.run(Path::new(".")).is_err());
        assert!(!cmd.succeeds(Path::new(".")));
    }
}
