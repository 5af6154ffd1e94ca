//! `cargo xtask bench placement` shows what measured placement gains, and how well the model
//! predicts.
//!
//! Each scene is a cluster of three zones with four hosts each, and one flaw that labels do not
//! show. The bench measures it with `racksum probe`, places a job with `racksum place`, and runs
//! the job at that placement, at one like it, at a best fit that knows labels only, and at random
//! ones. The random placements also test the predictions of the model.

mod accuracy;
mod job;
mod scene;
mod summary;
mod zones;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use fastrand::Rng;
use racksum_placer::inventory::Inventory;
use racksum_placer::job::Job;
use racksum_placer::model::step_time;
use racksum_placer::network::{Links, Network};
use racksum_placer::placement::Placement;
use racksum_placer::problem::Problem;
use racksum_placer::topology::Topology;
use racksum_tools::interrupt;
use racksum_tools::machine;
use racksum_tools::python;
use racksum_tools::shell::{Cmd, path, target};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use self::job::{Program, Server};
use self::scene::{Scene, Seats};
use self::summary::Summary;
use self::zones::Zones;
use crate::host::Provenance;
use crate::process_group::ProcessGroup;
use crate::show_progress;

/// The scenes to run.
#[derive(Debug, Args)]
pub(crate) struct PlacementArgs {
    /// Number of scenes with a flaw.
    #[arg(long, default_value_t = 20)]
    scenes: usize,
    /// Number of uniform scenes.
    #[arg(long, default_value_t = 5)]
    uniform: usize,
    /// Number of scenes that run at the same time, each with hosts of its own.
    #[arg(long, default_value_t = 2)]
    parallel: usize,
    /// Random placements in each scene.
    #[arg(long, default_value_t = 2)]
    random: usize,
    /// Seed of the scenes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of scenes in which the example `words` also trains with DDP.
    #[arg(long, default_value_t = 3)]
    ddp: usize,
    /// Only compare the probe's results with what was set, and measure how much it slows a job
    /// down.
    #[arg(long)]
    probe: bool,
    /// Use this build of racksum instead of a new release build.
    #[arg(long, value_name = "PROGRAM")]
    racksum: Option<PathBuf>,
    /// Bytes that a step reduces.
    #[arg(long, default_value_t = 2_000_000)]
    bytes: u64,
}

/// The steps of one placement, as predicted and as measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    pub(crate) scene: usize,
    pub(crate) flaw: String,
    pub(crate) placement: &'static str,
    pub(crate) ranks: Vec<u32>,
    pub(crate) aggregator: usize,
    pub(crate) predicted_s: f64,
    pub(crate) measured_s: f64,
    /// The step of a DDP training at this placement, if it was measured.
    pub(crate) ddp_s: Option<f64>,
}

/// Runs the scenes; returns whether all bounds hold.
pub(crate) fn run(root: &Path, args: &PlacementArgs) -> Result<bool> {
    interrupt::listen()?;
    if let Some(why) = machine::link_tools(root)? {
        anyhow::bail!("placements need network namespaces: {why}");
    }
    crate::network::sweep();
    let racksum = match &args.racksum {
        Some(racksum) => racksum.clone(),
        None => {
            Cmd::cargo(&["build", "--release", "--locked", "-p", "racksum-cli"]).run(root)?;
            target(root).join("release/racksum")
        }
    };
    let wants_python = args.ddp > 0 && !args.probe;
    let python = wants_python.then(|| python::installed(root)).transpose()?;
    let bench = Bench { root, racksum, python, work: target(root).join("placement"), args };
    fs::create_dir_all(&bench.work)?;
    println!("{}; seed {}", Provenance::now(root).line(), args.seed);
    if args.probe {
        return accuracy::run(&bench);
    }
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        let run = || bench.run_scenes(&next, &outcomes);
        let threads: Vec<_> = (0..args.parallel).map(|_| scope.spawn(run)).collect();
        let join = |thread: ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")))
        };
        threads.into_iter().try_for_each(join)
    })?;
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|outcome: &Outcome| outcome.scene);
    let lines: Result<Vec<_>, _> = outcomes.iter().map(serde_json::to_string).collect();
    fs::write(bench.work.join("results.jsonl"), lines?.join("\n") + "\n")?;
    let summary = Summary::of(&outcomes);
    print!("{summary}");
    Ok(summary.holds())
}

impl Outcome {
    fn line(&self) -> String {
        let Self { scene, flaw, placement, ranks, aggregator, predicted_s, measured_s, ddp_s } =
            self;
        let ddp = ddp_s.map(|ddp_s| format!(", DDP {:>7.1} ms", ddp_s * 1e3)).unwrap_or_default();
        let ranks: String = ranks.iter().map(|ranks| ranks.to_string()).collect();
        format!(
            "scene {scene:>2} {flaw:<20} {placement:<8} ranks {ranks} aggregator {aggregator:>2}: \
             {:>7.1} ms, predicted {:>7.1} ms{ddp}",
            measured_s * 1e3,
            predicted_s * 1e3
        )
    }
}

struct Bench<'a> {
    root: &'a Path,
    racksum: PathBuf,
    /// A Python with the package, if DDP is to train.
    python: Option<PathBuf>,
    work: PathBuf,
    args: &'a PlacementArgs,
}

impl Bench<'_> {
    /// Runs the next scene until all have run.
    fn run_scenes(&self, next: &AtomicUsize, outcomes: &Mutex<Vec<Outcome>>) -> Result<()> {
        let args = self.args;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= args.scenes + args.uniform {
                return Ok(());
            }
            interrupt::check()?;
            let mut random = Rng::with_seed(args.seed.wrapping_mul(1 << 32) + number as u64);
            let scene = if number < args.scenes {
                Scene::draw(number, &mut random)
            } else {
                Scene::uniform(&mut random)
            };
            show_progress(&format!("scene {number}: {}", scene.flaw));
            let bench = Bench {
                racksum: self.racksum.clone(),
                python: self.python.clone(),
                work: self.file(&format!("scene-{number}")),
                ..*self
            };
            fs::create_dir_all(&bench.work)?;
            let of_scene = bench.run(number, &scene, &mut random).inspect_err(|_| {
                // The other threads end with their scenes: the run fails anyway.
                next.store(args.scenes + args.uniform, Ordering::Relaxed);
            });
            let of_scene = of_scene.with_context(|| format!("scene {number} ({})", scene.flaw))?;
            show_progress("");
            for outcome in &of_scene {
                println!("{}", outcome.line());
            }
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).extend(of_scene);
        }
    }

    fn run(&self, number: usize, scene: &Scene, random: &mut Rng) -> Result<Vec<Outcome>> {
        let zones = Zones::build(self.root, &self.work, &format!("s{number}-"), scene)?;
        let inventory = scene.inventory(|host| zones.hosts[host].addr.to_string());
        let job = scene.job(self.args.bytes);
        fs::write(self.file("nodes.json"), serde_json::to_string(&inventory)?)?;
        fs::write(self.file("job.json"), job.to_string())?;
        let _agents = self.agents(&zones)?;
        self.probe(&zones)?;
        let placed = self.place(&inventory)?;
        let near = scene.neighbour(&placed, random);
        let mut placements = vec![("placer", placed), ("labels", scene.best_fit()), ("near", near)];
        for _ in 0..self.args.random {
            placements.push(("random", scene.random_placement(random)));
        }
        let predictor = Predictor::new(inventory, &self.file("net.json"), job)?;
        let mut outcomes = vec![];
        for (placement, seats) in placements {
            interrupt::check()?;
            // Equal placements have equal steps; measuring them twice would compare noise.
            let known = outcomes.iter().find(|known: &&Outcome| {
                known.ranks == seats.ranks && known.aggregator == seats.aggregator
            });
            let measured_s = match known {
                Some(known) => known.measured_s,
                None => self.step_s(&zones, &seats, Program::Bench)?,
            };
            outcomes.push(Outcome {
                scene: number,
                flaw: scene.flaw.to_string(),
                placement,
                predicted_s: predictor.step_s(&seats)?,
                measured_s,
                ddp_s: None,
                ranks: seats.ranks,
                aggregator: seats.aggregator,
            });
        }
        if let Some(python) = self.python.as_deref().filter(|_| number < self.args.ddp) {
            // The placer's placement and the best fit's.
            for outcome in &mut outcomes[..2] {
                let seats = Seats { ranks: outcome.ranks.clone(), aggregator: outcome.aggregator };
                outcome.ddp_s = Some(self.step_s(&zones, &seats, Program::Ddp(python))?);
            }
        }
        Ok(outcomes)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// Starts the agents of all hosts.
    fn agents(&self, zones: &Zones) -> Result<Server> {
        let serve = |host: &crate::network::Host| {
            let mut command = host.command(&self.racksum);
            command.args(["probe", "serve", "--insecure", "--bind", &host.addr.to_string()]);
            command
        };
        let mut agents = ProcessGroup::start("agent", zones.hosts.iter().map(serve), &self.work)?;
        agents.lines(START)?;
        Ok(Server(agents))
    }

    /// Measures the links into `net.json`, and returns the probe's report.
    fn probe(&self, zones: &Zones) -> Result<String> {
        // An earlier run's measurements are of another cluster.
        fs::remove_file(self.file("net.json")).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        })?;
        output(self.measuring(zones, SHARE)?)
    }

    /// Returns the command that measures the links with a share of their rates.
    fn measuring(&self, zones: &Zones, share: &str) -> Result<Command> {
        let [nodes, net] = ["nodes.json", "net.json"].map(|name| self.file(name));
        let mut command = zones.hosts[0].command(&self.racksum);
        command.args(["probe", "run", "--insecure", "--share", share]);
        command.args(["--nodes", path(&nodes)?, "--out", path(&net)?]);
        Ok(command)
    }

    /// Returns the placement that `racksum place` chooses.
    fn place(&self, inventory: &Inventory) -> Result<Seats> {
        let [job, nodes, net] = ["job.json", "nodes.json", "net.json"].map(|name| self.file(name));
        let mut command = Command::new(&self.racksum);
        command.args(["place", "--format", "json", "--job", path(&job)?]);
        command.args(["--nodes", path(&nodes)?, "--net", path(&net)?]);
        let plan: Value = serde_json::from_str(&output(command)?)?;
        let mut seats = Seats { ranks: vec![0; inventory.hosts.len()], aggregator: 0 };
        for host in plan["hosts"].as_array().context("the plan has no hosts")? {
            let place = inventory.hosts.iter().position(|known| host["host"] == known.name);
            let place = place.context("the plan names an unknown host")?;
            let ranks = host["ranks"].as_array().context("the plan lacks ranks")?;
            seats.ranks[place] = u32::try_from(ranks.len())?;
            if host["aggregators"] == 1 {
                seats.aggregator = place;
            }
        }
        Ok(seats)
    }
}

/// The model of a measured cluster.
struct Predictor {
    inventory: Inventory,
    topology: Topology,
    links: Links,
    job: Job,
}

impl Predictor {
    fn new(inventory: Inventory, net: &Path, job: Value) -> Result<Self> {
        let network: Network = read(net)?;
        let inventory = match &network.tree {
            Some(tree) => inventory.placed_by(tree),
            None => inventory,
        };
        let topology = Topology::new(&inventory)?;
        let links = Links::new(&topology, &network)?;
        Ok(Self { inventory, topology, links, job: serde_json::from_value(job)? })
    }

    /// Returns the expected step time of a placement in seconds.
    fn step_s(&self, seats: &Seats) -> Result<f64> {
        let hosts = self.topology.hosts().len();
        let mut placement = Placement { ranks: vec![0; hosts], aggregators: vec![0; hosts] };
        for (place, host) in self.topology.hosts().iter().enumerate() {
            let number = self.inventory.hosts.iter().position(|known| known.name == host.name);
            let number = number.context("the topology has a host that the inventory lacks")?;
            placement.ranks[place] = seats.ranks[number];
            placement.aggregators[place] = u32::from(seats.aggregator == number);
        }
        let problem = Problem::new(&self.topology, &self.links, &self.job)?;
        Ok(step_time(&problem, &placement).total_s())
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("cannot parse {}", path.display()))
}

/// Runs a command and returns its standard output; a failure is an error with its standard error.
fn output(mut command: Command) -> Result<String> {
    let output = command.output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {why}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Time limit for the start of a process.
const START: Duration = Duration::from_secs(20);
/// The share of the links that measurements use; nothing else uses them.
const SHARE: &str = "1";
