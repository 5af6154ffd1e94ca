//! The CSV format of CoInNetFlow's simulator.
//!
//! ```text
//! num_gpu,duration,submit_time,iterations,model
//! 8,0,0,52,vgg11
//! ```
//!
//! Times are in seconds. The columns may be in any order, and `duration` and `iterations` may be
//! missing if the rule for iterations does not use them. The original runs an unknown model as
//! resnet50; this reader refuses it.

use super::{Arrival, ArrivalError, Options, Row, table};

/// The names that the original maps to its profile `inception`, for [`Options::models`].
pub const INCEPTION: [&str; 2] = ["inception3", "inception4"];

/// Reads arrivals.
///
/// # Errors
/// If a row is malformed or its model has no profile; the error names the line.
pub fn read(text: &str, options: &Options) -> Result<Vec<Arrival>, ArrivalError> {
    let columns = ["num_gpu", "duration", "submit_time", "iterations", "model"];
    table::read(text, &columns, options, |fields| {
        let model = fields.text("model")?;
        Ok(Row {
            name: model.clone(),
            submitted: fields.seconds("submit_time")?,
            gpus: fields.gpus("num_gpu")?,
            column: fields.iterations("iterations")?,
            duration: fields.optional_seconds("duration")?,
            model,
        })
    })
}
