//! Why a process of this host was not called.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Why a process of this host was not called.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// There is another file than a socket, so nobody will ever listen there.
    #[error("it is no socket")]
    NoSocket,
    /// A process listens there that is not believed: a sentence that says why.
    #[error("{0}")]
    NotBelieved(String),
    /// The kernel's: nobody listens there, or this user may not call.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl CallError {
    /// Why a path could not be called, of which the kernel says the same whether nobody listens
    /// there or it is no socket.
    pub(super) fn of(path: &Path, error: io::Error) -> Self {
        match path.metadata() {
            Ok(found) if !found.file_type().is_socket() => Self::NoSocket,
            _ => Self::Io(error),
        }
    }

    /// Whether nobody listens there, now at least.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Io(error) if matches!(error.kind(), NotFound | ConnectionRefused))
    }
}
