//! `racksum place`: chooses hosts for the ranks and aggregators of a job.

mod apply;
mod document;
mod dot;
mod slurm;
mod svg;
mod text;
mod words;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use racksum_placer::explain::{Explanation, explain};
use racksum_placer::inventory::Inventory;
use racksum_placer::job::Job;
use racksum_placer::network::{Links, Network};
use racksum_placer::notes::{Note, misplaced, notes};
use racksum_placer::placement::{PlacementRecord, RankNumbers};
use racksum_placer::plan::{Plan, plan_problem, with_aggregators};
use racksum_placer::present::Present;
use racksum_placer::problem::Problem;
use racksum_placer::rebalance::{Rebalance, rebalance};
use racksum_placer::running::{RunningJobs, remaining};
use racksum_placer::shards::shards;
use racksum_placer::topology::{HostId, Topology};
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;

use crate::cluster_file::{placed, read, read_network, wrong};
use crate::exit::{Failure, print_line};
use crate::{args, stderr};

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
        value_parser = args::share)]
    threshold: f64,
    /// Also print the reason for each host, and what would shorten the step.
    #[arg(long)]
    explain: bool,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
    /// Port of the aggregators' control planes, for --slurm and --apply [default: 7177].
    #[arg(long, value_name = "PORT", value_parser = args::number::<u16>(1..=65534))]
    port: Option<u16>,
    #[command(flatten)]
    apply: apply::Apply,
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
    /// An image of the tree.
    Svg,
    /// With --slurm: only the commands that start the aggregators and ranks, for `eval`.
    Shell,
}

/// A plan, and the problem that it solves.
struct Planned<'a> {
    topology: &'a Topology,
    links: &'a Links,
    job: &'a Job,
    plan: Plan,
    rank_numbers: RankNumbers,
    /// The shards of each aggregator.
    shards: u32,
    /// The step time at both ends of the uncertainty of the rates.
    range_s: (f64, f64),
    /// The moves that are worth it, if these were asked for.
    rebalance: Option<Rebalance>,
    notes: Vec<Note>,
    explanation: Option<Explanation>,
}

impl Planned<'_> {
    /// Returns the hosts in use, each with the numbers of its ranks and of its aggregators.
    fn hosts(&self) -> impl Iterator<Item = (HostId, &[u32], u32)> {
        self.plan.placement.hosts().map(|(host, _, aggregators)| {
            let ranks = self.rank_numbers.get(&host).map_or(&[][..], Vec::as_slice);
            (host, ranks, aggregators)
        })
    }
}

impl Args {
    fn port(&self) -> u16 {
        self.port.unwrap_or(racksum_aggregator::PORT)
    }
}

/// Reads the hosts and their links, less the parts of these that other jobs use. Also returns notes
/// about hosts that were measured elsewhere than their labels say. A job on a Slurm allocation gets
/// the cores of its tasks.
fn cluster(args: &Args, job: &mut Job) -> Result<(Topology, Links, Vec<Note>), Failure> {
    let (nodes, inventory): (_, Inventory) = match &args.nodes {
        Some(nodes) => (nodes.clone(), read(nodes)?),
        None => args.slurm.inventory(job)?,
    };
    let mut notes = vec![];
    let (topology, mut links) = match args.net.as_deref() {
        None => {
            let topology = Topology::new(&inventory).map_err(|error| wrong(&nodes, error))?;
            let links = Links::nominal(&topology);
            (topology, links)
        }
        Some(net) => {
            let labelled = inventory.clone();
            let (topology, network) = placed((&nodes, inventory), (net, read_network(net)?))?;
            notes.extend(network.tree.iter().flat_map(|tree| misplaced(&labelled, tree)));
            let network =
                if args.slurm.is_set() { in_allocation(net, network, &topology) } else { network };
            let links = Links::new(&topology, &network).map_err(|error| wrong(net, error))?;
            (topology, links)
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
    Ok((topology, links, notes))
}

/// Returns the measurements of an allocation's hosts. The network file of a cluster has more.
fn in_allocation(net: &Path, network: Network, topology: &Topology) -> Network {
    let records = |network: &Network| network.links.len() + network.pairs.len();
    let all = records(&network);
    let network = network.only_of(topology);
    let left_out = all - records(&network);
    if left_out > 0 {
        stderr::warn(format_args!(
            "{}: {left_out} of {} left out: these links and paths have an end outside the \
             allocation",
            net.display(),
            counted(all, "record")
        ));
    }
    network
}

/// Reads the present placement of a job.
fn present(
    args: &Args,
    topology: &Topology,
    job: &Job,
) -> Result<Option<(Present, PlacementRecord)>, Failure> {
    let Some(path) = &args.placement else { return Ok(None) };
    let record: PlacementRecord = read(path)?;
    let present = Present::of_record(topology, job, &record).map_err(|error| wrong(path, error))?;
    Ok(Some((present, record)))
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.port.is_some() && !args.apply.is_set() && !args.slurm.is_set() {
        return Err(Failure::usage("--port needs --slurm or --apply"));
    }
    let asked = [(args.explain, "--explain"), (args.rebalance, "--rebalance")];
    let asked = asked.into_iter().find_map(|(is_asked, flag)| is_asked.then_some(flag));
    if let Some(flag) = asked.filter(|_| !matches!(args.format, Format::Text | Format::Json)) {
        return Err(Failure::usage(format!("{flag} needs --format text or json")));
    }
    let mut job: Job = read(&args.job)?;
    let (topology, links, misplaced) = cluster(args, &mut job)?;
    let present = present(args, &topology, &job)?;
    if let Some((present, _)) = &present {
        job = present.decided(&job);
    }
    let of_job = |error| wrong(&args.job, error);
    let job = with_aggregators(&topology, &links, &job).map_err(of_job)?;
    let problem = Problem::new(&topology, &links, &job).map_err(of_job)?;
    let plan = match &present {
        Some((present, _)) => present.clone().plan(&problem),
        None => plan_problem(&problem)
            .map_err(|error| Failure::unavailable(PeerText::of(error).as_str()))?,
    };
    let rebalance = args.rebalance.then(|| rebalance(&problem, &plan, args.threshold));
    if let (Some(rebalance), Some((_, record))) = (&rebalance, &present)
        && args.apply.is_set()
    {
        return args.apply.run((&topology, &job), rebalance, record, args.port());
    }
    let explanation = args.explain.then(|| explain(&problem, &plan));
    let range_s = plan.range_s(&problem);
    let planned = Planned {
        topology: &topology,
        links: &links,
        job: &job,
        shards: shards(&problem, &plan.placement, plan.tree.as_ref()),
        notes: [notes(&problem, &plan), misplaced].concat(),
        rank_numbers: match &present {
            Some((_, record)) => record.rank_numbers(&topology),
            None => plan.placement.rank_numbers(),
        },
        plan,
        range_s,
        rebalance,
        explanation,
    };
    let launch =
        args.slurm.is_set().then(|| args.slurm.launch(&planned, args.port())).transpose()?;
    print_line(&match (args.format, launch) {
        (Format::Text, None) => text::of(&planned),
        (Format::Text, Some(launch)) => format!("{}\n\n{}", text::of(&planned), launch.shell()?),
        (Format::Json, None) => document::of(&planned),
        (Format::Json, Some(launch)) => launch.added_to(&document::of(&planned)),
        (Format::Dot, _) => dot::of(&planned),
        (Format::Svg, _) => svg::of(&planned),
        (Format::Shell, Some(launch)) => launch.shell()?,
        (Format::Shell, None) => {
            return Err(Failure::usage("--format shell prints Slurm's commands; pass --slurm too"));
        }
    })
}
