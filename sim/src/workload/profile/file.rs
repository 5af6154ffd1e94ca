//! The TOML format of a profile.

use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{Profile, ProfileErrorKind, Tensor, Times};
use crate::engine::Picos;
use crate::text::line_of;
use crate::workload::duration::{self, MICROSECOND};

/// An error in a profile file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct ProfileError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The reason.
    pub kind: ProfileErrorKind,
}

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let at = |span: Range<usize>, kind| ProfileError { line: line_of(text, span.start), kind };
        let file: ReadFile = toml::from_str(text).map_err(|error| {
            let kind = ProfileErrorKind::Syntax(error.message().to_owned());
            at(error.span().unwrap_or(0..0), kind)
        })?;
        let name_span = file.name.span();
        let spans: Vec<_> = file.tensors.iter().map(Spanned::span).collect();
        let tensors = file.tensors.into_iter().map(|tensor| tensor.into_inner().tensor());
        let tensors =
            tensors.collect::<Result<Vec<_>, _>>().map_err(|(span, kind)| at(span, kind))?;
        let name = file.name.into_inner();
        let profile = Self { name, device: file.device, times: file.times, tensors };
        match profile.problem() {
            Some((None, kind)) => Err(at(name_span, kind)),
            Some((Some(tensor), kind)) => Err(at(spans[tensor].clone(), kind)),
            None => Ok(profile),
        }
    }
}

impl Profile {
    /// Returns the profile as a file. It reads back as the same profile if no time is longer than
    /// 19 minutes; a longer one may differ by a picosecond.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let micros = |time: Picos| duration::to_units(time, MICROSECOND);
        let tensors = self.tensors.iter().map(|tensor| WrittenTensor {
            name: &tensor.name,
            elements: tensor.elements,
            element_bytes: tensor.element_bytes,
            forward_us: micros(tensor.forward),
            backward_us: micros(tensor.backward),
            update_us: micros(tensor.update),
        });
        let file = WrittenFile {
            name: &self.name,
            device: &self.device,
            times: self.times,
            tensors: tensors.collect(),
        };
        toml::to_string(&file).expect("strings, numbers and tables can be encoded as TOML")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadFile {
    name: Spanned<String>,
    device: String,
    times: Times,
    #[serde(default)]
    tensors: Vec<Spanned<ReadTensor>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadTensor {
    name: String,
    elements: u64,
    #[serde(default = "four")]
    element_bytes: u32,
    forward_us: Spanned<f64>,
    backward_us: Spanned<f64>,
    update_us: Spanned<f64>,
}

impl ReadTensor {
    fn tensor(self) -> Result<Tensor, (Range<usize>, ProfileErrorKind)> {
        let time = |key, value: &Spanned<f64>| {
            duration::from_units(*value.get_ref(), MICROSECOND).map_err(|why| {
                let tensor = self.name.clone();
                (value.span(), ProfileErrorKind::Time { tensor, key, why })
            })
        };
        let forward = time("forward_us", &self.forward_us)?;
        let backward = time("backward_us", &self.backward_us)?;
        let update = time("update_us", &self.update_us)?;
        let Self { name, elements, element_bytes, .. } = self;
        Ok(Tensor { name, elements, element_bytes, forward, backward, update })
    }
}

#[derive(Serialize)]
struct WrittenFile<'a> {
    name: &'a str,
    device: &'a str,
    times: Times,
    tensors: Vec<WrittenTensor<'a>>,
}

#[derive(Serialize)]
struct WrittenTensor<'a> {
    name: &'a str,
    elements: u64,
    element_bytes: u32,
    forward_us: f64,
    backward_us: f64,
    update_us: f64,
}

/// Returns the size of a 32-bit float, which most gradients are.
const fn four() -> u32 {
    4
}
