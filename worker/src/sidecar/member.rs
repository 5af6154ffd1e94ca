//! A rank of a job, as its sidecar sees it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use racksum_net::local::{Line, LineError};
use racksum_net::log_limit::LogLimit;

use super::fold::Handed;
use super::message::FromSidecar;

/// Limits log messages about failed jobs, the ranks that caused the failures, and refused memory. A
/// user can cause any number of them.
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
    /// The rank's operands of ops that have not ended, by op number.
    in_flight: BTreeMap<u32, Handed>,
}

impl Member {
    pub(super) fn new(line: Arc<Line>, pid: i32) -> Self {
        Self { line, pid, next_op: 0, lent: 0, in_flight: BTreeMap::new() }
    }

    /// Records the operand of the rank's next op, and returns the op's number. Returns `None` if
    /// the operand shares memory with an op in flight.
    pub(super) fn call(&mut self, handed: &Handed) -> Option<u32> {
        if self.in_flight.values().any(|other| handed.overlaps(other)) {
            return None;
        }
        let op = self.refuse();
        self.in_flight.insert(op, handed.clone());
        Some(op)
    }

    /// Returns the number of the rank's next op, which has no operand because the rank refuses it.
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

    /// Sends a message to the rank. Hangs up if the rank does not read.
    pub(super) fn tell(&self, message: &FromSidecar, descriptor: Option<BorrowedFd<'_>>) {
        let told = self.line.send_now(message, descriptor);
        match told {
            // Sends the message without its descriptor. The rank then reports an error for the op.
            Err(LineError::TooManyOnTheWay) if descriptor.is_some() => self.tell(message, None),
            // The failed send has hung up the line, so the rank's thread removes the rank.
            Err(LineError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                LOST.note(|left_out| {
                    let what = "rank does not read its messages; closing its connection";
                    tracing::warn!(pid = self.pid, left_out, "{what}");
                });
            }
            // A rank that has hung up needs no message.
            Ok(()) | Err(_) => {}
        }
    }

    /// Hangs up the line, so that the rank's thread removes the rank and frees all it holds.
    pub(super) fn hang_up(&self) {
        self.line.hang_up();
    }
}
