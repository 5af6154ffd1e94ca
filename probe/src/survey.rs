//! A measurement under way: rounds of pairs, with bounds on bytes, shares and flows at once.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::Caller;
use racksum_placer::network::{Links, Network};
use racksum_placer::survey::{
    Contended, ContendedPair, HostRates, Pair, Sample, contended_pairs, fit, rounds, sampled_pairs,
    unconfirmed,
};
use racksum_placer::topology::{HostId, Topology, VertexId};
use racksum_proto::time::Time;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

use crate::PORT;
use crate::agent::PATIENCE;
use crate::message::{PROTOCOL, RATES_MBIT, Train};
use crate::node::{Node, NodeFailure, Unserved};
use crate::outcome::{MeasureError, Options, Outcome, Usage};
use crate::path::{
    FlowOrders, PathPings, measure_pings, path_bytes, proven_train_bytes, train_bytes,
};

/// A measurement under way.
pub(crate) struct Survey<'a> {
    topology: Arc<Topology>,
    options: &'a Options,
    clock: Clock,
    /// The times at which agents without orders are told to stay.
    pub(crate) stays: Interval,
    /// The agents that work, by host.
    nodes: BTreeMap<HostId, Arc<Node>>,
    /// The failures of agents by the names of their hosts.
    failed: BTreeMap<String, String>,
    samples: BTreeMap<(HostId, HostId), Sample>,
    /// The slower ones of two measurements of some paths.
    again: Vec<Sample>,
    /// The names of hosts between which no ping passed.
    dead: Vec<(String, String)>,
    /// The names of hosts between which a train showed no rate.
    without_rate: Vec<(String, String)>,
    unaffordable: usize,
    /// The bytes used at hosts whose agents have failed since.
    used_by_failed: Vec<Usage>,
}

impl<'a> Survey<'a> {
    /// Connects to the agents of all hosts, a few at a time.
    pub(crate) async fn connect(
        topology: Topology,
        options: &'a Options,
    ) -> Result<Self, MeasureError> {
        check_addresses(&topology)?;
        let caller = Arc::new(Caller::new(PROTOCOL, &options.credentials)?);
        let places = Arc::new(Semaphore::new(MOST_CALLS));
        let mut calls = JoinSet::new();
        for id in topology.host_ids() {
            let host = topology.host(id);
            let (name, address) = (host.name.clone(), host.address(PORT));
            let (caller, places) = (Arc::clone(&caller), Arc::clone(&places));
            calls.spawn(async move {
                let _place = places.acquire().await;
                Node::connect(name, &address, &caller).await.map(|node| (id, node))
            });
        }
        let mut survey = Self {
            topology: Arc::new(topology),
            options,
            clock: Clock::start(),
            stays: stays(PATIENCE / 4),
            nodes: BTreeMap::new(),
            failed: BTreeMap::new(),
            samples: BTreeMap::new(),
            again: vec![],
            dead: vec![],
            without_rate: vec![],
            unaffordable: 0,
            used_by_failed: vec![],
        };
        while let Some(call) = survey.hold(calls.join_next()).await {
            match flatten(call) {
                Some(Ok((id, node))) => drop(survey.nodes.insert(id, Arc::new(node))),
                Some(Err(Unserved::Failed(failure))) => survey.note_failure(failure),
                Some(Err(Unserved::Busy { host, busy })) => {
                    // Tell the agents that answered at once, or they would stay busy for a while.
                    calls.shutdown().await;
                    survey.close().await;
                    let (holder, held_s) = (busy.holder, busy.held_s);
                    return Err(MeasureError::Busy { host, holder, held_s });
                }
                None => {}
            }
        }
        let answered = survey.nodes.len();
        if answered < 2 {
            survey.close().await;
            return Err(MeasureError::NoPair { answered, failed: survey.failures() });
        }
        Ok(survey)
    }

    pub(crate) const fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// Records a failure, and uses that agent no more.
    fn note_failure(&mut self, NodeFailure { host, why }: NodeFailure) {
        let failed = self.nodes.extract_if(.., |_, node| node.host == host);
        let used = failed.map(|(_, node)| Usage { host: host.clone(), bytes: node.used() });
        self.used_by_failed.extend(used);
        self.failed.entry(host).or_insert(why);
    }

    pub(crate) fn failures(&self) -> Vec<(String, String)> {
        self.failed.iter().map(|(host, why)| (host.clone(), why.clone())).collect()
    }

    pub(crate) fn samples(&self) -> Vec<Sample> {
        self.samples.values().chain(&self.again).copied().collect()
    }

    fn names(&self, (one, other): Pair) -> (String, String) {
        let name = |host: HostId| self.topology.host(host).name.clone();
        (name(one), name(other))
    }

    /// Measures all chosen pairs, those of one round at the same time.
    pub(crate) async fn measure_pairs(&mut self, progress: &impl Fn(usize, usize)) {
        let (topology, samples) = (Arc::clone(&self.topology), self.options.samples);
        let seed = self.options.seed;
        let pairs = move || rounds(&topology, &sampled_pairs(&topology, samples, seed), MOST_PAIRS);
        let rounds = self.compute(pairs).await;
        for (done, round) in rounds.iter().enumerate() {
            progress(done, rounds.len());
            self.measure_round(round).await;
        }
        progress(rounds.len(), rounds.len());
    }

    async fn measure_round(&mut self, round: &[Pair]) {
        let round = round.iter().copied().filter(|pair| self.both(*pair).is_some());
        // The pairs of a large cluster would leave nothing for its uplinks.
        let reserve = self.options.budget / RESERVE;
        let (affordable, rest): (Vec<_>, Vec<_>) =
            round.partition(|pair| self.can_afford(*pair, 2, reserve));
        self.unaffordable += rest.len();
        if affordable.is_empty() {
            return;
        }
        let turn = self.turn();
        let paths = self.pings(&affordable).await;
        self.rest(&turn).await;
        let directed = |is_back: bool| {
            let turned = |(a, b): Pair| if is_back { (b, a) } else { (a, b) };
            let pairs = paths.keys().copied().map(turned);
            pairs.map(|pair| (pair, self.train_for(pair))).collect::<BTreeMap<_, _>>()
        };
        let trains = [false, true].map(directed);
        let mut rates = self.trains(&trains[0]).await;
        rates.extend(self.trains(&trains[1]).await);
        for ((one, other), path) in paths {
            let Some((rtt_us, rtt_p99_us)) = path.rtt_us else {
                self.dead.push(self.names((one, other)));
                continue;
            };
            for (from, to, loss) in [(one, other, path.loss), (other, one, path.loss_back)] {
                if let Some(&mbit) = rates.get(&(from, to)) {
                    let sample = Sample { from, to, mbit, loss, rtt_us, rtt_p99_us };
                    self.samples.insert((from, to), sample);
                }
            }
        }
    }

    /// Returns whether the budget did not suffice for most pairs. Then most hosts have no neighbour
    /// that they were measured with, and racks would look like many small ones.
    pub(crate) fn is_mostly_unaffordable(&self) -> bool {
        2 * self.unaffordable > self.samples.len()
    }

    /// Measures loss and round-trip times of pairs, all at the same time.
    async fn pings(&mut self, pairs: &[Pair]) -> BTreeMap<Pair, PathPings> {
        let mut tasks = JoinSet::new();
        for &pair in pairs {
            let Some((from, to)) = self.both(pair) else { continue };
            tasks.spawn(async move { Ok((pair, measure_pings(from, to).await?)) });
        }
        self.joined(tasks).await
    }

    /// Sends trains over paths, all at the same time, and waits until the share of the interfaces
    /// allows the next ones. Returns the rates in Mbit/s. A path that no ping passes has rate 0.
    async fn trains(&mut self, trains: &BTreeMap<Pair, Train>) -> BTreeMap<Pair, f64> {
        let turn = self.turn();
        let mut tasks = JoinSet::new();
        for &pair in trains.keys() {
            let Some((from, to)) = self.both(pair) else { continue };
            tasks.spawn(async move { Ok((pair, FlowOrders::open_proven(from, to).await?)) });
        }
        let opened: BTreeMap<_, Option<FlowOrders>> = self.joined(tasks).await;
        let (mut tasks, mut rates) = (JoinSet::new(), BTreeMap::new());
        for (pair, flow) in opened {
            let train = trains[&pair];
            match flow {
                Some(flow) => drop(tasks.spawn(async move { Ok((pair, flow.send(train).await?)) })),
                None => drop(rates.insert(pair, 0.0)),
            }
        }
        for (pair, rate) in self.joined::<Option<f64>>(tasks).await {
            match rate {
                Some(mbit) => drop(rates.insert(pair, mbit)),
                None => self.without_rate.push(self.names(pair)),
            }
        }
        self.rest(&turn).await;
        rates
    }

    async fn joined<T: 'static>(
        &mut self,
        mut tasks: JoinSet<Result<(Pair, T), NodeFailure>>,
    ) -> BTreeMap<Pair, T> {
        let mut values = BTreeMap::new();
        while let Some(task) = self.hold(tasks.join_next()).await {
            match flatten(task) {
                Some(Ok((pair, value))) => drop(values.insert(pair, value)),
                Some(Err(failure)) => self.note_failure(failure),
                None => {}
            }
        }
        values
    }

    /// Starts a turn, after which [`Self::rest`] waits.
    fn turn(&self) -> Turn {
        let used = self.nodes.iter().map(|(host, node)| (*host, node.used())).collect();
        Turn { began: self.clock.now(), used }
    }

    /// Waits until a turn used at most the allowed share of each interface.
    async fn rest(&mut self, turn: &Turn) {
        let needed_s = |(host, node): (&HostId, &Arc<Node>)| {
            let bytes = node.used().saturating_sub(turn.used.get(host).copied().unwrap_or(0));
            8.0 * as_f64(bytes) / (self.nic_mbit(*host) * 1e6 * self.options.share)
        };
        let needed_s = self.nodes.iter().map(needed_s).fold(0.0, f64::max);
        let passed = Duration::from_nanos(self.clock.now().since(turn.began).0);
        let needed = Duration::try_from_secs_f64(needed_s).unwrap_or(Duration::MAX);
        self.hold(sleep(needed.saturating_sub(passed))).await;
    }

    /// Waits, and meanwhile keeps the agents that have no orders.
    pub(crate) async fn hold<T>(&mut self, wait: impl Future<Output = T>) -> T {
        let mut wait = pin!(wait);
        loop {
            tokio::select! {
                biased;
                value = &mut wait => return value,
                _ = self.stays.tick() => {}
            }
            for node in self.nodes.values() {
                node.stay().await;
            }
        }
    }

    /// Runs a computation on a thread of its own: with thousands of hosts it takes seconds, in
    /// which the connections to agents must live.
    pub(crate) async fn compute<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        match self.hold(spawn_blocking(work)).await {
            Ok(value) => value,
            Err(error) => resume_unwind(error.into_panic()),
        }
    }

    /// Measures how much the uplinks of domains carry, one direction of one domain at a time. Those
    /// that limit their hosts are measured until two results agree, up to four times.
    pub(crate) async fn measure_uplinks(&mut self) -> Vec<Contended> {
        let domains = self.topology.inner_domains().collect::<Vec<_>>();
        let mut links: Vec<_> =
            domains.into_iter().flat_map(|of| [(of, true), (of, false)]).collect();
        let (topology, samples) = (Arc::clone(&self.topology), self.samples());
        let rates = self.compute(move || HostRates::new(&topology, &samples)).await;
        let mut found = vec![];
        for _ in 0..CONTENDED_TURNS {
            found.extend(self.measure_contended(links, &rates).await);
            let (topology, samples) = (Arc::clone(&self.topology), self.samples());
            let known = found.clone();
            links = self.compute(move || unconfirmed(&topology, &samples, &known)).await;
            if links.is_empty() {
                break;
            }
        }
        found
    }

    /// Measures links of domains, up or down, one after another.
    async fn measure_contended(
        &mut self,
        links: Vec<(VertexId, bool)>,
        rates: &HostRates,
    ) -> Vec<Contended> {
        let mut found = vec![];
        for (of, is_up) in links {
            // A host that nothing passes loads no link. A train is never longer than one between
            // two hosts with the same interface.
            let is_usable = |host: HostId| {
                rates.passes(&self.topology, host) && self.can_afford((host, host), 2, 0)
            };
            let mut pairs = contended_pairs(&self.topology, of, is_usable);
            pairs.truncate(MOST_PAIRS);
            let paths = pairs.into_iter().map(|(a, b)| if is_up { (a, b) } else { (b, a) });
            let alone = |pair: Pair| {
                let nics_mbit = self.nics_mbit(pair);
                let mbit = rates.path(&self.topology, pair).unwrap_or(nics_mbit);
                (pair, mbit.min(nics_mbit))
            };
            let alone: BTreeMap<_, _> = paths.map(alone).collect();
            // One pair at a time was measured before.
            if alone.len() < 2 {
                continue;
            }
            // What a slow host cannot receive would take the room of other pairs on the link.
            let trains = alone.iter().map(|(pair, mbit)| (*pair, train_of(*mbit, 2))).collect();
            let mut passed = self.trains(&trains).await;
            // A path that nothing passes does not load the link.
            passed.retain(|_, mbit| *mbit > 0.0);
            if passed.len() > 1 {
                let pairs = passed.into_iter().map(|((from, to), mbit)| {
                    let tested_mbit = alone[&(from, to)];
                    ContendedPair { from, to, mbit, tested_mbit }
                });
                found.push(Contended { of, is_up, pairs: pairs.collect() });
            }
        }
        found
    }

    /// Measures paths that differ from what their links imply once more. Where labels are wrong,
    /// other pairs of the round may have slowed a path down; by now, the topology is right.
    pub(crate) async fn measure_again(&mut self, contended: &[Contended]) {
        let (topology, samples) = (Arc::clone(&self.topology), self.samples());
        let contended = contended.to_vec();
        let plan = move || {
            let network = fit(&topology, &samples, &contended);
            let paths = doubtful(&topology, &network, &samples);
            rounds(&topology, &paths, MOST_PAIRS)
        };
        for round in self.compute(plan).await {
            // No host is in two pairs of a round, so none spends more than the check allows.
            let round = round.into_iter().filter(|pair| self.can_afford(*pair, 1, 0));
            let trains = round.map(|pair| (pair, self.train_for(pair))).collect();
            for (pair, mbit) in self.trains(&trains).await {
                let Some(sample) = self.samples.get_mut(&pair) else { continue };
                self.again.push(keep_faster(sample, mbit));
            }
        }
    }

    /// Changes to another topology of the same hosts.
    pub(crate) fn move_to(&mut self, topology: Topology) {
        let numbers: BTreeMap<_, _> =
            topology.host_ids().map(|host| (&topology.host(host).name, host)).collect();
        let old = Arc::clone(&self.topology);
        let new = |host: HostId| numbers.get(&old.host(host).name).copied().unwrap_or(host);
        let samples = self.samples.values().map(|sample| {
            let (from, to) = (new(sample.from), new(sample.to));
            ((from, to), Sample { from, to, ..*sample })
        });
        let samples = samples.collect();
        let nodes = self.nodes.iter().map(|(host, node)| (new(*host), Arc::clone(node))).collect();
        (self.samples, self.nodes) = (samples, nodes);
        self.topology = Arc::new(topology);
    }

    /// Hangs up. Returns the results but for those that are computed from the samples.
    pub(crate) async fn finish(mut self) -> Outcome {
        let used = self.nodes.values();
        let used = used.map(|node| Usage { host: node.host.clone(), bytes: node.used() });
        let used = used.chain(std::mem::take(&mut self.used_by_failed));
        let busiest = used.reduce(|most, it| if it.bytes > most.bytes { it } else { most });
        self.close().await;
        Outcome {
            network: Network::default(),
            passed: vec![],
            failed: self.failures(),
            samples: self.samples.into_values().collect(),
            topology: Arc::unwrap_or_clone(self.topology),
            wrong_labels: vec![],
            has_unknown_racks: false,
            dead: self.dead,
            without_rate: self.without_rate,
            unaffordable: self.unaffordable,
            busiest: busiest.unwrap_or(Usage { host: String::new(), bytes: 0 }),
        }
    }

    /// Ends all connections.
    async fn close(&mut self) {
        let nodes = std::mem::take(&mut self.nodes).into_values();
        let closing: JoinSet<_> = nodes.filter_map(Arc::into_inner).map(Node::close).collect();
        closing.join_all().await;
    }

    fn both(&self, (from, to): Pair) -> Option<(Arc<Node>, Arc<Node>)> {
        Some((Arc::clone(self.nodes.get(&from)?), Arc::clone(self.nodes.get(&to)?)))
    }

    /// Returns whether both hosts of a pair can afford to measure the path and some trains, and
    /// keep a reserve in bytes.
    fn can_afford(&self, pair: Pair, trains: u32, reserve: u64) -> bool {
        let Some((one, other)) = self.both(pair) else { return false };
        let train = proven_train_bytes(self.train_for(pair).bytes);
        let bytes = u64::from(trains) * train + path_bytes() + reserve;
        [one, other].iter().all(|node| node.used() + bytes <= self.options.budget)
    }

    fn nic_mbit(&self, host: HostId) -> f64 {
        self.topology.host(host).nic_mbit
    }

    /// Returns the rate of the slower interface of two hosts.
    fn nics_mbit(&self, (from, to): Pair) -> f64 {
        self.nic_mbit(from).min(self.nic_mbit(to))
    }

    /// Returns a train that is long enough for the hosts' interfaces.
    fn train_for(&self, pair: Pair) -> Train {
        train_of(self.nics_mbit(pair), 1)
    }
}

/// Returns a train that is long enough for a path of this rate, times `lengths`.
fn train_of(mbit: f64, lengths: u32) -> Train {
    // A little more than the path should carry, so that the path decides.
    let mbit = (EXCESS * mbit).clamp(*RATES_MBIT.start(), *RATES_MBIT.end());
    let millis = lengths * TRAIN_MILLIS;
    let bits = mbit * 1e3 * f64::from(millis);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast from float saturates"
    )]
    let bytes = (bits / 8.0) as u64;
    let most = MOST_TRAIN_BYTES * u64::from(lengths);
    Train { bytes: bytes.clamp(train_bytes(LEAST_DATAGRAMS), most), millis, mbit }
}

/// Keeps the faster one of a sample and a second measurement of its path. Returns the slower one.
fn keep_faster(sample: &mut Sample, again_mbit: f64) -> Sample {
    let slower = Sample { mbit: sample.mbit.min(again_mbit), ..*sample };
    sample.mbit = sample.mbit.max(again_mbit);
    slower
}

/// Checks that no two hosts name the same agent.
fn check_addresses(topology: &Topology) -> Result<(), MeasureError> {
    let mut hosts = BTreeMap::new();
    for host in topology.hosts() {
        let address = host.address(PORT);
        if let Some(one) = hosts.insert(address.clone(), &host.name) {
            let (one, other) = (one.clone(), host.name.clone());
            return Err(MeasureError::SameAgent { one, other, address });
        }
    }
    Ok(())
}

/// The start of measurements that run at the same time.
struct Turn {
    began: Time,
    /// Bytes that each host had used by then.
    used: BTreeMap<HostId, u64>,
}

/// Returns the paths that differ from what their links imply.
fn doubtful(topology: &Topology, network: &Network, samples: &[Sample]) -> Vec<Pair> {
    let numbers: BTreeMap<_, _> =
        topology.host_ids().map(|host| (topology.host(host).name.as_str(), host)).collect();
    let find = |name: &str| numbers.get(name).copied();
    let records = network.pairs.iter();
    let slow = records.filter_map(|record| find(&record.from).zip(find(&record.to)));
    let links = Links::new(topology, network).ok();
    let implied =
        |sample: &Sample| Some(links.as_ref()?.path(topology, sample.from, sample.to)?.mbit());
    let fast = samples.iter();
    let fast = fast.filter(|sample| implied(sample).is_some_and(|it| sample.mbit > FAST * it));
    let paths: BTreeSet<_> = slow.chain(fast.map(|sample| (sample.from, sample.to))).collect();
    paths.into_iter().collect()
}

/// Returns the times at which agents are told to stay.
pub(crate) fn stays(period: Duration) -> Interval {
    let mut stays = interval(period);
    stays.set_missed_tick_behavior(MissedTickBehavior::Delay);
    stays
}

/// Returns the result of a task. A task that panicked has printed its panic.
fn flatten<T, E>(task: Result<Result<T, E>, JoinError>) -> Option<Result<T, E>> {
    task.ok()
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 bytes")]
const fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

/// The greatest number of agents that are called at once.
const MOST_CALLS: usize = 64;
/// The greatest number of pairs that are measured at once.
const MOST_PAIRS: usize = 256;
/// The greatest number of times that an uplink is measured.
const CONTENDED_TURNS: u32 = 4;
/// The part of a budget that is kept for uplinks and doubtful paths: the budget over this.
const RESERVE: u64 = 4;
/// The time of a train in milliseconds: a hundred periods of interrupt coalescing and more.
const TRAIN_MILLIS: u32 = 100;
/// The greatest length of a train in bytes. At 10 Gbit/s it takes 3 ms, still dozens of periods of
/// interrupt coalescing.
const MOST_TRAIN_BYTES: u64 = 4_000_000;
/// The least length of a train in datagrams.
const LEAST_DATAGRAMS: u64 = 50;
/// A path whose rate exceeds that of its links by this factor is measured again.
const FAST: f64 = 1.1;
/// The rate of a train, divided by that of the slower interface.
const EXCESS: f64 = 1.25;

#[cfg(test)]
mod tests {
    use super::*;

    /// One great rate that counted twice would confirm itself.
    #[test]
    fn two_measurements_of_a_path_are_two_samples() {
        let hosts = r#"{"hosts": [{"name": "a", "nic_mbit": 1}, {"name": "b", "nic_mbit": 1}]}"#;
        let topology = Topology::new(&serde_json::from_str(hosts).unwrap()).unwrap();
        let [from, to] = ["a", "b"].map(|name| topology.host_named(name).unwrap());
        for (first, again) in [(30.0, 100.0), (100.0, 30.0)] {
            let mut sample =
                Sample { from, to, mbit: first, loss: 0.0, rtt_us: 50.0, rtt_p99_us: 60.0 };
            let slower = keep_faster(&mut sample, again);
            assert_eq!((sample.mbit, slower.mbit), (100.0, 30.0));
        }
    }
}
