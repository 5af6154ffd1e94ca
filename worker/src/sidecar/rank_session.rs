//! Serves one rank: handles its messages in order, and validates each one before use.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use racksum_net::local::{Line, LineError};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::loss::Loss;

use super::budget::Budget;
use super::fold::{Handed, LentRange, List, Memory};
use super::job::HostJob;
use super::member::LOST;
use super::message::{FromRank, FromSidecar, ListAt};
use super::queue::{Queue, Task};

/// The session of one rank, with the memory that the rank has lent.
#[derive(Debug)]
pub(super) struct RankSession<'a> {
    queue: &'a Queue,
    budget: &'a Arc<Budget>,
    line: &'a Line,
    job: &'a Arc<HostJob>,
    rank: u16,
    memories: HashMap<u32, Arc<Memory>>,
}

impl<'a> RankSession<'a> {
    pub(super) fn new(
        queue: &'a Queue,
        budget: &'a Arc<Budget>,
        line: &'a Line,
        job: &'a Arc<HostJob>,
        rank: u16,
    ) -> Self {
        Self { queue, budget, line, job, rank, memories: HashMap::new() }
    }

    /// Serves the rank until it leaves or disconnects, and returns the reason why the job loses it.
    pub(super) fn serve(mut self) -> Result<Loss, LineError> {
        while let Some((message, descriptor)) = self.line.recv()? {
            match message {
                FromRank::Lend { memory } => self.lend(memory, descriptor)?,
                FromRank::TakeBack { memory } => {
                    self.memories.remove(&memory);
                    self.note_lent();
                }
                FromRank::Submit { descriptor, memory, at, list } => {
                    let memory = self
                        .memories
                        .get(&memory)
                        .ok_or_else(|| broken("the rank named memory that is not lent"))?;
                    let descriptor = Descriptor::decode(&descriptor)
                        .map_err(|_| broken("the rank sent an invalid descriptor"))?;
                    let handed = handed(memory, at, list, &descriptor).ok_or_else(|| {
                        broken("the rank's operand is misaligned or outside its memory")
                    })?;
                    self.submit(descriptor, handed, memory)?;
                }
                FromRank::Refuse { descriptor } => {
                    let descriptor = Descriptor::decode(&descriptor).ok();
                    let refused = descriptor.filter(Descriptor::is_refused);
                    let refused = refused
                        .ok_or_else(|| broken("the rank's refusal has an invalid descriptor"))?;
                    self.job.refuse_op(self.rank, refused);
                }
                FromRank::AskStats => {
                    self.line.send_now(&FromSidecar::Stats(self.job.stats()), None)?;
                }
                FromRank::Leave => return Ok(Loss::Left),
                FromRank::Join(_) | FromRank::AskStatus => {
                    return Err(broken("the rank sent a second join or a status request"));
                }
            }
        }
        Ok(Loss::Died)
    }

    /// Maps memory that the rank lends. Tells the rank that the memory was accepted, or why it was
    /// refused.
    fn lend(&mut self, memory: u32, descriptor: Option<OwnedFd>) -> Result<(), LineError> {
        let none = || {
            io::Error::other(
                "the memory's file descriptor did not arrive; raise the sidecar's limit on open \
                 files (ulimit -n)",
            )
        };
        let taken = descriptor.ok_or_else(none);
        let taken = taken.and_then(|descriptor| Memory::of(&descriptor, self.budget));
        let refused = match taken {
            Ok(taken) => {
                self.memories.insert(memory, taken);
                self.note_lent();
                None
            }
            Err(error) => {
                LOST.note(|left_out| {
                    tracing::warn!(
                        rank = self.rank,
                        %error,
                        left_out,
                        "refusing memory that a rank lends"
                    );
                });
                Some(error.to_string())
            }
        };
        self.line.send_now(&FromSidecar::Lent { memory, refused }, None)
    }

    fn note_lent(&self) {
        self.job.note_lent(self.rank, self.memories.values().map(|memory| memory.len()).sum());
    }

    fn submit(
        &self,
        descriptor: Descriptor,
        handed: Handed,
        memory: &Arc<Memory>,
    ) -> Result<(), LineError> {
        if descriptor.lane >= self.job.lanes {
            return Err(broken("the rank named an unknown lane"));
        }
        if let Some((op, fold)) = self.job.submit(self.rank, descriptor, handed, memory) {
            let fold = Arc::new(fold);
            if fold.is_empty() {
                self.job.folded(op, &fold);
            } else {
                let job = Arc::clone(self.job);
                self.queue.push(descriptor.lane, Task { fold, job, op });
            }
        }
        Ok(())
    }
}

/// Returns the rank's operand, or `None` if it is misaligned or not within the lent memory.
fn handed(
    memory: &Arc<Memory>,
    at: u64,
    list: Option<ListAt>,
    descriptor: &Descriptor,
) -> Option<Handed> {
    Some(match list {
        None => {
            let len = descriptor.elements * descriptor.dtype.size() as u64;
            Handed::Tensor(LentRange::new(memory, at, len)?)
        }
        Some(list) => Handed::List(List::new(memory, at, list, descriptor)?),
    })
}

fn broken(what: &'static str) -> LineError {
    LineError::Io(io::Error::new(io::ErrorKind::InvalidData, what))
}
