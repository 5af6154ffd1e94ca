//! The status of a sidecar. A caller sees the jobs of its own user. Root and the sidecar's own user
//! see all jobs.

use std::io;
use std::path::Path;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Line, LineError};
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::SidecarStatus;

use super::message::{FromRank, FromSidecar, VERSION};

/// How long a sidecar may take to answer.
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
const PATIENCE_MS: u64 = 5000;

/// Maximum length of the status text in one message, in bytes. The message escapes the text, which
/// at most doubles its length.
const PART: usize = 16 << 10;

/// Maximum size of a status in bytes. The status of a sidecar that is full of jobs and ranks is
/// much smaller.
const MAX_STATUS: usize = 16 << 20;

/// The reason why a sidecar did not send its status.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The call failed.
    #[error("{0}")]
    Call(#[from] CallError),
    /// The sidecar does not answer.
    #[error("no answer; the process may be suspended")]
    Silent,
    /// The sidecar refused the request. The text says why, and what to do.
    #[error("{0}")]
    Refused(String),
    /// The sidecar closed the connection or sent an invalid answer. The text says which.
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

/// Asks the sidecar at `path` for its status.
///
/// # Errors
/// Returns an [`AskError`] if the call fails or the sidecar does not send its status.
pub fn ask(path: &Path) -> Result<SidecarStatus, AskError> {
    let line = Line::connect(path)?;
    line.set_patience(Some(PATIENCE)).map_err(LineError::from)?;
    let (clock, began) = (Clock::start(), Clock::start().now());
    line.send(&FromRank::AskStatus, None)?;
    let mut json = String::new();
    loop {
        match line.recv()? {
            Some((FromSidecar::Status { part, more }, _)) => {
                json.push_str(&part);
                // The line's timeout applies to each part. This check limits the time for all
                // parts.
                if more && clock.now().since(began).as_millis() > PATIENCE_MS {
                    return Err(AskError::Silent);
                }
                if json.len() > MAX_STATUS {
                    let why = format!("its status is longer than {MAX_STATUS} bytes");
                    return Err(AskError::Answer(why));
                }
                if !more {
                    return serde_json::from_str(&json).map_err(|error| {
                        AskError::Answer(PeerText::of(error).as_str().to_owned())
                    });
                }
            }
            Some((FromSidecar::Refused { reason }, _)) => {
                return Err(AskError::Refused(format!("it refuses to send its status: {reason}")));
            }
            Some((FromSidecar::WrongVersion { speaks }, _)) => {
                return Err(AskError::Refused(format!(
                    "it speaks protocol version {speaks}, but this program speaks version \
                     {VERSION}; install the same release on both"
                )));
            }
            answer => {
                let what = match answer {
                    Some(_) => "it sent another message before the end of its status",
                    None => "it closed the connection before the end of its status",
                };
                return Err(AskError::Answer(what.into()));
            }
        }
    }
}

/// Sends the status to the caller that asked for it.
pub(super) fn write_status(status: &SidecarStatus, line: &Line) -> Result<(), LineError> {
    let json = serde_json::to_string(status).map_err(LineError::Encode)?;
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
