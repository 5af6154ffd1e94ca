//! What an op is started on, and gives back once it has ended.

use std::ops::Range;

use racksum_proto::descriptor::Descriptor;

use crate::blocks::{BlockSet, Blocks};
use crate::error::Error;
use crate::payload::{Data, Payload, bytes_of};
use crate::tensor::Region;

/// What an op works on. Each is made of, and back into, what it holds.
#[derive(Debug)]
pub enum Operand {
    /// A tensor that is handed over.
    Tensor(Vec<u8>),
    /// A tensor that stays where it is.
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

impl Operand {
    /// Hands it to an op; the descriptor is valid in itself.
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

    /// The tensor, if it stays where it is.
    pub(crate) const fn region(&self) -> Option<&Region> {
        match self {
            Self::Region(region) => Some(region),
            Self::Tensor(_) | Self::Blocks(_) => None,
        }
    }

    /// The addresses of a tensor that stays where it is; of anything else none.
    #[must_use]
    pub fn extent(&self) -> Range<usize> {
        self.region().map(Region::extent).unwrap_or_default()
    }

    /// The bytes of a tensor; of a list there are none.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Tensor(tensor) => tensor,
            Self::Region(region) => region.bytes(0..region.len()),
            Self::Blocks(_) => &[],
        }
    }

    /// The same, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Tensor(tensor) => tensor,
            Self::Region(region) => region.bytes_mut(0..region.len()),
            Self::Blocks(_) => &mut [],
        }
    }

    /// Takes it back, reduced, if the op still has it; of blocks those of the union, sorted.
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
