//! The CSV format of the workloads of Pollux (OSDI 2021), sampled from Microsoft's Philly trace.
//!
//! ```text
//! name,time,application,num_replicas,batch_size
//! cifar10-0,107,cifar10,6,2048
//! ```
//!
//! Times are in seconds since the start. A replica is a GPU. The format has neither durations nor
//! iterations, so the rule for iterations must be one that needs none. The batch size is not used:
//! a profile has the times of one batch.

use super::{Arrival, ArrivalError, Options, Row, table};

/// Reads arrivals.
///
/// # Errors
/// If a row is malformed or its application has no profile; the error names the line.
pub fn read(text: &str, options: &Options) -> Result<Vec<Arrival>, ArrivalError> {
    let columns = ["name", "time", "application", "num_replicas", "batch_size"];
    table::read(text, &columns, options, |fields| {
        Ok(Row {
            name: fields.text("name")?,
            submitted: fields.seconds("time")?,
            gpus: fields.gpus("num_replicas")?,
            model: fields.text("application")?,
            column: None,
            duration: None,
        })
    })
}
