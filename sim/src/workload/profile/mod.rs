//! Layer profiles: how many elements each tensor of a model has, and how long its layers compute.
//!
//! A profile is a TOML file. Its tensors are in the order of the forward pass; a training step
//! computes them forward in this order, then backward in the opposite one, and updates a tensor
//! once its all-reduce ends. Each time covers all layers of the tensor.
//!
//! ```
//! let profile: racksum_sim::workload::profile::Profile = r#"
//!     name = "two-layers"
//!     device = "A100"
//!     times = "measured"
//!
//!     [[tensors]]
//!     name = "front"
//!     elements = 1_000
//!     forward_us = 12.5
//!     backward_us = 25
//!     update_us = 0.5
//!
//!     [[tensors]]
//!     name = "head"
//!     elements = 500
//!     element_bytes = 2
//!     forward_us = 3
//!     backward_us = 6
//!     update_us = 0.25
//! "#
//! .parse()?;
//! assert_eq!(profile.bytes(), 5_000);
//! # Ok::<(), racksum_sim::workload::profile::ProfileError>(())
//! ```
//!
//! [`mod@reference`] converts the profiles of CoInNetFlow's study.

mod file;
pub mod reference;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::engine::Picos;
use crate::workload::duration::DurationError;

pub use file::ProfileError;

/// A model's layer profile. A profile that exists is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    name: String,
    device: String,
    times: Times,
    tensors: Vec<Tensor>,
}

/// The origin of a profile's times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Times {
    /// The times were measured on the device.
    Measured,
    /// The times were computed from a model of the device.
    Estimated,
}

/// A tensor that one all-reduce sums, and the layers that yield it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The tensor's name, unique in its profile.
    pub name: String,
    /// The number of elements, not zero.
    pub elements: u64,
    /// Bytes of one element.
    pub element_bytes: u32,
    /// Mean time of the forward pass.
    pub forward: Picos,
    /// Mean time of the backward pass.
    pub backward: Picos,
    /// Mean time of the weight update.
    pub update: Picos,
}

impl Profile {
    /// Creates a profile of at least one tensor.
    ///
    /// # Errors
    /// If a name is empty or repeated, or if there are no tensors, too many, or a tensor without
    /// elements. The error does not name a line.
    pub fn new(
        name: String,
        device: String,
        times: Times,
        tensors: Vec<Tensor>,
    ) -> Result<Self, ProfileErrorKind> {
        let profile = Self { name, device, times, tensors };
        match profile.problem() {
            Some((_, problem)) => Err(problem),
            None => Ok(profile),
        }
    }

    /// Returns the model's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the device whose times the profile has.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the origin of the times.
    #[must_use]
    pub const fn times(&self) -> Times {
        self.times
    }

    /// Returns the tensors in the order of the forward pass.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the bytes that a worker contributes in each iteration.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    /// Returns the mean computing time of an iteration without its weight updates, which overlap
    /// the all-reduces of other tensors.
    #[must_use]
    pub fn compute(&self) -> Picos {
        let times = self.tensors.iter().map(|tensor| tensor.forward + tensor.backward);
        times.fold(Picos::ZERO, |all, time| all + time)
    }

    /// Returns the first problem and the index of its tensor.
    fn problem(&self) -> Option<(Option<usize>, ProfileErrorKind)> {
        if self.name.is_empty() {
            return Some((None, ProfileErrorKind::NoName));
        }
        if self.tensors.is_empty() {
            return Some((None, ProfileErrorKind::NoTensors));
        }
        if self.tensors.len() > MOST_TENSORS {
            return Some((None, ProfileErrorKind::TooManyTensors(self.tensors.len())));
        }
        let mut names = BTreeSet::new();
        self.tensors.iter().enumerate().find_map(|(index, tensor)| {
            let is_new = names.insert(tensor.name.as_str());
            tensor.problem(is_new).map(|problem| (Some(index), problem))
        })
    }
}

impl Tensor {
    /// Returns the bytes that a worker contributes for this tensor.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.elements * u64::from(self.element_bytes)
    }

    fn problem(&self, name_is_new: bool) -> Option<ProfileErrorKind> {
        let name = || self.name.clone();
        if self.name.is_empty() {
            Some(ProfileErrorKind::NoTensorName)
        } else if !name_is_new {
            Some(ProfileErrorKind::RepeatedTensor(name()))
        } else if self.elements == 0 || self.elements > MOST_ELEMENTS {
            Some(ProfileErrorKind::Elements { tensor: name(), elements: self.elements })
        } else if !ELEMENT_BYTES.contains(&self.element_bytes) {
            let element_bytes = self.element_bytes;
            Some(ProfileErrorKind::ElementBytes { tensor: name(), element_bytes })
        } else {
            None
        }
    }
}

/// A reason why a profile is not valid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileErrorKind {
    /// The text is not TOML, or it lacks a key, has an unknown one or one of the wrong type.
    #[error("{0}")]
    Syntax(String),
    /// The profile has no name.
    #[error("the profile's name is empty; name the model")]
    NoName,
    /// The profile has no tensors.
    #[error("the profile has no tensors; add a [[tensors]] table for each")]
    NoTensors,
    /// The profile has too many tensors.
    #[error("the profile has {0} tensors; the limit is {MOST_TENSORS}")]
    TooManyTensors(usize),
    /// A tensor has no name.
    #[error("a tensor's name is empty; name it")]
    NoTensorName,
    /// Two tensors have one name.
    #[error("two tensors are called {0:?}; give each its own name")]
    RepeatedTensor(String),
    /// A tensor has no elements, or too many.
    #[error("tensor {tensor:?} has {elements} elements; it needs 1 to {MOST_ELEMENTS}")]
    Elements {
        /// The tensor.
        tensor: String,
        /// The number of elements that it has.
        elements: u64,
    },
    /// The size of an element is not one that gradients have.
    #[error("tensor {tensor:?} has element_bytes = {element_bytes}; it must be 1, 2, 4 or 8")]
    ElementBytes {
        /// The tensor.
        tensor: String,
        /// The bytes per element that it has.
        element_bytes: u32,
    },
    /// A time is no duration.
    #[error("{key} of tensor {tensor:?}: {why}")]
    Time {
        /// The tensor.
        tensor: String,
        /// The key of the time.
        key: &'static str,
        /// The problem.
        why: DurationError,
    },
}

/// The largest number of tensors of a profile.
pub const MOST_TENSORS: usize = 1 << 16;
/// The largest number of elements of a tensor. The bytes of a profile fit a `u64` with it.
pub const MOST_ELEMENTS: u64 = 1 << 40;
/// The sizes of an element.
const ELEMENT_BYTES: [u32; 4] = [1, 2, 4, 8];

#[cfg(test)]
mod tests;
