//! Rates of flows, given an order of their coflows.
//!
//! Rates are whole bits per second. Greedy rates are exact. MADD's are rounded down, and the bits
//! that this leaves over go to the first flows that can use them.

use crate::coflow::bssi::Ratio;
use crate::coflow::workload::Fabric;

/// A rule that gives rates to flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rates {
    /// Sincronia's order-preserving greedy rule: in the order of the coflows, each flow takes all
    /// that is left of its two ports. Rates change whenever a flow ends.
    Greedy,
    /// Minimum allocation for desired duration (Varys, SIGCOMM 2014): in the order of the coflows,
    /// the flows of each coflow get the least rates with which they end together. A coflow with a
    /// full port gets fair shares of what the others leave, and the rest is given out greedily.
    /// Rates change only when a coflow that has its least rates ends, as in Sincronia's published
    /// simulator, so the ports of a flow that ends sooner are idle until then.
    Madd,
}

/// A flow with data left to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sending {
    /// The ingress port.
    pub(super) source: usize,
    /// The egress port.
    pub(super) destination: usize,
    /// The work left.
    pub(super) left: u128,
    /// The rate in bits per second.
    pub(super) rate_bps: u64,
}

impl Sending {
    /// Returns the picoseconds until the flow ends, if it moves at all.
    pub(super) fn ends_in_ps(&self) -> Option<u128> {
        (self.rate_bps > 0).then(|| self.left.div_ceil(self.rate_bps.into()))
    }
}

impl Rates {
    /// Sets the rates of all flows of the coflows in `order`. Returns the picoseconds until rates
    /// change next, or none if nothing moves.
    ///
    /// `sending` holds the flows of each coflow.
    pub(super) fn assign(
        self,
        fabric: &Fabric,
        order: &[usize],
        sending: &mut [Vec<Sending>],
    ) -> Option<u128> {
        let mut free = Free::all_of(fabric);
        match self {
            Self::Greedy => {
                free.give_greedily(order, sending);
                let flows = order.iter().flat_map(|&coflow| &sending[coflow]);
                flows.filter_map(Sending::ends_in_ps).min()
            }
            Self::Madd => {
                let (served, skipped): (Vec<usize>, Vec<usize>) =
                    order.iter().partition(|&&coflow| free.give_least(&mut sending[coflow]));
                free.give_fairly(&skipped, sending);
                free.give_greedily(order, sending);
                // The first coflow finds every port free, so at least one is served.
                let last =
                    |&coflow: &usize| sending[coflow].iter().filter_map(Sending::ends_in_ps).max();
                served.iter().filter_map(last).min()
            }
        }
    }
}

/// The rates that ports have left.
struct Free<'a> {
    fabric: &'a Fabric,
    ingress_bps: Vec<u64>,
    egress_bps: Vec<u64>,
}

impl<'a> Free<'a> {
    fn all_of(fabric: &'a Fabric) -> Self {
        let (ingress_bps, egress_bps) =
            (fabric.ingress_bps().to_vec(), fabric.egress_bps().to_vec());
        Self { fabric, ingress_bps, egress_bps }
    }

    /// Returns what a flow can still get.
    fn of(&self, flow: &Sending) -> u64 {
        self.ingress_bps[flow.source].min(self.egress_bps[flow.destination])
    }

    fn take(&mut self, flow: &mut Sending, rate_bps: u64) {
        self.ingress_bps[flow.source] -= rate_bps;
        self.egress_bps[flow.destination] -= rate_bps;
        flow.rate_bps += rate_bps;
    }

    /// Gives each flow, in order, all that its ports have left.
    fn give_greedily(&mut self, order: &[usize], sending: &mut [Vec<Sending>]) {
        for &coflow in order {
            for flow in &mut sending[coflow] {
                self.take(flow, self.of(flow));
            }
        }
    }

    /// Gives the flows of a coflow the least rates with which they end together, as soon as its
    /// slowest port allows. Returns false, and gives nothing, if one of its ports is full.
    fn give_least(&mut self, flows: &mut [Sending]) -> bool {
        let mut ingress = vec![0u128; self.ingress_bps.len()];
        let mut egress = vec![0u128; self.egress_bps.len()];
        for flow in &*flows {
            ingress[flow.source] += flow.left;
            egress[flow.destination] += flow.left;
        }
        let ingress = ingress.iter().zip(&self.ingress_bps).zip(self.fabric.ingress_bps());
        let egress = egress.iter().zip(&self.egress_bps).zip(self.fabric.egress_bps());
        let mut slowest: Option<Ratio> = None;
        for ((&left, &free), &rate) in ingress.chain(egress).filter(|((left, _), _)| **left > 0) {
            if is_full(free, rate) {
                return false;
            }
            slowest = slowest.max(Some(Ratio::new(left, free)));
        }
        let Some(slowest) = slowest else { return false };
        for flow in flows {
            let rate = rate_to_end_with(flow.left, slowest).min(self.of(flow));
            self.take(flow, rate);
        }
        true
    }

    /// Gives each flow of `coflows` an equal share of what its ports have left.
    fn give_fairly(&mut self, coflows: &[usize], sending: &mut [Vec<Sending>]) {
        let mut ingress = vec![0u64; self.ingress_bps.len()];
        let mut egress = vec![0u64; self.egress_bps.len()];
        let flows = coflows.iter().flat_map(|&coflow| &sending[coflow]);
        for flow in flows.filter(|flow| self.can_move(flow)) {
            ingress[flow.source] += 1;
            egress[flow.destination] += 1;
        }
        let mut shares = Vec::new();
        for &coflow in coflows {
            for (place, flow) in sending[coflow].iter().enumerate() {
                if self.can_move(flow) {
                    let ingress = self.ingress_bps[flow.source] / ingress[flow.source];
                    let egress = self.egress_bps[flow.destination] / egress[flow.destination];
                    shares.push((coflow, place, ingress.min(egress)));
                }
            }
        }
        for (coflow, place, share) in shares {
            self.take(&mut sending[coflow][place], share);
        }
    }

    fn can_move(&self, flow: &Sending) -> bool {
        let (source, destination) = (flow.source, flow.destination);
        !is_full(self.ingress_bps[source], self.fabric.ingress_bps()[source])
            && !is_full(self.egress_bps[destination], self.fabric.egress_bps()[destination])
    }
}

/// Returns whether a port is full: less than a millionth of its rate is left. Rounding leaves a few
/// bits per second free at ports that would be full with exact rates.
const fn is_full(free_bps: u64, rate_bps: u64) -> bool {
    free_bps == 0 || free_bps < rate_bps >> 20
}

/// Returns the rate, rounded down, at which `left` ends together with the work at a port. The
/// port is given by the ratio of its work, which includes `left`, to its rate.
fn rate_to_end_with(left: u128, port: Ratio) -> u64 {
    let rate = u128::from(port.under());
    let quotient = match left.checked_mul(rate) {
        Some(product) => product / port.over(),
        // Dropping low bits of both, rounded against the flow, keeps the sum below the rate.
        None => (left >> 64) * rate / ((port.over() >> 64) + 1),
    };
    u64::try_from(quotient).expect("a part of a rate is not larger than the rate")
}
