//! The coordinator: measures all paths within a budget, and infers the network.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::Credentials;
use racksum_placer::inventory::{Inventory, Tree};
use racksum_placer::network::{Links, Measurement, Network, PairRecord};
use racksum_placer::survey::{
    Contended, Pair, Sample, contended_pairs, fit, found_tree, misplaced, rounds, sampled_pairs,
};
use racksum_placer::topology::{HostId, InventoryError, Topology};
use racksum_proto::time::Time;
use tokio::task::{JoinError, JoinSet};
use tokio::time::sleep;

use crate::PORT;
use crate::datagram::TRAIN_LEN;
use crate::message::Train;
use crate::node::{
    Node, NodeFailure, Path, Way, measure_path, path_bytes, proof_bytes, train_bytes,
};

/// Settings of a measurement.
#[derive(Debug)]
pub struct Options {
    /// Identity of the coordinator, and the certificates that it trusts.
    pub credentials: Credentials,
    /// The share of each host's interface that measurements may use on average, above 0 and at
    /// most 1.
    pub share: f64,
    /// The bytes that measurements may send or receive at each host.
    pub budget: u64,
    /// Pairs of hosts to measure for each two innermost domains; `None` measures all pairs.
    pub samples: Option<usize>,
}

/// Results of a measurement, and hosts and pairs that were not measured.
#[derive(Debug)]
pub struct Outcome {
    /// The rates, losses and round-trip times of links.
    pub network: Network,
    /// The paths that were measured, each with its fastest measurement.
    pub samples: Vec<Sample>,
    /// The topology of `samples`: that of the labels, or the one that was measured.
    pub topology: Topology,
    /// Hosts that were measured elsewhere than their labels say.
    pub wrong_labels: Vec<WrongLabel>,
    /// Pairs of hosts between which no ping passed.
    pub dead: Vec<(String, String)>,
    /// Hosts whose agents did not answer or failed, and why.
    pub failed: Vec<(String, String)>,
    /// Pairs that would have exceeded the budget.
    pub unaffordable: usize,
    /// The greatest number of bytes that measurements used at one host.
    pub most_bytes: u64,
}

/// A host that was measured in another domain than its labels say.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongLabel {
    /// The name of the host.
    pub host: String,
    /// The path of the domain that its labels name.
    pub labelled: String,
    /// The path of the domain whose hosts are closest.
    pub measured: String,
    /// How many times as close they are as those of the labelled domain.
    pub ratio: f64,
}

/// The error of a measurement that yields nothing.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The inventory is inconsistent.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// Fewer than two agents answered.
    #[error("a measurement needs two agents, and {answered} answered{}", listed(failed))]
    NoPair {
        /// The number of agents that answered.
        answered: usize,
        /// Hosts whose agents did not answer, and why.
        failed: Vec<(String, String)>,
    },
    /// No pair was measured.
    #[error("no pair of hosts was measured{}", listed(failed))]
    Nothing {
        /// Hosts whose agents failed, and why.
        failed: Vec<(String, String)>,
    },
}

fn listed(failed: &[(String, String)]) -> String {
    failed.iter().map(|(host, why)| format!("; {host}: {why}")).collect()
}

/// Measures the paths between the hosts of an inventory. Calls `progress` with the number of rounds
/// that are done, and of all.
///
/// # Errors
///
/// If the inventory is inconsistent, or no pair of hosts could be measured.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn measure(
    inventory: &Inventory,
    options: &Options,
    progress: impl Fn(usize, usize),
) -> Result<Outcome, MeasureError> {
    let topology = Topology::new(inventory)?;
    let mut survey = Survey::connect(topology, options).await?;
    survey.measure_pairs(&progress).await;
    if survey.samples.is_empty() {
        return Err(MeasureError::Nothing { failed: survey.failures() });
    }
    let (tree, wrong_labels) = survey.places();
    if let Some(tree) = &tree {
        survey.move_to(Topology::new(&inventory.clone().placed_by(tree))?);
    }
    let contended = survey.measure_uplinks().await;
    survey.measure_again(&contended).await;
    let mut network = Network { tree, ..fit(&survey.topology, &survey.samples(), &contended) };
    network.pairs.extend(survey.dead.iter().flat_map(|(one, other)| {
        [(one, other), (other, one)].map(|(from, to)| dead_path(from, to))
    }));
    let most_bytes = survey.nodes.values().map(|node| node.spent()).max().unwrap_or(0);
    let failed = survey.failures();
    let Survey { topology, nodes, unaffordable, samples, dead, .. } = survey;
    let samples = samples.into_values().collect();
    for node in nodes.into_values().filter_map(Arc::into_inner) {
        node.close().await;
    }
    Ok(Outcome { network, samples, topology, wrong_labels, dead, failed, unaffordable, most_bytes })
}

/// A measurement under way.
struct Survey<'a> {
    topology: Topology,
    options: &'a Options,
    clock: Clock,
    /// The agents that work, by host.
    nodes: BTreeMap<HostId, Arc<Node>>,
    failed: BTreeMap<HostId, String>,
    samples: BTreeMap<(HostId, HostId), Sample>,
    /// Second measurements of some paths.
    again: Vec<Sample>,
    /// The names of hosts between which no ping passed.
    dead: Vec<(String, String)>,
    unaffordable: usize,
}

impl<'a> Survey<'a> {
    /// Connects to the agents of all hosts.
    async fn connect(topology: Topology, options: &'a Options) -> Result<Self, MeasureError> {
        let mut calls = JoinSet::new();
        for id in topology.host_ids() {
            let host = topology.host(id);
            let address = host.address(PORT);
            let credentials = options.credentials.clone();
            calls.spawn(async move { Node::connect(id, &address, &credentials).await });
        }
        let mut survey = Self {
            topology,
            options,
            clock: Clock::start(),
            nodes: BTreeMap::new(),
            failed: BTreeMap::new(),
            samples: BTreeMap::new(),
            again: vec![],
            dead: vec![],
            unaffordable: 0,
        };
        while let Some(call) = calls.join_next().await {
            if let Some(node) = survey.note(flatten(call)) {
                survey.nodes.insert(node.host, Arc::new(node));
            }
        }
        let answered = survey.nodes.len();
        if answered < 2 {
            return Err(MeasureError::NoPair { answered, failed: survey.failures() });
        }
        Ok(survey)
    }

    /// Returns the result of an order. Records a failure, and uses that agent no more.
    fn note<T>(&mut self, result: Option<Result<T, NodeFailure>>) -> Option<T> {
        match result? {
            Ok(value) => Some(value),
            Err(NodeFailure { host, why }) => {
                self.nodes.remove(&host);
                self.failed.entry(host).or_insert(why);
                None
            }
        }
    }

    fn failures(&self) -> Vec<(String, String)> {
        let name = |host: &HostId| self.topology.host(*host).name.clone();
        self.failed.iter().map(|(host, why)| (name(host), why.clone())).collect()
    }

    fn samples(&self) -> Vec<Sample> {
        self.samples.values().chain(&self.again).copied().collect()
    }

    /// Returns where the samples show hosts without labels or with wrong ones.
    fn places(&self) -> (Option<Tree>, Vec<WrongLabel>) {
        let (topology, samples) = (&self.topology, self.samples());
        let wrong = misplaced(topology, &samples).into_iter().map(|found| WrongLabel {
            host: topology.host(found.host).name.clone(),
            labelled: topology.name(found.labelled).into(),
            measured: topology.name(found.measured).into(),
            ratio: found.ratio,
        });
        (found_tree(topology, &samples), wrong.collect())
    }

    /// Measures all chosen pairs, those of one round at the same time.
    async fn measure_pairs(&mut self, progress: &impl Fn(usize, usize)) {
        let pairs = sampled_pairs(&self.topology, self.options.samples);
        let rounds = rounds(&self.topology, &pairs);
        for (done, round) in rounds.iter().enumerate() {
            progress(done, rounds.len());
            self.measure_round(round).await;
        }
        progress(rounds.len(), rounds.len());
    }

    async fn measure_round(&mut self, round: &[Pair]) {
        let round = round.iter().copied().filter(|pair| self.both(*pair).is_some());
        let (affordable, rest): (Vec<_>, Vec<_>) =
            round.partition(|pair| self.can_afford(*pair, 2));
        self.unaffordable += rest.len();
        let turn = self.turn();
        let paths = self.paths(&affordable).await;
        self.rest(&turn).await;
        let ways = |is_back: bool| {
            let turned = |(a, b): Pair| if is_back { (b, a) } else { (a, b) };
            paths.keys().copied().map(turned).collect::<Vec<_>>()
        };
        let mut rates = self.trains(&ways(false), 1).await;
        rates.extend(self.trains(&ways(true), 1).await);
        for ((one, other), path) in paths {
            let Some((rtt_us, _)) = path.rtt_us else {
                let name = |host: HostId| self.topology.host(host).name.clone();
                self.dead.push((name(one), name(other)));
                continue;
            };
            for (from, to, loss) in [(one, other, path.loss), (other, one, path.loss_back)] {
                if let Some(&mbit) = rates.get(&(from, to)) {
                    let sample = Sample { from, to, mbit, loss, rtt_us };
                    self.samples.insert((from, to), sample);
                }
            }
        }
    }

    /// Measures loss and round-trip times of pairs, all at the same time.
    async fn paths(&mut self, pairs: &[Pair]) -> BTreeMap<Pair, Path> {
        let mut tasks = JoinSet::new();
        for &pair in pairs {
            let Some((from, to)) = self.both(pair) else { continue };
            tasks.spawn(async move { Ok((pair, measure_path(&from, &to).await?)) });
        }
        self.joined(tasks).await
    }

    /// Sends trains over paths, all at the same time, and waits until the share of the interfaces
    /// allows the next ones. Returns the rates in Mbit/s. A path that no ping passes has rate 0.
    async fn trains(&mut self, paths: &[Pair], lengths: u32) -> BTreeMap<Pair, f64> {
        let turn = self.turn();
        let mut tasks = JoinSet::new();
        for &pair in paths {
            let Some((from, to)) = self.both(pair) else { continue };
            tasks.spawn(async move { Ok((pair, Way::open(from, to).await?)) });
        }
        let opened: BTreeMap<_, Option<Way>> = self.joined(tasks).await;
        let (mut tasks, mut rates) = (JoinSet::new(), BTreeMap::new());
        for (pair, way) in opened {
            let train = self.train_for(pair, lengths);
            match way {
                Some(way) => drop(tasks.spawn(async move { Ok((pair, way.send(train).await?)) })),
                None => drop(rates.insert(pair, 0.0)),
            }
        }
        rates.extend(self.joined(tasks).await);
        self.rest(&turn).await;
        rates
    }

    async fn joined<T: 'static>(
        &mut self,
        mut tasks: JoinSet<Result<(Pair, T), NodeFailure>>,
    ) -> BTreeMap<Pair, T> {
        let mut values = BTreeMap::new();
        while let Some(task) = tasks.join_next().await {
            values.extend(self.note(flatten(task)));
        }
        values
    }

    /// Starts a turn, after which [`Self::rest`] waits.
    fn turn(&self) -> Turn {
        let spent = self.nodes.iter().map(|(host, node)| (*host, node.spent())).collect();
        Turn { began: self.clock.now(), spent }
    }

    /// Waits until a turn used at most the allowed share of each interface.
    async fn rest(&self, turn: &Turn) {
        let needed_s = |(host, node): (&HostId, &Arc<Node>)| {
            let bytes = node.spent().saturating_sub(turn.spent.get(host).copied().unwrap_or(0));
            8.0 * as_f64(bytes) / (self.nic_mbit(*host) * 1e6 * self.options.share)
        };
        let needed_s = self.nodes.iter().map(needed_s).fold(0.0, f64::max);
        let passed = Duration::from_nanos(self.clock.now().since(turn.began).0);
        let needed = Duration::try_from_secs_f64(needed_s).unwrap_or(Duration::MAX);
        sleep(needed.saturating_sub(passed)).await;
    }

    /// Measures how much the uplinks of domains carry, one direction of one domain at a time.
    async fn measure_uplinks(&mut self) -> Vec<Contended> {
        let mut found = vec![];
        for of in self.topology.inner_domains().collect::<Vec<_>>() {
            let pairs = contended_pairs(&self.topology, of, |host| self.nodes.contains_key(&host));
            let pairs: Vec<_> =
                pairs.into_iter().filter(|pair| self.can_afford(*pair, 4)).collect();
            for is_up in [true, false] {
                let paths: Vec<_> =
                    pairs.iter().map(|&(a, b)| if is_up { (a, b) } else { (b, a) }).collect();
                let rates = self.trains(&paths, 2).await;
                if rates.len() > 1 {
                    let pairs = rates.into_iter().map(|((from, to), mbit)| (from, to, mbit));
                    found.push(Contended { of, is_up, pairs: pairs.collect() });
                }
            }
        }
        found
    }

    /// Measures paths that differ from what their links imply once more. Where labels are wrong,
    /// other pairs of the round may have slowed a path down; by now, the topology is right.
    async fn measure_again(&mut self, contended: &[Contended]) {
        let network = fit(&self.topology, &self.samples(), contended);
        let find = |name: &str| self.topology.host_named(name);
        let slow = network.pairs.iter();
        let slow = slow.filter_map(|record| find(&record.from).zip(find(&record.to)));
        let links = Links::new(&self.topology, &network).ok();
        let implied =
            |(from, to): Pair| Some(links.as_ref()?.path(&self.topology, from, to)?.mbit());
        let fast = self.samples.values().map(|sample| ((sample.from, sample.to), sample.mbit));
        let fast = fast.filter(|(pair, mbit)| implied(*pair).is_some_and(|it| *mbit > FAST * it));
        let paths: BTreeSet<_> = slow.chain(fast.map(|(pair, _)| pair)).collect();
        let paths: Vec<_> = paths.into_iter().collect();
        for round in rounds(&self.topology, &paths) {
            // No host is in two pairs of a round, so none spends more than the check allows.
            let round: Vec<_> =
                round.into_iter().filter(|pair| self.can_afford(*pair, 1)).collect();
            for (pair, mbit) in self.trains(&round, 1).await {
                let Some(sample) = self.samples.get_mut(&pair) else { continue };
                self.again.push(Sample { mbit, ..*sample });
                sample.mbit = sample.mbit.max(mbit);
            }
        }
    }

    /// Changes to another topology of the same hosts.
    fn move_to(&mut self, topology: Topology) {
        let new = |old: HostId| {
            let name = &self.topology.host(old).name;
            topology.host_named(name).unwrap_or(old)
        };
        let samples = self.samples.values().map(|sample| {
            let (from, to) = (new(sample.from), new(sample.to));
            ((from, to), Sample { from, to, ..*sample })
        });
        let samples = samples.collect();
        let nodes = self.nodes.iter().map(|(host, node)| (new(*host), Arc::clone(node))).collect();
        let failed = self.failed.iter().map(|(host, why)| (new(*host), why.clone())).collect();
        (self.samples, self.nodes, self.failed) = (samples, nodes, failed);
        self.topology = topology;
    }

    fn both(&self, (from, to): Pair) -> Option<(Arc<Node>, Arc<Node>)> {
        Some((Arc::clone(self.nodes.get(&from)?), Arc::clone(self.nodes.get(&to)?)))
    }

    /// Returns whether both hosts of a pair can afford to measure the path and some trains.
    fn can_afford(&self, pair: Pair, trains: u32) -> bool {
        let Some((one, other)) = self.both(pair) else { return false };
        let train = train_bytes(self.train_for(pair, 1).bytes.div_ceil(TRAIN_LEN as u64));
        let bytes = u64::from(trains) * (train + proof_bytes()) + path_bytes();
        [one, other].iter().all(|node| node.spent() + bytes <= self.options.budget)
    }

    fn nic_mbit(&self, host: HostId) -> f64 {
        self.topology.host(host).nic_mbit
    }

    /// Returns a train that is long enough for the hosts' interfaces, times `lengths`.
    fn train_for(&self, (from, to): Pair, lengths: u32) -> Train {
        // A little more than the interfaces should carry, so that the path decides.
        let mbit = EXCESS * self.nic_mbit(from).min(self.nic_mbit(to));
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
}

/// The start of measurements that run at the same time.
struct Turn {
    began: Time,
    /// Bytes that each host had used by then.
    spent: BTreeMap<HostId, u64>,
}

/// Returns the record of a path that no ping passed.
fn dead_path(from: &str, to: &str) -> PairRecord {
    let path = Measurement {
        mbit: 0.0,
        loss: 1.0,
        age_s: 0.0,
        confidence: 1.0,
        is_inferred: false,
        is_least: false,
    };
    PairRecord { from: from.into(), to: to.into(), path, rtt_us: None }
}

/// Returns the result of a task. A task that panicked has printed its panic.
fn flatten<T>(task: Result<Result<T, NodeFailure>, JoinError>) -> Option<Result<T, NodeFailure>> {
    task.ok()
}

#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 bytes")]
const fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

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
