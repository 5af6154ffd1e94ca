//! `racksum probe show`: prints a network file.

use std::io::Write;
use std::path::PathBuf;

use racksum_placer::inventory::Inventory;
use racksum_placer::network::{Links, Measurement, Network};

use super::{heat_map, report};
use crate::args;
use crate::cluster_file::{placed, read, read_network, wrong};
use crate::exit::{Failure, print_line};
use crate::out_file::{OutFile, cannot_write};
use crate::table::table;

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The network file, as `racksum probe run` writes it.
    #[arg(long, value_name = "FILE")]
    net: PathBuf,
    /// The hosts of the cluster: checks that the file names no others, and that `nic_mbit` and the
    /// labels are what was measured.
    #[arg(long, value_name = "FILE")]
    nodes: Option<PathBuf>,
    /// Write a heat map of the rates between all hosts to this file.
    #[arg(long, value_name = "FILE", requires = "nodes")]
    svg: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let network = read_network(&args.net)?;
    if let Some(nodes) = &args.nodes {
        let inventory: Inventory = read(nodes)?;
        let labelled = inventory.clone();
        let (topology, placed) = placed((nodes, inventory), (&args.net, network.clone()))?;
        let links = Links::new(&topology, &placed).map_err(|error| wrong(&args.net, error))?;
        report::warn_of_faster_interfaces(&topology, &placed);
        report::warn_of_wrong_labels(&labelled, &placed);
        if let Some(svg) = &args.svg {
            let picture = heat_map::of(&topology, &links).map_err(Failure::usage)?;
            let mut out = OutFile::create(svg)?;
            let written = out.file().write_all(picture.as_bytes());
            written.map_err(|error| cannot_write(svg, &error))?;
            out.commit()?;
        }
    }
    print_line(&tables(&network).join("\n"))
}

/// Returns the tables of links, paths and places of a network.
pub(super) fn tables(network: &Network) -> Vec<String> {
    let half_life_s = network.half_life_s;
    let links = network.links.iter().flat_map(|link| {
        let trips = [link.rtt_us, link.rtt_p99_us];
        let directions = [("up", link.up), ("down", link.down)];
        let directions = directions.into_iter().filter_map(|(name, it)| Some((name, it?)));
        let mut rows: Vec<_> = directions
            .map(|(name, measured)| row([&link.of, name], &measured, trips, half_life_s))
            .collect();
        if rows.is_empty() {
            let unknown = || "unknown".to_owned();
            let [median, p99] = trips.map(micros);
            let none = String::new;
            let of = link.of.clone();
            rows.push([of, none(), unknown(), unknown(), median, p99, none(), none()]);
        }
        rows
    });
    let heads = ["link", "direction", "Mbit/s", "loss", "RTT us", "p99 us", "age", "confidence"];
    let mut lines = table(heads, links.collect());
    if !network.pairs.is_empty() {
        let pairs = network.pairs.iter().map(|pair| {
            let trips = [pair.rtt_us, pair.rtt_p99_us];
            row([&pair.from, &pair.to], &pair.path, trips, half_life_s)
        });
        lines.push(String::new());
        let heads = ["path from", "to", "Mbit/s", "loss", "RTT us", "p99 us", "age", "confidence"];
        lines.extend(table(heads, pairs.collect()));
    }
    if let Some(tree) = &network.tree {
        lines.push(String::new());
        let hosts = tree.hosts.iter();
        let hosts =
            hosts.map(|(host, place)| [host.clone(), place.labels.join("/"), age(place.age_s)]);
        lines.extend(table(["host", "measured in", "age"], hosts.collect()));
    }
    lines
}

fn row(
    names: [&str; 2],
    measured: &Measurement,
    trips_us: [Option<f64>; 2],
    half_life_s: f64,
) -> [String; 8] {
    let [one, other] = names.map(str::to_owned);
    let [median, p99] = trips_us.map(micros);
    let inferred = if measured.is_inferred { " (inferred)" } else { "" };
    let least = if measured.is_least { ">= " } else { "" };
    [
        one,
        other,
        format!("{least}{:.1}", measured.mbit),
        format!("{:.2} %", 100.0 * measured.loss),
        median,
        p99,
        age(measured.age_s),
        format!("{:.2}{inferred}", measured.confidence_today(half_life_s)),
    ]
}

fn micros(rtt_us: Option<f64>) -> String {
    rtt_us.map_or_else(String::new, |rtt_us| format!("{rtt_us:.0}"))
}

/// Formats an age in the largest unit that it fills.
fn age(seconds: f64) -> String {
    match seconds {
        _ if seconds < 120.0 => format!("{seconds:.0} s"),
        _ if seconds < 7200.0 => format!("{:.0} min", seconds / 60.0),
        _ if seconds < 172_800.0 => format!("{:.0} h", seconds / 3600.0),
        _ => format!("{:.0} d", seconds / 86_400.0),
    }
}
