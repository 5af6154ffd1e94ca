//! The collective call that an op belongs to.
//!
//! Ops of different collectives may look alike on the wire: a broadcast is a sum of one rank's
//! elements and zeros. If ranks paired such ops, they would compute a wrong sum. So every op names
//! its call, and the aggregator compares calls along with the other fields of the descriptors.

use core::fmt;

/// A call of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// The call's number within its group; 0 if calls are not numbered.
    pub number: u32,
    /// The collective that was called.
    pub collective: Collective,
    /// The root: the rank to or from which the call's data flows; 0 if the collective has no root.
    pub root: u16,
}

/// The kind of a collective, which determines how it uses the ranks' tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Collective {
    /// A plain op, which is not part of a collective.
    #[default]
    Op = 0,
    /// The rank refused its own call. The op has no elements and only keeps the rank's op numbers
    /// in step with those of the other ranks.
    Refused = 1,
    /// Every rank gets the reduction of a tensor.
    AllReduce = 2,
    /// Every rank gets the reductions of several tensors.
    AllReduceCoalesced = 3,
    /// One rank gets the reduction of a tensor.
    Reduce = 4,
    /// Every rank gets its own part of a reduction.
    ReduceScatter = 5,
    /// Every rank gets the tensor of one rank.
    Broadcast = 6,
    /// Every rank gets the tensors of all ranks.
    AllGather = 7,
    /// No rank returns before all ranks have started the call.
    Barrier = 8,
}

impl Collective {
    /// All collectives, in the order of their codes.
    pub const ALL: [Self; 9] = [
        Self::Op,
        Self::Refused,
        Self::AllReduce,
        Self::AllReduceCoalesced,
        Self::Reduce,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::AllGather,
        Self::Barrier,
    ];

    /// Returns the collective's name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Op => "op",
            Self::Refused => "refused",
            Self::AllReduce => "all_reduce",
            Self::AllReduceCoalesced => "all_reduce_coalesced",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
        }
    }

    /// Returns the collective with this code on the wire, if the code is known.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| *collective as u8 == code)
    }

    /// Returns the collective with this name, if the name is known.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| collective.name() == name)
    }

    /// Returns whether one rank, the root, has a different role from the others.
    #[must_use]
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast)
    }
}

impl Call {
    /// The call of a plain op.
    pub const NONE: Self = Self { number: 0, collective: Collective::Op, root: 0 };

    /// Returns the call that the other ranks see if a rank refuses this call.
    #[must_use]
    pub const fn refused(self) -> Self {
        Self { collective: Collective::Refused, root: 0, ..self }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.collective.name())?;
        match self.collective {
            Collective::Broadcast => write!(f, " from {}", self.root)?,
            Collective::Reduce => write!(f, " to {}", self.root)?,
            _ => {}
        }
        write!(f, ", call {}", self.number)
    }
}
