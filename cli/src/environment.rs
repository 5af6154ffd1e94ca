//! What variables of the environment say where the command line says nothing. A variable only
//! completes a command: none makes a rank of a distributed run of one that runs on this host.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::exit::Failure;
use crate::option_source::{take, with_variable};

/// The aggregators of a distributed run.
pub(crate) const AGGREGATOR: &str = "RACKSUM_AGGREGATOR";
/// The identity file.
pub(crate) const IDENTITY: &str = "RACKSUM_IDENTITY";
/// The interface to call from.
pub(crate) const INTERFACE: &str = "RACKSUM_INTERFACE";
/// What is logged.
pub(crate) const LOG: &str = "RACKSUM_LOG";

/// What a variable says; one that is empty says nothing.
///
/// # Errors
/// A sentence that names the variable, if it is not UTF-8.
pub(crate) fn variable(name: &str) -> Result<Option<String>, Failure> {
    let text = bytes(name).map(OsString::into_string).transpose();
    text.map_err(|value| {
        Failure::usage(format!("{name}={value:?} is not UTF-8; correct the variable, or unset it"))
    })
}

/// What a variable holds, be it UTF-8 or not; one that is empty holds nothing.
fn bytes(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The aggregators that the variable names, read as the flag is.
///
/// # Errors
/// A sentence that names the variable.
pub(crate) fn aggregator<T>(
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let Some(value) = variable(AGGREGATOR)? else { return Ok(None) };
    take("aggregator", AGGREGATOR, value.as_ref());
    let of_variable = |why| Failure::usage(with_variable(&["aggregator"], why));
    read(&value).map_err(of_variable).map(Some)
}

/// The interfaces to call from that a flag names, or else the variable.
///
/// # Errors
/// A sentence that names the variable, if it is not UTF-8.
pub(crate) fn interface(named: Option<String>) -> Result<Option<String>, Failure> {
    if named.is_some() {
        return Ok(named);
    }
    let value = variable(INTERFACE)?;
    if let Some(value) = &value {
        take("interface", INTERFACE, value.as_ref());
    }
    Ok(value)
}

/// The identity file that a flag or a configuration names, or else the variable.
///
/// # Errors
/// A sentence, if the variable names one and `--insecure` is given.
pub(crate) fn identity(named: Option<PathBuf>, insecure: bool) -> Result<Option<PathBuf>, Failure> {
    match (named, bytes(IDENTITY)) {
        (Some(named), _) => Ok(Some(named)),
        (None, Some(file)) if insecure => Err(Failure::usage(format!(
            "{IDENTITY}={file:?} names an identity, which is of no use with --insecure; unset the \
             variable, or leave --insecure out"
        ))),
        (None, file) => Ok(file.map(|file| {
            take("identity", IDENTITY, &file);
            PathBuf::from(file)
        })),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    /// The variables that the help of a command and its subcommands names.
    fn told_of(command: &mut clap::Command) -> BTreeSet<String> {
        let help = command.render_long_help().to_string();
        let words = help.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let own = words.filter(|word| word.starts_with("RACKSUM_")).map(str::to_owned);
        let mut all: BTreeSet<String> = own.collect();
        command.get_subcommands_mut().for_each(|sub| all.append(&mut told_of(sub)));
        all
    }

    #[test]
    fn readme_and_help_name_the_variables_that_there_are() {
        let there_are = BTreeSet::from([AGGREGATOR, IDENTITY, INTERFACE, LOG].map(str::to_owned));
        assert_eq!(told_of(&mut crate::Cli::command()), there_are);
        let readme = include_str!("../../README.md");
        let rows = readme.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let rows = rows.filter(|name| name.starts_with("RACKSUM_")).map(str::to_owned);
        assert_eq!(rows.collect::<BTreeSet<_>>(), there_are);
    }
}
