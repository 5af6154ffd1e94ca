//! Which of the caller's calls an op is part of.
//!
//! Ops of two collectives may look alike on the wire: a broadcast is a sum of zeros and one rank's
//! elements. Ranks that pair them would end with a wrong sum, so every op says what it is for, and
//! the aggregator compares that like the rest of the descriptor.

use core::fmt;

/// A call of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// The call's number among those of its group; 0 where calls are not numbered.
    pub number: u32,
    /// What was called.
    pub collective: Collective,
    /// The rank that the call is to or from; 0 if there is none.
    pub root: u16,
}

/// What a call does with the ranks' tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Collective {
    /// The op itself is the call.
    #[default]
    Op = 0,
    /// The rank refused its own call: the op has no elements, and only keeps the numbers in step.
    Refused = 1,
    /// Every rank gets the reduction of a tensor.
    AllReduce = 2,
    /// Every rank gets the reductions of several tensors.
    AllReduceCoalesced = 3,
    /// One rank gets the reduction of a tensor.
    Reduce = 4,
    /// Every rank gets its part of a reduction.
    ReduceScatter = 5,
    /// Every rank gets the tensor of one.
    Broadcast = 6,
    /// Every rank gets the tensors of all.
    AllGather = 7,
    /// No rank ends before all have begun.
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

    /// The name users know it by.
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

    /// The collective of a code on the wire, if there is one.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| *collective as u8 == code)
    }

    /// The collective of a name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| collective.name() == name)
    }

    /// Whether one rank differs from the others in it.
    #[must_use]
    pub const fn has_root(self) -> bool {
        matches!(self, Self::Reduce | Self::Broadcast)
    }
}

impl Call {
    /// The call of an op that is one by itself.
    pub const NONE: Self = Self { number: 0, collective: Collective::Op, root: 0 };

    /// What the call is for the other ranks when this one refuses it.
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
