//! A rank of a job, as its sidecar sees it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use racksum_net::local::{Line, LineError};
use racksum_net::log_limit::LogLimit;

use super::fold::Handed;
use super::message::FromSidecar;

/// Limits log messages about failed jobs, about the ranks that caused the failures, and about
/// refused memory. A user can cause any number of such messages.
pub(super) static LOST: LogLimit = LogLimit::new(64);

/// A rank that has joined.
#[derive(Debug)]
pub(super) struct Member {
    line: Arc<Line>,
    pub(super) pid: i32,
    /// The number of the rank's next op.
    pub(super) next_op: u32,
    /// Bytes of memory that the rank has lent.
    pub(super) lent: usize,
    /// The rank's operands for ops that have not ended, by op number.
    in_flight: BTreeMap<u32, Handed>,
}

impl Member {
    pub(super) fn new(line: Arc<Line>, pid: i32) -> Self {
        Self { line, pid, next_op: 0, lent: 0, in_flight: BTreeMap::new() }
    }

    /// Records the operand of the rank's next op, and returns the op's number. Returns `None` if
    /// the operand overlaps that of an op in flight.
    pub(super) fn call(&mut self, handed: &Handed) -> Option<u32> {
        if self.in_flight.values().any(|other| handed.overlaps(other)) {
            return None;
        }
        let op = self.refuse();
        self.in_flight.insert(op, handed.clone());
        Some(op)
    }

    /// Assigns a number to the rank's next op without recording an operand, for example because the
    /// rank refuses the op. Returns the number.
    pub(super) const fn refuse(&mut self) -> u32 {
        let op = self.next_op;
        self.next_op += 1;
        op
    }

    /// Forgets the rank's operand for an op that no longer uses it.
    pub(super) fn end(&mut self, op: u32) {
        self.in_flight.remove(&op);
    }

    /// Returns whether `is_such` is true for any op that holds an operand of this rank.
    pub(super) fn has_any(&self, is_such: impl Fn(u32) -> bool) -> bool {
        self.in_flight.keys().any(|op| is_such(*op))
    }

    /// Sends a message to the rank. Closes the line if the rank does not read.
    pub(super) fn send(&self, message: &FromSidecar, descriptor: Option<BorrowedFd<'_>>) {
        let sent = self.line.send_now(message, descriptor);
        match sent {
            // Send the message without its descriptor. The rank then reports an error for the op.
            Err(LineError::TooManyOnTheWay) if descriptor.is_some() => self.send(message, None),
            // The failed send has closed the line, so the rank's thread removes the rank.
            Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                LOST.note(|left_out| {
                    let what = "rank does not read its messages; closing its connection";
                    tracing::warn!(pid = self.pid, left_out, "{what}");
                });
            }
            // A rank that has closed the line needs no message.
            Ok(()) | Err(_) => {}
        }
    }

    /// Closes the line, so that the rank's thread removes the rank and frees its memory.
    pub(super) fn hang_up(&self) {
        self.line.hang_up();
    }
}
