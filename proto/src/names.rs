//! Parses the names that users write: the inverse of each type's `name` method.

use alloc::string::String;
use alloc::vec::Vec;
use core::str::FromStr;

use crate::auth::DataAuth;
use crate::control::OnRankLoss;
use crate::dtype::{DType, Reduction, WireType};

/// The error for an unknown name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {given:?}; choose one of {}", known.join(", "))]
pub struct UnknownName {
    what: &'static str,
    given: String,
    known: Vec<&'static str>,
}

macro_rules! from_name {
    ($type:ty, $what:literal) => {
        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                let found = Self::ALL.into_iter().find(|one| text.eq_ignore_ascii_case(one.name()));
                found.ok_or_else(|| UnknownName {
                    what: $what,
                    given: text.into(),
                    known: Self::ALL.iter().map(|one| one.name()).collect(),
                })
            }
        }
    };
}

from_name!(DType, "dtype");
from_name!(WireType, "wire type");
from_name!(Reduction, "reduction");
from_name!(OnRankLoss, "rank-loss policy");
from_name!(DataAuth, "data authentication mode");

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn every_name_is_read_and_others_are_answered_with_all_there_are() {
        for wire in WireType::ALL {
            assert_eq!(wire.name().parse(), Ok(wire));
            assert_eq!(wire.name().to_uppercase().parse(), Ok(wire));
        }
        let error = "f8".parse::<DType>().unwrap_err().to_string();
        assert_eq!(error, "unknown dtype \"f8\"; choose one of f32, f64, f16, bf16, i32, i64");
    }
}
