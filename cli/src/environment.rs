//! Environment variables that stand in for omitted flags. They only complete a command: no variable
//! turns a run on this host into one rank of a distributed run.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::exit::Failure;
use crate::option_source::{take, with_variable};

/// The variable for the aggregators of a distributed run.
pub(crate) const AGGREGATOR: &str = "RACKSUM_AGGREGATOR";
/// The variable for the identity file.
pub(crate) const IDENTITY: &str = "RACKSUM_IDENTITY";
/// The variable for connecting without an identity. Commands that serve ignore it: it is meant for
/// workers, and an aggregator that read it would admit every host.
pub(crate) const INSECURE: &str = "RACKSUM_INSECURE";
/// The variable for the network interface to connect from.
pub(crate) const INTERFACE: &str = "RACKSUM_INTERFACE";
/// The variable for the log filter.
pub(crate) const LOG: &str = "RACKSUM_LOG";

/// Returns the value of a variable, or `None` if it is unset or empty.
///
/// # Errors
/// A message that names the variable, if its value is not UTF-8.
pub(crate) fn variable(name: &str) -> Result<Option<String>, Failure> {
    let text = bytes(name).map(OsString::into_string).transpose();
    text.map_err(|value| {
        Failure::usage(format!("{name}={value:?} is not UTF-8; correct the variable, or unset it"))
    })
}

/// Returns the raw value of a variable, or `None` if it is unset or empty.
fn bytes(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Returns the aggregators that [`AGGREGATOR`] names, parsed with `read`, the flag's parser.
///
/// # Errors
/// A message that names the variable, if its value is invalid.
pub(crate) fn aggregator<T>(
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let Some(value) = variable(AGGREGATOR)? else { return Ok(None) };
    take("aggregator", AGGREGATOR, value.as_ref());
    let of_variable = |why| Failure::usage(with_variable(&["aggregator"], why));
    read(&value).map_err(of_variable).map(Some)
}

/// Returns the interfaces to connect from: those that the flag names, or else those that
/// [`INTERFACE`] names.
///
/// # Errors
/// A message that names the variable, if its value is not UTF-8.
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

/// Returns the identity file that the flag or the configuration names, or else the one that
/// [`IDENTITY`] names.
///
/// # Errors
/// A message that names the variable, if only the variable names a file and `insecure` is set.
pub(crate) fn identity(named: Option<PathBuf>, insecure: bool) -> Result<Option<PathBuf>, Failure> {
    match (named, bytes(IDENTITY)) {
        (Some(named), _) => Ok(Some(named)),
        (None, Some(file)) if insecure => Err(Failure::usage(format!(
            "{IDENTITY}={file:?} conflicts with --insecure, or with insecure of the configuration \
             file; unset the variable, or leave that option out"
        ))),
        (None, file) => Ok(file.map(|file| {
            take("identity", IDENTITY, &file);
            PathBuf::from(file)
        })),
    }
}

/// Returns the identity file to connect with, and whether to connect without one: what the flags
/// say, completed by [`IDENTITY`] and [`INSECURE`].
///
/// # Errors
/// A message that names the variable, if its value is not a truth value or conflicts with the
/// identity.
pub(crate) fn credentials(
    named: Option<PathBuf>,
    insecure: bool,
) -> Result<(Option<PathBuf>, bool), Failure> {
    let identity = identity(named, insecure)?;
    if insecure {
        return Ok((identity, true));
    }
    let Some(value) = variable(INSECURE)? else { return Ok((identity, false)) };
    let insecure = truth(&value).ok_or_else(|| {
        Failure::usage(format!("{INSECURE}={value:?} must be 1 or 0; correct the variable"))
    })?;
    match identity {
        Some(file) if insecure => Err(Failure::usage(format!(
            "{INSECURE}={value:?} conflicts with the identity {file:?}; unset the variable, or \
             leave the identity out"
        ))),
        identity => {
            if insecure {
                take("insecure", INSECURE, value.as_ref());
            }
            Ok((identity, insecure))
        }
    }
}

/// Parses a truth value as the Python package does.
fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    /// Returns the variables that appear in the help of a command and of its subcommands.
    fn variables_of(command: &mut clap::Command) -> BTreeSet<String> {
        let help = command.render_long_help().to_string();
        let words = help.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let own = words.filter(|word| word.starts_with("RACKSUM_")).map(str::to_owned);
        let mut all: BTreeSet<String> = own.collect();
        command.get_subcommands_mut().for_each(|sub| all.append(&mut variables_of(sub)));
        all
    }

    #[test]
    fn document_and_help_name_the_variables_that_there_are() {
        let there_are =
            BTreeSet::from([AGGREGATOR, IDENTITY, INSECURE, INTERFACE, LOG].map(str::to_owned));
        assert_eq!(variables_of(&mut crate::Cli::command()), there_are);
        let document = include_str!("../../docs/operating.md");
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let rows = rows.filter(|name| name.starts_with("RACKSUM_")).map(str::to_owned);
        assert_eq!(rows.collect::<BTreeSet<_>>(), there_are);
    }
}
