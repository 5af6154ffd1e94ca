//! Errors of calls to another process of this host.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Reason why a call to another process of this host failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The path leads to a file that is not a socket, so no process can ever listen at it.
    #[error("not a socket")]
    NoSocket,
    /// The process that listens at the path is not trusted; the text is a sentence that states the
    /// reason.
    #[error("{0}")]
    Untrusted(String),
    /// The kernel's error: no process listens at the path, the listener's queue is full, or this
    /// user may not connect.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl CallError {
    /// Creates the error for a failed connection to a path. Examines the file, because the kernel
    /// reports the same error for a dead socket and for a file that is not a socket.
    pub(super) fn of(path: &Path, error: io::Error) -> Self {
        match path.metadata() {
            Ok(found) if !found.file_type().is_socket() => Self::NoSocket,
            _ => Self::Io(error),
        }
    }

    /// Returns whether the error means that no process is listening at the path.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Io(error) if matches!(error.kind(), NotFound | ConnectionRefused))
    }
}
