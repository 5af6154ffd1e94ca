//! `racksum probe learn`: measurements from the counters of running jobs.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use racksum_net::resolve::resolve_blocking;
use racksum_placer::inventory::Inventory;
use racksum_placer::network::{Links, Network};
use racksum_placer::survey::{RankCounters, Transfers, learn};
use racksum_placer::topology::{HostId, Topology};
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::{self, AggregatorStatus, JobStatus, RankStatus};
use racksum_worker::aggregator_sets;

use super::measure::written;
use super::show;
use crate::cluster_file::{now, placed, read, read_network, wrong};
use crate::environment;
use crate::exit::{Failure, print_line};
use crate::out_file::{OutFile, cannot_write};
use crate::status::ask_one;
use crate::{args, stderr};

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
    /// Identity file for aggregators at HOST:PORT. With role aggregator it sees all jobs [env:
    /// RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity.
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
    let older = if args.net.exists() { read_network(&args.net)? } else { Network::default() };
    let (topology, older) = placed((&args.nodes, inventory), (&args.net, older))?;
    let links = Links::new(&topology, &older).map_err(|error| wrong(&args.net, error))?;
    let hosts = Hosts::find(&topology)?;
    let mut counters = vec![];
    for (which, before, after) in args.ask()? {
        counters.extend(hosts.counters(&which, before.as_ref(), &after)?);
    }
    let learned = learn(&topology, &older, &links, &counters);
    if learned == Network::default() {
        return print_line(
            "nothing to learn: no rank of a known host has sent its aggregator a megabyte in \
             ops of a tenth of a second; the file stays as it is",
        );
    }
    let links: Vec<_> = learned.links.iter().map(|link| link.of.clone()).collect();
    let network = Network { measured_at: Some(now()), ..learned.learned_over(older) };
    let mut out = OutFile::create(&args.net)?;
    let text = written(&args.net, &network)?;
    out.file().write_all(text.as_bytes()).map_err(|error| cannot_write(&args.net, &error))?;
    out.commit()?;
    print_line(&format!(
        "learned of {} from {}",
        counted(links.len() as u64, "link"),
        counted(counters.len() as u64, "rank")
    ))?;
    let mut shown = network;
    shown.links.retain(|link| links.contains(&link.of));
    print_line(&show::tables(&Network { pairs: vec![], tree: None, ..shown }).join("\n"))
}

/// An aggregator's name, and its status before and after the time that counts.
type Asked = (String, Option<AggregatorStatus>, AggregatorStatus);

impl Args {
    /// Queries the aggregators: twice if only a part of their time counts.
    fn ask(&self) -> Result<Vec<Asked>, Failure> {
        let identity = environment::identity(self.identity.clone(), self.insecure)?;
        let ask = || {
            let all = self.aggregators.0.iter();
            let statuses = all.map(|which| ask_one(which, identity.as_deref(), self.insecure));
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
                     `address` or `aggregator` in the file of nodes"
                )))
            }
        }
    }

    /// Returns what an aggregator counted of each rank. Warns of ranks on unknown hosts.
    fn counters(
        &self,
        which: &str,
        before: Option<&AggregatorStatus>,
        after: &AggregatorStatus,
    ) -> Result<Vec<RankCounters>, Failure> {
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
                        all.push(counters(&job.job, (host, aggregator), before, rank));
                    }
                    Err(why) => stderr::warn(PeerText::of(format!(
                        "rank {} of job {:?} tells nothing: {why}",
                        rank.rank, job.job
                    ))),
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
             the file of nodes"
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
        let (before, after) = (before.map(of).unwrap_or_default(), of(after));
        Transfers {
            bytes: after.bytes.saturating_sub(before.bytes),
            fragments: after.fragments.saturating_sub(before.fragments),
            again: after.again.saturating_sub(before.again),
        }
    };
    RankCounters {
        job: job.to_owned(),
        host,
        aggregator,
        contributed: transfers(|rank| rank.contributed),
        results: transfers(|rank| rank.results),
        busy_s: seconds(since(|rank| rank.busy_ms)),
        waited_s: seconds(since(|rank| rank.waited_ms)),
        round_trip_us: after.round_trip_us.map(|trip_us| trip_us as f64),
    }
}
