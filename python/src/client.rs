//! A client of either kind: connected to an aggregator directly, or to a sidecar.

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

/// A client that represents one rank of a job.
#[derive(Debug)]
pub(crate) enum Client {
    /// A client that sends its tensors to an aggregator.
    Direct(Box<worker::Client>),
    /// A client that hands its tensors to the sidecar of this host.
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

    /// Starts an empty op in place of a refused call, to keep the ops of all ranks in step.
    pub(crate) fn refuse(&self, call: Call) -> Result<(), Error> {
        match self {
            Self::Direct(client) => client.refuse(call),
            Self::Beside(client) => client.refuse(call),
        }
    }

    /// Waits up to `limit` until no earlier op uses the memory at these addresses. Returns whether
    /// the memory is free.
    pub(crate) fn is_free_within(&self, memory: &Range<usize>, limit: Duration) -> bool {
        match self {
            // An op of a direct client waits for the memory itself.
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

    /// Returns whether `ops` more ops would begin, or be refused, without a wait.
    pub(crate) fn has_room_for(&self, lane: u8, ops: usize) -> bool {
        match self {
            Self::Direct(client) => client.has_room_for(lane, ops),
            Self::Beside(client) => client.has_room_for(ops),
        }
    }

    /// Returns whether an op of this wire type begins only once all ranks have called it. With a
    /// sidecar, the sidecar waits for the ranks, so the client does not.
    pub(crate) const fn must_agree(&self, wire: WireType) -> bool {
        match self {
            Self::Direct(client) => client.must_agree(wire),
            Self::Beside(_) => false,
        }
    }

    /// Waits up to `limit` for an op to end. Returns whether the op has ended.
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

    /// Waits for an op to end. Returns the ranks that the result lacks, and the sums of an op on
    /// blocks.
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

    /// Gives the client the memory of sums that are no longer needed.
    pub(crate) fn recycle(&self, blocks: Blocks) {
        match self {
            Self::Direct(client) => client.recycle(blocks),
            Self::Beside(client) => client.recycle(blocks),
        }
    }

    /// Returns the client of a sidecar, if it is one.
    pub(crate) const fn beside(&self) -> Option<&sidecar::Client> {
        match self {
            Self::Direct(_) => None,
            Self::Beside(client) => Some(client),
        }
    }

    /// Returns whether the client takes no more ops.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Direct(client) => client.is_over(),
            Self::Beside(client) => client.is_over(),
        }
    }

    /// Returns the longest time that a leaving rank waits before it leaves.
    pub(crate) const fn linger(&self) -> Duration {
        match self {
            Self::Direct(_) => worker::Client::LINGER,
            Self::Beside(_) => sidecar::Client::LINGER,
        }
    }

    /// Waits up to `limit` until the rank may leave the job. Returns whether it may.
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

    /// Returns what the rank handed to a sidecar, and what was sent to and received from the
    /// network. With a sidecar, the latter covers all ranks of the host.
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
