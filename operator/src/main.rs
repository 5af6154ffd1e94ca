//! The binary `racksum-operator`.

use std::convert::Infallible;
use std::fmt;
use std::io::Write;
use std::net::SocketAddr;
use std::process::{ExitCode, Termination};
use std::time::Duration;

use clap::{Parser, Subcommand};
use jiff::Timestamp;
use kube::{Client, Config, Error};
use racksum_operator::api;
use racksum_operator::controller::{self, Options};
use racksum_operator::crd::definition;
use racksum_operator::decide::Trouble;
use racksum_operator::health;
use racksum_operator::lease::{Election, Lost, Times};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Places the aggregators of training jobs in Kubernetes, and their workers.
#[derive(Debug, Parser)]
#[command(name = "racksum-operator", version, after_long_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the groups of a cluster until a signal arrives.
    Run(Run),
    /// Print the definition of the custom resource.
    Crd,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// The only namespace whose groups to serve [default: all].
    #[arg(long)]
    namespace: Option<String>,
    /// The name of this replica, unique among all [default: the host's name].
    #[arg(long)]
    replica: Option<String>,
    /// The namespace of the Lease by which replicas agree on a leader [default: that of the service
    /// account, or of the current context].
    #[arg(long)]
    lease_namespace: Option<String>,
    /// The time in seconds after which another replica takes over from a silent leader.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(2..=3600))]
    lease_duration: u64,
    /// The address of the page /healthz for probes.
    #[arg(long, default_value = "0.0.0.0:8080")]
    health: SocketAddr,
    /// Log level: off, error, warn, info, debug or trace; or module=level.
    #[arg(long, default_value = "info,kube=warn")]
    log: String,
}

/// The exit codes, which are those of `racksum`.
const EXIT_CODES: &str = "Exit codes: 0 stopped by a signal, 1 failed, 2 usage, 3 the API server \
                          or a port is not available";

/// The name of the Lease.
const LEASE: &str = "racksum-operator";

/// The longest time to release the Lease. Otherwise its duration ends it.
const RELEASE: Duration = Duration::from_secs(3);

/// The error of a command, and the exit code that tells its kind.
#[derive(Debug)]
struct Failure {
    exit: u8,
    message: String,
}

impl Failure {
    fn failed(message: impl fmt::Display) -> Self {
        Self { exit: 1, message: message.to_string() }
    }

    fn usage(message: impl fmt::Display) -> Self {
        Self { exit: 2, message: message.to_string() }
    }

    fn unavailable(message: impl fmt::Display) -> Self {
        Self { exit: 3, message: message.to_string() }
    }
}

/// The end of the process: prints the failure, if there is one.
struct End(Result<(), Failure>);

impl Termination for End {
    fn report(self) -> ExitCode {
        let Err(failure) = self.0 else { return ExitCode::SUCCESS };
        // A closed standard error must not change the exit code.
        drop(writeln!(std::io::stderr(), "racksum-operator: {}", failure.message));
        ExitCode::from(failure.exit)
    }
}

fn main() -> End {
    End(match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Crd => print_definition(),
    })
}

fn print_definition() -> Result<(), Failure> {
    let text = serde_saphyr::to_string(&definition()).map_err(Failure::failed)?;
    std::io::stdout().write_all(text.as_bytes()).map_err(Failure::failed)
}

fn run(args: &Run) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(&args.log)
        .map_err(|error| Failure::usage(format!("--log {:?}: {error}", args.log)))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("starting: {error}")))?;
    let done = runtime.block_on(serve(args));
    // A plan that is still being made must not delay the end.
    runtime.shutdown_background();
    done
}

async fn serve(args: &Run) -> Result<(), Failure> {
    let client = client().await.map_err(|error| {
        Failure::unavailable(format!(
            "no access to the API server: {error}; run in a pod with a service account, or set \
             KUBECONFIG"
        ))
    })?;
    let identity = args.replica.clone().map_or_else(host_name, Ok)?;
    let namespace = args.lease_namespace.as_deref().unwrap_or_else(|| client.default_namespace());
    let mut election = Election::new(&client, namespace, LEASE, &identity);
    let duration = Duration::from_secs(args.lease_duration);
    election.times = Times { duration, deadline: duration * 2 / 3, retry: duration * 2 / 15 };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    let options = Options { namespace: args.namespace.clone(), identity, ..Options::default() };
    tokio::select! {
        never = lead(&election, &client, &options) => match never {},
        Err(error) = health::serve(args.health) => Err(Failure::unavailable(format!(
            "cannot bind {}: {error}; choose another address with --health", args.health
        ))),
        _ = interrupt.recv() => leave(&election).await,
        _ = terminate.recv() => leave(&election).await,
    }
}

/// Returns a client for the cluster that the process runs in, or that its environment names.
async fn client() -> Result<Client, Error> {
    api::client(Config::infer().await.map_err(Error::InferConfig)?)
}

/// Serves whenever this replica holds the Lease.
async fn lead(election: &Election, client: &Client, options: &Options) -> Infallible {
    let mut outage = None;
    loop {
        tracing::info!("{} waits for lease {}", election.identity, election.name);
        election.acquire().await;
        tracing::info!("{} leads", election.identity);
        // Dropping the controller's future stops all writes of this process but those in flight.
        let lost = tokio::select! {
            lost = election.hold() => lost,
            () = controller::run(client.clone(), options.clone(), outage.take()) => {
                Lost { was_taken: false, message: "the controller ended".into() }
            }
        };
        tracing::warn!("{} no longer leads: {}", election.identity, lost.message);
        outage = (!lost.was_taken).then(|| Trouble {
            is_conflict: false,
            is_answered: false,
            message: lost.message,
            since: Timestamp::now(),
            failures: 1,
        });
    }
}

async fn leave(election: &Election) -> Result<(), Failure> {
    tracing::info!("{} stops", election.identity);
    // The kubelet kills a process that waits for an API server that is gone.
    match tokio::time::timeout(RELEASE, election.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("releasing lease {}: {error}", election.name),
        Err(_) => tracing::warn!("releasing lease {}: no answer", election.name),
    }
    Ok(())
}

fn host_name() -> Result<String, Failure> {
    let read = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = read.map_err(|error| {
        Failure::failed(format!("cannot read the host's name: {error}; pass --replica"))
    })?;
    Ok(name.trim().into())
}
