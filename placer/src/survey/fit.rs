//! The rates, losses and round trips of links that explain samples of paths.

use std::collections::BTreeMap;

use super::directions::{directed_links, down, up};
use super::rates::Rates;
use super::sample::{Contended, Sample};
use crate::network::{LinkRecord, Measurement, Network, PairRecord, RATE_TOLERANCE, is_slower};
use crate::topology::{HostId, Topology, VertexId};

/// Returns the network that samples imply.
///
/// A path is as fast as its slowest link. The rate of a link is therefore the greatest throughput
/// over it that two samples agree on, and a path that is slower than all of its links gets a record
/// of its own. A single greater throughput does not count: after a stall, a token bucket lets more
/// pass for a while.
///
/// A domain's link that let all paths through at the rates of their hosts carries at least that;
/// how much more, only [`Contended`] samples show. Without these it gets no rate.
///
/// A host whose interface is faster than those of all hosts that it was measured with, or faster
/// than its `nic_mbit` says, carries at least the rate that was measured: trains are as fast as the
/// slower interface and a little faster.
///
/// The logarithm of the share of datagrams that arrive, and the median round-trip time, are sums
/// over the links. Least squares without negative values find them. Those of the 99th percentiles
/// are estimates: a path over two links with rare delays seldom has both delays at once.
#[must_use]
pub fn fit(topology: &Topology, samples: &[Sample], contended: &[Contended]) -> Network {
    let rates = Rates::new(topology, samples, contended);
    let arrivals = |sample: &Sample| -(1.0 - sample.loss).max(LEAST_ARRIVALS).ln();
    let directed = |sample: &Sample| directed_links(topology, sample.from, sample.to);
    let losses = least_squares(samples, 2 * topology.vertices(), directed, arrivals);
    let both =
        |sample: &Sample| topology.links_between(sample.from, sample.to).map(|v| v.0).collect();
    let rtts_us = least_squares(samples, topology.vertices(), both, |sample| sample.rtt_us);
    let rtts_p99_us = least_squares(samples, topology.vertices(), both, |it| it.rtt_p99_us);
    let limits = TrainLimits::new(topology, samples);
    let measured = |link: usize| {
        rates.0[link].map(|mbit| Measurement {
            mbit,
            loss: 1.0 - (-losses[link]).exp(),
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: true,
            is_least: limits.hide_more_than(mbit, link),
        })
    };
    let link = |vertex: usize| {
        let rtt_us = Some(rtts_us[vertex]).filter(|rtt_us| *rtt_us >= LEAST_RTT_US);
        let record = LinkRecord {
            of: topology.name(VertexId(vertex)).into(),
            up: measured(up(vertex)),
            down: measured(down(vertex)),
            rtt_us,
            // The two fits are independent, and a percentile is no less than the median.
            rtt_p99_us: rtt_us.map(|rtt_us| rtts_p99_us[vertex].max(rtt_us)),
        };
        (record.up.is_some() || record.down.is_some() || record.rtt_us.is_some()).then_some(record)
    };
    let pairs = fastest_of_paths(samples).into_iter().filter_map(|sample| {
        let links = directed(sample);
        // A link without a rate has no record that could hold its loss.
        let recorded = links.iter().filter(|link| rates.0[**link].is_some());
        let loss = 1.0 - (-recorded.map(|link| losses[*link]).sum::<f64>()).exp();
        let rtt_us: f64 = both(sample).iter().map(|link: &usize| rtts_us[*link]).sum();
        let is_slow = is_slower(sample.mbit, rates.of(&links));
        let is_lossy = sample.loss > loss + LOSS_TOLERANCE;
        let is_far = sample.rtt_us > rtt_us * (1.0 + RTT_TOLERANCE) + RTT_TOLERANCE_US;
        (is_slow || is_lossy || is_far).then(|| record(topology, sample))
    });
    Network {
        links: (1..topology.vertices()).filter_map(link).collect(),
        pairs: pairs.collect(),
        ..Network::default()
    }
}

/// Returns the fastest sample of each path.
fn fastest_of_paths(samples: &[Sample]) -> Vec<&Sample> {
    let mut fastest: BTreeMap<_, &Sample> = BTreeMap::new();
    for sample in samples {
        let known = fastest.entry((sample.from, sample.to)).or_insert(sample);
        if sample.mbit > known.mbit {
            *known = sample;
        }
    }
    fastest.into_values().collect()
}

fn record(topology: &Topology, sample: &Sample) -> PairRecord {
    PairRecord {
        from: topology.host(sample.from).name.clone(),
        to: topology.host(sample.to).name.clone(),
        path: Measurement {
            mbit: sample.mbit,
            loss: sample.loss,
            age_s: 0.0,
            confidence: 1.0,
            is_inferred: false,
            is_least: false,
        },
        rtt_us: Some(sample.rtt_us),
        rtt_p99_us: Some(sample.rtt_p99_us),
    }
}

/// The rates up to which the trains of samples test the links of hosts.
struct TrainLimits {
    /// Per direction of a link: the `nic_mbit` of its host, if it is a host's, and the greatest one
    /// of the hosts at the other ends.
    nics_mbit: Vec<Option<(f64, f64)>>,
}

impl TrainLimits {
    fn new(topology: &Topology, samples: &[Sample]) -> Self {
        let mut nics_mbit = vec![None; 2 * topology.vertices()];
        for sample in samples {
            let nic = |host: HostId| topology.host(host).nic_mbit;
            let (from, to) = (nic(sample.from), nic(sample.to));
            let ends = [
                (up(topology.leaf(sample.from).0), from, to),
                (down(topology.leaf(sample.to).0), to, from),
            ];
            for (link, own, other) in ends {
                let (_, most) = nics_mbit[link].get_or_insert((own, other));
                *most = other.max(*most);
            }
        }
        Self { nics_mbit }
    }

    /// Returns whether a link may carry more than this measured rate.
    fn hide_more_than(&self, mbit: f64, link: usize) -> bool {
        self.nics_mbit[link].is_some_and(|(own, other)| {
            exceeds_nic(mbit, own) || (is_slower(other, own) && mbit >= NIC_IS_LIMIT * other)
        })
    }
}

/// Returns whether a measured rate shows that an interface is faster than its `nic_mbit`.
fn exceeds_nic(mbit: f64, nic_mbit: f64) -> bool {
    mbit > nic_mbit * (1.0 + RATE_TOLERANCE)
}

/// A host whose interface is faster than its `nic_mbit` says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FasterInterface {
    /// The host.
    pub host: HostId,
    /// The greater of the rates that were measured at the host, in Mbit/s. Trains are only a little
    /// faster than `nic_mbit`, so the interface may be faster still.
    pub mbit: f64,
}

/// Returns the hosts whose interfaces were measured to be faster than their `nic_mbit` says.
#[must_use]
pub fn faster_interfaces(topology: &Topology, network: &Network) -> Vec<FasterInterface> {
    let hosts = topology.host_numbers();
    let faster = |link: &LinkRecord| {
        let host = *hosts.get(link.of.as_str())?;
        let rates = [link.up, link.down].into_iter().flatten().map(|measured| measured.mbit);
        let mbit = rates.reduce(f64::max)?;
        exceeds_nic(mbit, topology.host(host).nic_mbit).then_some(FasterInterface { host, mbit })
    };
    network.links.iter().filter_map(faster).collect()
}

/// Returns values of links, none negative, whose sums over the links of each sample are closest to
/// the sample's value: coordinate descent for non-negative least squares.
fn least_squares(
    samples: &[Sample],
    links: usize,
    links_of: impl Fn(&Sample) -> Vec<usize>,
    value: impl Fn(&Sample) -> f64,
) -> Vec<f64> {
    let rows: Vec<_> = samples.iter().map(&links_of).collect();
    let mut rest: Vec<_> = samples.iter().map(value).collect();
    let mut uses = vec![vec![]; links];
    for (row, links) in rows.iter().enumerate() {
        links.iter().for_each(|link| uses[*link].push(row));
    }
    let mut values = vec![0.0f64; links];
    for _ in 0..SWEEPS {
        let mut moved = 0.0f64;
        for (value, rows) in values.iter_mut().zip(&uses).filter(|(_, rows)| !rows.is_empty()) {
            #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 samples")]
            let step = rows.iter().map(|row| rest[*row]).sum::<f64>() / rows.len() as f64;
            let step = step.max(-*value);
            *value += step;
            rows.iter().for_each(|row| rest[*row] -= step);
            moved = moved.max(step.abs());
        }
        if moved < CONVERGED {
            break;
        }
    }
    values
}

/// A rate of at least this share of an interface's is limited by the interface: headers take the
/// rest.
const NIC_IS_LIMIT: f64 = 0.85;
/// Excess loss below this share makes no record of a pair.
const LOSS_TOLERANCE: f64 = 0.01;
/// A round trip that is longer by a smaller share than its links imply makes no record of a pair.
const RTT_TOLERANCE: f64 = 0.2;
/// A difference of a round trip that does not count, in microseconds.
const RTT_TOLERANCE_US: f64 = 50.0;
/// The least share of datagrams that a path can deliver, for its logarithm.
const LEAST_ARRIVALS: f64 = 1e-6;
/// A shorter round trip of a link is noise, in microseconds.
const LEAST_RTT_US: f64 = 0.1;
/// The greatest number of passes over all links.
const SWEEPS: usize = 200;
/// A pass that changes no value by more ends the descent.
const CONVERGED: f64 = 1e-9;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Inventory;
    use crate::network::Links;
    use crate::network::Passed;
    use crate::survey::sampled_pairs;
    use crate::survey::tests::racks;
    use crate::survey::{ContendedPair, HostRates, passed, unconfirmed};

    /// The true rates, losses and round trips of the links of a cluster.
    struct Truth {
        mbit: Vec<f64>,
        loss: Vec<f64>,
        rtt_us: Vec<f64>,
        rtt_p99_us: Vec<f64>,
    }

    impl Truth {
        fn new(topology: &Topology) -> Self {
            let directions = 2 * topology.vertices();
            let mut mbit = vec![1000.0; directions];
            for host in topology.host_ids() {
                mbit[up(topology.leaf(host).0)] = 100.0;
                mbit[down(topology.leaf(host).0)] = 100.0;
            }
            let rtts = |us: f64| vec![us; topology.vertices()];
            let loss = vec![0.0; directions];
            Self { mbit, loss, rtt_us: rtts(50.0), rtt_p99_us: rtts(80.0) }
        }

        fn samples(&self, topology: &Topology) -> Vec<Sample> {
            let pairs = sampled_pairs(topology, None, 1).into_iter();
            let sample = |(from, to): (HostId, HostId)| {
                let links = directed_links(topology, from, to);
                let arrivals: f64 = links.iter().map(|link| 1.0 - self.loss[*link]).product();
                Sample {
                    from,
                    to,
                    mbit: links.iter().map(|link| self.mbit[*link]).fold(f64::INFINITY, f64::min),
                    loss: 1.0 - arrivals,
                    rtt_us: links.iter().map(|link| self.rtt_us[link / 2]).sum(),
                    rtt_p99_us: links.iter().map(|link| self.rtt_p99_us[link / 2]).sum(),
                }
            };
            pairs.flat_map(|(one, other)| [(one, other), (other, one)]).map(sample).collect()
        }
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() <= 1e-6 * other.abs() + 1e-9
    }

    #[test]
    fn slow_and_lossy_links_are_found_in_their_direction() {
        let topology = racks(&[3, 3, 3]);
        let mut truth = Truth::new(&topology);
        let (host, rack) = (topology.vertex("r1h1").unwrap(), topology.vertex("r2").unwrap());
        truth.mbit[up(host.0)] = 20.0;
        truth.loss[down(host.0)] = 0.05;
        truth.mbit[down(rack.0)] = 40.0;
        let network = fit(&topology, &truth.samples(&topology), &[]);
        assert_eq!(network.pairs, []);
        let link = |name: &str| network.links.iter().find(|link| link.of == name).unwrap();
        assert!(close(link("r1h1").up.unwrap().mbit, 20.0));
        assert!(close(link("r1h1").down.unwrap().mbit, 100.0));
        assert!((link("r1h1").down.unwrap().loss - 0.05).abs() < 1e-4);
        assert!(link("r1h1").up.unwrap().loss < 1e-4);
        assert!(close(link("r2").down.unwrap().mbit, 40.0));
        // The uplinks let each single path through, so nothing is known about them.
        assert_eq!((link("r2").up, link("r0").down, link("r0").up), (None, None, None));
    }

    #[test]
    fn a_single_fast_sample_counts_only_once_it_is_confirmed() {
        let topology = racks(&[4, 4]);
        let mut samples = Truth::new(&topology).samples(&topology);
        let find = |s: &Sample| (s.from, s.to) == (HostId(1), HostId(6));
        let fast = samples.iter().position(find).unwrap();
        samples[fast].mbit = 150.0;
        let rate = |samples: &[Sample]| {
            let network = fit(&topology, samples, &[]);
            let link = network.links.into_iter().find(|link| link.of == "r0h1").unwrap();
            link.up.unwrap().mbit
        };
        assert!(close(rate(&samples), 100.0));
        samples.push(Sample { mbit: 145.0, ..samples[fast] });
        assert!(close(rate(&samples), 150.0));
    }

    #[test]
    fn only_paths_at_the_same_time_show_the_rate_of_an_uplink() {
        let topology = racks(&[2, 2]);
        let samples = Truth::new(&topology).samples(&topology);
        let rack = topology.vertex("r0").unwrap();
        let contended = |each: f64| Contended {
            of: rack,
            is_up: true,
            pairs: [(0, 2), (1, 3)]
                .map(|(from, to)| ContendedPair {
                    from: HostId(from),
                    to: HostId(to),
                    mbit: each,
                    tested_mbit: 100.0,
                })
                .into(),
        };
        let rate = |each: &[f64]| {
            let contended: Vec<_> = each.iter().map(|each| contended(*each)).collect();
            let network = fit(&topology, &samples, &contended);
            network.links.into_iter().find(|link| link.of == "r0").and_then(|link| link.up)
        };
        assert!(close(rate(&[60.0]).unwrap().mbit, 120.0));
        assert_eq!(rate(&[99.0]), None);
        // What passed an uplink that limits nothing refutes an older, slower rate.
        let of_rack = |it: &Passed| it.of == "r0" && it.is_up;
        let passed = |each: &[f64]| {
            let contended: Vec<_> = each.iter().map(|each| contended(*each)).collect();
            passed(&topology, &samples, &contended).into_iter().find(of_rack).unwrap().mbit
        };
        assert!(close(passed(&[]), 100.0) && close(passed(&[99.0]), 198.0));
        assert!(close(passed(&[30.0]), 100.0));
        let alone = HostRates::new(&topology, &samples).path(&topology, (HostId(0), HostId(2)));
        assert!(close(alone.unwrap(), 100.0));
        // Trains that were no faster show no limit.
        let mut slow = contended(60.0);
        slow.pairs.iter_mut().for_each(|pair| pair.tested_mbit = 60.0);
        let network = fit(&topology, &samples, &[slow.clone(), slow]);
        assert!(network.links.iter().all(|link| link.of != "r0" || link.up.is_none()));
        // Two that agree count, whatever others say, or else the least.
        assert!(close(rate(&[80.0, 60.0, 59.0, 30.0]).unwrap().mbit, 120.0));
        assert!(close(rate(&[80.0, 60.0, 30.0]).unwrap().mbit, 60.0));
        assert_eq!(rate(&[30.0, 99.0, 98.0]), None);
        let is_open = |each: &[f64]| {
            let contended: Vec<_> = each.iter().map(|each| contended(*each)).collect();
            !unconfirmed(&topology, &samples, &contended).is_empty()
        };
        assert!(is_open(&[60.0]) && is_open(&[80.0, 60.0, 30.0]) && is_open(&[30.0, 99.0]));
        assert!(!is_open(&[99.0]) && !is_open(&[60.0, 80.0, 59.0]));
        // Without samples, the second pair may be limited by its own hosts.
        let is_shown = |sample: &&Sample| [sample.from.0, sample.to.0].iter().all(|it| it % 2 == 0);
        let samples: Vec<_> = samples.iter().filter(is_shown).copied().collect();
        let network = fit(&topology, &samples, &[contended(20.0)]);
        assert!(network.links.iter().all(|link| link.of != "r0" || link.up.is_none()));
    }

    #[test]
    fn totals_of_fewer_pairs_show_no_limit_of_an_uplink() {
        let topology = racks(&[4, 4]);
        let samples = Truth::new(&topology).samples(&topology);
        let of = topology.vertex("r0").unwrap();
        let total = |pairs: usize, each: f64| {
            let pair = |host: usize| ContendedPair {
                from: HostId(host),
                to: HostId(host + 4),
                mbit: each,
                tested_mbit: 100.0,
            };
            Contended { of, is_up: true, pairs: (0..pairs).map(pair).collect() }
        };
        // Two hosts have failed, or can afford no more, after the first measurement.
        let all = [total(4, 70.0), total(2, 99.0), total(2, 100.0)];
        for contended in [all.clone(), [all[1].clone(), all[2].clone(), all[0].clone()]] {
            let network = fit(&topology, &samples, &contended);
            let link = network.links.iter().find(|link| link.of == "r0").unwrap();
            assert!(close(link.up.unwrap().mbit, 280.0), "{link:?}");
            assert_eq!(unconfirmed(&topology, &samples, &contended), [(of, true)]);
        }
    }

    #[test]
    fn a_host_that_nothing_passes_is_known() {
        let topology = racks(&[2, 2]);
        let mut samples = Truth::new(&topology).samples(&topology);
        // Pings pass, and the longer datagrams of trains do not.
        samples.iter_mut().filter(|it| it.to == HostId(1)).for_each(|it| it.mbit = 0.0);
        let rates = HostRates::new(&topology, &samples);
        let passes = [0, 1, 2].map(|host| rates.passes(&topology, HostId(host)));
        assert_eq!(passes, [true, false, true]);
        let unknown = HostRates::new(&topology, &[]);
        assert!(unknown.passes(&topology, HostId(1)));
    }

    #[test]
    fn a_path_that_its_links_do_not_explain_gets_a_record() {
        let topology = racks(&[4, 4]);
        let mut samples = Truth::new(&topology).samples(&topology);
        let odd = samples.iter().position(|s| (s.from, s.to) == (HostId(1), HostId(6))).unwrap();
        samples[odd].mbit = 30.0;
        let network = fit(&topology, &samples, &[]);
        let [pair] = &network.pairs[..] else { panic!("{:?}", network.pairs) };
        assert_eq!((pair.from.as_str(), pair.to.as_str()), ("r0h1", "r1h2"));
        assert!(close(pair.path.mbit, 30.0) && !pair.path.is_inferred);
    }

    #[test]
    fn round_trips_are_divided_among_links() {
        let topology = racks(&[3, 3, 3]);
        let mut truth = Truth::new(&topology);
        truth.rtt_us[topology.vertex("r0").unwrap().0] = 2000.0;
        let samples = truth.samples(&topology);
        let network = fit(&topology, &samples, &[]);
        assert_eq!(network.pairs, []);
        let of = |name: &str| {
            network.links.iter().find(|link| link.of == name).and_then(|link| link.rtt_us)
        };
        let path = |one: &str, other: &str| [one, other].map(|name| of(name).unwrap_or(0.0));
        let across: f64 = ["r0h0", "r1h0"].map(|n| of(n).unwrap()).iter().sum::<f64>()
            + path("r0", "r1").iter().sum::<f64>();
        assert!((across - 2150.0).abs() < 1.0, "{across}");
    }

    #[test]
    fn the_99th_percentiles_are_those_of_the_links_with_rare_delays() {
        let topology = racks(&[3, 3, 3]);
        let mut truth = Truth::new(&topology);
        truth.rtt_p99_us[topology.vertex("r1h1").unwrap().0] = 5000.0;
        let mut samples = truth.samples(&topology);
        let find = |s: &Sample| (s.from, s.to) == (HostId(0), HostId(1));
        let slow = samples.iter().position(find).unwrap();
        samples[slow].mbit = 20.0;
        let network = fit(&topology, &samples, &[]);
        let of = |name: &str| network.links.iter().find(|link| link.of == name).unwrap();
        assert!((of("r1h1").rtt_p99_us.unwrap() - 5000.0).abs() < 60.0, "{:?}", of("r1h1"));
        assert!(network.links.iter().all(|link| link.rtt_p99_us >= link.rtt_us));
        assert_eq!(network.pairs[0].rtt_p99_us, Some(160.0));
        let links = Links::new(&topology, &network).unwrap();
        let trips = |one: usize, other: usize| {
            let (median, p99) = links.round_trips(&topology, HostId(one), HostId(other));
            (median.unwrap() * 1e6, p99.unwrap() * 1e6)
        };
        let (median, p99) = trips(0, 4);
        assert!((median - 200.0).abs() < 1.0 && (p99 - 5240.0).abs() < 1.0, "{median} {p99}");
        // Known in one direction by itself.
        assert_eq!((trips(0, 1), trips(1, 0)), ((100.0, 160.0), (100.0, 160.0)));
    }

    #[test]
    fn a_rate_is_a_lower_bound_where_other_interfaces_limit_the_trains() {
        let topology = {
            let mut inventory =
                Inventory { levels: vec!["rack".into()], hosts: racks(&[3, 2]).hosts().to_vec() };
            inventory.hosts[0].nic_mbit = 1000.0;
            inventory.hosts[4].nic_mbit = 50.0;
            Topology::new(&inventory).unwrap()
        };
        // The first host is as fast as it says, and the last one twice as fast.
        let samples = Truth::new(&topology).samples(&topology);
        let network = fit(&topology, &samples, &[]);
        let of = |name: &str| network.links.iter().find(|link| link.of == name).unwrap();
        let is_least =
            |name: &str| [of(name).up.unwrap(), of(name).down.unwrap()].map(|it| it.is_least);
        assert_eq!((is_least("r0h0"), is_least("r1h1")), ([true; 2], [true; 2]));
        assert_eq!((is_least("r0h1"), is_least("r1h0")), ([false; 2], [false; 2]));
        let [faster] = faster_interfaces(&topology, &network)[..] else { panic!("one is") };
        assert_eq!(topology.host(faster.host).name, "r1h1");
        assert!(close(faster.mbit, 100.0));
        // A slow host with a fast interface has a rate of its own.
        let mut truth = Truth::new(&topology);
        truth.mbit[up(topology.vertex("r0h0").unwrap().0)] = 30.0;
        let network = fit(&topology, &truth.samples(&topology), &[]);
        let slow = network.links.iter().find(|link| link.of == "r0h0").unwrap();
        assert_eq!((slow.up.unwrap().is_least, slow.down.unwrap().is_least), (false, true));
    }
}
