//! The input of an op, which becomes its result.

use std::ops::Range;

use racksum_proto::descriptor::Descriptor;

use crate::blocks::{BlockSet, Blocks};
use crate::error::Error;
use crate::payload::{Data, Payload, bytes_of};
use crate::tensor::{Element, Region, TensorBytes, TensorBytesMut};

/// The input of an op. Each variant converts to and from the type that it holds.
#[derive(Debug)]
pub enum Operand {
    /// A tensor that the op owns.
    Tensor(Vec<u8>),
    /// A tensor that stays in the caller's memory.
    Region(Region),
    /// Some blocks of a tensor.
    Blocks(Blocks),
}

macro_rules! operand {
    ($variant:ident, $type:ty) => {
        impl From<$type> for Operand {
            fn from(operand: $type) -> Self {
                Self::$variant(operand)
            }
        }

        impl TryFrom<Operand> for $type {
            type Error = Operand;

            fn try_from(operand: Operand) -> Result<Self, Operand> {
                match operand {
                    Operand::$variant(operand) => Ok(operand),
                    other => Err(other),
                }
            }
        }
    };
}

operand!(Tensor, Vec<u8>);
operand!(Region, Region);
operand!(Blocks, Blocks);

impl<T: Element> From<Vec<T>> for Operand {
    fn from(tensor: Vec<T>) -> Self {
        Self::Region(Region::owned(tensor))
    }
}

impl<T: Element> TryFrom<Operand> for Vec<T> {
    type Error = Operand;

    fn try_from(operand: Operand) -> Result<Self, Operand> {
        match operand {
            Operand::Region(region) => region.into_tensor().map_err(Operand::Region),
            other => Err(other),
        }
    }
}

impl Operand {
    /// Converts the operand to an op's data. The caller has validated the descriptor.
    pub(crate) fn into_data(self, descriptor: &Descriptor) -> Result<Data, Error> {
        match self {
            Self::Tensor(tensor) => {
                check_len(tensor.len(), descriptor)?;
                Ok(Data::Owned(tensor))
            }
            Self::Region(region) => {
                check_len(region.len(), descriptor)?;
                Ok(Data::InPlace(region))
            }
            Self::Blocks(blocks) => Ok(Data::Blocks(BlockSet::new(descriptor, blocks)?)),
        }
    }

    /// Returns the region, if the operand is one.
    pub(crate) const fn region(&self) -> Option<&Region> {
        match self {
            Self::Region(region) => Some(region),
            Self::Tensor(_) | Self::Blocks(_) => None,
        }
    }

    /// Returns the address range of a region; an empty range for other operands.
    #[must_use]
    pub fn extent(&self) -> Range<usize> {
        self.region().map(Region::extent).unwrap_or_default()
    }

    /// Returns the length in bytes of a tensor or a region; zero for a list of blocks.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.len(),
            Self::Region(region) => region.len(),
            Self::Blocks(_) => 0,
        }
    }

    /// Returns the bytes of a tensor or a region; no bytes for a list of blocks.
    pub(crate) fn bytes(&self) -> TensorBytes<'_> {
        match self {
            Self::Tensor(tensor) => TensorBytes::Own(tensor),
            Self::Region(region) => region.bytes(0..region.len()),
            Self::Blocks(_) => TensorBytes::Own(&[]),
        }
    }

    /// Returns a mutable view of the bytes of a tensor or a region; no bytes for a list of blocks.
    pub(crate) fn bytes_mut(&mut self) -> TensorBytesMut<'_> {
        match self {
            Self::Tensor(tensor) => TensorBytesMut::Own(tensor),
            Self::Region(region) => region.bytes_mut(0..region.len()),
            Self::Blocks(_) => TensorBytesMut::Own(&mut []),
        }
    }

    /// Converts an op's payload back to its operand, unless the payload has returned it already. A
    /// list of blocks becomes the union of all ranks' blocks, sorted.
    pub(crate) fn of(payload: Payload) -> Option<Self> {
        let Payload { data, geometry, descriptor, .. } = payload;
        match data {
            Data::Owned(tensor) => Some(Self::Tensor(tensor)),
            Data::InPlace(region) => Some(Self::Region(region)),
            Data::Blocks(blocks) => Some(Self::Blocks(blocks.into_result(&geometry, &descriptor))),
            Data::Returned => None,
        }
    }
}

pub(crate) fn check_len(have: usize, descriptor: &Descriptor) -> Result<(), Error> {
    let need = descriptor.elements.saturating_mul(descriptor.dtype.size() as u64);
    if have as u64 == need && bytes_of(descriptor, 0..descriptor.elements).len() == have {
        return Ok(());
    }
    let Descriptor { elements, dtype, .. } = *descriptor;
    Err(Error::Length { have, elements, dtype: dtype.name(), need })
}
