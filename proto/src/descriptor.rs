//! The descriptor of an op, on which all ranks must agree.

use core::fmt;

use crate::call::{Call, Collective};
use crate::dtype::{DType, Reduction, WireType};
use crate::reject::Reject;

/// The parameters of an op, which must be equal at all ranks. Descriptors are compared as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// The number of elements of the tensor.
    pub elements: u64,
    /// The caller's own check value, such as a hash of the tensor's name; 0 if unused.
    pub tag: u64,
    /// The element type of the tensor.
    pub dtype: DType,
    /// The encoding of elements on the wire.
    pub wire: WireType,
    /// The reduction over the ranks.
    pub reduction: Reduction,
    /// The binary logarithm of the number of elements in a block: 5 to 10.
    pub block_log2: u8,
    /// The lane in which the op runs.
    pub lane: u8,
    /// The call that the op is part of.
    pub call: Call,
}

impl Descriptor {
    /// Returns the descriptor for a sum over some of the ranks. An average becomes a sum, since
    /// only the final result is divided.
    #[must_use]
    pub fn of_partial_sum(self) -> Self {
        let reduction = match self.reduction {
            Reduction::Avg => Reduction::Sum,
            other => other,
        };
        Self { reduction, ..self }
    }

    /// The size of an encoded descriptor, in bytes.
    pub const LEN: usize = 28;
    /// The default number of elements in a block.
    pub const DEFAULT_BLOCK: usize = 256;
    /// The maximum number of elements of an op: window numbers have 32 bits, and a window holds at
    /// least 32 elements.
    pub const MAX_ELEMENTS: u64 = 1 << 36;

    /// Returns the descriptor of a sum of `elements` elements of `dtype`, sent unchanged in lane 0.
    #[must_use]
    pub const fn sum(elements: u64, dtype: DType) -> Self {
        Self {
            elements,
            tag: 0,
            dtype,
            wire: dtype.native_wire(),
            reduction: Reduction::Sum,
            block_log2: 8,
            lane: 0,
            call: Call::NONE,
        }
    }

    /// Returns the descriptor with which a rank opens an op in place of a call that it refused. All
    /// ranks then number later ops alike, and the other ranks learn of the refusal.
    #[must_use]
    pub const fn refused(call: Call) -> Self {
        Self { call: call.refused(), ..Self::sum(0, DType::F32) }
    }

    /// Returns whether a rank refused the call that the op belongs to.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.call.collective == Collective::Refused
    }

    /// Returns the descriptor with blocks of `elements` elements.
    ///
    /// # Errors
    /// Returns an error if `elements` is not a power of two from 32 to 1024.
    pub fn with_block(self, elements: usize) -> Result<Self, DescriptorError> {
        if !elements.is_power_of_two() || !(32..=1024).contains(&elements) {
            return Err(DescriptorError::Block(elements));
        }
        let block_log2 = u8::try_from(elements.ilog2()).unwrap_or(u8::MAX);
        Ok(Self { block_log2, ..self })
    }

    /// Returns the number of elements in a block.
    #[must_use]
    pub const fn block_elements(&self) -> usize {
        1 << self.block_log2
    }

    /// Checks that the descriptor is valid in itself.
    ///
    /// # Errors
    /// Returns the reason why the descriptor is invalid.
    pub fn validate(&self) -> Result<(), DescriptorError> {
        if !(5..=10).contains(&self.block_log2) {
            return Err(DescriptorError::Block(1 << u32::from(self.block_log2).min(31)));
        }
        if !self.wire.carries(self.dtype) {
            return Err(DescriptorError::Wire { dtype: self.dtype.name(), wire: self.wire.name() });
        }
        if self.elements > Self::MAX_ELEMENTS {
            return Err(DescriptorError::TooLarge(self.elements));
        }
        let Call { collective, root, .. } = self.call;
        if root != 0 && !collective.has_root() {
            return Err(DescriptorError::Root(collective.name()));
        }
        if self.is_refused() && self.elements != 0 {
            return Err(DescriptorError::Refused(self.elements));
        }
        Ok(())
    }

    /// Writes the descriptor to `out` in wire form.
    pub fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0..8].copy_from_slice(&self.elements.to_be_bytes());
        out[8..16].copy_from_slice(&self.tag.to_be_bytes());
        out[16] = self.dtype as u8;
        out[17] = self.wire as u8;
        out[18] = self.reduction as u8;
        out[19] = self.block_log2;
        out[20] = self.lane;
        out[21] = self.call.collective as u8;
        out[22..24].copy_from_slice(&self.call.root.to_be_bytes());
        out[24..28].copy_from_slice(&self.call.number.to_be_bytes());
    }

    /// Reads a descriptor from its wire form, and checks that it is valid.
    ///
    /// # Errors
    /// Returns [`Reject::Descriptor`] for an invalid descriptor.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Reject> {
        let [e0, e1, e2, e3, e4, e5, e6, e7, t0, t1, t2, t3, t4, t5, t6, t7, ..] = *bytes;
        let [.., r0, r1, n0, n1, n2, n3] = *bytes;
        let call = Call {
            number: u32::from_be_bytes([n0, n1, n2, n3]),
            collective: Collective::from_code(bytes[21]).ok_or(Reject::Descriptor)?,
            root: u16::from_be_bytes([r0, r1]),
        };
        let descriptor = Self {
            elements: u64::from_be_bytes([e0, e1, e2, e3, e4, e5, e6, e7]),
            tag: u64::from_be_bytes([t0, t1, t2, t3, t4, t5, t6, t7]),
            dtype: DType::from_code(bytes[16]).ok_or(Reject::Descriptor)?,
            wire: WireType::from_code(bytes[17]).ok_or(Reject::Descriptor)?,
            reduction: Reduction::from_code(bytes[18]).ok_or(Reject::Descriptor)?,
            block_log2: bytes[19],
            lane: bytes[20],
            call,
        };
        // wire: W-12, W-13
        descriptor.validate().map_err(|_| Reject::Descriptor)?;
        Ok(descriptor)
    }
}

impl Descriptor {
    /// Formats the descriptor for comparison with `other`. Leaves out the lane if both have the
    /// same lane, and the tag if both have the same tag.
    pub fn beside(&self, other: &Self) -> impl fmt::Display {
        let (lane, tag) = (self.lane != other.lane, self.tag != other.tag);
        Shown { descriptor: *self, lane, tag }
    }
}

/// A descriptor formatted for people, with or without its lane and its tag.
struct Shown {
    descriptor: Descriptor,
    lane: bool,
    tag: bool,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            descriptor: Descriptor { elements, tag, dtype, wire, reduction, lane, call, .. },
            ..
        } = *self;
        if self.descriptor.is_refused() {
            return write!(f, "a call that it rejected (see that rank's error)");
        }
        if call != Call::NONE {
            write!(f, "{call}: ")?;
        }
        let (reduction, dtype, wire) = (reduction.name(), dtype.name(), wire.name());
        let block = self.descriptor.block_elements();
        write!(f, "{reduction} of {elements} x {dtype}, wire {wire}, block {block}")?;
        if self.lane {
            write!(f, ", lane {lane}")?;
        }
        if self.tag {
            write!(f, ", tag {tag:#x}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Shown { descriptor: *self, lane: true, tag: true }, f)
    }
}

/// The reason why a descriptor is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The block size is not a power of two from 32 to 1024.
    #[error("the number of elements in a block must be a power of two from 32 to 1024, not {0}")]
    Block(usize),
    /// The wire type cannot carry the dtype.
    #[error("wire type {wire} cannot carry a tensor of {dtype}")]
    Wire {
        /// The tensor's dtype, by name.
        dtype: &'static str,
        /// The wire type, by name.
        wire: &'static str,
    },
    /// The op has so many elements that its windows cannot be numbered.
    #[error("a tensor of {0} elements is too large for one op; split it")]
    TooLarge(u64),
    /// The root is not 0, but the collective has no root.
    #[error("{0} has no root, so `root` must be 0")]
    Root(&'static str),
    /// The descriptor belongs to a refused call but has elements.
    #[error("a refused call must have no elements, not {0}")]
    Refused(u64),
}
