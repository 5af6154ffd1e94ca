//! `racksum probe run`: the coordinator of a measurement.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use racksum_net::quic::Credentials;
use racksum_net::runtime::single_threaded;
use racksum_placer::inventory::Inventory;
use racksum_placer::network::Network;
use racksum_probe::{MeasureError, Options, Outcome, measure};
use racksum_proto::peer_text::PeerText;

use super::{report, show};
use crate::cluster_file::{network_today, now, read, wrong};
use crate::exit::{Failure, print_line, with_flags};
use crate::out_file::{OutFile, cannot_write};
use crate::progress::{Line, Work};
use crate::{args, environment, stderr};

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The hosts of the cluster: names or addresses, labels, interface rates. A host runs `racksum
    /// probe serve`.
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// The network file to write: TOML, or JSON if its name ends in .json. Older measurements in it
    /// of links and paths that are not measured now stay until they are too old.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The share of each host's interface that measurements use on average, up to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01, value_parser = positive_share)]
    share: f64,
    /// Bytes that measurements send and receive at each host, at most; with K, M, G or T.
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = args::size)]
    budget: u64,
    /// Pairs of hosts to measure for each two of the innermost domains, besides all pairs within
    /// them [default: all pairs in clusters of up to 32 hosts, otherwise 4].
    #[arg(long, value_name = "N", value_parser = args::number::<u32>(1..=1 << 20))]
    samples: Option<u32>,
    /// Decides which pairs are measured first. If the budget does not suffice for all, another seed
    /// measures other ones.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Identity file with role operator [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity [env: RACKSUM_INSECURE].
    #[arg(long)]
    insecure: bool,
}

fn positive_share(text: &str) -> Result<f64, String> {
    let share = args::share(text).ok().filter(|share| *share >= LEAST_SHARE);
    share.ok_or_else(|| format!("must be a number from {LEAST_SHARE} to 1"))
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let inventory: Inventory = read(&args.nodes)?;
    let older_at_start = older(&args.out)?;
    // A path that cannot be written must not cost a measurement.
    let out = OutFile::create(&args.out)?;
    out.remove_at_signal()?;
    let outcome = measured(args, &inventory)?;
    // Another program may have improved the file in the meantime.
    let older = older(&args.out).unwrap_or_else(|failure| {
        stderr::warn(format_args!("{failure}; the file as it was before is used"));
        older_at_start
    });
    let mut network = Network { measured_at: Some(now()), ..outcome.network.clone() };
    if let Some(older) = older {
        network.half_life_s = older.half_life_s;
        let older = older.at(now()).without_slower(&outcome.passed);
        network = network.over(older, &outcome.topology, &outcome.measured());
    }
    let saved = save(out, &args.out, &network);
    // A full disk must not cost the results.
    report::print(&outcome, args.budget)?;
    print_line(&show::tables(&network).join("\n"))?;
    saved
}

/// Writes a network file.
pub(super) fn save(mut out: OutFile, path: &Path, network: &Network) -> Result<(), Failure> {
    let text = written(path, network)?;
    out.file().write_all(text.as_bytes()).map_err(|error| cannot_write(path, &error))?;
    out.commit()
}

/// Reads the measurements that the output file has already.
pub(super) fn older(path: &Path) -> Result<Option<Network>, Failure> {
    if path.exists() { network_today(path).map(Some) } else { Ok(None) }
}

fn measured(args: &Args, inventory: &Inventory) -> Result<Outcome, Failure> {
    let (identity, insecure) = environment::credentials(args.identity.clone(), args.insecure)?;
    let credentials = Credentials::read_blocking(identity, insecure)?;
    let options = Options {
        credentials,
        share: args.share,
        budget: args.budget,
        samples: samples(args, inventory.hosts.len()),
        seed: args.seed,
    };
    let runtime = single_threaded().map_err(|error| {
        Failure::of_host(format!("cannot start the measurement: {error}"), &error)
    })?;
    let work = Work::new(1_000);
    let progress = std::sync::Arc::clone(&work);
    let line = Line::start(move |passed: Duration| format!("measures: {}", progress.text(passed)));
    let measuring = measure(inventory, &options, |done, all| {
        work.reach(u64::try_from(done * 1_000 / all.max(1)).unwrap_or(0));
    });
    let outcome = runtime.block_on(measuring);
    drop(line);
    outcome.map_err(|error| match error {
        error @ (MeasureError::Inventory(_) | MeasureError::SameAgent { .. }) => {
            wrong(&args.nodes, error)
        }
        MeasureError::Net(error) => error.into(),
        error => Failure::unavailable(with_flags(PeerText::of(error))),
    })
}

/// Returns the number of samples that the flag or the size of the cluster implies.
fn samples(args: &Args, hosts: usize) -> Option<usize> {
    match args.samples {
        Some(samples) => Some(usize::try_from(samples).unwrap_or(usize::MAX)),
        None if hosts <= MOST_HOSTS_FOR_ALL_PAIRS => None,
        None => Some(DEFAULT_SAMPLES),
    }
}

fn written(path: &Path, network: &Network) -> Result<String, Failure> {
    let failed = |why: String| Failure::failed(format!("cannot write {}: {why}", path.display()));
    if path.extension().is_some_and(|extension| extension == "json") {
        serde_json::to_string_pretty(network).map_err(|error| failed(error.to_string()))
    } else {
        toml::to_string(network).map_err(|error| failed(error.to_string()))
    }
}

/// The least share of an interface. With less, a round takes more than 20 minutes.
const LEAST_SHARE: f64 = 0.0001;
/// The greatest cluster of which all pairs are measured by default.
const MOST_HOSTS_FOR_ALL_PAIRS: usize = 32;
/// Pairs for each two innermost domains of larger clusters.
const DEFAULT_SAMPLES: usize = 4;
