//! The rates and delays of a topology's links and paths, as measurements imply them today.

use std::collections::BTreeMap;

use super::{LinkRecord, Measurement, Network, NetworkError, default_half_life};
use crate::topology::{HostId, Topology, VertexId};

/// The rates and delays of all links of a topology, as expected today.
#[derive(Debug, Clone)]
pub struct Links {
    /// Per vertex, towards the parent.
    pub(crate) up: Vec<Rate>,
    /// Per vertex, from the parent.
    pub(crate) down: Vec<Rate>,
    /// Per vertex: round-trip time that the link adds, in seconds.
    pub(crate) rtt: Vec<f64>,
    /// Per vertex: 99th percentile of the round-trip times that the link adds, in seconds.
    rtt_p99: Vec<Option<f64>>,
    /// Per host: the hosts to or from which the path was measured by itself, in ascending order.
    /// Each pair is in the lists of both hosts.
    peers: Vec<Vec<Peer>>,
    has_pairs: bool,
}

/// The origin of a link's rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A measurement of this link.
    Measured,
    /// Measurements of other links.
    Inferred,
    /// The rate of the host's network interface.
    Nominal,
    /// None: the rate is unknown. The planner assumes that the link carries all that the interfaces
    /// of the hosts behind it can send.
    Unknown,
}

/// The rate of one direction of a link or path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The expected goodput in bytes per second.
    pub bytes_per_s: f64,
    /// The origin of the rate.
    pub source: Source,
    /// The confidence in a measured rate, from 0 to 1, after ageing.
    pub confidence: f64,
}

impl Rate {
    /// Returns the goodput in Mbit/s.
    #[must_use]
    pub fn mbit(self) -> f64 {
        self.bytes_per_s / BYTES_PER_MBIT
    }

    /// Returns the relative error that the rate may have.
    fn uncertainty(self) -> f64 {
        let confidence = match self.source {
            Source::Measured | Source::Inferred => self.confidence,
            Source::Nominal | Source::Unknown => 0.0,
        };
        confidence.mul_add(LEAST_UNCERTAINTY - UNCERTAINTY_UNMEASURED, UNCERTAINTY_UNMEASURED)
    }
}

/// The link or path that limits the transfers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// Nothing crosses a link.
    None,
    /// The link of a vertex to its parent.
    Up(VertexId),
    /// The link of a vertex from its parent.
    Down(VertexId),
    /// The path from a host to another one.
    Path(HostId, HostId),
}

impl Bottleneck {
    /// Returns the link or path in words, or `None` if nothing crosses a link.
    #[must_use]
    pub fn text(self, topology: &Topology) -> Option<String> {
        let host = |host| &topology.host(host).name;
        match self {
            Self::None => None,
            Self::Up(vertex) => Some(format!("the link from {}", topology.name(vertex))),
            Self::Down(vertex) => Some(format!("the link to {}", topology.name(vertex))),
            Self::Path(from, to) => Some(format!("the path from {} to {}", host(from), host(to))),
        }
    }

    /// Returns whether the link between a vertex and its parent is the bottleneck.
    #[must_use]
    pub fn is_link_of(self, vertex: VertexId) -> bool {
        self == Self::Up(vertex) || self == Self::Down(vertex)
    }
}

/// The measurements of a path that replace those of its links, as one of its hosts sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) host: HostId,
    /// The path to the peer.
    to: Option<Path>,
    /// The path from the peer.
    from: Option<Path>,
}

/// The measurements of one direction of a path.
#[derive(Debug, Clone, Copy)]
struct Path {
    /// The greatest goodput.
    ceiling: Rate,
    rtt: Option<f64>,
    rtt_p99: Option<f64>,
}

impl Peer {
    /// Returns the greatest goodput to the peer in bytes per second.
    pub(crate) fn ceiling_to(&self) -> Option<f64> {
        self.to.map(|path| path.ceiling.bytes_per_s)
    }

    /// Returns the greatest goodput from the peer in bytes per second.
    pub(crate) fn ceiling_from(&self) -> Option<f64> {
        self.from.map(|path| path.ceiling.bytes_per_s)
    }

    /// Returns the shorter of the round trips that were measured from both ends, in seconds.
    pub(crate) fn shortest_rtt(&self) -> Option<f64> {
        let rtts = [self.to, self.from].into_iter().flatten().filter_map(|path| path.rtt);
        rtts.reduce(f64::min)
    }

    /// Returns the measured round-trip time in seconds.
    pub(crate) fn rtt(&self) -> Option<f64> {
        let rtt = |path: Option<Path>| path.and_then(|path| path.rtt);
        rtt(self.to).or_else(|| rtt(self.from))
    }
}

impl Links {
    /// Combines measurements with the nominal rates of the hosts' interfaces.
    ///
    /// A measured goodput *m* with confidence *c* and a nominal rate *n* give *m^c n^(1-c)*: an old
    /// measurement fades towards the nominal rate. Lost datagrams are sent again and make the
    /// sender slow down, which [`goodput_share`] accounts for.
    ///
    /// A domain's link without a measurement carries all that the interfaces of the hosts behind it
    /// can send, which is marked as [`Source::Unknown`].
    ///
    /// # Errors
    /// If a record names an unknown host or domain, or has a value outside its range.
    pub fn new(topology: &Topology, network: &Network) -> Result<Self, NetworkError> {
        network.check_half_life()?;
        network.tree.iter().try_for_each(|tree| tree.check_against(topology))?;
        let records = records_by_vertex(topology, network)?;
        let mut links = Self::of_records(topology, &records, network.half_life_s);
        links.add_pairs(topology, network)?;
        Ok(links)
    }

    /// Returns the rates that the hosts' interfaces imply, for a cluster without measurements.
    #[must_use]
    pub fn nominal(topology: &Topology) -> Self {
        Self::of_records(topology, &vec![None; topology.vertices()], default_half_life())
    }

    fn of_records(topology: &Topology, records: &[Option<&LinkRecord>], half_life_s: f64) -> Self {
        let direction = |measurement: fn(&LinkRecord) -> Option<Measurement>| {
            resolve(topology, |vertex| records[vertex].and_then(measurement), half_life_s)
        };
        let rtt_of = |record: &Option<&LinkRecord>| record.and_then(|record| record.rtt_us);
        Self {
            up: direction(|record| record.up),
            down: direction(|record| record.down),
            rtt: records.iter().map(|record| rtt_of(record).unwrap_or(0.0) / 1e6).collect(),
            rtt_p99: records.iter().map(|record| Some((*record)?.rtt_p99_us? / 1e6)).collect(),
            peers: vec![vec![]; topology.hosts().len()],
            has_pairs: false,
        }
    }

    fn add_pairs(&mut self, topology: &Topology, network: &Network) -> Result<(), NetworkError> {
        let hosts = topology.host_numbers();
        let find = |name: &String| {
            let host = hosts.get(name.as_str()).copied();
            host.ok_or_else(|| NetworkError::Unknown(name.clone()))
        };
        self.has_pairs = !network.pairs.is_empty();
        for record in &network.pairs {
            let ends = (find(&record.from)?, find(&record.to)?);
            if ends.0 == ends.1 {
                return Err(NetworkError::Loop(record.from.clone()));
            }
            record.check()?;
            let slowest = self.slowest_link(topology, ends.0, ends.1);
            let bytes_per_s = slowest.map_or(f64::INFINITY, |rate| rate.bytes_per_s);
            let links = Rate { bytes_per_s, source: Source::Inferred, confidence: 0.0 };
            let ceiling = record.path.blend(links, network.half_life_s);
            let [rtt, rtt_p99] = [record.rtt_us, record.rtt_p99_us].map(|us| Some(us? / 1e6));
            let path = Path { ceiling, rtt, rtt_p99 };
            if self.peer(ends.0, ends.1).to.replace(path).is_some() {
                return Err(NetworkError::Twice(record.name()));
            }
            self.peer(ends.1, ends.0).from = Some(path);
        }
        Ok(())
    }

    /// Returns the record of a peer at a host, which is added if it is missing.
    fn peer(&mut self, host: HostId, peer: HostId) -> &mut Peer {
        let peers = &mut self.peers[host.0];
        let index = peers.binary_search_by_key(&peer, |known| known.host).unwrap_or_else(|index| {
            peers.insert(index, Peer { host: peer, to: None, from: None });
            index
        });
        &mut peers[index]
    }

    /// Returns the measurements of the paths between a host and another one.
    fn measured(&self, host: HostId, peer: HostId) -> Option<&Peer> {
        let peers = &self.peers[host.0];
        peers.binary_search_by_key(&peer, |known| known.host).ok().map(|index| &peers[index])
    }

    /// Returns the hosts to or from which the path was measured by itself.
    pub(crate) fn peers(&self, host: HostId) -> &[Peer] {
        &self.peers[host.0]
    }

    /// Returns the rate of the slowest link between two hosts. `None` from a host to itself.
    fn slowest_link(&self, topology: &Topology, from: HostId, to: HostId) -> Option<Rate> {
        let (from, to) = (topology.leaf(from), topology.leaf(to));
        let meet = topology.meet(from, to);
        let below = |vertex: &VertexId| *vertex != meet;
        let up = topology.climb(from).take_while(below).map(|v| self.up[v.0]);
        let down = topology.climb(to).take_while(below).map(|v| self.down[v.0]);
        up.chain(down).min_by(|one, other| one.bytes_per_s.total_cmp(&other.bytes_per_s))
    }

    /// Returns the rate of the path from one host to another: that of its slowest link, or of the
    /// path if it was measured by itself and is slower. `None` from a host to itself.
    #[must_use]
    pub fn path(&self, topology: &Topology, from: HostId, to: HostId) -> Option<Rate> {
        let link = self.slowest_link(topology, from, to)?;
        let path = self.measured(from, to).and_then(|peer| peer.to).map(|path| path.ceiling);
        Some(path.filter(|path| path.bytes_per_s < link.bytes_per_s).unwrap_or(link))
    }

    /// Returns the round-trip time between two hosts in seconds: zero from a host to itself.
    #[must_use]
    pub fn rtt(&self, topology: &Topology, from: HostId, to: HostId) -> f64 {
        if let Some(rtt) = self.measured(from, to).and_then(Peer::rtt) {
            return rtt;
        }
        self.rtt_of_links(topology, from, to)
    }

    /// Returns the round-trip time of the links between two hosts in seconds.
    pub(crate) fn rtt_of_links(&self, topology: &Topology, from: HostId, to: HostId) -> f64 {
        topology.links_between(from, to).map(|link| self.rtt[link.0]).sum()
    }

    /// Returns the median and the 99th percentile of the round-trip times between two hosts in
    /// seconds, as far as they were measured. The planner uses only [`Self::rtt`].
    #[must_use]
    pub fn round_trips(
        &self,
        topology: &Topology,
        from: HostId,
        to: HostId,
    ) -> (Option<f64>, Option<f64>) {
        let (known, back) = (self.measured(from, to), self.measured(to, from));
        let path =
            |peer: Option<&Peer>| peer.and_then(|peer| peer.to.filter(|it| it.rtt.is_some()));
        if let Some(path) = path(known).or_else(|| path(back)) {
            return (path.rtt, path.rtt_p99);
        }
        let median = Some(self.rtt_of_links(topology, from, to)).filter(|rtt| *rtt > 0.0);
        let links = topology.links_between(from, to).filter_map(|link| self.rtt_p99[link.0]);
        (median, links.reduce(|one, other| one + other))
    }

    /// Returns the measured ceiling of the goodput from one host to another in bytes per second, if
    /// the path was measured by itself.
    #[must_use]
    pub fn ceiling(&self, from: HostId, to: HostId) -> Option<f64> {
        self.measured(from, to)?.ceiling_to()
    }

    /// Returns the rate of a vertex's link to its parent.
    #[must_use]
    pub fn up(&self, vertex: VertexId) -> Rate {
        self.up[vertex.0]
    }

    /// Returns the rate of a vertex's link from its parent.
    #[must_use]
    pub fn down(&self, vertex: VertexId) -> Rate {
        self.down[vertex.0]
    }

    /// Returns these links with each rate at the better or the worse end of its uncertainty.
    pub(crate) fn at_limit(&self, is_best: bool) -> Self {
        let factor = |uncertainty: f64| {
            if is_best { 1.0 + uncertainty } else { 1.0 / (1.0 + uncertainty) }
        };
        self.changed(|rate| rate.bytes_per_s *= factor(rate.uncertainty()))
    }

    /// Returns these links as if no path had been measured by itself.
    pub(crate) fn without_pairs(&self) -> Self {
        let peers = vec![vec![]; self.peers.len()];
        let Self { up, down, rtt, rtt_p99, .. } = self;
        let (up, down) = (up.clone(), down.clone());
        let (rtt, rtt_p99) = (rtt.clone(), rtt_p99.clone());
        Self { up, down, rtt, rtt_p99, peers, has_pairs: false }
    }

    /// Returns these links with a change of each rate.
    fn changed(&self, change: impl Fn(&mut Rate)) -> Self {
        let mut links = self.clone();
        let paths =
            links.peers.iter_mut().flatten().flat_map(|peer| [&mut peer.to, &mut peer.from]);
        let paths = paths.flatten().map(|path| &mut path.ceiling);
        links.up.iter_mut().chain(&mut links.down).chain(paths).for_each(change);
        links
    }

    /// Returns these links with twice the rate at a bottleneck, in both directions since most links
    /// are as fast either way, or `None` if no link is one.
    pub(crate) fn faster(&self, bottleneck: Bottleneck) -> Option<Self> {
        let mut links = self.clone();
        match bottleneck {
            Bottleneck::None => return None,
            Bottleneck::Up(vertex) | Bottleneck::Down(vertex) => {
                links.up[vertex.0].bytes_per_s *= 2.0;
                links.down[vertex.0].bytes_per_s *= 2.0;
            }
            Bottleneck::Path(from, to) => {
                links.change_ceiling(from, to, |rate| rate * 2.0);
                links.change_ceiling(to, from, |rate| rate * 2.0);
            }
        }
        Some(links)
    }

    /// Returns the names of links and paths that carry nothing.
    pub(crate) fn dead(&self, topology: &Topology) -> Vec<String> {
        let name = |bottleneck: Bottleneck| bottleneck.text(topology);
        let is_dead = |rate: Rate| rate.bytes_per_s <= 0.0;
        let links = (1..topology.vertices()).map(VertexId).flat_map(|vertex| {
            let up = is_dead(self.up(vertex)).then_some(Bottleneck::Up(vertex));
            let down = is_dead(self.down(vertex)).then_some(Bottleneck::Down(vertex));
            [up, down].into_iter().flatten()
        });
        let paths = topology.host_ids().flat_map(|from| {
            let dead = |peer: &&Peer| peer.to.is_some_and(|path| is_dead(path.ceiling));
            let dead = self.peers(from).iter().filter(dead);
            dead.map(move |peer| Bottleneck::Path(from, peer.host))
        });
        links.chain(paths).filter_map(name).collect()
    }

    /// Returns these links as if each that carries nothing carried much.
    pub(crate) fn alive(&self) -> Self {
        self.changed(|rate| {
            if rate.bytes_per_s <= 0.0 {
                rate.bytes_per_s = MUCH;
            }
        })
    }

    /// Changes the ceiling of a path that was measured by itself.
    pub(crate) fn change_ceiling(
        &mut self,
        from: HostId,
        to: HostId,
        changed: impl Fn(f64) -> f64,
    ) {
        let change = |path: &mut Option<Path>| {
            if let Some(path) = path {
                path.ceiling.bytes_per_s = changed(path.ceiling.bytes_per_s);
            }
        };
        change(&mut self.peer(from, to).to);
        change(&mut self.peer(to, from).from);
    }

    /// Returns whether the links of two vertices have the same rates and delays.
    pub(crate) fn are_alike(&self, one: VertexId, other: VertexId) -> bool {
        let rates = |v: VertexId| (self.up[v.0].bytes_per_s, self.down[v.0].bytes_per_s);
        rates(one) == rates(other) && self.rtt[one.0] == self.rtt[other.0]
    }

    /// Returns whether any path was measured by itself.
    pub(crate) const fn has_pairs(&self) -> bool {
        self.has_pairs
    }
}

impl Measurement {
    /// Returns the rate that this measurement and the rate without it imply together.
    fn blend(&self, without: Rate, half_life_s: f64) -> Rate {
        let confidence = self.confidence_today(half_life_s);
        let throughput = self.mbit * BYTES_PER_MBIT;
        let is_nominal = self.is_least && throughput < without.bytes_per_s;
        let throughput = if is_nominal { without.bytes_per_s } else { throughput };
        let measured = throughput * goodput_share(self.loss);
        let faded = measured.powf(confidence) * without.bytes_per_s.powf(1.0 - confidence);
        // A geometric mean with zero is zero, and a dead link would never be tried again.
        let least = without.bytes_per_s * (1.0 - confidence).powi(3);
        let bytes_per_s = faded.max(least);
        if is_nominal {
            return Rate { bytes_per_s, ..without };
        }
        let source = if self.is_inferred { Source::Inferred } else { Source::Measured };
        Rate { bytes_per_s, source, confidence }
    }
}

/// Returns the share of a link's throughput that remains as goodput at a loss rate.
///
/// The throughput at the receiver already lacks the lost datagrams. The congestion control slows
/// the sender down. The factor 16 is an assumption that no measurement has confirmed yet.
#[must_use]
pub fn goodput_share(loss: f64) -> f64 {
    if loss < 1.0 { 1.0 / 16.0f64.mul_add(loss, 1.0) } else { 0.0 }
}

fn records_by_vertex<'a>(
    topology: &Topology,
    network: &'a Network,
) -> Result<Vec<Option<&'a LinkRecord>>, NetworkError> {
    let vertices = (1..topology.vertices()).map(VertexId);
    let vertices: BTreeMap<_, _> = vertices.map(|v| (topology.name(v), v)).collect();
    let mut records = vec![None; topology.vertices()];
    for record in &network.links {
        let unknown = || NetworkError::Unknown(record.of.clone());
        let vertex = vertices.get(record.of.as_str()).ok_or_else(unknown)?;
        record.check()?;
        if records[vertex.0].replace(record).is_some() {
            return Err(NetworkError::Twice(record.of.clone()));
        }
    }
    Ok(records)
}

/// Returns the rate of one direction of each vertex's link.
fn resolve(
    topology: &Topology,
    measurement: impl Fn(usize) -> Option<Measurement>,
    half_life_s: f64,
) -> Vec<Rate> {
    let unknown = Rate { bytes_per_s: 0.0, source: Source::Unknown, confidence: 0.0 };
    let mut rates = vec![unknown; topology.vertices()];
    for (index, host) in topology.hosts().iter().enumerate() {
        let bytes_per_s = host.nic_mbit * BYTES_PER_MBIT * PAYLOAD_SHARE;
        let leaf = topology.leaf(HostId(index));
        rates[leaf.0] = Rate { bytes_per_s, source: Source::Nominal, confidence: 0.0 };
    }
    // Children precede their parent, which starts with the sum of their nominal rates. Their
    // measured rates do not count: a slow host does not slow down its neighbours' uplink.
    for vertex in (1..topology.vertices()).rev() {
        let parent = topology.parent(VertexId(vertex)).unwrap_or(Topology::ROOT);
        rates[parent.0].bytes_per_s += rates[vertex].bytes_per_s;
        if let Some(measurement) = measurement(vertex) {
            rates[vertex] = measurement.blend(rates[vertex], half_life_s);
        }
    }
    rates
}

/// The rate of a link in bytes per second with which no transfer counts as endless.
const MUCH: f64 = 1e12;
/// The relative error of a rate that was measured just now.
const LEAST_UNCERTAINTY: f64 = 0.1;
/// The relative error of a rate that was not measured.
const UNCERTAINTY_UNMEASURED: f64 = 0.5;
const BYTES_PER_MBIT: f64 = 1e6 / 8.0;
/// The share of an interface's rate that datagrams of 1472 bytes leave for payload.
const PAYLOAD_SHARE: f64 = 0.94;
