//! `racksum place`: chooses hosts for the ranks and aggregators of a job.

mod document;
mod dot;
mod svg;
mod text;
mod words;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use racksum_net::file::read_text;
use racksum_placer::explain::{Explanation, explain};
use racksum_placer::inventory::Inventory;
use racksum_placer::job::{Job, Setting};
use racksum_placer::network::{Links, Network};
use racksum_placer::placement::{Placement, PlacementRecord};
use racksum_placer::plan::{Plan, plan_problem, with_aggregators};
use racksum_placer::problem::Problem;
use racksum_placer::rebalance::{Rebalance, present_plan, rebalance};
use racksum_placer::running::{RunningJobs, remaining};
use racksum_placer::shards::shards;
use racksum_placer::topology::Topology;
use racksum_proto::peer_text::PeerText;
use serde::de::DeserializeOwned;

use crate::args;
use crate::exit::{Failure, print_line};

/// Chooses hosts for the ranks and aggregators of a job, such that a step's all-reduce takes the
/// least time that the links allow.
///
/// All files are TOML, or JSON if their names end in .json; docs/placement.md describes them.
#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The needs of the job, and the bytes that it sends.
    #[arg(long, value_name = "FILE")]
    job: PathBuf,
    /// The hosts of the cluster: labels, interface rates, free resources.
    #[arg(long, value_name = "FILE")]
    nodes: PathBuf,
    /// Measurements of the links. Without them, the rates of the hosts' interfaces count.
    #[arg(long, value_name = "FILE")]
    net: Option<PathBuf>,
    /// The jobs that run and load the links: each with its job, its placement and its period.
    #[arg(long, value_name = "FILE")]
    jobs: Option<PathBuf>,
    /// The present placement, as `--format json` printed it: print its step time instead of a plan.
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Also print the moves that save more of the step time than --threshold.
    #[arg(long, requires = "placement")]
    rebalance: bool,
    /// The share of the step time that moves must save, from 0 to 1.
    #[arg(long, value_name = "SHARE", requires = "rebalance", default_value_t = 0.1,
        value_parser = share)]
    threshold: f64,
    /// Also print the reason for each host, and what would shorten the step.
    #[arg(long)]
    explain: bool,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
}

/// The output format of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Text for people.
    Text,
    /// JSON for programs, one object.
    Json,
    /// A graph for Graphviz.
    Dot,
    /// An image of the tree.
    Svg,
}

/// A plan, and the problem that it solves.
struct Planned<'a> {
    topology: &'a Topology,
    links: &'a Links,
    job: &'a Job,
    plan: Plan,
    /// The shards of each aggregator.
    shards: u32,
    /// The step time at both ends of the uncertainty of the rates.
    range_s: (f64, f64),
    /// The moves that are worth it, if these were asked for.
    rebalance: Option<Rebalance>,
    explanation: Option<Explanation>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut job: Job = read(&args.job)?;
    let inventory: Inventory = read(&args.nodes)?;
    let topology = Topology::new(&inventory).map_err(|error| wrong(&args.nodes, error))?;
    let mut links = match &args.net {
        None => Links::nominal(&topology),
        Some(net) => {
            let network: Network = read(net)?;
            Links::new(&topology, &network).map_err(|error| wrong(net, error))?
        }
    };
    if let Some(jobs) = &args.jobs {
        let running: RunningJobs = read(jobs)?;
        if running.jobs.iter().any(|running| running.job.name == job.name) {
            let why = format!("job {:?} is the one to plan; list only the other jobs", job.name);
            return Err(wrong(jobs, why));
        }
        links = remaining(&topology, &links, &running).map_err(|error| wrong(jobs, error))?;
    }
    let mut present = None;
    if let Some(path) = &args.placement {
        let record: PlacementRecord = read(path)?;
        let placement = Placement::of_record(&topology, &job, &record);
        let placement = placement.map_err(|error| wrong(path, error))?;
        if job.racks == Setting::Given(true) {
            let why = "racks is true; only placements without racks can be compared";
            return Err(wrong(&args.job, why));
        }
        job.racks = Setting::Given(false);
        job.aggregators = placement.aggregators.iter().sum::<u32>().into();
        present = Some(placement);
    }
    let of_job = |error| wrong(&args.job, error);
    let job = with_aggregators(&topology, &links, &job).map_err(of_job)?;
    let problem = Problem::new(&topology, &links, &job).map_err(of_job)?;
    let plan = match present {
        Some(placement) => present_plan(&problem, placement),
        None => plan_problem(&problem)
            .map_err(|error| Failure::unavailable(PeerText::of(error).as_str()))?,
    };
    let rebalance = args.rebalance.then(|| rebalance(&problem, &plan, args.threshold));
    let explanation = args.explain.then(|| explain(&problem, &plan));
    let range_s = plan.range_s(&problem);
    let planned = Planned {
        topology: &topology,
        links: &links,
        job: &job,
        shards: shards(&problem, &plan.placement),
        plan,
        range_s,
        rebalance,
        explanation,
    };
    print_line(&match args.format {
        Format::Text => text::of(&planned),
        Format::Json => document::of(&planned),
        Format::Dot => dot::of(&planned),
        Format::Svg => svg::of(&planned),
    })
}

/// Reads a file as TOML, or as JSON if its name ends in `.json`.
fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let text = read_text(path, MOST_BYTES).map_err(|error| {
        Failure::of_file(format!("cannot read {}: {error}", path.display()), &error)
    })?;
    if path.extension().is_some_and(|extension| extension == "json") {
        serde_json::from_str(&text).map_err(|error| wrong(path, error))
    } else {
        toml::from_str(&text).map_err(|error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let at = line.map_or_else(String::new, |line| format!("line {line}: "));
            wrong(path, format!("{at}{}", error.message()))
        })
    }
}

/// Parses a share from 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    let share: Option<f64> = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// Returns the failure for a file whose content is wrong.
fn wrong(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(PeerText::of(format!("{}: {why}", path.display())).as_str())
}

/// The greatest size of a file: a network file of 5,000 hosts with a record each has 2 MB.
const MOST_BYTES: u64 = 256 << 20;
