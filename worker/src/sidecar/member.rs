//! A rank of a job at a sidecar.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use racksum_net::local::{Line, LineError};
use racksum_net::log_limit::LogLimit;

use super::fold::Handed;
use super::message::FromSidecar;

/// Jobs that ended otherwise than by their ranks, ranks that made them, and memory that was not
/// taken: a user may cause any number.
pub(super) static LOST: LogLimit = LogLimit::new(64);

/// A rank that has joined.
#[derive(Debug)]
pub(super) struct Member {
    line: Arc<Line>,
    pub(super) pid: i32,
    /// The number of the op that it calls next.
    pub(super) next_op: u32,
    /// Bytes of its memory that it has lent.
    pub(super) lent: usize,
    /// What it has handed for ops that have not ended.
    in_flight: BTreeMap<u32, Handed>,
}

impl Member {
    pub(super) fn new(line: Arc<Line>, pid: i32) -> Self {
        Self { line, pid, next_op: 0, lent: 0, in_flight: BTreeMap::new() }
    }

    /// Numbers its next op; none that is handed memory which an op in flight has.
    pub(super) fn call(&mut self, handed: &Handed) -> Option<u32> {
        if self.in_flight.values().any(|other| handed.overlaps(other)) {
            return None;
        }
        let op = self.refuse();
        self.in_flight.insert(op, handed.clone());
        Some(op)
    }

    /// Numbers its next op, for which it hands nothing.
    pub(super) const fn refuse(&mut self) -> u32 {
        let op = self.next_op;
        self.next_op += 1;
        op
    }

    /// Lets go of what it has handed for an op: nothing works on it any more.
    pub(super) fn end(&mut self, op: u32) {
        self.in_flight.remove(&op);
    }

    /// Whether one of its ops that have not ended is such.
    pub(super) fn has_any(&self, is_such: impl Fn(u32) -> bool) -> bool {
        self.in_flight.keys().any(|op| is_such(*op))
    }

    /// Tells it something, if it listens.
    pub(super) fn tell(&self, message: &FromSidecar, descriptor: Option<BorrowedFd<'_>>) {
        let told = self.line.send_now(message, descriptor);
        match told {
            // Without what was to come with it, which is an error of the op.
            Err(LineError::TooManyOnTheWay) if descriptor.is_some() => self.tell(message, None),
            // The line is hung up, so that its thread lets the rank go.
            Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                LOST.note(|left_out| {
                    let what = "rank does not read what it is told, and is let go";
                    tracing::warn!(pid = self.pid, left_out, "{what}");
                });
            }
            // Whoever has hung up needs no word.
            Ok(()) | Err(_) => {}
        }
    }

    /// Hangs up, so that its thread lets it go with all that it has.
    pub(super) fn hang_up(&self) {
        self.line.hang_up();
    }
}
