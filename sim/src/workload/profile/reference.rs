//! The layer profiles and baseline times of CoInNetFlow's study (Ho, KAUST 2023), in JSON.
//!
//! The file lists for each model the `sizes` of its tensors in elements, times in seconds for three
//! devices (`fp`, `bp` and `wu`: forward pass, backward pass, weight update), and baselines: the
//! time of 0 to 10 iterations of two workers on an idle network, at 10 and 100 Gbit/s.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Profile, ProfileErrorKind, Tensor, Times};
use crate::engine::Picos;
use crate::workload::duration::{self, DurationError, SECOND};

/// The devices that the study measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// A V100 with its largest batch.
    V100,
    /// An A100 with its largest batch.
    A100,
    /// An A100 with the V100's batch, which the baselines use.
    A100MatchV100,
}

/// The link rates of the baselines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// 10 Gbit/s.
    Gbit10,
    /// 100 Gbit/s.
    Gbit100,
}

/// The profiles and baselines of the study.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    models: BTreeMap<String, Model>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Model {
    profiles: BTreeMap<Device, Profile>,
    baseline_10: Vec<Picos>,
    baseline_100: Vec<Picos>,
}

impl Reference {
    /// Reads the JSON file.
    ///
    /// # Errors
    /// If the text is not such a file, or if the sizes and times of a model do not match.
    pub fn parse(json: &str) -> Result<Self, ReferenceError> {
        let file: File = serde_json::from_str(json).map_err(|error| ReferenceError::Syntax {
            line: error.line(),
            why: error.to_string(),
        })?;
        if file.units.times != "seconds" {
            return Err(ReferenceError::Unit(file.units.times));
        }
        let models = file.models.into_iter().map(|(name, model)| {
            let read = model.model(&name);
            read.map(|model| (name.clone(), model))
                .map_err(|why| ReferenceError::Model { model: name, why })
        });
        Ok(Self { models: models.collect::<Result<_, _>>()? })
    }

    /// Returns the profiles of all models on a device, ordered by name.
    pub fn profiles(&self, device: Device) -> impl Iterator<Item = &Profile> {
        self.models.values().map(move |model| &model.profiles[&device])
    }

    /// Returns the time that a model's first 0, 1, ... iterations take on an idle network.
    #[must_use]
    pub fn baseline(&self, model: &str, rate: Rate) -> Option<&[Picos]> {
        let model = self.models.get(model)?;
        Some(match rate {
            Rate::Gbit10 => &model.baseline_10,
            Rate::Gbit100 => &model.baseline_100,
        })
    }
}

/// An error in the reference file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReferenceError {
    /// The text is not JSON of this layout.
    #[error("line {line}: {why}")]
    Syntax {
        /// The number of the line, from 1.
        line: usize,
        /// The reason.
        why: String,
    },
    /// The times have another unit.
    #[error("the unit of times is {0:?}; this reader knows only \"seconds\"")]
    Unit(String),
    /// A model is not valid.
    #[error("model {model:?}: {why}")]
    Model {
        /// The model.
        model: String,
        /// The reason.
        why: ModelError,
    },
}

/// A reason why a model of the reference file is not valid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A list of times has not one entry for each tensor.
    #[error("{list} has {len} entries for {tensors} tensors")]
    Lengths {
        /// The list.
        list: &'static str,
        /// The number of entries that it has.
        len: usize,
        /// The number of tensors.
        tensors: usize,
    },
    /// A time is no duration.
    #[error("{list}: {why}")]
    Time {
        /// The list that holds the time.
        list: &'static str,
        /// The problem.
        why: DurationError,
    },
    /// The profile is not valid.
    #[error(transparent)]
    Profile(#[from] ProfileErrorKind),
}

#[derive(Deserialize)]
struct File {
    units: Units,
    models: BTreeMap<String, ReadModel>,
}

#[derive(Deserialize)]
struct Units {
    times: String,
}

#[derive(Deserialize)]
struct ReadModel {
    sizes: Vec<u64>,
    v100: ReadTimes,
    a100: ReadTimes,
    a100_match_v100_bs: ReadTimes,
    #[serde(rename = "baseline_10G")]
    baseline_10: Vec<f64>,
    #[serde(rename = "baseline_100G")]
    baseline_100: Vec<f64>,
}

#[derive(Deserialize)]
struct ReadTimes {
    fp: Vec<f64>,
    bp: Vec<f64>,
    wu: Vec<f64>,
}

impl ReadModel {
    fn model(&self, name: &str) -> Result<Model, ModelError> {
        let devices = [
            (Device::V100, "v100", &self.v100),
            (Device::A100, "a100", &self.a100),
            (Device::A100MatchV100, "a100_match_v100_bs", &self.a100_match_v100_bs),
        ];
        let profiles = devices.map(|(device, device_name, times)| {
            let tensors = times.tensors(&self.sizes)?;
            let (name, device_name) = (name.to_owned(), device_name.to_owned());
            Ok((device, Profile::new(name, device_name, Times::Measured, tensors)?))
        });
        Ok(Model {
            profiles: profiles.into_iter().collect::<Result<_, ModelError>>()?,
            baseline_10: seconds("baseline_10G", &self.baseline_10)?,
            baseline_100: seconds("baseline_100G", &self.baseline_100)?,
        })
    }
}

impl ReadTimes {
    fn tensors(&self, sizes: &[u64]) -> Result<Vec<Tensor>, ModelError> {
        let times = |list, values: &[f64]| {
            if values.len() == sizes.len() {
                return seconds(list, values);
            }
            Err(ModelError::Lengths { list, len: values.len(), tensors: sizes.len() })
        };
        let (fp, bp, wu) = (times("fp", &self.fp)?, times("bp", &self.bp)?, times("wu", &self.wu)?);
        let tensors = sizes.iter().enumerate().map(|(index, elements)| Tensor {
            name: format!("tensor{index}"),
            elements: *elements,
            element_bytes: 4,
            forward: fp[index],
            backward: bp[index],
            update: wu[index],
        });
        Ok(tensors.collect())
    }
}

fn seconds(list: &'static str, values: &[f64]) -> Result<Vec<Picos>, ModelError> {
    let picos = values.iter().map(|value| duration::from_units(*value, SECOND));
    picos.collect::<Result<_, _>>().map_err(|why| ModelError::Time { list, why })
}
