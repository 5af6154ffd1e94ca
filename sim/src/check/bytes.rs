//! I3: a rank sends at most the bytes of its own non-zero blocks, and receives at most those of the
//! union. Both limits allow 6 % more, plus one datagram for each op and stream.

use std::collections::BTreeMap;
use std::rc::Rc;

use racksum_proto::geometry::Stripe;
use racksum_proto::ids::{OpId, Rank};

use super::oracle::{Oracle, Truth};
use super::{Checker, Invariant, Machine, Sight, Violation};
use crate::engine::Picos;
use crate::plan::Plan;

/// Counts the bytes that every rank sends and receives. The checker is valid only for runs without
/// loss or disagreement, because I3 does not cover retransmissions.
#[derive(Debug)]
pub struct FewBytes {
    plan: Plan,
    oracle: Rc<Oracle>,
    /// Bytes of datagrams, including headers and tags, that each rank has sent and received.
    traffic: BTreeMap<(usize, Rank), (u64, u64)>,
}

impl FewBytes {
    /// Creates a checker for runs of `plan`.
    #[must_use]
    pub fn new(plan: &Plan, oracle: Rc<Oracle>) -> Self {
        Self { plan: plan.clone(), oracle, traffic: BTreeMap::new() }
    }

    /// Returns the payload of all ops of a job in bytes, counting only the blocks of each window
    /// that `mask` returns.
    fn due(&self, job: usize, mask: impl Fn(&Truth, u32) -> u64) -> u64 {
        let truths = (0..).map_while(|op| self.oracle.truth(job, OpId(op)));
        let windows = truths.flat_map(|truth| (0..truth.windows()).map(move |i| (truth, i)));
        windows.map(|(truth, i)| truth.payload_len(i, mask(truth, i)) as u64).sum()
    }

    /// Returns the extra bytes allowed: one datagram for each op and stream.
    fn allowance(&self, job: usize) -> u64 {
        let shards = self.plan.network.shards;
        let datagram = self.plan.jobs[job].cut.unsealed() as u64;
        let truths = (0..).map_while(|op| Some((op, self.oracle.truth(job, OpId(op))?)));
        let streams = truths.flat_map(|(op, truth)| {
            (0..shards).map(move |i| Stripe::new(OpId(op), truth.windows(), i, shards))
        });
        datagram * streams.filter(|stripe| !stripe.is_empty()).count() as u64
    }
}

impl Checker for FewBytes {
    fn see(&mut self, _: Picos, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
        if let Machine::Worker { job, rank } = machine {
            let tag = self.plan.jobs[job].cut.trailer();
            let (sent, received) = self.traffic.entry((job, rank)).or_default();
            match sight {
                Sight::Sent(datagram) => *sent += (datagram.len() + tag) as u64,
                Sight::Received(datagram) => *received += (datagram.len() + tag) as u64,
                _ => {}
            }
        }
        Ok(())
    }

    fn conclude(&mut self) -> Result<(), Violation> {
        for ((job, rank), (sent, received)) in &self.traffic {
            let allowance = self.allowance(*job);
            let own = self.due(*job, |truth, window| truth.mask(*rank, window));
            let union = self.due(*job, Truth::union);
            for (what, moved, due) in [("sent", *sent, own), ("received", *received, union)] {
                let most = due + due * PERCENT / 100 + allowance;
                if moved > most {
                    return Invariant::I3.broken(format!(
                        "rank {} of job {job} {what} {moved} bytes, more than the limit of {most}; \
                         the payload is {due} bytes",
                        rank.0
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The overhead allowed for headers and control datagrams, in percent.
const PERCENT: u64 = 6;
