//! `racksum probe learn`: measurements from the counters of running jobs, both those of the
//! aggregators and those that ranks have reported to them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use racksum_net::resolve::resolve_blocking;
use racksum_placer::inventory::Inventory;
use racksum_placer::network::{Links, Network};
use racksum_placer::survey::{Difference, Figure, OwnCounters, RankCounters, Transfers, learn};
use racksum_placer::topology::{HostId, Topology};
use racksum_proto::counted::counted;
use racksum_proto::status::{self, AggregatorStatus, JobStatus, RankStatus};
use racksum_worker::aggregator_sets;

use super::measure::{older, save};
use super::{report, show};
use crate::args;
use crate::cluster_file::{now, placed, read, read_network, wrong};
use crate::environment;
use crate::exit::{Failure, print_line};
use crate::out_file::OutFile;
use crate::status::ask_one;
use crate::table::table;

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The aggregators whose jobs to learn from: each as HOST:PORT or as the path of its status
    /// socket, several as A,B or A+B.
    #[arg(value_name = "AGGREGATORS", value_parser = aggregators)]
    aggregators: Aggregators,
    /// The hosts of the cluster. The addresses of ranks and aggregators show which hosts they are.
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// The network file to improve: TOML, or JSON if its name ends in .json. A new one is written
    /// if there is none.
    #[arg(long, value_name = "FILE")]
    net: PathBuf,
    /// Count for this many seconds from now on [default: since the ranks joined].
    #[arg(long, value_name = "SECONDS", value_parser = args::number::<u64>(args::SECONDS))]
    over: Option<u64>,
    /// Identity file for aggregators at HOST:PORT. With role operator or aggregator it sees
    /// all jobs [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity [env: RACKSUM_INSECURE].
    #[arg(long)]
    insecure: bool,
}

/// The aggregators of `racksum probe learn`.
#[derive(Debug, Clone)]
struct Aggregators(Vec<String>);

fn aggregators(text: &str) -> Result<Aggregators, String> {
    Ok(Aggregators(aggregator_sets(text)?.into_iter().flatten().collect()))
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let inventory: Inventory = read(&args.nodes)?;
    // A wrong file, or one that cannot be written, must not cost the time of `--over`.
    older(&args.net)?;
    let topology = Topology::new(&inventory).map_err(|error| wrong(&args.nodes, error))?;
    Hosts::find(&topology)?;
    let out = OutFile::create(&args.net)?;
    out.remove_at_signal()?;
    let asked = args.ask()?;
    // Another program may have improved the file in the meantime.
    let older = if args.net.exists() { read_network(&args.net)? } else { Network::default() };
    let (topology, older) = placed((&args.nodes, inventory), (&args.net, older))?;
    let links = Links::new(&topology, &older).map_err(|error| wrong(&args.net, error))?;
    let hosts = Hosts::find(&topology)?;
    let (mut ranks, mut doubts) = (vec![], Doubts::default());
    for (which, before, after) in asked {
        ranks.extend(hosts.counters((&which, before.as_ref(), &after), &mut doubts)?);
    }
    report::warn_all(doubts.lines());
    let counters: Vec<_> = ranks.iter().map(|(_, counters)| counters.clone()).collect();
    let learned = learn(&topology, &older, &links, &counters);
    if learned == Network::default() {
        return print_line(
            "nothing to learn: no rank of a known host has sent its aggregator a megabyte in \
             ops of a tenth of a second; the file stays as it is",
        );
    }
    let links: Vec<_> = learned.links.iter().map(|link| link.of.clone()).collect();
    let network = Network { measured_at: Some(now()), ..learned.learned_over(older) };
    save(out, &args.net, &network)?;
    print_line(&format!(
        "learned of {} from {}",
        counted(links.len() as u64, "link"),
        counted(counters.len() as u64, "rank")
    ))?;
    let mut shown = network;
    shown.links.retain(|link| links.contains(&link.of));
    let mut lines = show::tables(&Network { pairs: vec![], tree: None, ..shown });
    lines.extend(differences(&topology, &ranks));
    print_line(&lines.join("\n"))
}

/// Returns a table of the figures that a rank and its aggregator count differently. Returns no line
/// if there are none.
fn differences(topology: &Topology, ranks: &[(u16, RankCounters)]) -> Vec<String> {
    let mut rows = vec![];
    for (rank, counters) in ranks {
        for Difference { of, aggregator, rank: own, right } in counters.differences() {
            let shown = |value: Option<f64>| match (value, of) {
                (None, _) => "unknown".to_owned(),
                (Some(us), Figure::RoundTrip) => format!("{us:.0} us"),
                (Some(share), Figure::LossUp | Figure::LossDown) => {
                    format!("{:.2} %", 100.0 * share)
                }
            };
            let name = match of {
                Figure::LossUp => "loss of contributions",
                Figure::LossDown => "loss of results",
                Figure::RoundTrip => "shortest round trip",
            };
            rows.push([
                rank.to_string(),
                counters.job.clone(),
                topology.host(counters.host).name.clone(),
                name.to_owned(),
                shown(aggregator),
                shown(own),
                format!("the {}'s", right.name()),
            ]);
        }
    }
    if rows.is_empty() {
        return vec![];
    }
    let heads = ["rank", "job", "host", "figure", "by aggregator", "by rank", "counts"];
    std::iter::once(String::new()).chain(table(heads, rows)).collect()
}

/// An aggregator's name, and its status before and after the time that counts.
type Asked = (String, Option<AggregatorStatus>, AggregatorStatus);

impl Args {
    /// Queries the aggregators: twice if only a part of their time counts.
    fn ask(&self) -> Result<Vec<Asked>, Failure> {
        let (identity, insecure) = environment::credentials(self.identity.clone(), self.insecure)?;
        let ask = || {
            let all = self.aggregators.0.iter();
            let statuses = all.map(|which| ask_one(which, identity.as_deref(), insecure));
            statuses.collect::<Result<Vec<_>, _>>()
        };
        let mut before = vec![];
        if let Some(seconds) = self.over {
            before = ask()?;
            std::thread::sleep(Duration::from_secs(seconds));
        }
        let before = before.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let asked = self.aggregators.0.iter().zip(before).zip(ask()?);
        Ok(asked.map(|((which, before), after)| (which.clone(), before, after)).collect())
    }
}

/// The hosts at the addresses of ranks and aggregators.
struct Hosts<'a> {
    topology: &'a Topology,
    at: BTreeMap<IpAddr, Vec<HostId>>,
    aggregators: BTreeMap<SocketAddr, HostId>,
}

impl<'a> Hosts<'a> {
    fn find(topology: &'a Topology) -> Result<Self, Failure> {
        let mut hosts = Self { topology, at: BTreeMap::new(), aggregators: BTreeMap::new() };
        for id in topology.host_ids() {
            let host = topology.host(id);
            for addr in resolved(&host.name, &host.address(racksum_aggregator::PORT))? {
                hosts.at.entry(addr.ip()).or_default().push(id);
            }
            for addr in resolved(&host.name, &host.aggregator(racksum_aggregator::PORT))? {
                hosts.aggregators.insert(addr, id);
            }
        }
        Ok(hosts)
    }

    /// Returns the host at an IP address, or the reason why none is known.
    fn at(&self, ip: IpAddr) -> Result<HostId, String> {
        match self.at.get(&ip.to_canonical()).map(Vec::as_slice) {
            Some([host]) => Ok(*host),
            Some([one, other, ..]) => {
                let [one, other] = [one, other].map(|host| &self.topology.host(*host).name);
                Err(format!("{one} and {other} both have the address {ip}"))
            }
            _ => Err(format!("no host has the address {ip}")),
        }
    }

    fn of_aggregator(&self, which: &str, status: &AggregatorStatus) -> Result<HostId, Failure> {
        let named = resolve_blocking(which).unwrap_or_default();
        let addrs = named.into_iter().chain(status.addr.parse());
        let addrs: Vec<_> = addrs.filter(|addr| !addr.ip().is_unspecified()).collect();
        let own = addrs.iter().find_map(|addr| self.aggregators.get(addr).copied());
        let by_ip = || addrs.iter().map(|addr| self.at(addr.ip())).next();
        match own.map(Ok).or_else(by_ip) {
            Some(Ok(host)) => Ok(host),
            other => {
                let why = other.and_then(Result::err);
                let why = why.unwrap_or_else(|| format!("it serves on {}", status.addr));
                Err(Failure::usage(format!(
                    "cannot tell the host of the aggregator {which}: {why}; give the host's \
                     `address` or `aggregator` in the nodes file"
                )))
            }
        }
    }

    /// Returns the number of each rank, and what the aggregator and the rank itself counted of it.
    fn counters(
        &self,
        (which, before, after): (&str, Option<&AggregatorStatus>, &AggregatorStatus),
        doubts: &mut Doubts,
    ) -> Result<Vec<(u16, RankCounters)>, Failure> {
        let aggregator = self.of_aggregator(which, after)?;
        let mut all = vec![];
        for job in &after.jobs {
            let before = before.and_then(|before| before.jobs.iter().find(|it| is_same(it, job)));
            for rank in &job.ranks {
                let addr = rank.addr.parse::<SocketAddr>();
                let host = addr.map_err(|_| format!("it has no address but {:?}", rank.addr));
                match host.and_then(|addr| self.at(addr.ip())) {
                    Ok(host) => {
                        let before = before.and_then(|job| {
                            job.ranks
                                .iter()
                                .find(|it| (it.rank, &it.addr) == (rank.rank, &rank.addr))
                        });
                        doubts.full.extend(drops(&job.job, before, rank));
                        let counters = counters(&job.job, (host, aggregator), before, rank);
                        all.push((rank.rank, counters));
                    }
                    Err(why) => doubts.unknown.push(format!(
                        "rank {} of job {:?} tells nothing: {why}; give the host's `address` in \
                         the nodes file",
                        rank.rank, job.job
                    )),
                }
            }
        }
        Ok(all)
    }
}

fn resolved(host: &str, address: &str) -> Result<Vec<SocketAddr>, Failure> {
    resolve_blocking(address).map_err(|error| {
        Failure::unavailable(format!(
            "cannot find the address of host {host}: {address}: {error}; give its `address` in \
             the nodes file"
        ))
    })
}

/// Returns whether two statuses are of the same life of a job at an aggregator.
fn is_same(one: &JobStatus, other: &JobStatus) -> bool {
    let life = |job: &JobStatus| (job.id, job.generation);
    (&one.job, &one.group, life(one)) == (&other.job, &other.group, life(other))
}

/// Returns the counters of a rank after some time, less those before.
#[expect(clippy::cast_precision_loss, reason = "far fewer than 2^53 milliseconds")]
fn counters(
    job: &str,
    (host, aggregator): (HostId, HostId),
    before: Option<&RankStatus>,
    after: &RankStatus,
) -> RankCounters {
    let since =
        |counter: fn(&RankStatus) -> u64| counter(after).saturating_sub(before.map_or(0, counter));
    let seconds = |millis: u64| millis as f64 / 1e3;
    let transfers = |of: fn(&RankStatus) -> status::Transfers| {
        to_transfers(of(after).since(before.map(of).unwrap_or_default()))
    };
    let trip_us = |trip_us: u64| trip_us as f64;
    RankCounters {
        job: job.to_owned(),
        host,
        aggregator,
        contributed: transfers(|rank| rank.contributed),
        results: transfers(|rank| rank.results),
        busy_s: seconds(since(|rank| rank.busy_ms)),
        waited_s: seconds(since(|rank| rank.waited_ms)),
        round_trip_us: after.round_trip_us.map(trip_us),
        own: own_since(before, after).map(|own| OwnCounters {
            sent: to_transfers(own.sent),
            results: to_transfers(own.results),
            round_trip_us: own.round_trip_us.map(trip_us),
        }),
    }
}

const fn to_transfers(of: status::Transfers) -> Transfers {
    let status::Transfers { bytes, fragments, again } = of;
    Transfers { bytes, fragments, again }
}

/// Returns what a rank itself has counted since an earlier status. Ranks report every ten seconds,
/// so there may be no report of this time: then `None`.
fn own_since(before: Option<&RankStatus>, after: &RankStatus) -> Option<status::OwnCounters> {
    let earlier = before.and_then(|rank| rank.own).unwrap_or_default();
    let own = after.own?.since(&earlier);
    (own.results.fragments > 0).then_some(own)
}

/// Returns a warning about a rank whose kernel dropped results: their loss is not that of a link.
fn drops(job: &str, before: Option<&RankStatus>, rank: &RankStatus) -> Option<String> {
    let drops = own_since(before, rank).map_or(0, |own| own.kernel_drops);
    (drops > 0).then(|| {
        format!(
            "rank {} of job {job:?} lost {} because its receive buffer was full: the loss of \
             results is not only that of its link; raise net.core.rmem_max on its host",
            rank.rank,
            counted(drops, "datagram")
        )
    })
}

/// Warnings about ranks. A job may have thousands.
#[derive(Default)]
struct Doubts {
    /// Ranks on unknown hosts.
    unknown: Vec<String>,
    /// Ranks whose receive buffers overflow.
    full: Vec<String>,
}

impl Doubts {
    fn lines(self) -> Vec<String> {
        let unknown = report::bounded(self.unknown, ("more rank", "on hosts that are not known"));
        let full = report::bounded(self.full, ("more rank", "whose receive buffers were full"));
        [unknown, full].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warnings_about_thousands_of_ranks_are_few() {
        let lines = |count: usize| (0..count).map(|rank| format!("rank {rank}")).collect();
        let doubts = Doubts { unknown: lines(5000), full: lines(9) };
        let lines = doubts.lines();
        assert_eq!(lines.len(), 9 + 9, "{lines:?}");
        assert_eq!(lines[8], "4992 more ranks on hosts that are not known");
        assert_eq!(lines[17], "1 more rank whose receive buffers were full");
    }
}
