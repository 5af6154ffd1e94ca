//! Finds the shortest step, where a longer transfer can buy a shorter round trip.

use super::Found;
use super::tree::LONGEST_S;

/// A limit on a step: the time of its transfers and the longest round trip, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) transfer_s: f64,
    pub(crate) latency_s: f64,
}

/// A search for a placement within a limit. A placement within a limit is within all longer ones.
pub(crate) trait Within {
    /// Returns whether the ranks fit within a limit.
    fn fits(&self, limit: Limit) -> bool;

    /// Returns a placement within a limit, if the ranks fit.
    fn within(&self, limit: Limit) -> Option<Found>;
}

/// Returns the placement with the shortest step, if there is one that is shorter than `below_s`
/// seconds. Takes the round trips of the hosts, one of which is the longest of each placement.
pub(crate) fn shortest(search: &impl Within, rtts_s: &[f64], below_s: f64) -> Option<Found> {
    let mut rtts_s = rtts_s.to_vec();
    rtts_s.sort_unstable_by(f64::total_cmp);
    rtts_s.dedup();
    let mut best: Option<Found> = None;
    let mut below_s = below_s.min(LONGEST_S);
    let least_s = least_latency(search, &rtts_s, below_s)?;
    let (mut too_short, mut latency_s) = (0.0, below_s);
    // Find the shortest round trip for the least transfer, and then try only shorter ones.
    while latency_s >= least_s {
        let limit = Limit { transfer_s: (below_s - least_s).next_down(), latency_s };
        let Some(found) = least_transfer(search, limit, too_short) else { break };
        let transfer_s = found.time.transfer_s;
        let latency_s_now = least_latency(search, &rtts_s, transfer_s).unwrap_or(f64::INFINITY);
        let limit = Limit { transfer_s, latency_s: latency_s_now.min(found.time.latency_s) };
        let found = search.within(limit).unwrap_or(found);
        // The transfer only becomes longer, so the round trip must make up for it.
        too_short = found.time.transfer_s;
        let shorter = found.time.latency_s.next_down();
        if found.time.total_s() < below_s {
            below_s = found.time.total_s();
            best = Some(found);
        }
        latency_s = shorter.min(below_s - too_short);
    }
    best
}

/// Returns the least of these round trips within which the ranks fit, if their transfers may take
/// `transfer_s` seconds.
fn least_latency(search: &impl Within, rtts_s: &[f64], transfer_s: f64) -> Option<f64> {
    let is_too_short = |rtt_s: &f64| !search.fits(Limit { transfer_s, latency_s: *rtt_s });
    rtts_s.get(rtts_s.partition_point(is_too_short)).copied()
}

/// Returns the placement with the least transfer time within a limit. No shorter time than
/// `too_short` seconds fits.
fn least_transfer(search: &impl Within, limit: Limit, mut too_short: f64) -> Option<Found> {
    let nothing_sent = Limit { transfer_s: 0.0, ..limit };
    if let Some(found) = search.within(nothing_sent) {
        return Some(found);
    }
    let mut best = search.within(limit)?;
    let mut enough = best.time.transfer_s;
    while too_short < enough * (1.0 - PRECISION) {
        let transfer_s = f64::midpoint(too_short, enough);
        let middle = Limit { transfer_s, ..limit };
        *if search.fits(middle) { &mut enough } else { &mut too_short } = transfer_s;
    }
    if enough < best.time.transfer_s {
        best = search.within(Limit { transfer_s: enough, ..limit }).expect("tested by fits");
    }
    Some(best)
}

/// The least relative difference of two transfer times that the search tells apart.
const PRECISION: f64 = 1e-9;
