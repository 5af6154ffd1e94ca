//! Suspension of the engine while its job moves to other aggregators. The engine then neither sends
//! nor receives, and ops in flight keep their data.

use racksum_proto::ids::{OpId, WindowId};
use racksum_proto::stats::Stats;
use racksum_proto::time::Time;
use racksum_proto::worker::Config;

use super::{Engine, Links, Next, Progress};

impl Engine {
    /// Starts to keep sums for other ranks, because the job is about to move.
    pub(crate) fn prepare_to_move(&mut self) {
        self.machine.prepare_to_move();
    }

    /// Stops keeping sums for other ranks, because the job does not move.
    pub(crate) fn stop_keeping(&mut self) {
        self.machine.stop_keeping();
        self.drop_kept();
    }

    /// Returns whether this rank keeps every sum that another rank may lack.
    pub(crate) fn is_ready_to_move(&self) -> bool {
        self.machine.is_ready_to_move()
    }

    /// Leaves the current aggregators. Returns the op at which the job must resume. If no other
    /// aggregator takes the job, the errors of its ops contain `why`.
    pub(crate) fn leave(&mut self, why: String) -> OpId {
        self.migration = Some(why);
        self.machine.first_kept()
    }

    /// Records the outcome at each aggregator tried so far.
    pub(crate) fn note_tried(&mut self, what: String) {
        self.migration = Some(what);
    }

    /// Returns whether the session has ended, after which no op can start.
    pub(crate) fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    /// Continues at other aggregators. Returns false if the session has ended meanwhile, for
    /// example because an op timed out.
    pub(crate) fn resume(&mut self, config: Config, links: Links) -> bool {
        if self.machine.has_ended() {
            return false;
        }
        self.migration = None;
        // Keep the counts of the old sockets, because the new sockets count from zero.
        let Stats { kernel_drops, send_failures, .. } = self.stats();
        self.stats = Stats { kernel_drops, send_failures, ..self.stats };
        self.links = links;
        self.in_place = false;
        self.staging.clear();
        for payload in self.payloads.values_mut() {
            payload.forget_partial();
        }
        self.machine.resume(config, self.clock.now(), &mut self.events);
        for (shard, link) in (0..).zip(&self.links.shards) {
            self.machine.set_shard_job(shard, link.job);
        }
        self.collect();
        true
    }

    /// Performs a step during a migration: only checks deadlines, and leaves late datagrams unread.
    pub(super) fn wait_for_aggregator(&mut self) -> Progress {
        let (now, deadline) = (self.clock.now(), self.machine.deadline());
        if deadline <= now
            && let Some(tried) = self.migration.take()
        {
            self.machine.handle_no_aggregator(&tried, &mut self.events);
            self.migration = Some(tried);
        }
        let ended = self.collect();
        let patience = (deadline < Time::NEVER).then(|| deadline.since(now));
        Progress { ended, next: if ended { Next::Step } else { Next::Sleep(patience) } }
    }

    /// Drops kept sums that every rank is known to have.
    pub(super) fn drop_kept(&mut self) {
        let Self { kept, payloads, machine, .. } = self;
        let first = machine.first_kept();
        while kept.first_key_value().is_some_and(|(op, _)| *op < first) {
            kept.pop_first();
        }
        let pool = machine.config().pool_slots as usize * usize::from(machine.config().shards);
        for (op, payload) in payloads {
            payload.drop_kept(2 * pool, |index| machine.may_lack(WindowId::new(*op, index)));
        }
    }
}

#[cfg(test)]
mod tests;
