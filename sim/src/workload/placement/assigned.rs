//! Placements from a list: CoInNetFlow's custom string, or the placer's plan.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::{Placement, PlacementError, Rack, Share, WorkerId};
use crate::workload::arrivals::JobNumber;

/// The workers of each job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Assignments {
    jobs: BTreeMap<JobNumber, Placement>,
}

impl Assignments {
    /// Creates assignments from a plan, which lists a worker for each GPU of each job. A job's
    /// ranks keep the order in which the plan first names their workers.
    #[must_use]
    pub fn from_plan(plan: impl IntoIterator<Item = (JobNumber, Vec<WorkerId>)>) -> Self {
        let jobs = plan.into_iter().map(|(job, workers)| {
            let mut placement = Placement::new();
            for worker in workers {
                match placement.iter_mut().find(|share| share.worker == worker) {
                    Some(share) => share.gpus += 1,
                    None => placement.push(Share { worker, gpus: 1 }),
                }
            }
            (job, placement)
        });
        Self { jobs: jobs.collect() }
    }

    /// Returns the placement of a job if its GPUs are free.
    pub(super) fn place(
        &self,
        job: JobNumber,
        asked: u32,
        racks: &[Rack],
    ) -> Result<Option<Placement>, PlacementError> {
        let placement = self.jobs.get(&job).ok_or(PlacementError::NoAssignment(job))?;
        let placed: u64 = placement.iter().map(|share| u64::from(share.gpus)).sum();
        if placed != u64::from(asked) {
            return Err(PlacementError::Gpus { job, asked, placed });
        }
        let mut fits = true;
        for Share { worker, gpus } in placement {
            let mut workers = racks.iter().flat_map(|rack| &rack.workers);
            match workers.find(|candidate| candidate.id == *worker) {
                Some(found) => fits &= found.free_gpus >= *gpus,
                None => return Err(PlacementError::UnknownWorker { job, worker: *worker }),
            }
        }
        Ok(fits.then(|| placement.clone()))
    }
}

/// Reads CoInNetFlow's custom string, such as `5-0&2,4-1:4&3:2`: job 5 has one GPU of the workers 0
/// and 2 each, and job 4 has four of worker 1 and two of worker 3.
impl FromStr for Assignments {
    type Err = CustomError;

    fn from_str(text: &str) -> Result<Self, CustomError> {
        let mut jobs = BTreeMap::new();
        for (entry, text) in (1..).zip(text.split(',')) {
            let error = |kind| CustomError { entry, text: text.to_owned(), kind };
            let (job, placement) = parse(text).map_err(error)?;
            if jobs.insert(job, placement).is_some() {
                return Err(error(CustomErrorKind::RepeatedJob(job)));
            }
        }
        Ok(Self { jobs })
    }
}

/// Reads the part of a custom string for one job.
fn parse(text: &str) -> Result<(JobNumber, Placement), CustomErrorKind> {
    let (job, workers) = text.split_once('-').ok_or(CustomErrorKind::NoDash)?;
    let job = JobNumber(number(job)?);
    // Each worker, its GPUs, and whether a colon gave their number.
    let mut shares: Vec<(Share, bool)> = Vec::new();
    for part in workers.split('&') {
        let (worker, gpus) = match part.split_once(':') {
            None => (part, None),
            Some((worker, gpus)) => (worker, Some(number(gpus)?)),
        };
        let worker = WorkerId(number(worker)?);
        if gpus == Some(0) {
            return Err(CustomErrorKind::NoGpus(worker));
        }
        let share = shares.iter_mut().find(|(share, _)| share.worker == worker);
        match (share, gpus) {
            (None, gpus) => {
                shares.push((Share { worker, gpus: gpus.unwrap_or(1) }, gpus.is_some()));
            }
            (Some((share, false)), None) => share.gpus += 1,
            (Some(_), _) => return Err(CustomErrorKind::RepeatedWorker(worker)),
        }
    }
    Ok((job, shares.into_iter().map(|(share, _)| share).collect()))
}

fn number<T: FromStr>(text: &str) -> Result<T, CustomErrorKind> {
    // The standard parser also accepts a plus sign.
    let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| CustomErrorKind::Number(text.to_owned()))
}

/// An error in a custom string.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("entry {entry} {text:?}: {kind}")]
pub struct CustomError {
    /// The number of the entry, from 1.
    pub entry: usize,
    /// The entry.
    pub text: String,
    /// The reason.
    pub kind: CustomErrorKind,
}

/// A reason why a custom string is malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CustomErrorKind {
    /// The entry has no dash.
    #[error("write a job, a dash and its workers, as in 5-0&2 or 5-0:4&2:4")]
    NoDash,
    /// A number is malformed or too large.
    #[error("{0:?} is not a number")]
    Number(String),
    /// A worker has no GPUs.
    #[error("worker {} has 0 GPUs; remove it", .0.0)]
    NoGpus(WorkerId),
    /// A worker with a number of GPUs is there twice.
    #[error("worker {} is there twice; give its number of GPUs once", .0.0)]
    RepeatedWorker(WorkerId),
    /// A job is there twice.
    #[error("job {} is there twice; merge the entries", .0.0)]
    RepeatedJob(JobNumber),
}
