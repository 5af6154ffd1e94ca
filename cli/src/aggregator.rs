//! `racksum aggregator`: serves jobs until a signal stops it.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use racksum_aggregator::{Aggregator, Config, Reload, StartError, bind_address, host_mib};
use racksum_net::aside::Aside;
use racksum_net::file::read_text;
use racksum_net::local::raise_open_files;
use racksum_net::with_limit;
use racksum_proto::auth::DataAuth;
use racksum_proto::counted::counted;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{self, Fanout};
use crate::exit::{Failure, print_or_warn};
use crate::signals::cannot_wait;
use crate::{environment, status, stderr};

/// Flags override the configuration file, which overrides the defaults.
#[derive(Debug, Clone, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// The address to serve on [default: 127.0.0.1].
    #[arg(long, value_name = "IP", value_parser = bind_address)]
    bind: Option<IpAddr>,
    /// UDP port of the control plane; shard i uses this port + i + 1; with 0, the control plane and
    /// the shards use free ports [default: 7177].
    #[arg(long, value_name = "PORT")]
    #[arg(value_parser = args::number::<u16>(args::of_configuration("port")))]
    port: Option<u16>,
    /// Number of shards, each a thread with a socket of its own [default: 1].
    #[arg(long, value_name = "K", value_parser = args::number::<u8>(args::SHARDS))]
    shards: Option<u8>,
    /// Maximum number of slots that a stream of a job is granted [default: 256].
    #[arg(long, value_name = "P")]
    #[arg(value_parser = args::number::<u32>(args::of_configuration("pool_slots")))]
    pool_slots: Option<u32>,
    /// MiB of packet buffers that each shard allocates at start; without [[admit]] rules, the jobs
    /// share them equally [default: 1024].
    #[arg(long, value_name = "MIB")]
    #[arg(value_parser = args::number::<u32>(args::of_configuration("pool_mib")))]
    pool_mib: Option<u32>,
    /// Maximum number of jobs at a time [default: 8].
    #[arg(long, value_name = "N")]
    #[arg(value_parser = args::number::<u16>(args::of_configuration("max_jobs")))]
    max_jobs: Option<u16>,
    /// Maximum number of ranks at a time, over all jobs [default: 4096].
    #[arg(long, value_name = "N")]
    #[arg(value_parser = args::number::<u32>(args::of_configuration("max_ranks")))]
    max_ranks: Option<u32>,
    /// Maximum time in seconds that a job waits for its last rank [default: 600].
    #[arg(long, value_name = "S")]
    #[arg(value_parser = args::number::<u32>(args::of_configuration("join_timeout_s")))]
    join_timeout_s: Option<u32>,
    /// How results reach the ranks [default: auto].
    #[arg(long, value_enum, ignore_case = true)]
    fanout: Option<Fanout>,
    /// The identity file to serve with, as `racksum identity issue` writes it; then only callers
    /// with an identity from the same authority are served [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Serve beyond loopback without identities.
    #[arg(long)]
    insecure: bool,
    /// Path of the unix socket that `racksum status` connects to [default: a path that `racksum
    /// status` finds by itself].
    #[arg(long, value_name = "PATH")]
    status_socket: Option<PathBuf>,
    /// The aggregator to send sums to; the ranks of both aggregators can then join the same jobs
    /// [default: none].
    #[arg(long, value_name = "HOST:PORT")]
    parent: Option<String>,
    /// How datagrams are authenticated: none, mac or aead [default: mac, or none on loopback].
    #[arg(long, value_name = "HOW")]
    data_auth: Option<DataAuth>,
    /// TOML file to read the configuration from; its keys are the names of these flags, with
    /// underscores instead of dashes.
    #[arg(long, value_name = "F.toml")]
    config: Option<PathBuf>,
}

impl Args {
    fn config(&self) -> Result<Config, Failure> {
        let mut config = match &self.config {
            None => Config::default(),
            Some(path) => {
                let text = read_text(path, MAX_CONFIG).map_err(|error| {
                    let why = format!("cannot read {}: {error}", path.display());
                    Failure::of_file(why, &error)
                })?;
                let config = Config::from_toml(&text)
                    .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
                // Paths in a configuration file are relative to its folder, not to the working
                // directory.
                let folder = path.parent().unwrap_or_else(|| Path::new(""));
                let beside = |named: Option<PathBuf>| named.map(|named| folder.join(named));
                Config {
                    identity: beside(config.identity),
                    status_socket: beside(config.status_socket),
                    ..config
                }
            }
        };
        config.bind = self.bind.unwrap_or(config.bind);
        config.port = self.port.unwrap_or(config.port);
        config.shards = self.shards.unwrap_or(config.shards);
        config.pool_slots = self.pool_slots.unwrap_or(config.pool_slots);
        config.pool_mib = self.pool_mib.unwrap_or(config.pool_mib);
        config.max_jobs = self.max_jobs.unwrap_or(config.max_jobs);
        config.max_ranks = self.max_ranks.unwrap_or(config.max_ranks);
        config.join_timeout_s = self.join_timeout_s.unwrap_or(config.join_timeout_s);
        config.fanout = self.fanout.map_or(config.fanout, Into::into);
        config.insecure |= self.insecure;
        let identity = self.identity.clone().or(config.identity);
        config.identity = environment::identity(identity, config.insecure)?;
        config.status_socket = self.status_socket.clone().or(config.status_socket);
        config.parent = self.parent.clone().or(config.parent);
        config.data_auth = self.data_auth.or(config.data_auth);
        // Packet buffers of the default size shrink to fit the host's memory. Never shrink a size
        // that the user gives on the command line: refuse it if it does not fit, even if it equals
        // the default.
        if let (Some(_), Some(mib)) = (self.pool_mib, host_mib()) {
            config.check_memory(mib).map_err(|error| Failure::usage(error.to_string()))?;
        }
        Ok(config)
    }
}

/// Largest size of a configuration file in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// Serves until a signal or an internal failure stops the aggregator.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.config()?;
    // Each rank's process keeps a lifeline open: a TCP connection, for which the aggregator needs a
    // file descriptor.
    if let Err(error) = raise_open_files() {
        stderr::warn(format_args!("cannot raise the limit on open files: {error}"));
    }
    let aggregator = start(&config)?;
    for warning in aggregator.warnings() {
        stderr::warn(warning);
    }
    if config.insecure {
        stderr::warn("--insecure: every host that can reach this port may join any job");
    }
    let ports: Vec<_> =
        aggregator.data_addrs().iter().map(|addr| addr.port().to_string()).collect();
    let ready = format!(
        "racksum aggregator on {}: {} on UDP {}, {} MiB of packet buffers each, at most {}, data \
         auth {}{}",
        aggregator.addr(),
        counted(config.shards, "shard"),
        ports.join(" "),
        aggregator.config().pool_mib,
        counted(config.max_jobs, "job"),
        config.data_auth(),
        config.parent.iter().map(|parent| format!(", parent {parent}")).collect::<String>()
    );
    let stop = racksum_net::runtime::single_threaded()
        .and_then(|runtime| {
            let reloader = Reloader {
                aside: Aside::one_of(RELOADING, 1),
                args,
                aggregator: &aggregator,
                is_usual: config.status_socket.is_none(),
            };
            let reload = || reloader.reload();
            runtime.block_on(async {
                let mut signals = Signals::listen()?;
                print_or_warn(&ready);
                let stopped = signals.stopped(aggregator.failed(), reload);
                let (stop, has_callers) = tokio::select! {
                    stop = stopped => (stop, aggregator.jobs() > 0),
                    // The operator who has moved the jobs waits for the answer.
                    () = aggregator.drain_requested() => (Stop::Signaled, true),
                };
                match stop {
                    Stop::Signaled if has_callers => Ok(drained(&aggregator, &mut signals).await),
                    stop => Ok(stop),
                }
            })
        })
        .map_err(|error| Failure::unavailable(cannot_wait(&error)))?;
    match stop {
        Stop::Signaled => {
            print_or_warn("racksum aggregator stops");
            Ok(())
        }
        Stop::Failed(why) => Err(Failure::failed(format!("{why}; start the aggregator again"))),
    }
}

/// Starts the aggregator. If the configuration names no status socket, tries the default path and
/// starts without a status socket if that fails.
fn start(config: &Config) -> Result<Aggregator, Failure> {
    if config.status_socket.is_some() {
        return Ok(Aggregator::start(config.clone())?);
    }
    let usual = status::usual_socket();
    let started = usual
        .map(|socket| Aggregator::start(Config { status_socket: Some(socket), ..config.clone() }));
    let why = match started {
        Ok(Err(StartError::StatusSocket { path, cause })) => {
            format!("cannot bind {}: {}", path.display(), with_limit(&cause))
        }
        Ok(started) => return Ok(started?),
        Err(why) => why,
    };
    stderr::warn(format_args!(
        "running without a status socket: {why}; choose a path with --status-socket"
    ));
    Ok(Aggregator::start(config.clone())?)
}

/// Reason why an aggregator stopped.
#[derive(Debug, PartialEq, Eq)]
enum Stop {
    /// The aggregator received a signal to stop.
    Signaled,
    /// The aggregator failed with this error.
    Failed(String),
}

/// Reloads the configuration and the identity, one reload at a time.
struct Reloader<'a> {
    aside: Aside,
    args: &'a Args,
    aggregator: &'a Aggregator,
    /// Whether the configuration named no status socket at start. A reload then keeps the socket
    /// that is in use.
    is_usual: bool,
}

/// Name of a reload in error messages.
const RELOADING: &str = "reloading the configuration and the identity";

/// Timeout for reading the configuration and the identity.
const RELOAD_PATIENCE: Duration = Duration::from_secs(10);

impl Reloader<'_> {
    /// Reads the configuration and the identity, and applies both; an error in either leaves both
    /// unchanged. Another thread reads them, so that signals are handled even if a read hangs.
    async fn reload(&self) {
        let (args, running) = (self.args.clone(), self.aggregator.config());
        let is_usual = self.is_usual;
        let read = move || -> Result<Reload, Failure> {
            let mut config = args.config()?;
            if is_usual && config.status_socket.is_none() {
                config.status_socket.clone_from(&running.status_socket);
            }
            Ok(Reload::read(config, &running)?)
        };
        let read = self.aside.run(RELOAD_PATIENCE, read).await;
        let read = read.unwrap_or_else(|error| Err(Failure::unavailable(error.to_string())));
        match read.and_then(|read| Ok(self.aggregator.reload(read)?)) {
            Ok(fixed) if fixed.is_empty() => {
                print_or_warn("racksum aggregator: configuration reloaded")
            }
            Ok(fixed) => {
                print_or_warn("racksum aggregator: configuration reloaded");
                let keys = fixed.join(", ");
                stderr::warn(format_args!("restart the aggregator to apply the changes to {keys}"));
            }
            Err(failure) => {
                stderr::warn(format_args!("nothing was reloaded: {failure}"));
            }
        }
    }
}

/// Stops accepting jobs, and waits until all running jobs have ended or moved. Returns early if
/// another signal to stop arrives, or if the aggregator fails.
async fn drained(aggregator: &Aggregator, signals: &mut Signals) -> Stop {
    let jobs = aggregator.jobs();
    aggregator.drain();
    print_or_warn(&format!(
        "racksum aggregator is draining: waiting for {} to end or move; another signal stops it",
        counted(jobs, "job")
    ));
    let over = async {
        while aggregator.jobs() > 0 {
            tokio::time::sleep(DRAIN_POLL).await;
        }
        // The ranks of jobs that had not started must still receive the refusal and disconnect.
        drop(tokio::time::timeout(REFUSAL_TIMEOUT, aggregator.idle()).await);
    };
    let reload = async || stderr::warn("nothing was reloaded: the aggregator is draining");
    tokio::select! {
        () = over => Stop::Signaled,
        stop = signals.stopped(aggregator.failed(), reload) => stop,
    }
}

/// How often a draining aggregator checks whether its jobs have ended or moved.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// How long to wait for ranks to receive the refusal of a job that had not started.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// A listener for the signals that an aggregator handles. It misses no signal after
/// [`Signals::listen`].
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    quit: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGINT, SIGTERM or SIGQUIT, or for a failure of the aggregator, and returns the
    /// reason. Calls `reload` at each SIGHUP, and still handles the other signals during a reload.
    /// If SIGHUP arrives during a reload, one more reload follows.
    async fn stopped(
        &mut self,
        failed: impl Future<Output = String>,
        reload: impl AsyncFn(),
    ) -> Stop {
        let Self { interrupt, terminate, quit, hangup } = self;
        let reloads = async {
            while hangup.recv().await.is_some() {
                reload().await;
            }
            std::future::pending::<Stop>().await
        };
        tokio::select! {
            _ = interrupt.recv() => Stop::Signaled,
            _ = terminate.recv() => Stop::Signaled,
            _ = quit.recv() => Stop::Signaled,
            why = failed => Stop::Failed(why),
            stop = reloads => stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aggregator_that_fails_is_not_waited_for() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let failed = std::future::ready("a shard failed".to_owned());
        let stop = runtime
            .block_on(async { Signals::listen().unwrap().stopped(failed, async || {}).await });
        assert_eq!(stop, Stop::Failed("a shard failed".into()));
    }

    /// Returns the keys of a configuration table, taken from the error about an unknown key.
    fn keys_of(table: &str) -> Vec<String> {
        let why = Config::from_toml(&format!("{table}no_such_key = 1")).unwrap_err().to_string();
        let (_, keys) = why.split_once("expected one of ").unwrap();
        keys.split(", ").map(|key| key.trim_matches('`').to_owned()).collect()
    }

    /// Returns the values that a flag accepts, as docs/configuration.md lists them.
    fn values(argument: &clap::Arg) -> String {
        let key = argument.get_id().as_str();
        if let Some(bounds) = racksum_aggregator::bounds(key) {
            return format!("{} to {}", bounds.start(), bounds.end());
        }
        let named = argument.get_possible_values();
        match (key, &named[..]) {
            ("data_auth", _) => DataAuth::ALL.map(DataAuth::name).join(", "),
            (_, []) => argument.get_value_names().unwrap()[0].to_string(),
            _ => named.iter().map(|value| value.get_name()).collect::<Vec<_>>().join(", "),
        }
    }

    /// Returns the expected rows of docs/configuration.md, for all keys except the admission rules.
    fn rows() -> String {
        use clap::Args as _;
        let command = Args::augment_args(clap::Command::new("aggregator"));
        let row = |key: String| {
            let argument = command.get_arguments().find(|argument| *argument.get_id() == *key);
            let help = argument.unwrap_or_else(|| panic!("{key} has no flag")).get_help().unwrap();
            let (text, default) = match help.to_string().split_once(" [default: ") {
                Some((text, default)) => {
                    (text.to_owned(), default.trim_end_matches(']').to_owned())
                }
                None => (help.to_string(), "none".to_owned()),
            };
            let text = text.split(" [env: ").next().unwrap().to_owned();
            let flag = key.replace('_', "-");
            let values = values(argument.unwrap());
            format!("| `{key}` | `--{flag}` | {values} | {default} | {text} |\n")
        };
        keys_of("").into_iter().filter(|key| key != "admit").map(row).collect()
    }

    #[test]
    fn the_document_of_the_configuration_lists_every_key() {
        let document = include_str!("../../docs/configuration.md");
        let rows = rows();
        assert!(document.contains(&rows), "docs/configuration.md lacks these rows:\n{rows}");
        let (_, rules) = document.split_once("## `[[admit]]`").unwrap();
        let documented =
            rules.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        assert_eq!(documented.collect::<Vec<_>>(), keys_of("[[admit]]\n"));
    }

    #[test]
    fn what_a_file_names_lies_beside_it() {
        let folder = std::env::temp_dir().join(format!("racksum-beside-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("racksum.toml");
        let config = |text: &str| {
            std::fs::write(&file, text).unwrap();
            let parsed =
                <Cli as clap::Parser>::parse_from(["test", "--config", file.to_str().unwrap()]);
            parsed.args.config().unwrap()
        };
        let beside = config("identity = \"agg.pem\"\nstatus_socket = \"run/status\"");
        assert_eq!(beside.identity, Some(folder.join("agg.pem")));
        assert_eq!(beside.status_socket, Some(folder.join("run/status")));
        assert_eq!(config("identity = \"/agg.pem\"").identity, Some("/agg.pem".into()));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn the_help_names_the_defaults() {
        use clap::Args as _;
        let command = Args::augment_args(clap::Command::new("aggregator"));
        let of = Config::default();
        let fanout = format!("{:?}", of.fanout).to_lowercase();
        for (flag, default) in [
            ("bind", of.bind.to_string()),
            ("port", of.port.to_string()),
            ("shards", of.shards.to_string()),
            ("pool_slots", of.pool_slots.to_string()),
            ("pool_mib", of.pool_mib.to_string()),
            ("max_jobs", of.max_jobs.to_string()),
            ("max_ranks", of.max_ranks.to_string()),
            ("join_timeout_s", of.join_timeout_s.to_string()),
            ("fanout", fanout),
        ] {
            let argument = command.get_arguments().find(|argument| argument.get_id() == flag);
            let help = argument.unwrap().get_help().unwrap().to_string();
            assert!(help.contains(&format!("[default: {default}]")), "{flag}: {help}");
        }
    }
}
