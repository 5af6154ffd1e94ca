//! What a sidecar tells of itself, to whoever may call it: of the jobs of the caller's user, and of
//! all to its own user and to root.

use std::io;
use std::path::Path;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Line, LineError};
use racksum_proto::peer_text::PeerText;
use serde::{Deserialize, Serialize};

use super::message::{FromRank, FromSidecar};

/// How long a sidecar may take to say what it does.
const PATIENCE: Duration = Duration::from_millis(PATIENCE_MS);
const PATIENCE_MS: u64 = 5000;

/// Bytes of an answer that one message has: escaped they are less than twice as many.
const PART: usize = 16 << 10;

/// The most bytes that are read of an answer: many times those of the most jobs and ranks.
const MAX_TOLD: usize = 16 << 20;

/// What a sidecar is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The release that runs.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// Milliseconds since it started.
    pub up_ms: u64,
    /// Where jobs meet that have ranks on other hosts: the aggregator, and then its standbys.
    #[serde(deserialize_with = "PeerText::list")]
    pub aggregators: Vec<String>,
    /// Whether it calls them without an identity.
    #[serde(default)]
    pub insecure: bool,
    /// Whether it takes no more jobs, since it is about to stop.
    pub draining: bool,
    /// Most jobs at a time.
    pub max_jobs: usize,
    /// Most ranks at a time.
    pub max_ranks: usize,
    /// How many ranks there are, of all jobs.
    pub ranks: usize,
    /// Bytes of memory that ranks have lent and that sums of lists take, and the most that may be.
    pub memory: [u64; 2],
    /// The jobs that the caller may know of, by name.
    pub jobs: Vec<JobStatus>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// Which of its groups; empty if it has none.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// Its life.
    pub generation: u32,
    /// Whose it is.
    pub uid: u32,
    /// How many ranks it has.
    pub world: u16,
    /// How many of them are to be on this host.
    pub local_world: u16,
    /// How many lanes.
    pub lanes: u8,
    /// The name of its [`Stage`].
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since its first rank joined.
    pub age_ms: u64,
    /// How many ranks of this host have not joined, or are there no more.
    pub awaited: usize,
    /// Ops that not all ranks of this host have called.
    pub awaited_ops: usize,
    /// Ops that all have called, and that are being summed here or with other hosts.
    pub summed_ops: usize,
    /// Milliseconds since the oldest op was called that not all have called: how long the ranks
    /// that are behind have been waited for.
    pub stalled_ms: Option<u64>,
    /// Its ranks here.
    pub ranks: Vec<RankStatus>,
}

/// How far a job of a sidecar is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Ranks of this host are missing.
    Gathering,
    /// Ranks of other hosts are missing.
    Calling,
    /// Ops may run.
    Running,
    /// It has ended.
    Over,
}

impl Stage {
    /// All, in the order in which a job has them.
    pub const ALL: [Self; 4] = [Self::Gathering, Self::Calling, Self::Running, Self::Over];

    /// Returns its name, as `racksum status` prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Calling => "calling the aggregator",
            Self::Running => "running",
            Self::Over => "over",
        }
    }
}

/// A rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Its number.
    pub rank: u16,
    /// Its process, by the sidecar's numbers.
    pub pid: i32,
    /// The op that it calls next.
    pub next_op: u32,
    /// Bytes of memory that it has lent.
    pub lent_bytes: u64,
    /// The oldest op waits for it.
    pub behind: bool,
}

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
pub fn ask(path: &Path) -> Result<Status, AskError> {
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

impl Status {
    /// Tells it to whoever has asked.
    pub(super) fn tell(&self, line: &Line) -> Result<(), LineError> {
        let json = serde_json::to_string(self)?;
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
}
