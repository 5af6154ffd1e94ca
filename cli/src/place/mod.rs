//! `racksum place`: chooses hosts for the ranks and aggregators of a job.

mod document;
mod dot;
mod slurm;
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
    /// The hosts of the cluster: labels, interface rates, free resources. `racksum inventory` makes
    /// this file from topologies of other programs.
    #[arg(long, value_name = "FILE", required_unless_present = "slurm")]
    nodes: Option<PathBuf>,
    /// Measurements of the links. Without them, the rates of the hosts' interfaces count.
    #[arg(long, value_name = "FILE")]
    net: Option<PathBuf>,
    /// Also print the reason for each host, and what would shorten the step.
    #[arg(long)]
    explain: bool,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
    #[command(flatten)]
    slurm: slurm::Slurm,
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
    /// With --slurm: only the commands that start the aggregators and ranks, for `eval`.
    Shell,
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
    let mut job: Job = read(&args.job)?;
    let (nodes, inventory): (_, Inventory) = match &args.nodes {
        Some(nodes) => (nodes.clone(), read(nodes)?),
        None => args.slurm.inventory(&mut job)?,
    };
    let network = args.net.as_deref().map(read_network).transpose()?.unwrap_or_default();
    let inventory = match &network.tree {
        Some(tree) => inventory.placed_by(tree),
        None => inventory,
    };
    let topology = Topology::new(&inventory).map_err(|error| wrong(&nodes, error))?;
    let net = args.net.as_ref().unwrap_or(&nodes);
    let links = Links::new(&topology, &network).map_err(|error| wrong(net, error))?;
    let plan = plan(&topology, &links, &job).map_err(|error| match error {
        PlanError::Job(error) => wrong(&args.job, error),
        error => Failure::unavailable(PeerText::of(error).as_str()),
    })?;
    let problem = Problem::new(&topology, &links, &job).map_err(|error| wrong(&args.job, error))?;
    let explanation = args.explain.then(|| explain(&problem, &job, &plan));
    let planned = Planned { topology: &topology, links: &links, job: &job, plan, explanation };
    let launch = args.slurm.is_set().then(|| args.slurm.launch(&planned)).transpose()?;
    print_line(&match (args.format, launch) {
        (Format::Text, None) => text::of(&planned),
        (Format::Text, Some(launch)) => format!("{}\n\n{}", text::of(&planned), launch.shell()?),
        (Format::Json, None) => document::of(&planned),
        (Format::Json, Some(launch)) => launch.added_to(&document::of(&planned)),
        (Format::Dot, _) => dot::of(&planned),
        (Format::Shell, Some(launch)) => launch.shell()?,
        (Format::Shell, None) => {
            return Err(Failure::usage("--format shell prints Slurm's commands; pass --slurm too"));
        }
    })
}
