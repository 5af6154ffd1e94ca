//! The processes of a race's sides: how each program is started, prepared and run.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use racksum_proto::auth::DataAuth;
use racksum_proto::dtype::WireType;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::background_job::BackgroundJob;
use crate::case::{Build, Net, Program, Race, Racksum, Side, Training, Way};
use crate::network::{Drops, Host, INTERFACE, Network};
use crate::process_group::{ITERATION_TIMEOUT, ProcessGroup};
use crate::setup::Setup;
use crate::volume::{Traffic, Volume};

/// An aggregator of a race.
#[derive(Debug)]
struct Serving {
    /// Data authentication of the aggregator. The ranks set none of their own.
    data_auth: Option<DataAuth>,
    build: Build,
    addr: SocketAddr,
    /// The aggregator's process, which ends with the race.
    _process: ProcessGroup,
}

/// The hosts and aggregators of a race.
#[derive(Debug)]
pub(crate) struct Venue {
    // Fields drop in this order, so the processes end before their hosts.
    aggregators: Vec<Serving>,
    network: Option<Network>,
}

impl Venue {
    /// Creates the network that a race needs, and starts its aggregators.
    pub(crate) fn new(race: &Race, setup: &Setup, logs: &Path) -> Result<Self> {
        let network = match race.net {
            Net::Loopback => None,
            Net::Gigabit { aggregators, aggregators_limited } => {
                Some(Network::build(race.world, aggregators, aggregators_limited)?)
            }
        };
        let mut place = Self { aggregators: Vec::new(), network };
        for racksum in race.sides.iter().filter_map(|side| side.program.served()).copied() {
            let there = place.serving(racksum).count();
            for i in there..usize::from(racksum.aggregators) {
                place.serve(race, racksum, i, setup, logs)?;
            }
        }
        Ok(place)
    }

    /// Starts an aggregator on host `i` with the settings that a side needs.
    fn serve(
        &mut self,
        race: &Race,
        racksum: Racksum,
        i: usize,
        setup: &Setup,
        logs: &Path,
    ) -> Result<()> {
        let data_auth = racksum.data_auth;
        let mut flags = vec![format!("--shards={}", race.shards)];
        flags.extend(data_auth.map(|how| format!("--data-auth={how}")));
        let host = match &self.network {
            None => None,
            Some(network) => {
                let host = network.aggregators().get(i);
                Some(host.context("the race needs more aggregators than its network has")?)
            }
        };
        let build = racksum.build;
        let (process_group, addr) = aggregator(setup.program(build), host, &flags, logs)?;
        self.aggregators.push(Serving { data_auth, build, addr, _process: process_group });
        Ok(())
    }

    /// Returns the aggregators with the settings that a side needs.
    fn serving(&self, racksum: Racksum) -> impl Iterator<Item = &Serving> {
        let needed = (racksum.data_auth, racksum.build);
        self.aggregators.iter().filter(move |it| (it.data_auth, it.build) == needed)
    }

    /// Returns the number of packets that the links' queues have dropped so far.
    pub(crate) fn drops(&self) -> Result<Drops> {
        self.network.as_ref().map_or_else(|| Ok(Drops::default()), Network::drops)
    }

    fn worker(&self, rank: u16) -> Option<&Host> {
        self.network.as_ref().and_then(|network| network.workers().get(usize::from(rank)))
    }
}

/// Starts an aggregator and returns its address once it serves.
pub(crate) fn aggregator(
    program: &Path,
    host: Option<&Host>,
    flags: &[String],
    logs: &Path,
) -> Result<(ProcessGroup, SocketAddr)> {
    let bind = host.map_or(Ipv4Addr::LOCALHOST, |host| host.addr);
    let mut command = on(host, program);
    command.args(["aggregator", "--port", "0", "--bind", &bind.to_string()]).args(flags);
    if host.is_some() {
        command.arg("--insecure");
    }
    let name = format!("aggregator-{bind}{}", flags.concat());
    let mut process_group = ProcessGroup::start(&name, [command], logs)?;
    let line = process_group.lines(START_TIMEOUT)?.remove(0);
    let addr = served(&line)
        .with_context(|| format!("unexpected first line of the aggregator: {line:?}"))?;
    Ok((process_group, addr))
}

/// Parses the address in an aggregator's first line.
fn served(line: &str) -> Option<SocketAddr> {
    let rest = line.strip_prefix("racksum aggregator on ")?;
    rest.split(": ").next()?.parse().ok()
}

/// The ranks of a side, ready to run.
#[derive(Debug)]
pub(crate) struct Team {
    process_group: ProcessGroup,
    background_job: Option<BackgroundJob>,
    /// The sidecar of the ranks, if they use one.
    _served: Option<ProcessGroup>,
    predicted_us: Option<f64>,
}

/// One iteration of a side.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Iteration {
    /// Time from the first rank's start to the last rank's end.
    pub(crate) span_us: f64,
    /// Time that each rank measured for itself.
    pub(crate) rank_us: Vec<f64>,
    pub(crate) traffic: Option<Traffic>,
    pub(crate) retransmits: u64,
}

impl Team {
    /// Starts the ranks of a side; returns once they are ready. By then, ranks that do not train
    /// have checked a first sum.
    pub(crate) fn start(
        race: &Race,
        side: &Side,
        place: &Venue,
        setup: &Setup,
        logs: &Path,
    ) -> Result<Self> {
        match side.program {
            Program::Racksum(racksum) => Self::racksum(race, side, racksum, place, setup, logs),
            Program::Gloo { sparse } => Self::gloo(race, side, sparse, place, setup, logs),
            Program::Training(training) => Self::training(race, side, training, place, setup, logs),
            Program::Sidecar { way, build } => Self::sidecar(race, side, (way, build), setup, logs),
            Program::OpenMpi { shared } => Self::openmpi(race, side, shared, setup, logs),
            Program::Floor { wire } => Self::floor(race, side, wire, setup, logs),
        }
    }

    fn racksum(
        race: &Race,
        side: &Side,
        racksum: Racksum,
        place: &Venue,
        setup: &Setup,
        logs: &Path,
    ) -> Result<Self> {
        // Volumes are counted in blocks of 256, and the peers generate blocks of 256.
        ensure!(
            race.data.is_dense() || racksum.block == Racksum::PLAIN.block,
            "sparse data needs blocks of {} elements",
            Racksum::PLAIN.block
        );
        let program = setup.program(racksum.build);
        let served = place.serving(racksum).take(usize::from(racksum.aggregators));
        let aggregator = served.map(|it| it.addr.to_string()).collect::<Vec<_>>().join("+");
        let job = format!("{}-{}", race.name, side.name);
        let mut flags = vec!["--seed".to_owned(), race.data.seed.to_string()];
        flags.push(format!("--block={}", racksum.block));
        flags.extend(racksum.drop.map(|share| format!("--drop={share}")));
        flags.extend(place.network.is_some().then(|| "--insecure".to_owned()));
        let rank = |rank| {
            let mut command =
                rank_of(program, place.worker(rank), &aggregator, &job, rank, race.world);
            command.args(&flags);
            command
        };
        let start = |name: &str, rank: &dyn Fn(u16) -> Command, bytes: u64| {
            let mut process_group = ProcessGroup::start(name, (0..race.world).map(rank), logs)?;
            ready(&process_group.answers(START_TIMEOUT)?)?;
            let setting = Value::Object(
                setting(race, racksum)
                    .into_iter()
                    .chain([("bytes".to_owned(), json!(bytes))])
                    .collect(),
            );
            // The command `set` checks the first sum; the start does not.
            ready(&process_group.ask(&format!("set {setting}"), START_TIMEOUT)?)?;
            anyhow::Ok(process_group)
        };
        let process_group = start(side.name, &rank, race.data.bytes)?;
        let other = format!("{job}-background");
        let of_other = |rank| {
            let host = place.worker(rank);
            let mut command = rank_of(program, host, &aggregator, &other, rank, race.world);
            command.args(&flags);
            command
        };
        let background_job = racksum.beside.map(|bytes| start(&other, &of_other, bytes));
        Ok(Self {
            background_job: background_job.transpose()?.map(BackgroundJob::new),
            ..Self::of(process_group)
        })
    }

    fn gloo(
        race: &Race,
        side: &Side,
        sparse: bool,
        place: &Venue,
        setup: &Setup,
        logs: &Path,
    ) -> Result<Self> {
        let Ok(python) = &setup.python else { bail!("no Python with torch was found") };
        let master = master(race, side, place)?.to_string();
        let data = race.data;
        let mode = if sparse { "sparse" } else { "dense" };
        let rank = |rank: u16| {
            let host = place.worker(rank);
            let mut command = on(host, python);
            command.arg(setup.peers.join("gloo.py")).args(gloo_flags(race, rank, &master));
            command.args(["--mode", mode]);
            command.args(["--iface", if host.is_some() { INTERFACE } else { "lo" }]);
            if sparse {
                command.args(["--density", &data.density.to_string()]);
                command.args(["--overlap", data.overlap.name()]);
            }
            command
        };
        let mut process_group = ProcessGroup::start(side.name, (0..race.world).map(rank), logs)?;
        let answers = process_group.answers(START_TIMEOUT)?;
        ready(&answers)?;
        if sparse {
            same_blocks(&data.volume(race.world), &answers)?;
        }
        Ok(Self::of(process_group))
    }

    fn training(
        race: &Race,
        side: &Side,
        training: Training,
        place: &Venue,
        setup: &Setup,
        logs: &Path,
    ) -> Result<Self> {
        let Ok(python) = &setup.python else { bail!("no Python with torch was found") };
        let master = master(race, side, place)?;
        let build = training.racksum.map_or(Build::Own, |racksum| racksum.build);
        let rank = |rank: u16| {
            let host = place.worker(rank);
            let mut command = with_package(python, "training.py", host, setup, build);
            command.arg(training.script).args(training.flags);
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", race.world.to_string())
                .env("MASTER_ADDR", master.ip().to_string())
                .env("MASTER_PORT", master.port().to_string())
                .env("GLOO_SOCKET_IFNAME", if host.is_some() { INTERFACE } else { "lo" })
                .env("OMP_NUM_THREADS", "1");
            if host.is_some() {
                command.env("LINK_GBIT_PER_S", "1");
            }
            let served = training.racksum.and_then(|racksum| place.serving(racksum).next());
            match (served, training.racksum) {
                (Some(serving), Some(racksum)) => {
                    command.args(["--backend", "racksum", "--wire", racksum.wire.name()]);
                    command.env("RACKSUM_AGGREGATOR", serving.addr.to_string());
                    command.env("RACKSUM_INSECURE", "1");
                    command.env("RACKSUM_JOB", format!("{}-{}", race.name, side.name));
                }
                _ => {
                    command.args(["--backend", "gloo"]);
                }
            }
            command
        };
        let mut process_group = ProcessGroup::start(side.name, (0..race.world).map(rank), logs)?;
        let answers = process_group.answers(START_TIMEOUT)?;
        ready(&answers)?;
        // All ranks predict the same time.
        Ok(Self { predicted_us: answers[0]["predicted_us"].as_f64(), ..Self::of(process_group) })
    }

    fn sidecar(
        race: &Race,
        side: &Side,
        (way, build): (Way, Build),
        setup: &Setup,
        logs: &Path,
    ) -> Result<Self> {
        let Ok(python) = &setup.python else { bail!("no Python with torch was found") };
        ensure!(race.net == Net::Loopback, "a sidecar serves the ranks of one host");
        let socket = logs.join(format!("{}.sock", side.name));
        let mut worker = Command::new(setup.program(build));
        worker.arg("worker").arg("--socket").arg(&socket);
        let mut worker = ProcessGroup::start(&format!("{}-worker", side.name), [worker], logs)?;
        worker.lines(START_TIMEOUT)?;
        let master = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)).to_string();
        let rank = |rank: u16| {
            let mut command = with_package(python, "sidecar.py", None, setup, build);
            command.args(gloo_flags(race, rank, &master));
            command.args(["--way", way.name(), "--iface", "lo", "--sidecar"]).arg(&socket);
            command
        };
        let mut process_group = ProcessGroup::start(side.name, (0..race.world).map(rank), logs)?;
        ready(&process_group.answers(START_TIMEOUT)?)?;
        Ok(Self { _served: Some(worker), ..Self::of(process_group) })
    }

    fn openmpi(race: &Race, side: &Side, shared: bool, setup: &Setup, logs: &Path) -> Result<Self> {
        let Ok(mpi) = &setup.mpi else { bail!("Open MPI was not found") };
        ensure!(race.net == Net::Loopback, "Open MPI's ranks must all be on one host");
        let mut command = Command::new("mpirun");
        command
            .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
            .args(["--mca", "pml", "ob1", "--mca", "btl"])
            .arg(if shared { "vader,self" } else { "tcp,self" })
            .args(["--mca", "btl_tcp_if_include", "lo"])
            .args(["-n", &race.world.to_string()])
            .arg(mpi)
            .args(["--bytes", &race.data.bytes.to_string()])
            .args(["--seed", &race.data.seed.to_string(), "--interactive"]);
        let mut process_group = ProcessGroup::start(side.name, [command], logs)?;
        ready(&process_group.answers(START_TIMEOUT)?)?;
        Ok(Self::of(process_group))
    }

    fn floor(race: &Race, side: &Side, wire: WireType, setup: &Setup, logs: &Path) -> Result<Self> {
        let Ok(floor) = &setup.floor else { bail!("no C compiler was found") };
        ensure!(race.net == Net::Loopback, "the floor's ranks must all be on one host");
        let mut command = Command::new(floor);
        command
            .args(["--world", &race.world.to_string(), "--shards", &race.shards.to_string()])
            .args(["--bytes", &race.data.bytes.to_string(), "--wire", wire.name()])
            .args(["--seed", &race.data.seed.to_string(), "--interactive"]);
        let mut process_group = ProcessGroup::start(side.name, [command], logs)?;
        ready(&process_group.answers(START_TIMEOUT)?)?;
        Ok(Self::of(process_group))
    }

    /// Creates a team that needs no other process.
    const fn of(process_group: ProcessGroup) -> Self {
        Self { process_group, background_job: None, _served: None, predicted_us: None }
    }

    /// Returns the predicted time of an iteration, if the ranks have predicted it.
    pub(crate) const fn predicted_us(&self) -> Option<f64> {
        self.predicted_us
    }

    /// Makes the background job, if there is one, start or stop sending.
    pub(crate) fn set_background(&self, sends: bool) -> Result<()> {
        let there =
            self.background_job.as_ref().is_none_or(|background_job| background_job.set(sends));
        ensure!(there, "the ranks of the background job have failed");
        Ok(())
    }

    /// Runs one iteration.
    pub(crate) fn go(&mut self) -> Result<Iteration> {
        let answers = self.process_group.ask("go", ITERATION_TIMEOUT)?;
        let answers =
            answers.into_iter().map(serde_json::from_value).collect::<Result<Vec<_>, _>>();
        Iteration::of(&answers.context("cannot parse an answer to `go`")?)
    }
}

/// Creates the command of one racksum rank, to which the caller may add arguments.
pub(crate) fn rank_of(
    program: &Path,
    host: Option<&Host>,
    aggregator: &str,
    job: &str,
    rank: u16,
    world: u16,
) -> Command {
    let mut command = on(host, program);
    command.args(["bench", "--interactive", "--aggregator", aggregator, "--job", job]);
    command.args(["--rank", &rank.to_string(), "--world", &world.to_string()]);
    command
}

/// Creates the command of a program in `benches/peers` that uses the Python package of `build`.
fn with_package(
    python: &Path,
    script: &str,
    host: Option<&Host>,
    setup: &Setup,
    build: Build,
) -> Command {
    let mut command = on(host, python);
    let package = setup.package(build);
    if let Some(package) = package {
        command.env("PYTHONPATH", &package.folder);
    }
    command.arg(package.map_or(&setup.peers, |package| &package.peers).join(script));
    command
}

fn on(host: Option<&Host>, program: &Path) -> Command {
    host.map_or_else(|| Command::new(program), |host| host.command(program))
}

/// Returns the arguments that `gloo.py` takes in every case.
fn gloo_flags(race: &Race, rank: u16, master: &str) -> Vec<String> {
    let Race { world, data, .. } = race;
    vec![
        "--interactive".to_owned(),
        format!("--rank={rank}"),
        format!("--world={world}"),
        format!("--master={master}"),
        format!("--bytes={}", data.bytes),
        format!("--seed={}", data.seed),
    ]
}

/// Returns the settings of racksum's ranks.
fn setting(race: &Race, racksum: Racksum) -> Map<String, Value> {
    let data = race.data;
    let mut setting = vec![
        ("mode", json!(if data.is_dense() { "dense" } else { "sparse" })),
        ("wire", json!(racksum.wire.name())),
        ("input", json!(racksum.input.name())),
    ];
    if !data.is_dense() {
        setting.push(("density", json!(data.density)));
        setting.push(("overlap", json!(data.overlap.name())));
    }
    setting.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

pub(crate) fn ready(answers: &[Value]) -> Result<()> {
    for answer in answers {
        ensure!(answer["ready"] == true, "a rank is not ready: {answer}");
    }
    Ok(())
}

/// Checks that a peer's ranks generated the blocks that [`Volume`] counts.
fn same_blocks(volume: &Volume, answers: &[Value]) -> Result<()> {
    for (answer, own) in answers.iter().zip(&volume.own) {
        let blocks = |key: &str| answer[key].as_u64().map(|blocks| blocks * 1024);
        let theirs = (blocks("nonzero_blocks"), blocks("union_blocks"));
        // The last block may be short.
        let near = |theirs: Option<u64>, ours: u64| {
            theirs.is_some_and(|theirs| (ours..ours + 1024).contains(&theirs))
        };
        ensure!(
            near(theirs.0, *own) && near(theirs.1, volume.union),
            "a peer generated other data: {theirs:?} non-zero bytes (own, union) instead of {own} \
             and {}",
            volume.union
        );
    }
    Ok(())
}

/// A rank's answer to `go`.
#[derive(Debug, Clone, Deserialize)]
struct Answer {
    us: f64,
    start_ns: u64,
    end_ns: u64,
    tx_bytes: Option<u64>,
    rx_bytes: Option<u64>,
    retransmits: Option<u64>,
}

impl Iteration {
    fn of(answers: &[Answer]) -> Result<Self> {
        let start = answers.iter().map(|answer| answer.start_ns).min();
        let end = answers.iter().map(|answer| answer.end_ns).max();
        let (Some(start), Some(end)) = (start, end) else { bail!("no rank answered") };
        ensure!(start < end, "an iteration ended before it started");
        let all = |of: fn(&Answer) -> Option<u64>| answers.iter().map(of).collect();
        let tx: Option<Vec<u64>> = all(|answer| answer.tx_bytes);
        let rx: Option<Vec<u64>> = all(|answer| answer.rx_bytes);
        Ok(Self {
            span_us: (end - start) as f64 / 1e3,
            rank_us: answers.iter().map(|answer| answer.us).collect(),
            traffic: tx.zip(rx).map(|(tx, rx)| Traffic { tx, rx }),
            retransmits: answers.iter().filter_map(|answer| answer.retransmits).sum(),
        })
    }
}

/// Returns the address where the first rank of a side with Gloo listens.
fn master(race: &Race, side: &Side, place: &Venue) -> Result<SocketAddr> {
    Ok(match place.worker(0) {
        // All ports of the new host are free, but several sides may use Gloo there, so each side
        // gets a different port.
        Some(host) => {
            let nth = race.sides.iter().position(|other| other.name == side.name);
            let nth = u16::try_from(nth.unwrap_or(0)).context("too many sides")?;
            SocketAddr::from((host.addr, 29_500 + nth))
        }
        None => SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)),
    })
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot get a port")?;
    Ok(listener.local_addr()?.port())
}

/// Timeout for starting the ranks, or for a first sum with its check.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(lines: &[&str]) -> Vec<Answer> {
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn an_iteration_lasts_from_the_first_start_to_the_last_end() {
        let iteration = Iteration::of(&answers(&[
            r#"{"us": 2.0, "start_ns": 1000, "end_ns": 3000, "tx_bytes": 5, "rx_bytes": 6,
                "retransmits": 1}"#,
            r#"{"us": 2.5, "start_ns": 1500, "end_ns": 4000, "tx_bytes": 7, "rx_bytes": 8,
                "retransmits": 2}"#,
        ]))
        .unwrap();
        let traffic = Some(Traffic { tx: vec![5, 7], rx: vec![6, 8] });
        let rank_us = vec![2.0, 2.5];
        assert_eq!(iteration, Iteration { span_us: 3.0, rank_us, traffic, retransmits: 3 });
    }

    #[test]
    fn peers_that_count_no_bytes_have_no_traffic() {
        let line = r#"{"us": 430.662, "start_ns": 1945377175205, "end_ns": 1945377605867}"#;
        let iteration = Iteration::of(&answers(&[line])).unwrap();
        assert_eq!((iteration.span_us, iteration.traffic), (430.662, None));
        assert!(Iteration::of(&[]).is_err());
    }

    #[test]
    fn an_aggregators_first_line_tells_its_address() {
        let line = "racksum aggregator on 10.77.0.200:7177: 1 shard on UDP 7178, 1024 MiB";
        assert_eq!(served(line), Some("10.77.0.200:7177".parse().unwrap()));
        let line = "racksum aggregator on [::1]:7177: 1 shard on UDP 7178, 1024 MiB";
        assert_eq!(served(line), Some("[::1]:7177".parse().unwrap()));
        assert_eq!(served("racksum: warning: no"), None);
    }

    #[test]
    fn other_data_than_ours_are_refused() {
        let volume = Volume { own: vec![2048, 1000], union: 3048 };
        let blocks = |own, union| json!({ "nonzero_blocks": own, "union_blocks": union });
        assert!(same_blocks(&volume, &[blocks(2, 3), blocks(1, 3)]).is_ok());
        assert!(same_blocks(&volume, &[blocks(2, 3), blocks(2, 3)]).is_err());
        assert!(same_blocks(&volume, &[blocks(2, 4), blocks(1, 3)]).is_err());
        assert!(same_blocks(&volume, &[json!({}), json!({})]).is_err());
    }
}
