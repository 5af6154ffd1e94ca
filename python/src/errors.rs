//! Conversion of the worker's errors to the package's exceptions.

use std::fmt::Display;
use std::str::FromStr;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_worker::{ConnectError, Error};

/// Converts a failure to join a job into an exception.
pub(crate) fn of_connect(py: Python<'_>, error: &ConnectError) -> PyErr {
    let text = error.to_string();
    match error {
        error if error.is_usage() => raise(py, "BadArgument", (text, error.options())),
        error if error.is_other_version() => raise(py, "VersionMismatch", text),
        ConnectError::Refused(_) | ConnectError::SidecarRefused(_) | ConnectError::Draining => {
            raise(py, "Refused", text)
        }
        ConnectError::NoRoom { .. } => raise(py, "NoRoom", text),
        ConnectError::Incomplete { missing, .. } => {
            raise(py, "JoinTimeout", (text, missing.clone()))
        }
        ConnectError::PeerLost { ranks, .. } => raise(py, "PeerLost", (text, numbers(ranks))),
        ConnectError::Arguments { .. }
        | ConnectError::NoAddress { .. }
        | ConnectError::Unresolved { .. }
        | ConnectError::Blocked(_)
        | ConnectError::NoWay { .. }
        | ConnectError::Version { .. }
        | ConnectError::SidecarVersion { .. }
        | ConnectError::Net(_)
        | ConnectError::Named { .. }
        | ConnectError::Silent
        | ConnectError::Closed(_)
        | ConnectError::NoSidecar { .. }
        | ConnectError::UntrustedSidecar { .. }
        | ConnectError::NoAggregator(_) => raise(py, "NoAggregator", text),
        ConnectError::GivenUp => raise(py, "SessionClosed", text),
        // Only `Protocol` and `Io` remain, which have no exceptions of their own.
        _ => raise(py, "Error", text),
    }
}

/// Converts the failure of an op into an exception.
pub(crate) fn of_op(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Submit(SubmitError::Descriptor(_) | SubmitError::NoSuchLane { .. })
        | Error::Length { .. }
        | Error::Blocks(_) => raise(py, "BadArgument", text),
        Error::Submit(SubmitError::PeerLost { ranks, .. })
        | Error::Op(OpError::PeerLost { ranks, .. }) => {
            raise(py, "PeerLost", (text, numbers(ranks)))
        }
        Error::Op(OpError::Timeout { missing, .. }) => {
            let missing: Vec<u16> = missing.iter().map(|(rank, _)| rank.0).collect();
            raise(py, "OpTimeout", (text, missing))
        }
        Error::Op(OpError::Mismatch { .. }) => raise(py, "Mismatch", format!("{text}{OF_TAGS}")),
        Error::Op(OpError::Dropped { .. }) => raise(py, "Mismatch", text),
        Error::Op(OpError::Overflow { element, .. }) => raise(py, "Overflow", (text, *element)),
        Error::Op(OpError::NoAggregator { .. }) => raise(py, "NoAggregator", text),
        Error::Submit(SubmitError::Ended { .. } | SubmitError::OpsExhausted)
        | Error::Op(OpError::Ended { .. }) => raise(py, "SessionClosed", text),
        // Only `Memory` and `TooManyOps` remain. `TooManyOps` should not occur, because callers
        // wait for room.
        _ => raise(py, "Error", text),
    }
}

fn numbers(ranks: &[Rank]) -> Vec<u16> {
    ranks.iter().map(|rank| rank.0).collect()
}

/// Parses the text of a user's option, or returns a `BadArgument` that names the option.
pub(crate) fn read<T: FromStr<Err: Display>>(
    py: Python<'_>,
    option: &str,
    text: &str,
) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| bad(py, option, error.to_string()))
}

/// Creates the exception for an invalid option.
pub(crate) fn bad(py: Python<'_>, option: &str, why: String) -> PyErr {
    raise(py, "BadArgument", (why, [option]))
}

/// Creates the package's exception of this name, with these arguments.
pub(crate) fn raise<'py>(py: Python<'py>, name: &str, args: impl IntoArgs<'py>) -> PyErr {
    let exception = py
        .import("racksum.errors")
        .and_then(|errors| errors.getattr(name)?.call1(args.into_args(py)?));
    match exception {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Values that can become the arguments of an exception.
pub(crate) trait IntoArgs<'py> {
    fn into_args(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>>;
}

impl<'py> IntoArgs<'py> for String {
    fn into_args(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        (self,).into_pyobject(py)
    }
}

impl<'py, T: IntoPyObject<'py>> IntoArgs<'py> for (String, T) {
    fn into_args(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.into_pyobject(py)
    }
}

/// The explanation of default tags that follows each error that shows a difference: the difference
/// may be between tags that no user has set.
const OF_TAGS: &str = " (the default tag is derived from the tensor's shape, dtype and layout)";
