//! What a sidecar tells of itself, to whoever may call it: of the jobs of the caller's user, and of
//! all to its own user and to root.

use std::io;
use std::path::Path;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Line, LineError};
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::SidecarStatus;

use super::message::{FromRank, FromSidecar};

/// How long a sidecar may take to say what it does.
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
const PATIENCE_MS: u64 = 5000;

/// Bytes of an answer that one message has: escaped they are less than twice as many.
const PART: usize = 16 << 10;

/// The most bytes that are read of an answer: many times those of the most jobs and ranks.
const MAX_TOLD: usize = 16 << 20;

/// Why a sidecar did not tell what it is doing.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It was not called.
    #[error("{0}")]
    Call(#[from] CallError),
    /// It does not answer.
    #[error("it does not answer, so it may be stopped")]
    Silent,
    /// It is gone, or its answer cannot be read: a sentence that says so.
    #[error("{0}")]
    Answer(String),
}

impl From<LineError> for AskError {
    fn from(error: LineError) -> Self {
        use io::ErrorKind::{TimedOut, WouldBlock};
        match error {
            LineError::Io(error) if matches!(error.kind(), WouldBlock | TimedOut) => Self::Silent,
            other => Self::Answer(other.to_string()),
        }
    }
}

/// Asks the sidecar at a path what it is doing.
///
/// # Errors
/// [`AskError`].
pub fn ask(path: &Path) -> Result<SidecarStatus, AskError> {
    let line = Line::connect(path)?;
    line.set_patience(Some(PATIENCE)).map_err(LineError::from)?;
    let (clock, began) = (Clock::start(), Clock::start().now());
    line.send(&FromRank::AskStatus, None)?;
    let mut told = String::new();
    loop {
        match line.recv()? {
            Some((FromSidecar::Status { part, more }, _)) => {
                told.push_str(&part);
                // Each part is waited for, and all of them no longer than one might be.
                if more && clock.now().since(began).as_millis() > PATIENCE_MS {
                    return Err(AskError::Silent);
                }
                if told.len() > MAX_TOLD {
                    let why = format!("what it says is longer than {MAX_TOLD} bytes");
                    return Err(AskError::Answer(why));
                }
                if !more {
                    return serde_json::from_str(&told).map_err(|error| {
                        AskError::Answer(PeerText::of(error).as_str().to_owned())
                    });
                }
            }
            Some((FromSidecar::WrongVersion { .. } | FromSidecar::Refused { .. }, _)) => {
                return Err(AskError::Answer("it tells nothing to this user".into()));
            }
            _ => {
                return Err(AskError::Answer("it does not say what it does".into()));
            }
        }
    }
}

/// Sends a status to whoever has asked.
pub(super) fn tell(status: &SidecarStatus, line: &Line) -> Result<(), LineError> {
    let json = serde_json::to_string(status)?;
    let mut left = &json[..];
    loop {
        let (part, rest) = left.split_at(left.floor_char_boundary(PART));
        let more = !rest.is_empty();
        line.send(&FromSidecar::Status { part: part.to_owned(), more }, None)?;
        if !more {
            return Ok(());
        }
        left = rest;
    }
}
