//! I4: memory is bounded by what was configured at start.

use std::collections::{BTreeMap, BTreeSet};

use racksum_proto::geometry::MAX_FRAGMENTS;
use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::observer::Event;
use racksum_proto::wire::{self, Header, Kind};

use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;
use crate::plan::Plan;

/// Counts the windows in flight at both ends of every stream, and the fragments held by shards.
#[derive(Debug)]
pub struct Bounded {
    plan: Plan,
    /// Windows that a rank has sent, but whose results it has not acknowledged, by stream.
    sent: BTreeMap<(usize, Rank, u8, u8), BTreeSet<WindowId>>,
    /// Windows that a shard has folded but not retired, by shard and lane.
    folded: BTreeMap<(usize, u8, u8), BTreeSet<WindowId>>,
}

impl Bounded {
    /// Creates a checker for runs of `plan`.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self { plan: plan.clone(), sent: BTreeMap::new(), folded: BTreeMap::new() }
    }

    fn slots(&self, job: usize) -> usize {
        self.plan.jobs[job].pool_slots as usize
    }

    fn sent(&mut self, job: usize, header: &Header) -> Result<(), Violation> {
        let slots = self.slots(job);
        let stream = (job, header.sender, header.lane, header.shard);
        let windows = self.sent.entry(stream).or_default();
        *windows = windows.split_off(&header.ack);
        if header.kind == Kind::Data {
            windows.insert(header.window);
        }
        // After a disagreement, the shard may already be past windows that the rank still has to
        // send.
        if windows.len() > slots && self.plan.jobs[job].ops.iter().all(|op| op.odd.is_none()) {
            return BROKEN.broken(format!(
                "rank {} of job {job} has {} windows in flight to shard {}, more than the pool's \
                 {slots} slots",
                header.sender.0,
                windows.len(),
                header.shard
            ));
        }
        Ok(())
    }

    fn folded(&mut self, job: usize, shard: u8, event: &Event<'_>) -> Result<(), Violation> {
        let (Event::Folded { window, .. } | Event::Retired { window }) = event else {
            return Ok(());
        };
        let Some(op) = self.plan.jobs[job].ops.get(window.op.0 as usize) else { return Ok(()) };
        let slots = self.slots(job);
        let windows = self.folded.entry((job, shard, op.descriptor.lane)).or_default();
        if let Event::Folded { .. } = event {
            windows.insert(*window);
        } else if !windows.remove(window) {
            return BROKEN.broken(format!("{window:?} freed a slot that it did not hold"));
        }
        if windows.len() > slots {
            return BROKEN.broken(format!(
                "shard {shard} holds {} results of job {job}, more than its {slots} slots",
                windows.len()
            ));
        }
        Ok(())
    }
}

impl Checker for Bounded {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        match (machine, sight) {
            (Machine::Worker { job, .. }, Sight::Sent(datagram)) => {
                let mut headers = wire::messages(datagram).flatten().map(|(header, _)| header);
                headers.try_for_each(|header| self.sent(job, &header))
            }
            (Machine::Shard { job, shard }, Sight::Event(event)) => self.folded(job, shard, event),
            (Machine::Shard { job, shard }, Sight::Driven { held }) => {
                let plan = &self.plan.jobs[job];
                let streams = usize::from(plan.lanes) * self.slots(job);
                let max = streams * usize::from(plan.world) * MAX_FRAGMENTS;
                if *held > max {
                    return BROKEN.broken(format!(
                        "shard {shard} holds {held} fragments of job {job}, more than {max}"
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

const BROKEN: Invariant = Invariant::I4;
