//! `racksum probe show`: prints a network file.

use std::io::Write;
use std::path::PathBuf;

use racksum_placer::inventory::Inventory;
use racksum_placer::network::{Links, Measurement, Network};
use racksum_placer::topology::Topology;

use super::heat_map;
use crate::args;
use crate::cluster_file::{read, read_network, wrong};
use crate::exit::{Failure, print_line};
use crate::out_file::{OutFile, cannot_write};
use crate::table::table;

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The network file, as `racksum probe run` writes it.
    #[arg(long, value_name = "FILE")]
    net: PathBuf,
    /// The hosts of the cluster, for the heat map.
    #[arg(long, value_name = "FILE", requires = "svg")]
    nodes: Option<PathBuf>,
    /// Write a heat map of the rates between all hosts to this file.
    #[arg(long, value_name = "FILE", requires = "nodes")]
    svg: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let network = read_network(&args.net)?;
    if let (Some(nodes), Some(svg)) = (&args.nodes, &args.svg) {
        let mut inventory: Inventory = read(nodes)?;
        if let Some(tree) = &network.tree {
            inventory = inventory.placed_by(tree);
        }
        let topology = Topology::new(&inventory).map_err(|error| wrong(nodes, error))?;
        let links = Links::new(&topology, &network).map_err(|error| wrong(&args.net, error))?;
        let picture = heat_map::of(&topology, &links).map_err(Failure::usage)?;
        let mut out = OutFile::create(svg)?;
        let written = out.file().write_all(picture.as_bytes());
        written.map_err(|error| cannot_write(svg, &error))?;
        out.commit()?;
    }
    print_line(&tables(&network).join("\n"))
}

/// Returns the tables of links, paths and places of a network.
pub(super) fn tables(network: &Network) -> Vec<String> {
    let half_life_s = network.half_life_s;
    let links = network.links.iter().flat_map(|link| {
        let ways = [("up", link.up), ("down", link.down)];
        let ways = ways.into_iter().filter_map(|(way, measured)| Some((way, measured?)));
        let mut rows: Vec<_> = ways
            .map(|(way, measured)| row([&link.of, way], &measured, link.rtt_us, half_life_s))
            .collect();
        if let (true, Some(rtt_us)) = (rows.is_empty(), link.rtt_us) {
            let unknown = || "unknown".to_owned();
            let rtt_us = format!("{rtt_us:.0}");
            let none = String::new;
            rows.push([link.of.clone(), none(), unknown(), unknown(), rtt_us, none(), none()]);
        }
        rows
    });
    let mut lines =
        table(["link", "way", "Mbit/s", "loss", "RTT us", "age", "confidence"], links.collect());
    if !network.pairs.is_empty() {
        let pairs = network.pairs.iter();
        let pairs = pairs.map(|p| row([&p.from, &p.to], &p.path, p.rtt_us, half_life_s));
        lines.push(String::new());
        let heads = ["path from", "to", "Mbit/s", "loss", "RTT us", "age", "confidence"];
        lines.extend(table(heads, pairs.collect()));
    }
    if let Some(tree) = &network.tree {
        lines.push(String::new());
        let hosts = tree.hosts.iter().map(|(host, path)| [host.clone(), path.join("/")]);
        lines.extend(table(["host", "measured in"], hosts.collect()));
    }
    lines
}

fn row(
    names: [&str; 2],
    measured: &Measurement,
    rtt_us: Option<f64>,
    half_life_s: f64,
) -> [String; 7] {
    let [one, other] = names.map(str::to_owned);
    let inferred = if measured.is_inferred { " (inferred)" } else { "" };
    let least = if measured.is_least { ">= " } else { "" };
    [
        one,
        other,
        format!("{least}{:.1}", measured.mbit),
        format!("{:.2} %", 100.0 * measured.loss),
        rtt_us.map_or_else(String::new, |rtt_us| format!("{rtt_us:.0}")),
        age(measured.age_s),
        format!("{:.2}{inferred}", measured.confidence_today(half_life_s)),
    ]
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
