//! Between two aggregators: nothing is sent and nothing is taken, and ops in flight keep what they
//! have until the job goes on.

use racksum_proto::ids::{OpId, WindowId};
use racksum_proto::time::Time;
use racksum_proto::worker::Config;

use super::{Engine, Links, Next, Progress};

impl Engine {
    /// Stops at the present aggregators; returns the first op that the job is to go on with. `why`
    /// is said of them if it does not.
    pub(crate) fn leave(&mut self, why: String) -> OpId {
        self.migration = Some(why);
        self.machine.first_kept()
    }

    /// Notes what has become of the aggregators that were tried.
    pub(crate) fn note_tried(&mut self, what: String) {
        self.migration = Some(what);
    }

    /// Whether ops may still be started.
    pub(crate) fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    /// Goes on at other aggregators. Returns false if the session has ended in the meantime, since
    /// an op's time was over.
    pub(crate) fn resume(&mut self, config: Config, links: Links) -> bool {
        if self.machine.has_ended() {
            return false;
        }
        self.migration = None;
        self.links = links;
        self.in_place = false;
        self.staging.clear();
        for payload in self.payloads.values_mut() {
            payload.forget_partial();
        }
        self.machine.resume(config, self.clock.now(), &mut ());
        for (shard, link) in (0..).zip(&self.links.shards) {
            self.machine.set_shard_job(shard, link.job);
        }
        self.collect();
        true
    }

    /// A step while there is no aggregator: only time passes, whatever late datagrams there are.
    pub(super) fn wait_for_aggregator(&mut self) -> Progress {
        let (now, deadline) = (self.clock.now(), self.machine.deadline());
        if deadline <= now
            && let Some(tried) = self.migration.take()
        {
            self.machine.handle_no_aggregator(&tried, &mut ());
            self.migration = Some(tried);
        }
        let ended = self.collect();
        let patience = (deadline < Time::NEVER).then(|| deadline.since(now));
        Progress { ended, next: if ended { Next::Step } else { Next::Sleep(patience) } }
    }

    /// Drops sums that no rank can lack any more.
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
