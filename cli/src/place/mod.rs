//! `racksum place`: chooses hosts for the ranks and aggregators of a job.

mod document;
mod dot;
mod text;
mod words;

use std::path::PathBuf;

use clap::ValueEnum;
use racksum_placer::explain::{Explanation, explain};
use racksum_placer::inventory::Inventory;
use racksum_placer::job::Job;
use racksum_placer::network::Links;
use racksum_placer::plan::{Plan, PlanError, plan};
use racksum_placer::problem::Problem;
use racksum_placer::topology::Topology;
use racksum_proto::peer_text::PeerText;

use crate::args;
use crate::cluster_file::{read, read_network, wrong};
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
}

/// A plan, and the problem that it solves.
struct Planned<'a> {
    topology: &'a Topology,
    links: &'a Links,
    job: &'a Job,
    plan: Plan,
    explanation: Option<Explanation>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let job: Job = read(&args.job)?;
    let inventory: Inventory = read(&args.nodes)?;
    let network = args.net.as_deref().map(read_network).transpose()?.unwrap_or_default();
    let inventory = match &network.tree {
        Some(tree) => inventory.placed_by(tree),
        None => inventory,
    };
    let topology = Topology::new(&inventory).map_err(|error| wrong(&args.nodes, error))?;
    let net = args.net.as_ref().unwrap_or(&args.nodes);
    let links = Links::new(&topology, &network).map_err(|error| wrong(net, error))?;
    let plan = plan(&topology, &links, &job).map_err(|error| match error {
        PlanError::Job(error) => wrong(&args.job, error),
        error => Failure::unavailable(PeerText::of(error).as_str()),
    })?;
    let problem = Problem::new(&topology, &links, &job).map_err(|error| wrong(&args.job, error))?;
    let explanation = args.explain.then(|| explain(&problem, &job, &plan));
    let planned = Planned { topology: &topology, links: &links, job: &job, plan, explanation };
    print_line(&match args.format {
        Format::Text => text::of(&planned),
        Format::Json => document::of(&planned),
        Format::Dot => dot::of(&planned),
    })
}
