//! The links that the counters of running jobs show.
//!
//! A job that runs uses its links as far as its slowest rank lets it, so a counter says less than a
//! probe does:
//!
//! - The bytes of a transfer over its time are a rate that the links attain: a lower bound.
//! - If the others wait for one host's data most of the time, they would take more from it. Its
//!   rate is then an estimate, since no other link limits them all.
//! - A loss and the shortest round trip are upper bounds of those of idle links, since the job
//!   itself fills queues until they overflow. They refute greater ones that were measured, and say
//!   nothing about links of which none were.

mod sides;

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::MBIT;
use crate::network::{LinkRecord, Links, Measurement, Network, PairRecord, goodput_share};
use crate::problem::OVERHEAD;
use crate::topology::{HostId, Topology, VertexId};

pub use self::sides::{Difference, Figure, Side};

/// Windows that were transferred over some time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfers {
    /// The bytes of their payload.
    pub bytes: u64,
    /// The number of their fragments.
    pub fragments: u64,
    /// The number of fragments that were sent again.
    pub again: u64,
}

/// The counters of one rank at one aggregator over some time.
#[derive(Debug, Clone, PartialEq)]
pub struct RankCounters {
    /// The name of the job. The aggregators of a job sum parts of the same ops.
    pub job: String,
    /// The host of the rank.
    pub host: HostId,
    /// The host of the aggregator.
    pub aggregator: HostId,
    /// The contributions of the rank.
    pub contributed: Transfers,
    /// The results for the rank.
    pub results: Transfers,
    /// The time for which the rank had windows open without their results, in seconds.
    pub busy_s: f64,
    /// The time for which windows waited for the rank's data alone, in seconds.
    pub waited_s: f64,
    /// The shortest round trip in microseconds.
    pub round_trip_us: Option<f64>,
    /// The rank's own counters over about the same time, if it has reported them.
    pub own: Option<OwnCounters>,
}

/// The counters of one rank at one aggregator, as the rank counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OwnCounters {
    /// The contributions that the rank sent.
    pub sent: Transfers,
    /// The results that arrived at the rank.
    pub results: Transfers,
    /// The shortest round trip in microseconds.
    pub round_trip_us: Option<f64>,
}

/// One direction of a host's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Up,
    Down,
}

/// The counters of one job that are about one direction of a link.
#[derive(Debug, Clone, Copy)]
struct Seen {
    bytes: u64,
    /// The longest time that a rank was busy. The ranks of a job are busy at the same time, because
    /// each op ends for all of them together.
    busy_s: f64,
    /// How long windows waited for this direction alone.
    waited_s: f64,
    /// The least loss of a path over the link.
    loss: f64,
}

impl Default for Seen {
    fn default() -> Self {
        Self { bytes: 0, busy_s: 0.0, waited_s: 0.0, loss: 1.0 }
    }
}

/// Returns what the counters of jobs show of the links of hosts, and of paths as lower bounds.
/// Merge it with older measurements by [`Network::learned_over`]. `older` holds these, and
/// `present` the rates and round trips that they imply.
///
/// Ranks that share a host with their aggregator say nothing. Neither do those that transfer less
/// than a megabyte, or for less than a tenth of a second: delays rather than rates limit them. A
/// rate that no interface has shows that a counter is wrong, and nothing of the link.
#[must_use]
pub fn learn(
    topology: &Topology,
    older: &Network,
    present: &Links,
    ranks: &[RankCounters],
) -> Network {
    let tells = |rank: &&RankCounters| {
        rank.host != rank.aggregator
            && rank.contributed.bytes.max(rank.results.bytes) >= LEAST_BYTES
            && rank.busy_s >= LEAST_BUSY_S
    };
    let ranks: Vec<_> = ranks.iter().filter(tells).collect();
    let mut records: BTreeMap<HostId, LinkRecord> = BTreeMap::new();
    let mut record = |host: HostId, way: Way, measured: Measurement| {
        if measured.mbit > *MBIT.end() {
            return;
        }
        let of = topology.host(host).name.clone();
        let record = records.entry(host).or_insert(LinkRecord {
            of,
            up: None,
            down: None,
            rtt_us: None,
            rtt_p99_us: None,
        });
        let place = match way {
            Way::Up => &mut record.up,
            Way::Down => &mut record.down,
        };
        // Jobs that share a link see their shares of it.
        let shared =
            |known| Measurement { confidence: BOUND, is_least: true, ..greater(known, measured) };
        *place = Some(place.map_or(measured, shared));
    };
    let jobs: BTreeSet<_> = ranks.iter().map(|rank| rank.job.as_str()).collect();
    for job in jobs {
        let of_job: Vec<_> = ranks.iter().copied().filter(|rank| rank.job == job).collect();
        for ((host, way), seen) in seen_by(&of_job) {
            let known_loss = older.loss_of(&topology.host(host).name, way == Way::Up);
            let is_confirmed = is_confirmed(topology, host, &of_job);
            record(host, way, seen.measurement(known_loss, is_confirmed));
        }
    }
    let mut network = Network { links: vec![], pairs: paths(topology, &ranks), ..<_>::default() };
    for (vertex, rtt_us) in shorter_trips(topology, present, &ranks) {
        let host = HostId(topology.hosts_of(vertex).start);
        match records.get_mut(&host).filter(|_| topology.leaf(host) == vertex) {
            Some(record) => record.rtt_us = Some(rtt_us),
            None => network.links.push(LinkRecord {
                of: topology.name(vertex).into(),
                up: None,
                down: None,
                rtt_us: Some(rtt_us),
                rtt_p99_us: None,
            }),
        }
    }
    network.links.extend(records.into_values());
    network
}

/// Returns what the ranks of one job show of each direction of a host's link.
fn seen_by(ranks: &[&RankCounters]) -> BTreeMap<(HostId, Way), Seen> {
    let mut all: BTreeMap<(HostId, Way), Seen> = BTreeMap::new();
    let aggregators: BTreeSet<_> = ranks.iter().map(|rank| rank.aggregator).collect();
    for aggregator in aggregators {
        let mut most_out = Seen::default();
        for rank in ranks.iter().filter(|rank| rank.aggregator == aggregator) {
            let mut add = |(host, way): (HostId, Way), bytes: u64, loss: f64, waited_s: f64| {
                let seen = all.entry((host, way)).or_default();
                seen.bytes = seen.bytes.saturating_add(bytes);
                seen.busy_s = seen.busy_s.max(rank.busy_s);
                seen.waited_s += waited_s;
                seen.loss = seen.loss.min(loss);
            };
            let (contributed, results) = (rank.contributed, rank.results);
            add((rank.host, Way::Up), contributed.bytes, loss(contributed), rank.waited_s);
            add((rank.host, Way::Down), results.bytes, rank.result_loss(), 0.0);
            add((aggregator, Way::Down), contributed.bytes, loss(contributed), 0.0);
            // With multicast, a result leaves the aggregator once for all ranks.
            most_out.bytes = most_out.bytes.max(rank.results.bytes);
            most_out.busy_s = most_out.busy_s.max(rank.busy_s);
            most_out.loss = most_out.loss.min(rank.result_loss());
        }
        let out = all.entry((aggregator, Way::Up)).or_default();
        out.bytes = out.bytes.saturating_add(most_out.bytes);
        out.busy_s = out.busy_s.max(most_out.busy_s);
        out.loss = out.loss.min(most_out.loss);
    }
    all
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 fragments")]
fn loss(transfers: Transfers) -> f64 {
    let Transfers { fragments, again, .. } = transfers;
    if fragments == 0 { 0.0 } else { (again as f64 / fragments as f64).min(1.0) }
}

impl Seen {
    /// Returns the goodput on the wire in Mbit/s.
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 bytes")]
    fn mbit(&self) -> f64 {
        self.bytes as f64 * OVERHEAD / self.busy_s * 8.0 / 1e6
    }

    /// Returns the link's throughput: an estimate if the others waited for it most of the time, or
    /// else a lower bound. `known_loss` is the loss that was measured before.
    fn measurement(&self, known_loss: f64, is_confirmed: bool) -> Measurement {
        let loss = known_loss.min(self.loss);
        let waited = (self.waited_s / self.busy_s).min(1.0);
        let is_least = waited < LEAST_WAITED;
        let certainty = if is_confirmed { 1.0 } else { UNCONFIRMED };
        Measurement {
            // The model takes the effect of loss off the throughput, and the job has felt it.
            mbit: self.mbit() / goodput_share(loss).max(LEAST_SHARE),
            loss,
            age_s: 0.0,
            confidence: if is_least { BOUND } else { ESTIMATE * waited * certainty },
            is_inferred: true,
            is_least,
        }
    }
}

/// Returns the greater rate: a link that carries it for one job is no slower for another.
fn greater(one: Measurement, other: Measurement) -> Measurement {
    if other.mbit > one.mbit { other } else { one }
}

/// Returns whether the others can only wait for the host's own link: its rank reaches the
/// aggregator without leaving the innermost domain, or another host of the domain took part without
/// being waited for.
fn is_confirmed(topology: &Topology, host: HostId, ranks: &[&RankCounters]) -> bool {
    let domain = topology.domain_of(host);
    let is_inside = |other: HostId| topology.domain_of(other) == domain;
    let mut own = ranks.iter().filter(|rank| rank.host == host);
    let mut others = ranks.iter().filter(|rank| rank.host != host && is_inside(rank.host));
    own.all(|rank| is_inside(rank.aggregator))
        || others.any(|rank| rank.waited_s < rank.busy_s * LEAST_WAITED / 2.0)
}

/// Returns the lower bounds of all paths that the ranks of jobs use.
fn paths(topology: &Topology, ranks: &[&RankCounters]) -> Vec<PairRecord> {
    let mut paths: BTreeMap<(HostId, HostId, &str), Seen> = BTreeMap::new();
    for rank in ranks {
        let (host, aggregator) = (rank.host, rank.aggregator);
        for (from, to, bytes) in
            [(host, aggregator, rank.contributed.bytes), (aggregator, host, rank.results.bytes)]
        {
            let seen = paths.entry((from, to, &rank.job)).or_default();
            // With multicast, a result reaches all ranks of a host at once.
            seen.bytes =
                if from == host { seen.bytes.saturating_add(bytes) } else { seen.bytes.max(bytes) };
            seen.busy_s = seen.busy_s.max(rank.busy_s);
        }
    }
    let mut fastest: BTreeMap<(HostId, HostId), Measurement> = BTreeMap::new();
    for ((from, to, _), seen) in paths {
        let measured = seen.measurement(0.0, false);
        if measured.mbit > *MBIT.end() {
            continue;
        }
        let known = fastest.entry((from, to)).or_insert(measured);
        *known = greater(*known, measured);
    }
    let record = |((from, to), path): ((HostId, HostId), Measurement)| PairRecord {
        from: topology.host(from).name.clone(),
        to: topology.host(to).name.clone(),
        path,
        rtt_us: None,
        rtt_p99_us: None,
    };
    fastest.into_iter().map(record).collect()
}

/// Returns the round trips of links, in microseconds, where a job had a shorter one than these add
/// up to: all links of a path in the same proportion.
fn shorter_trips(
    topology: &Topology,
    present: &Links,
    ranks: &[&RankCounters],
) -> BTreeMap<VertexId, f64> {
    let mut trips: BTreeMap<VertexId, f64> = BTreeMap::new();
    for rank in ranks {
        let Some(seen_us) = rank.shortest_trip_us() else { continue };
        let (one, other) = (rank.host, rank.aggregator);
        let known_us = present.rtt_of_links(topology, one, other) * 1e6;
        if seen_us < known_us {
            for vertex in topology.links_between(one, other) {
                let rtt_us = present.rtt[vertex.0] * 1e6 * seen_us / known_us;
                let least = trips.entry(vertex).or_insert(rtt_us);
                *least = least.min(rtt_us);
            }
        }
    }
    trips
}

/// Transfers of fewer bytes say nothing about a rate.
const LEAST_BYTES: u64 = 1_000_000;
/// Transfers over a shorter time say nothing about a rate, in seconds.
const LEAST_BUSY_S: f64 = 0.1;
/// The others wait for a host if windows wait for its data alone for this share of its time.
const LEAST_WAITED: f64 = 0.5;
/// The confidence in a lower bound. It may count bursts that a link does not carry for long.
const BOUND: f64 = 0.9;
/// The confidence in an estimate whose host is waited for all the time. The host's processor may
/// be what is slow, or another program that uses its link.
const ESTIMATE: f64 = 0.9;
/// The factor on that confidence if the link of the host's domain may be what is slow.
const UNCONFIRMED: f64 = 0.5;
/// The least share of a throughput that is divided by it.
const LEAST_SHARE: f64 = 0.01;

#[cfg(test)]
mod tests;
