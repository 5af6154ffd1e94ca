//! `racksum worker`: the sidecar of a host's ranks.

use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread::available_parallelism;

use racksum_net::local::{Listener, listener_of_systemd, tell_systemd};
use racksum_proto::auth::DataAuth;
use racksum_worker::ConnectOptions;
use racksum_worker::sidecar::Sidecar;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{Failure, tell};
use crate::stderr;

/// The flags of a sidecar.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where ranks call it: connect("unix:PATH"). Not needed if systemd has opened the socket.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Who may call it, as the socket's permissions: of whom it lets write.
    #[arg(long, value_name = "OCTAL", default_value = "600", value_parser = mode)]
    mode: u32,
    /// Threads that sum [default: one for each core].
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// The aggregator where jobs meet that have ranks on other hosts.
    #[arg(long, value_name = "HOST:PORT", env = "RACKSUM_AGGREGATOR")]
    aggregator: Option<String>,
    /// The identity file to connect with, of an aggregator's role, since it speaks for several
    /// ranks: `racksum identity issue --role aggregator` writes it.
    #[arg(long, value_name = "FILE", env = "RACKSUM_IDENTITY", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without identities.
    #[arg(long)]
    insecure: bool,
    /// How datagrams are authenticated: none, mac or aead, as the aggregator does.
    #[arg(long, value_name = "HOW")]
    data_auth: Option<DataAuth>,
    /// Which of this host's interfaces to call from, in the grammar of NCCL_SOCKET_IFNAME.
    #[arg(long, value_name = "NAMES", env = "RACKSUM_INTERFACE")]
    interface: Option<String>,
    /// Wait while the aggregator has no room for a job, rather than be refused.
    #[arg(long)]
    wait: bool,
}

impl Args {
    /// How jobs are joined that have ranks on other hosts.
    fn upstream(&self) -> Option<ConnectOptions> {
        Some(ConnectOptions {
            identity: self.identity.clone(),
            insecure: self.insecure,
            data_auth: self.data_auth,
            interface: self.interface.clone(),
            wait: self.wait,
            ..ConnectOptions::new(self.aggregator.as_ref()?, "")
        })
    }
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("permissions are an octal number, like 660".into()),
    }
}

/// Serves until a signal ends the process.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let passed = listener_of_systemd().map_err(Failure::usage)?;
    let (listener, at) = match (passed, &args.socket) {
        (Some(passed), _) => (passed, "the socket of systemd".to_owned()),
        (None, Some(path)) => {
            let listener = Listener::bind(path, args.mode).map_err(|error| {
                let why = match error.kind() {
                    io::ErrorKind::AddrInUse => "somebody serves there already".into(),
                    _ => error.to_string(),
                };
                Failure::unavailable(format!("cannot serve at {}: {why}", path.display()))
            })?;
            (listener, path.display().to_string())
        }
        (None, None) => {
            return Err(Failure::usage("nobody says where to serve: give --socket PATH"));
        }
    };
    let cores = || available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.threads.map_or_else(cores, NonZeroUsize::get);
    let sidecar = Sidecar::start(listener, threads, args.upstream())
        .map_err(|error| Failure::unavailable(format!("cannot start threads: {error}")))?;
    let beyond = args.aggregator.as_ref().map(|at| format!(", aggregator {at}"));
    let ready = format!("racksum worker at {at}: {threads} threads{}", beyond.unwrap_or_default());
    until_told(&ready)
        .map_err(|error| Failure::unavailable(format!("cannot wait for signals: {error}")))?;
    notify("STOPPING=1");
    drop(sidecar);
    tell("racksum worker stops");
    Ok(())
}

/// Says that it is ready, and returns at SIGINT or SIGTERM.
fn until_told(ready: &str) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tell(ready);
        notify("READY=1");
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}

fn notify(state: &str) {
    if let Err(error) = tell_systemd(state) {
        stderr::warn(format_args!("systemd is not told {state}: {error}"));
    }
}
