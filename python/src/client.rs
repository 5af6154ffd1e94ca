//! A rank of a job, whichever way its tensors go.

use std::ops::Range;
use std::time::Duration;

use racksum_proto::call::Call;
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_worker::{
    self as worker, Blocks, Error, Handle, Operand, Reduced, Region, Stats,
    sidecar::{self, Traffic},
};

/// A rank of a job.
#[derive(Debug)]
pub(crate) enum Client {
    /// It sends its tensors to an aggregator.
    Direct(Box<worker::Client>),
    /// It hands them to the sidecar of this host.
    Beside(sidecar::Client),
}

/// An op in flight.
#[derive(Debug)]
pub(crate) enum Running {
    InPlace(Handle<Region>),
    Blocks(Handle<Blocks>),
    InPlaceBeside(sidecar::Handle<Region>),
    BlocksBeside(sidecar::Handle<Blocks>),
}

impl Client {
    pub(crate) fn submit(
        &self,
        operand: impl Into<Operand>,
        descriptor: Descriptor,
    ) -> Result<Running, Error> {
        Ok(match (self, operand.into()) {
            (Self::Direct(client), Operand::Region(region)) => {
                Running::InPlace(client.submit(region, descriptor)?)
            }
            (Self::Direct(client), Operand::Blocks(blocks)) => {
                Running::Blocks(client.submit(blocks, descriptor)?)
            }
            (Self::Beside(client), Operand::Region(region)) => {
                Running::InPlaceBeside(client.submit(region, descriptor)?)
            }
            (Self::Beside(client), Operand::Blocks(blocks)) => {
                Running::BlocksBeside(client.submit(blocks, descriptor)?)
            }
            (_, Operand::Tensor(_)) => unreachable!("tensors of Python stay where they are"),
        })
    }

    /// Has an op of nothing in the place of a call that is refused.
    pub(crate) fn refuse(&self, call: Call) -> Result<(), Error> {
        match self {
            Self::Direct(client) => client.refuse(call),
            Self::Beside(client) => client.refuse(call),
        }
    }

    /// Waits until an op at these addresses would not wait for others, but not longer than this.
    /// Returns whether it would not.
    pub(crate) fn is_free_within(&self, memory: &Range<usize>, limit: Duration) -> bool {
        match self {
            // There the op itself waits.
            Self::Direct(_) => true,
            Self::Beside(client) => client.is_free_within(memory, limit),
        }
    }

    pub(crate) fn has_room_within(&self, lane: u8, limit: Duration) -> bool {
        match self {
            Self::Direct(client) => client.has_room_within(lane, limit),
            Self::Beside(client) => client.has_room_within(limit),
        }
    }

    /// Whether so many more ops would begin at once, or be refused at once.
    pub(crate) fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        match self {
            Self::Direct(client) => client.has_room_for(lane, ops),
            Self::Beside(client) => client.has_room_for(ops),
        }
    }

    /// Whether an op of this wire type begins once all ranks have called it. A sidecar waits for
    /// them, and not its ranks.
    pub(crate) const fn must_agree(&self, wire: WireType) -> bool {
        match self {
            Self::Direct(client) => client.must_agree(wire),
            Self::Beside(_) => false,
        }
    }

    /// Waits for an op to end, but not longer than this. Returns whether it has.
    pub(crate) fn ends_within(&self, running: &Running, limit: Duration) -> Result<bool, Error> {
        match (self, running) {
            (Self::Direct(client), Running::InPlace(handle)) => client.ends_within(handle, limit),
            (Self::Direct(client), Running::Blocks(handle)) => client.ends_within(handle, limit),
            (Self::Beside(client), Running::InPlaceBeside(handle)) => {
                client.ends_within(handle, limit)
            }
            (Self::Beside(client), Running::BlocksBeside(handle)) => {
                client.ends_within(handle, limit)
            }
            _ => Err(Error::OtherClient),
        }
    }

    /// Waits for an op to end: the ranks that its result lacks, and the sums of one on blocks.
    pub(crate) fn finish(&self, running: Running) -> Result<(Vec<u16>, Option<Blocks>), Error> {
        Ok(match (self, running) {
            (Self::Direct(client), Running::InPlace(handle)) => {
                let Reduced { absent, .. } = client.wait(handle)?;
                (absent.iter().map(|rank| rank.0).collect(), None)
            }
            (Self::Direct(client), Running::Blocks(handle)) => {
                let Reduced { tensor, absent } = client.wait(handle)?;
                (absent.iter().map(|rank| rank.0).collect(), Some(tensor))
            }
            (Self::Beside(client), Running::InPlaceBeside(handle)) => {
                client.wait(handle)?;
                (Vec::new(), None)
            }
            (Self::Beside(client), Running::BlocksBeside(handle)) => {
                (Vec::new(), Some(client.wait(handle)?))
            }
            _ => return Err(Error::OtherClient),
        })
    }

    /// Hands back sums that are of no more use.
    pub(crate) fn recycle(&self, blocks: Blocks) {
        match self {
            Self::Direct(client) => client.recycle(blocks),
            Self::Beside(client) => client.recycle(blocks),
        }
    }

    /// The sidecar, if there is one.
    pub(crate) const fn beside(&self) -> Option<&sidecar::Client> {
        match self {
            Self::Direct(_) => None,
            Self::Beside(client) => Some(client),
        }
    }

    /// Whether there are no more ops.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Direct(client) => client.is_over(),
            Self::Beside(client) => client.is_over(),
        }
    }

    /// How long a rank that leaves waits until it may.
    pub(crate) const fn linger(&self) -> Duration {
        match self {
            Self::Direct(_) => worker::Client::LINGER,
            Self::Beside(_) => sidecar::Client::LINGER,
        }
    }

    /// Waits until it may leave the job, but not longer than this. Returns whether it may.
    pub(crate) fn may_leave_within(&self, limit: Duration) -> bool {
        match self {
            Self::Direct(client) => client.may_leave_within(limit),
            Self::Beside(client) => client.may_leave_within(limit),
        }
    }

    pub(crate) fn leave(&self) {
        match self {
            Self::Direct(client) => client.leave(),
            Self::Beside(client) => client.leave(),
        }
    }

    /// What it has handed a sidecar, and what was sent and received: of a sidecar's rank by that,
    /// for all ranks of the host.
    pub(crate) fn stats(&self) -> (Traffic, Stats) {
        match self {
            Self::Direct(client) => (Traffic::default(), client.stats()),
            Self::Beside(client) => client.stats(),
        }
    }

    pub(crate) fn max_ops(&self) -> u16 {
        match self {
            Self::Direct(client) => client.welcome().max_ops,
            Self::Beside(_) => MAX_OPS,
        }
    }

    pub(crate) fn multicast(&self) -> bool {
        matches!(self, Self::Direct(client) if client.multicast())
    }
}
