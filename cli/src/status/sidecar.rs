//! The status of a sidecar.

use std::path::Path;

use racksum_proto::counted::counted;
use racksum_proto::rank_list::named;
use racksum_proto::status::{Memory, SidecarJobStatus, SidecarStatus};
use racksum_worker::sidecar::{AskError, ask};

use super::{advice, job_name};
use crate::args::Format;
use crate::exit::{Failure, print_line};

/// Queries the sidecar at a path and prints its answer.
pub(super) fn print(path: &Path, format: Format) -> Result<(), Failure> {
    let status = ask(path).map_err(|error| {
        let question = "check that the path is the --socket of a racksum worker from the same \
                        release as this program";
        let path = path.display();
        let what = format!("cannot query {path}: {error}");
        match error {
            AskError::Call(error) => {
                let advice = advice(&error, "sidecar", question);
                Failure::of_call(format!("{what}; {advice}"), &error)
            }
            AskError::Silent => Failure::unavailable(format!(
                "cannot query {path}: no answer from the sidecar; its process may be suspended"
            )),
            AskError::Refused(_) => Failure::unavailable(what),
            AskError::Answer(_) => Failure::unavailable(format!("{what}; {question}")),
        }
    })?;
    match format {
        Format::Json => {
            let json = serde_json::to_string(&status);
            print_line(&json.map_err(|error| Failure::failed(error.to_string()))?)
        }
        Format::Text => print_line(text(&status).trim_end()),
    }
}

/// Formats a sidecar's status for people.
pub(super) fn text(status: &SidecarStatus) -> String {
    let SidecarStatus {
        version,
        up_ms,
        max_jobs,
        ranks,
        max_ranks,
        memory: Memory { used: lent, limit: most },
        jobs,
        ..
    } = status;
    let aggregators = match &status.aggregators[..] {
        [] => String::new(),
        all => format!(", aggregator {}", all.join(", then ")),
    };
    let insecure =
        if status.insecure { ", INSECURE: the aggregator's identity is not verified" } else { "" };
    let draining = if status.draining { ", draining: it takes no more jobs" } else { "" };
    let mut text = format!(
        "racksum worker {version}, up {} s, {} of {}, {ranks} of {}, \
         {lent} of {most} B of memory{aggregators}{draining}{insecure}\n",
        up_ms / 1000,
        jobs.len(),
        counted(*max_jobs, "job"),
        counted(*max_ranks, "rank"),
    );
    jobs.iter().for_each(|job| text += &job_text(job));
    text
}

fn job_text(job: &SidecarJobStatus) -> String {
    let SidecarJobStatus { generation, uid, world, local_world, state, age_ms, .. } = job;
    let mut text = format!(
        "job {:?}, generation {generation}, of user {uid}: {state}, {local_world} of {} here, \
         {} s old",
        job_name(&job.job, &job.group),
        counted(*world, "rank"),
        age_ms / 1000
    );
    if job.awaited > 0 {
        text += &format!("; {} missing", job.awaited);
    }
    for (count, what) in
        [(job.awaited_ops, "called by some ranks"), (job.summed_ops, "called by all")]
    {
        if count > 0 {
            text += &format!("; {} {what}", counted(count, "op"));
        }
    }
    let behind: Vec<_> =
        job.ranks.iter().filter(|rank| rank.behind).map(|rank| rank.rank).collect();
    if let Some(stalled) = job.stalled_ms.filter(|_| !behind.is_empty()) {
        text += &format!("; has waited {stalled} ms for {}", named(behind));
    }
    text += "\n  rank     process  next op      bytes lent\n";
    for rank in &job.ranks {
        let behind = if rank.behind { "  BEHIND" } else { "" };
        let (number, pid, next_op) = (rank.rank, rank.pid, rank.next_op);
        text += &format!("  {number:>4} {pid:>11} {next_op:>8} {:>15}{behind}\n", rank.lent_bytes);
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use racksum_proto::status::SidecarRankStatus;

    use super::*;

    /// Returns a sidecar's status in which every optional part is present.
    pub(in crate::status) fn status() -> SidecarStatus {
        let rank = SidecarRankStatus { rank: 0, pid: 1, next_op: 0, lent_bytes: 0, behind: true };
        let job = SidecarJobStatus {
            job: "0".into(),
            group: "0".into(),
            generation: 0,
            uid: 0,
            world: 1,
            local_world: 1,
            lanes: 1,
            state: "0".into(),
            age_ms: 0,
            awaited: 1,
            awaited_ops: 1,
            summed_ops: 1,
            stalled_ms: Some(1),
            ranks: vec![rank],
        };
        SidecarStatus {
            version: "0".into(),
            up_ms: 0,
            aggregators: vec!["0".into(), "1".into()],
            insecure: true,
            draining: true,
            max_jobs: 1,
            max_ranks: 1,
            ranks: 1,
            memory: Memory::default(),
            jobs: vec![job],
        }
    }
}
