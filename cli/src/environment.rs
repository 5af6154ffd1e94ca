//! What variables of the environment say where the command line says nothing. A variable only
//! completes a command: none makes a rank of a distributed run of one that runs on this host.

use std::ffi::OsString;
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

/// What a variable says, read as a flag of the same meaning is.
///
/// # Errors
/// A sentence that names the variable.
pub(crate) fn read<T>(
    name: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Failure> {
    let Some(value) = variable(name)? else { return Ok(None) };
    let value = read(&value).map_err(|why| Failure::usage(format!("{name}={value:?}: {why}")))?;
    Ok(Some(value))
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
        (None, file) => Ok(file.map(PathBuf::from)),
    }
}
