use proptest::prelude::*;

use super::*;
use crate::job::Job;
use crate::model::step_time;
use crate::placement::Placement;
use crate::problem::Problem;
use crate::survey::tests::racks;

/// Racks of 100 Mbit/s interfaces, and the true throughput and losses of each host's uplink.
struct Truth {
    topology: Topology,
    mbit: Vec<f64>,
    /// Lost fragments of 100,000.
    lost: Vec<u32>,
}

/// The bytes of a rank's tensors.
const BYTES: u32 = 100_000_000;

impl Truth {
    fn new(hosts: &[usize]) -> Self {
        let topology = racks(hosts);
        let all = topology.hosts().len();
        Self { topology, mbit: vec![94.0; all], lost: vec![0; all] }
    }

    fn loss(&self, host: usize) -> f64 {
        f64::from(self.lost[host]) / 100_000.0
    }

    /// Returns the counters after one step of a job with a rank on each host but that of the
    /// aggregator. All ranks are busy until the slowest one has sent its data, which the others
    /// wait for after they have sent their own.
    fn counters(&self, aggregator: usize) -> Vec<RankCounters> {
        let hosts = (0..self.mbit.len()).filter(|host| *host != aggregator);
        let time = |host: usize| {
            f64::from(BYTES) * OVERHEAD * 8.0
                / 1e6
                / (self.mbit[host] * goodput_share(self.loss(host)))
        };
        let mut times: Vec<_> = hosts.clone().map(time).collect();
        times.sort_by(f64::total_cmp);
        let (slowest, second) = (times[times.len() - 1], times[times.len() - 2]);
        let counters = |host: usize| {
            let is_slowest = time(host) == slowest;
            let sent = |lost: u32| Transfers {
                bytes: BYTES.into(),
                fragments: 100_000,
                again: lost.into(),
            };
            RankCounters {
                job: "job".into(),
                host: HostId(host),
                aggregator: HostId(aggregator),
                contributed: sent(self.lost[host]),
                results: sent(0),
                busy_s: slowest,
                waited_s: if is_slowest { slowest - second } else { 0.0 },
                round_trip_us: Some(300.0),
                own: None,
            }
        };
        hosts.map(counters).collect()
    }

    /// Returns the measurements that hold the truth, except for the uplink of one host.
    fn network(&self, wrong: usize, mbit: f64) -> Network {
        let measured = |mbit: f64, loss: f64| Measurement {
            mbit,
            loss,
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: false,
            is_least: false,
        };
        let link = |host: usize| LinkRecord {
            of: self.topology.host(HostId(host)).name.clone(),
            up: Some(match host == wrong {
                true => Measurement { age_s: 86_400.0, ..measured(mbit, 0.0) },
                false => measured(self.mbit[host], self.loss(host)),
            }),
            down: Some(measured(94.0, 0.0)),
            rtt_us: Some(100.0),
            rtt_p99_us: None,
        };
        Network { links: (0..self.mbit.len()).map(link).collect(), ..Network::default() }
    }

    /// Returns the step time that a network implies for a job with ranks on `hosts`, in seconds.
    fn step_s(&self, network: &Network, hosts: &[usize], aggregator: usize) -> f64 {
        let links = Links::new(&self.topology, network).unwrap();
        let job = format!("name = 'j'\nranks = {}\nbytes = {BYTES}", hosts.len());
        let job: Job = toml::from_str(&job).unwrap();
        let problem = Problem::new(&self.topology, &links, &job).unwrap();
        let mut placement =
            Placement { ranks: vec![0; self.mbit.len()], aggregators: vec![0; self.mbit.len()] };
        hosts.iter().for_each(|host| placement.ranks[*host] += 1);
        placement.aggregators[aggregator] = 1;
        step_time(&problem, &placement).total_s()
    }

    fn learned(&self, older: &Network, aggregator: usize) -> Network {
        let links = Links::new(&self.topology, older).unwrap();
        learn(&self.topology, older, &links, &self.counters(aggregator)).learned_over(older.clone())
    }
}

fn link<'a>(network: &'a Network, of: &str) -> &'a LinkRecord {
    network.links.iter().find(|link| link.of == of).unwrap()
}

/// Returns the error of a predicted step time as a factor.
fn error(predicted_s: f64, true_s: f64) -> f64 {
    (predicted_s / true_s).max(true_s / predicted_s)
}

#[test]
fn a_host_that_the_others_wait_for_corrects_a_rate_that_was_too_high() {
    let mut truth = Truth::new(&[4]);
    truth.mbit[1] = 20.0;
    let older = truth.network(1, 94.0);
    let step_s = |network: &Network| truth.step_s(network, &[1], 0);
    let true_s = step_s(&truth.network(2, 94.0));
    let mut network = older;
    let mut last = error(step_s(&network), true_s);
    assert!(last > 2.0, "{last}");
    // Each run of the job improves the prediction, and after a few it is close.
    for _ in 0..4 {
        network = truth.learned(&network, 0);
        let next = error(step_s(&network), true_s);
        assert!(next < last, "{next} {last}");
        last = next;
    }
    assert!(last < 1.25, "{last}");
    let up = link(&network, "r0h1").up.unwrap();
    assert!(up.is_inferred && !up.is_least && up.confidence < 1.0, "{up:?}");
    // The hosts that wait do not look slow.
    assert_eq!(link(&network, "r0h2").up.unwrap().mbit, 94.0);
}

#[test]
fn what_a_job_gets_corrects_a_rate_that_was_too_low() {
    let truth = Truth::new(&[4]);
    let older = truth.network(2, 10.0);
    let step_s = |network: &Network| truth.step_s(network, &[2], 0);
    let true_s = step_s(&truth.network(1, 94.0));
    let before = error(step_s(&older), true_s);
    let learned = truth.learned(&older, 0);
    let after = error(step_s(&learned), true_s);
    assert!(before > 1.5 && after < 1.01, "{before} {after}");
    let up = link(&learned, "r0h2").up.unwrap();
    assert!((up.mbit - 94.0).abs() < 0.1 && up.age_s == 0.0, "{up:?}");
}

#[test]
fn a_waiting_job_says_nothing_about_the_limits_of_its_fast_hosts() {
    let mut truth = Truth::new(&[4]);
    truth.mbit[1] = 20.0;
    let unknown = Network::default();
    let learned = truth.learned(&unknown, 0);
    let fast = link(&learned, "r0h2").up.unwrap();
    assert!(fast.is_least && (fast.mbit - 20.0).abs() < 0.1, "{fast:?}");
    let links = Links::new(&truth.topology, &learned).unwrap();
    let nominal = links.up(truth.topology.leaf(HostId(2)));
    assert!((nominal.mbit() - 94.0).abs() < 1e-9, "{nominal:?}");
}

#[test]
fn an_uplink_that_may_be_slow_makes_an_estimate_less_certain() {
    let confidence = |hosts: &[usize], slow: usize| {
        let mut truth = Truth::new(hosts);
        truth.mbit[slow] = 10.0;
        let up =
            link(&truth.learned(&Network::default(), 0), &truth.topology.host(HostId(slow)).name)
                .up
                .unwrap();
        assert!(!up.is_least, "{up:?}");
        up.confidence
    };
    // The slow host has a neighbour in its rack that is fast, or none.
    let (beside, alone) = (confidence(&[2, 2], 3), confidence(&[3, 1], 3));
    assert!((beside - 2.0 * alone).abs() < 1e-9, "{beside} {alone}");
}

#[test]
fn losses_refute_greater_ones_and_invent_none() {
    let mut truth = Truth::new(&[4]);
    truth.lost = vec![0, 1000, 3000, 3000];
    // Without an older loss, queues that the job fills may be what lost the fragments.
    let learned = truth.learned(&Network::default(), 0);
    assert!(
        learned
            .links
            .iter()
            .flat_map(|link| [link.up, link.down])
            .all(|way| { way.is_none_or(|measured| measured.loss == 0.0) })
    );
    let mut older = truth.network(2, 94.0);
    for link in &mut older.links {
        link.up.as_mut().unwrap().loss = 0.02;
        link.down.as_mut().unwrap().loss = 0.02;
    }
    let learned = truth.learned(&older, 0);
    let loss = |of: &str, is_up: bool| learned.loss_of(of, is_up);
    assert!(loss("r0h1", true) < 0.012, "{}", loss("r0h1", true));
    assert!(loss("r0h0", false) < 0.012 && loss("r0h0", true) < 0.002);
    assert_eq!(loss("r0h3", true), 0.02);
}

#[test]
fn each_direction_of_a_path_is_told_by_the_side_that_receives() {
    let truth = Truth::new(&[4]);
    let mut older = truth.network(2, 94.0);
    for link in &mut older.links {
        (link.up.as_mut().unwrap().loss, link.down.as_mut().unwrap().loss) = (0.2, 0.2);
        link.rtt_us = Some(1000.0);
    }
    let sent = |again| Transfers { bytes: BYTES.into(), fragments: 100_000, again };
    let counters = |own: Option<OwnCounters>| {
        let mut all = truth.counters(0);
        for rank in &mut all {
            (rank.contributed, rank.results, rank.own) = (sent(3000), sent(5000), own);
            rank.round_trip_us = None;
        }
        all
    };
    let links = Links::new(&truth.topology, &older).unwrap();
    let learned = |own: Option<OwnCounters>| {
        let learned = learn(&truth.topology, &older, &links, &counters(own));
        let link = link(&learned, "r0h1");
        (link.up.unwrap().loss, link.down.unwrap().loss, link.rtt_us)
    };
    assert_eq!(learned(None), (0.03, 0.05, None));
    assert_eq!(counters(None)[0].differences(), []);
    // The rank sent more copies than were needed, and lacked fewer results than it was sent again.
    let own = OwnCounters { sent: sent(4000), results: sent(2900), round_trip_us: Some(300.0) };
    assert_eq!(learned(Some(own)), (0.03, 0.029, Some(150.0)));
    let difference =
        |of, aggregator, rank, right| Difference { of, aggregator, rank: Some(rank), right };
    let different = counters(Some(own))[0].differences();
    assert_eq!(
        different,
        [
            difference(Figure::LossUp, Some(0.03), 0.04, Side::Aggregator),
            difference(Figure::LossDown, Some(0.05), 0.029, Side::Rank),
            difference(Figure::RoundTrip, None, 300.0, Side::Rank),
        ]
    );
    // Figures that are alike are not told apart.
    let own = OwnCounters { sent: sent(3050), results: sent(5050), round_trip_us: Some(300.0) };
    let mut alike = counters(Some(own)).remove(0);
    alike.round_trip_us = Some(290.0);
    assert_eq!(alike.differences(), []);
}

#[test]
fn round_trips_only_get_shorter() {
    let truth = Truth::new(&[2, 2]);
    let rtt = |network: &Network| {
        Links::new(&truth.topology, network).unwrap().rtt(&truth.topology, HostId(0), HostId(3))
    };
    let mut older = truth.network(0, 94.0);
    assert!((rtt(&truth.learned(&older, 0)) - 200e-6).abs() < 1e-9);
    older.links.iter_mut().for_each(|link| link.rtt_us = Some(1000.0));
    assert!((rtt(&truth.learned(&older, 0)) - 300e-6).abs() < 1e-9);
    assert_eq!(rtt(&truth.learned(&Network::default(), 0)), 0.0);
}

#[test]
fn jobs_that_share_a_link_see_a_lower_bound() {
    let mut truth = Truth::new(&[4]);
    truth.mbit[1] = 20.0;
    let mut counters = truth.counters(0);
    counters.extend(
        truth.counters(0).into_iter().map(|rank| RankCounters { job: "other".into(), ..rank }),
    );
    let links = Links::nominal(&truth.topology);
    let learned = learn(&truth.topology, &Network::default(), &links, &counters);
    assert!(link(&learned, "r0h1").up.unwrap().is_least);
}

#[test]
fn too_few_bytes_and_ranks_beside_their_aggregator_say_nothing() {
    let truth = Truth::new(&[3]);
    let links = Links::nominal(&truth.topology);
    for spoil in [
        |rank: &mut RankCounters| (rank.contributed.bytes, rank.results.bytes) = (999_999, 0),
        |rank: &mut RankCounters| rank.busy_s = 0.099,
        |rank: &mut RankCounters| rank.host = rank.aggregator,
    ] {
        let mut counters = truth.counters(0);
        counters.iter_mut().for_each(spoil);
        assert_eq!(
            learn(&truth.topology, &Network::default(), &links, &counters),
            Network::default()
        );
    }
}

#[test]
fn counters_that_no_interface_allows_say_nothing() {
    let truth = Truth::new(&[3]);
    let mut counters = truth.counters(0);
    for rank in &mut counters {
        (rank.contributed.bytes, rank.results.bytes) = (u64::MAX, u64::MAX);
        rank.waited_s = rank.busy_s;
    }
    let (older, links) = (Network::default(), Links::nominal(&truth.topology));
    let learned = learn(&truth.topology, &older, &links, &counters);
    assert_eq!((learned.links, learned.pairs), (vec![], vec![]));
}

/// Times of which some are so short that the rates are greater than any interface's.
fn seconds() -> impl Strategy<Value = f64> {
    prop_oneof![0.0..1.0, 0.0..1e9]
}

proptest! {
    /// Whatever jobs count, a merged file is valid and no rate falls below what the job got.
    #[test]
    fn any_counters_give_a_file_that_can_be_planned_with(
        ranks in proptest::collection::vec(
            (0..5usize, 0..5usize, 0..u64::MAX / 4, 0..u64::MAX / 4, seconds(), seconds()), 0..12),
        old in 0.0..1e3,
    ) {
        let truth = Truth::new(&[3, 2]);
        let counters: Vec<_> = ranks
            .into_iter()
            .map(|(host, aggregator, bytes, again, busy_s, waited_s)| {
                let sent = Transfers { bytes, fragments: bytes / 2, again };
                RankCounters {
                    job: format!("job{}", again % 2),
                    host: HostId(host),
                    aggregator: HostId(aggregator),
                    contributed: sent,
                    results: sent,
                    busy_s,
                    waited_s,
                    round_trip_us: Some(busy_s),
                    own: Some(OwnCounters {
                        sent,
                        results: sent,
                        round_trip_us: Some(waited_s),
                    }),
                }
            })
            .collect();
        let older = truth.network(1, old);
        let links = Links::new(&truth.topology, &older).unwrap();
        let learned = learn(&truth.topology, &older, &links, &counters);
        let merged = learned.clone().learned_over(older.clone());
        prop_assert!(Links::new(&truth.topology, &merged).is_ok());
        for new in &learned.links {
            // A round trip through a rack may have been shorter, and the file has no record of it.
            let Some(old) = older.links.iter().find(|old| old.of == new.of) else { continue };
            let merged = link(&merged, &new.of);
            for (new, merged) in [(new.up, merged.up), (new.down, merged.down)] {
                if let Some((new, merged)) = new.zip(merged) {
                    prop_assert!(merged.mbit >= new.mbit * (1.0 - 1e-9));
                }
            }
            prop_assert!(merged.rtt_us <= old.rtt_us);
        }
    }
}
