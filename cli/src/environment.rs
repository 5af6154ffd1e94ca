//! What variables of the environment say where the command line says nothing. A variable only
//! completes a command: none makes a rank of a distributed run of one that runs on this host.

use std::path::PathBuf;

use crate::exit::Failure;

/// The aggregators of a distributed run.
pub(crate) const AGGREGATOR: &str = "RACKSUM_AGGREGATOR";
/// The identity file.
pub(crate) const IDENTITY: &str = "RACKSUM_IDENTITY";
/// The interface to call from.
pub(crate) const INTERFACE: &str = "RACKSUM_INTERFACE";
/// What is logged.
pub(crate) const LOG: &str = "RACKSUM_LOG";

/// What a variable says; one that is empty says nothing.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What a variable says, read as a flag of the same meaning is.
///
/// # Errors
/// A sentence that names the variable.
pub(crate) fn read<T>(
    name: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let Some(value) = variable(name) else { return Ok(None) };
    let value = read(&value).map_err(|why| Failure::usage(format!("{name}={value:?}: {why}")))?;
    Ok(Some(value))
}

/// The identity file that a flag or a configuration names, or else the variable.
///
/// # Errors
/// A sentence, if the variable names one and `--insecure` is given.
pub(crate) fn identity(named: Option<PathBuf>, insecure: bool) -> Result<Option<PathBuf>, Failure> {
    match (named, variable(IDENTITY)) {
        (Some(named), _) => Ok(Some(named)),
        (None, Some(file)) if insecure => Err(Failure::usage(format!(
            "{IDENTITY}={file:?} names an identity, which is of no use with --insecure; unset the \
             variable, or leave --insecure out"
        ))),
        (None, file) => Ok(file.map(PathBuf::from)),
    }
}
