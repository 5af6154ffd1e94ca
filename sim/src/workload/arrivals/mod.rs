//! Arrivals: which jobs come when, with how many GPUs, and how long they train.
//!
//! [`coinnetflow`] and [`pollux`] read CSV files. Such traces carry no layer sizes and often no
//! iterations, so two mappings are the caller's: from the trace's models to profiles
//! ([`Options::models`]), and from durations to iterations ([`Iterations`]). [`repeated`] makes
//! arrivals without a file.
//!
//! Jobs are sorted by the time of their submission, then by their place in the file, and numbered
//! in this order from 0.

pub mod coinnetflow;
pub mod pollux;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};

use crate::engine::Picos;
use crate::workload::duration::{self, DurationError, SECOND};

/// A job's number in its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobNumber(pub u64);

/// The arrival of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// The number of the job.
    pub job: JobNumber,
    /// The job's name in its trace, or its model.
    pub name: String,
    /// The time of its submission.
    pub submitted: Picos,
    /// The number of GPUs that it asks for.
    pub gpus: NonZeroU32,
    /// The number of iterations that it trains.
    pub iterations: NonZeroU64,
    /// The model; a profile has this name.
    pub model: String,
}

/// How a trace becomes arrivals.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Whether all jobs are submitted at time 0. Their order stays.
    pub submit_all_at_start: bool,
    /// The divisor of all numbers of iterations. The quotient is rounded down, but is at least 1.
    pub iteration_factor: NonZeroU64,
    /// The factor of all numbers of GPUs.
    pub gpu_factor: NonZeroU32,
    /// The number of rows to read, from the first.
    pub max_jobs: Option<usize>,
    /// The source of the numbers of iterations.
    pub iterations: Iterations,
    /// The profile that stands for a model of the trace. Other models keep their names.
    pub models: BTreeMap<String, String>,
    /// The names of the profiles. A row whose model has no profile is refused.
    pub profiles: BTreeSet<String>,
}

/// The source of a job's number of iterations.
#[derive(Debug, Clone, PartialEq)]
pub enum Iterations {
    /// The trace's column of iterations.
    Column,
    /// The trace's column of durations in seconds, times this rate. CoInNetFlow's study uses 2.
    PerSecond(f64),
    /// One number for all jobs.
    Fixed(NonZeroU64),
    /// A number for each model of the trace.
    PerModel(BTreeMap<String, NonZeroU64>),
}

impl Options {
    /// Creates options that take the trace as it is.
    #[must_use]
    pub fn new(iterations: Iterations, profiles: impl IntoIterator<Item = String>) -> Self {
        Self {
            submit_all_at_start: false,
            iteration_factor: NonZeroU64::MIN,
            gpu_factor: NonZeroU32::MIN,
            max_jobs: None,
            iterations,
            models: BTreeMap::new(),
            profiles: profiles.into_iter().collect(),
        }
    }

    /// Returns the profile for a model of the trace.
    fn profile(&self, model: &str) -> Result<String, ArrivalErrorKind> {
        let profile = self.models.get(model).map_or(model, String::as_str);
        if self.profiles.contains(profile) {
            return Ok(profile.to_owned());
        }
        Err(ArrivalErrorKind::NoProfile { model: model.to_owned(), profile: profile.to_owned() })
    }
}

/// Returns `jobs` arrivals at a fixed interval, whose models repeat in a cycle. Jobs are numbered
/// from 1, as in CoInNetFlow's submitter.
#[must_use]
pub fn repeated(
    models: &[&str],
    jobs: u64,
    gpus: NonZeroU32,
    iterations: NonZeroU64,
    interval: Picos,
) -> Vec<Arrival> {
    let models = models.iter().cycle();
    let arrivals = (0..jobs).zip(models).map(|(index, model)| Arrival {
        job: JobNumber(index + 1),
        name: (*model).to_owned(),
        submitted: Picos(interval.0.saturating_mul(index)),
        gpus,
        iterations,
        model: (*model).to_owned(),
    });
    arrivals.collect()
}

/// An error in a file of arrivals.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("line {line}: {kind}")]
pub struct ArrivalError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The reason.
    pub kind: ArrivalErrorKind,
}

/// A reason why a file of arrivals is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ArrivalErrorKind {
    /// The text is not CSV.
    #[error("{0}")]
    Csv(String),
    /// The file has no header, or no rows.
    #[error("the file has no jobs; it needs a line of column names and one line for each job")]
    Empty,
    /// A column is missing.
    #[error("column {0} is missing")]
    MissingColumn(&'static str),
    /// The column that the rule for iterations uses is missing.
    #[error("column {0} is missing, which the rule in `iterations` needs; choose another rule")]
    MissingSource(&'static str),
    /// The format has no such column.
    #[error("column {0:?} is unknown; remove it")]
    UnknownColumn(String),
    /// Two columns have one name.
    #[error("column {0} is there twice; remove one")]
    RepeatedColumn(&'static str),
    /// A row has too many or too few fields.
    #[error("the row has {found} fields, but there are {expected} columns")]
    Fields {
        /// The number of columns.
        expected: usize,
        /// The number of fields.
        found: usize,
    },
    /// A value cannot be used.
    #[error("{column} is {value:?}; it must be {expected}")]
    Value {
        /// The column.
        column: &'static str,
        /// The value.
        value: String,
        /// The values that can be used.
        expected: &'static str,
    },
    /// A time is too long or no time.
    #[error("{column}: {why}")]
    Time {
        /// The column.
        column: &'static str,
        /// The reason.
        why: DurationError,
    },
    /// A number becomes too large.
    #[error("the job would have more {0} than a number can hold; lower the factor")]
    TooLarge(&'static str),
    /// There is no profile for a model.
    #[error("model {model:?} has no profile {profile:?}; add it, or map the model in `models`")]
    NoProfile {
        /// The model of the trace.
        model: String,
        /// The profile that would stand for it.
        profile: String,
    },
    /// The rule for iterations does not know a model.
    #[error("model {0:?} has no number in `iterations`; add it")]
    NoIterations(String),
    /// The rate of iterations is not positive.
    #[error("the rule in `iterations` has rate {0}; it must be positive and finite")]
    Rate(f64),
}

impl ArrivalErrorKind {
    /// Returns whether the names of the columns are at fault, which only a row finds out.
    const fn is_of_header(&self) -> bool {
        matches!(self, Self::MissingColumn(_) | Self::MissingSource(_))
    }
}

/// A row of a trace, before the options have been applied.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    name: String,
    submitted: Picos,
    gpus: NonZeroU32,
    model: String,
    /// The value of the trace's own column, if the rule needs it.
    column: Option<NonZeroU64>,
    /// The duration, if the rule needs it.
    duration: Option<Picos>,
}

impl Row {
    fn arrival(self, options: &Options) -> Result<Arrival, ArrivalErrorKind> {
        let iterations = self.iterations(options)?.get() / options.iteration_factor;
        let gpus = self.gpus.checked_mul(options.gpu_factor);
        Ok(Arrival {
            job: JobNumber(0),
            model: options.profile(&self.model)?,
            name: self.name,
            submitted: self.submitted,
            gpus: gpus.ok_or(ArrivalErrorKind::TooLarge("GPUs"))?,
            iterations: NonZeroU64::new(iterations).unwrap_or(NonZeroU64::MIN),
        })
    }

    fn iterations(&self, options: &Options) -> Result<NonZeroU64, ArrivalErrorKind> {
        match &options.iterations {
            Iterations::Fixed(iterations) => Ok(*iterations),
            Iterations::Column => self.column.ok_or(ArrivalErrorKind::MissingSource("iterations")),
            Iterations::PerModel(numbers) => match numbers.get(&self.model) {
                Some(iterations) => Ok(*iterations),
                None => Err(ArrivalErrorKind::NoIterations(self.model.clone())),
            },
            Iterations::PerSecond(rate) => {
                let duration = self.duration.ok_or(ArrivalErrorKind::MissingSource("duration"))?;
                let iterations = (duration::to_units(duration, SECOND) * rate).round();
                if !rate.is_finite() || *rate <= 0.0 {
                    return Err(ArrivalErrorKind::Rate(*rate));
                }
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "positive, and a number that is too large saturates and is refused"
                )]
                let iterations = NonZeroU64::new(iterations as u64).unwrap_or(NonZeroU64::MIN);
                if iterations == NonZeroU64::MAX {
                    return Err(ArrivalErrorKind::TooLarge("iterations"));
                }
                Ok(iterations)
            }
        }
    }
}

/// Sorts and numbers arrivals that are in the order of their file.
fn numbered(mut arrivals: Vec<Arrival>, options: &Options) -> Vec<Arrival> {
    // The sort is stable, so the place in the file breaks ties.
    arrivals.sort_by_key(|arrival| arrival.submitted);
    for (arrival, number) in arrivals.iter_mut().zip(0..) {
        arrival.job = JobNumber(number);
        if options.submit_all_at_start {
            arrival.submitted = Picos::ZERO;
        }
    }
    arrivals
}

#[cfg(test)]
mod tests;
