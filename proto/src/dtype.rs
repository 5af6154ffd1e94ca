//! Element types of tensors and of the wire, and reductions over elements.

use serde::{Deserialize, Serialize};

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary64.
    F64 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 4,
    /// Two's complement, 32 bits; sums wrap.
    I32 = 5,
    /// Two's complement, 64 bits; sums wrap.
    I64 = 6,
}

/// The encoding of elements on the wire. The first six variants are the dtypes themselves; the last
/// two are block encodings that carry a scale with each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum WireType {
    /// Elements as [`DType::F32`].
    F32 = 1,
    /// Elements as [`DType::F64`].
    F64 = 2,
    /// Elements as [`DType::F16`].
    F16 = 3,
    /// Elements as [`DType::Bf16`].
    Bf16 = 4,
    /// Elements as [`DType::I32`].
    I32 = 5,
    /// Elements as [`DType::I64`].
    I64 = 6,
    /// Blocks, each with an f32 scale and one signed byte per element.
    Int8 = 7,
    /// Blocks, each with an exponent of base 2 and one i32 per element (SwitchML's arithmetic).
    Fixed32 = 8,
}

/// The reduction that the fold computes over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Reduction {
    /// The sum, in rank order.
    Sum = 1,
    /// The sum, divided once by the number of ranks that took part; integers are rounded toward
    /// zero.
    Avg = 2,
    /// The least value, or NaN if any value is NaN.
    Min = 3,
    /// The greatest value, or NaN if any value is NaN.
    Max = 4,
}

impl DType {
    /// All dtypes, in the order of their codes.
    pub const ALL: [Self; 6] = [Self::F32, Self::F64, Self::F16, Self::Bf16, Self::I32, Self::I64];

    /// Returns the size of an element in a tensor, in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// Returns whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        !matches!(self, Self::I32 | Self::I64)
    }

    /// Returns the wire type that carries this dtype unchanged.
    #[must_use]
    pub const fn native_wire(self) -> WireType {
        match self {
            Self::F32 => WireType::F32,
            Self::F64 => WireType::F64,
            Self::F16 => WireType::F16,
            Self::Bf16 => WireType::Bf16,
            Self::I32 => WireType::I32,
            Self::I64 => WireType::I64,
        }
    }

    /// Returns the dtype's name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }

    /// Returns the dtype with this code on the wire, if the code is known.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl WireType {
    /// All wire types, in the order of their codes.
    pub const ALL: [Self; 8] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::I64,
        Self::Int8,
        Self::Fixed32,
    ];

    /// Returns the size of an element on the wire, in bytes, without a block's scale.
    #[must_use]
    pub const fn element_size(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::Fixed32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// Returns whether each block starts with a four-byte scale. Such blocks can only be folded
    /// whole.
    #[must_use]
    pub const fn is_scaled(self) -> bool {
        matches!(self, Self::Int8 | Self::Fixed32)
    }

    /// Returns the size on the wire of a block of `elements` elements, in bytes.
    #[must_use]
    pub const fn block_len(self, elements: usize) -> usize {
        let scale = if self.is_scaled() { SCALE_LEN } else { 0 };
        scale + elements * self.element_size()
    }

    /// Returns whether a tensor of `dtype` may travel as this type: unchanged, or, if its elements
    /// are floats, as a narrower or scaled type.
    #[must_use]
    pub const fn carries(self, dtype: DType) -> bool {
        if self as u8 == dtype as u8 {
            return true;
        }
        dtype.is_float()
            && match self {
                Self::Int8 => true,
                Self::Bf16 | Self::F16 | Self::Fixed32 => dtype.size() >= 4,
                Self::F32 => dtype.size() == 8,
                Self::F64 | Self::I32 | Self::I64 => false,
            }
    }

    /// Returns the wire type's name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::Int8 => "int8",
            Self::Fixed32 => "fixed32",
        }
    }

    /// Returns the wire type with this code on the wire, if the code is known.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|wire| *wire as u8 == code)
    }
}

impl Reduction {
    /// All reductions, in the order of their codes.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Avg, Self::Min, Self::Max];

    /// Returns the reduction's name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Min => "min",
            Self::Max => "max",
        }
    }

    /// Returns the reduction with this code on the wire, if the code is known.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reduction| *reduction as u8 == code)
    }
}

/// The size of the scale at the start of each block of a scaled wire type, in bytes.
pub const SCALE_LEN: usize = 4;
