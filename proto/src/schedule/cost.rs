//! Prices, in bytes, of the work that a job's messages cause.
//!
//! The dominant cost is memory traffic, so folds and sends cost the bytes that they read and write.
//! Work whose cost does not depend on the number of bytes has a fixed price on that scale.

use crate::dtype::{DType, WireType};
use crate::wire::Kind;

/// The cost of a system call that sends to one address, in addition to the bytes sent.
pub const SEND: usize = 8 << 10;

/// The cost of receiving a message, in addition to the bytes of its body.
const MESSAGE: usize = 1 << 10;
/// The cost of receiving an open, which includes decompressing and recording its occupancy.
const OPEN: usize = 16 << 10;

/// Returns the cost of receiving a message of this kind, in addition to the bytes of its body.
#[must_use]
pub const fn of_message(kind: Kind) -> usize {
    match kind {
        Kind::Open => OPEN,
        _ => MESSAGE,
    }
}

/// Returns the cost of a fold whose inputs and result have this many bytes in total. Scaled
/// elements cost as much as the `f32` values they represent.
#[must_use]
pub const fn of_fold(wire: WireType, bytes: usize) -> usize {
    if wire.is_scaled() { bytes * DType::F32.size() / wire.element_size() } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fold_costs_as_much_as_its_elements_take() {
        for (wire, costs) in [
            (WireType::F32, 100),
            (WireType::F64, 100),
            (WireType::Bf16, 100),
            (WireType::Fixed32, 100),
            (WireType::Int8, 400),
        ] {
            assert_eq!(of_fold(wire, 100), costs, "{wire:?}");
        }
    }
}
