//! `racksum place --rebalance --apply`: carries out the moves of aggregators.

use std::io::Write;
use std::path::PathBuf;

use racksum_placer::job::Job;
use racksum_placer::placement::PlacementRecord;
use racksum_placer::rebalance::{Proposal, Rebalance};
use racksum_placer::topology::{HostId, Topology};

use super::words::millis;
use crate::exit::{Failure, print_line};
use crate::moves::move_job;
use crate::out_file::{OutFile, cannot_write};
use crate::stderr;

#[derive(Debug, clap::Args)]
pub(super) struct Apply {
    /// With --rebalance: move the job's aggregators as proposed, while the job runs, and print the
    /// placement that holds then as JSON. Ranks never move.
    #[arg(long, requires = "rebalance", conflicts_with_all = ["format", "explain"])]
    apply: bool,
    /// File to write that placement to, in place of standard output.
    #[arg(long, value_name = "FILE", requires = "apply")]
    out: Option<PathBuf>,
    /// Identity file with role operator, which moving jobs requires if the aggregators have
    /// identities [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", requires = "apply", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity [env: RACKSUM_INSECURE].
    #[arg(long, requires = "apply")]
    insecure: bool,
}

impl Apply {
    pub(super) const fn is_set(&self) -> bool {
        self.apply
    }

    /// Moves the job's aggregators if that is worth it. All of them move in one request, so either
    /// all moves are made or none.
    pub(super) fn run(
        &self,
        (topology, job): (&Topology, &Job),
        rebalance: &Rebalance,
        present: &PlacementRecord,
        port: u16,
    ) -> Result<(), Failure> {
        // A path that cannot be written must not cost a move.
        let out = self.out.as_deref().map(OutFile::create).transpose()?;
        let record = match &rebalance.aggregators {
            Some(proposal) => self.moved((topology, &job.name), proposal, present, port)?,
            None => {
                stderr::print_line("no aggregator moves: no such move saves enough");
                present.clone()
            }
        };
        if let Some(ranks) = &rebalance.ranks {
            stderr::print_line(format_args!(
                "moves of ranks as well would save {:.1} % of the step; they restart the job, so \
                 they are never applied",
                ranks.saving * 100.0
            ));
        }
        if rebalance.standbys.is_some() {
            stderr::print_line(
                "other standbys would be better; ranks learn theirs when they start, so they are \
                 never changed here",
            );
        }
        let json = serde_json::to_string(&record).expect("numbers and texts have a form in JSON");
        match out.zip(self.out.as_deref()) {
            Some((mut out, path)) => {
                let written = writeln!(out.file(), "{json}");
                let saved = written.map_err(|error| cannot_write(path, &error));
                let saved = saved.and_then(|()| out.commit());
                if saved.is_err() {
                    // A full disk must not cost the placement, which exists nowhere else.
                    print_line(&json)?;
                }
                saved
            }
            None => print_line(&json),
        }
    }

    fn moved(
        &self,
        (topology, job): (&Topology, &str),
        proposal: &Proposal,
        present: &PlacementRecord,
        port: u16,
    ) -> Result<PlacementRecord, Failure> {
        if proposal.tree.is_some() {
            return Err(Failure::unavailable(
                "the moves are not applied: the job has racks, and aggregators that are parents \
                 or have one move only when the job restarts; see the moves without --apply, and \
                 restart the job there",
            ));
        }
        let address = |host: HostId| topology.host(host).aggregator(port);
        let several =
            proposal.placement.aggregator_hosts().into_iter().find(|(_, count)| *count > 1);
        if let Some((host, count)) = several {
            return Err(Failure::usage(format!(
                "the moves are not applied: {count} aggregators would run on {}, and the \
                 nodes file has one address for a host's aggregator; move the job by hand with \
                 `racksum move`",
                topology.host(host).name
            )));
        }
        let to: Vec<_> = proposal.placement.aggregator_hosts();
        let is_new = |host: &HostId| proposal.aggregator_moves.iter().any(|it| it.to == *host);
        if let Some((kept, _)) = to.iter().find(|(host, _)| !is_new(host)) {
            return Err(Failure::unavailable(format!(
                "the moves are not applied: the job would keep its aggregator on {}, and an \
                 aggregator cannot take over a job that it serves; move the job to other \
                 aggregators by hand with `racksum move`",
                topology.host(*kept).name
            )));
        }
        let to: Vec<_> = to.into_iter().map(|(host, _)| address(host)).collect();
        let from: Vec<_> = proposal.aggregator_moves.iter().map(|it| address(it.from)).collect();
        let Some(asked) = from.first().cloned() else { return Ok(present.clone()) };
        move_job(job, asked, &to, (self.identity.clone(), self.insecure)).map_err(|failure| {
            let why = format!("cannot move the aggregators of job {job:?}: {failure}");
            Failure { why, ..failure }
        })?;
        stderr::print_line(format_args!(
            "job {job:?} moved from {} to {}: step {} (-{:.1} %)",
            from.join("+"),
            to.join("+"),
            millis(proposal.time.total_s()),
            proposal.saving * 100.0
        ));
        Ok(present.with_aggregators(topology, &proposal.placement))
    }
}
