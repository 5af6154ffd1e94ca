//! `racksum worker`: the sidecar of a host's ranks.

use std::io;
use std::num::NonZeroUsize;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use racksum_aggregator::host_mib;
use racksum_net::local::{Listener, listener_of_systemd, notify_systemd, raise_open_files};
use racksum_net::with_limit;
use racksum_proto::auth::DataAuth;
use racksum_proto::counted::counted;
use racksum_worker::sidecar::{Limits, Sidecar};
use racksum_worker::{ConnectOptions, aggregator_sets, check_sidecar};

use crate::exit::{Failure, print_or_warn, with_flags};
use crate::signals::{Ending, cannot_wait};
use crate::stderr;
use crate::thread::not_started;
use crate::{args, environment};

/// The flags of a sidecar.
#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// Path of the socket that ranks connect to as unix:PATH. Leave it out if systemd opens the
    /// socket.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Permissions of the socket; users who may write to it can connect [default: 600].
    #[arg(long, value_name = "OCTAL", value_parser = mode)]
    mode: Option<u32>,
    /// Number of summing threads [default: one per core].
    #[arg(long, value_name = "N", value_parser = args::number::<usize>(args::THREADS))]
    threads: Option<usize>,
    /// Maximum number of jobs at a time.
    #[arg(long, value_name = "N", default_value = "64")]
    #[arg(value_parser = args::number::<usize>(args::PLACES))]
    max_jobs: usize,
    /// Maximum number of ranks at a time, over all jobs.
    #[arg(long, value_name = "N", default_value = "256")]
    #[arg(value_parser = args::number::<usize>(args::PLACES))]
    max_ranks: usize,
    /// Maximum memory for tensors that ranks share and for sums of block lists, in bytes or with
    /// the unit K, M, G or T; at least 1M [default: half of the host's memory].
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// Aggregator for jobs that have ranks on other hosts, HOST:PORT; with A,B a job moves to B
    /// when A fails. RACKSUM_AGGREGATOR does not apply here, because ranks may use it to name
    /// this sidecar.
    #[arg(long, value_name = "HOSTS")]
    aggregator: Option<String>,
    /// Identity file to connect with. It needs role aggregator, because a sidecar joins for
    /// several ranks: `racksum identity issue --role aggregator` writes it [env: RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", requires = "aggregator", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without identities [env: RACKSUM_INSECURE].
    #[arg(long, requires = "aggregator")]
    insecure: bool,
    /// Data authentication: none, mac or aead. An aggregator with another mode refuses the sidecar
    /// [default: the aggregator's setting, which defaults to mac, or to none on loopback].
    #[arg(long, value_name = "HOW", requires = "aggregator")]
    data_auth: Option<DataAuth>,
    /// Interfaces of this host to connect from, in the syntax of NCCL_SOCKET_IFNAME [env:
    /// RACKSUM_INTERFACE].
    #[arg(long, value_name = "NAMES", requires = "aggregator")]
    interface: Option<String>,
    /// MTU of the path to the aggregator [default: the interface's].
    #[arg(long, requires = "aggregator", value_parser = args::number::<usize>(args::MTUS))]
    mtu: Option<usize>,
    /// Wait while the aggregator has no room for a job, instead of failing.
    #[arg(long, requires = "aggregator")]
    wait: bool,
}

impl Args {
    /// Returns the options for joining jobs that have ranks on other hosts.
    fn upstream(&self) -> Result<Option<ConnectOptions>, Failure> {
        let Some(aggregators) = &self.aggregator else { return Ok(None) };
        let sets = aggregator_sets(aggregators).map_err(Failure::usage)?;
        if let Some(several) = sets.iter().find(|set| set.len() > 1) {
            return Err(Failure::usage(format!(
                "a sidecar can use one aggregator at a time, not {}; separate standbys with a \
                 comma",
                several.join("+")
            )));
        }
        let interface = environment::interface(self.interface.clone())?;
        let (identity, insecure) = environment::credentials(self.identity.clone(), self.insecure)?;
        let mut sets = sets.into_iter();
        let options = ConnectOptions {
            aggregators: sets.next().unwrap_or_default(),
            standbys: sets.collect(),
            identity,
            insecure,
            data_auth: self.data_auth,
            interface,
            mtu: self.mtu,
            wait: self.wait,
            ..ConnectOptions::new("", "")
        };
        // Check now: otherwise the ranks would get these errors when the first job joins.
        for later in check_sidecar(&options)? {
            let later = with_flags(later);
            stderr::warn(format_args!("{later}; jobs with ranks on other hosts cannot start yet"));
        }
        Ok(Some(options))
    }

    fn limits(&self) -> Result<Limits, Failure> {
        // If the system does not report its memory, accept any size, and set no limit by default.
        let host_mib = host_mib();
        let memory = match (self.memory, host_mib) {
            (Some(asked), Some(mib)) if asked.div_ceil(1 << 20) > mib => {
                return Err(Failure::usage(format!(
                    "--memory of {} MiB exceeds this host's memory of {mib} MiB; lower --memory",
                    asked.div_ceil(1 << 20)
                )));
            }
            (Some(asked), _) => asked,
            (None, mib) => mib.map_or(u64::MAX, |mib| (mib << 20) / 2),
        };
        Ok(Limits {
            jobs: self.max_jobs,
            ranks: self.max_ranks,
            memory: usize::try_from(memory).unwrap_or(usize::MAX),
        })
    }
}

fn memory(text: &str) -> Result<u64, String> {
    match args::size(text)? {
        few if few < LEAST_MEMORY => {
            Err(format!("{few} B is too little memory for ranks to share; give 1M or more"))
        }
        bytes => Ok(bytes),
    }
}

/// Smallest limit on memory in bytes: enough for one or two tensors of a small model.
const LEAST_MEMORY: u64 = 1 << 20;

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("must be an octal number up to 777, such as 660".into()),
    }
}

/// Runs the sidecar until a signal stops it.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let passed = listener_of_systemd().map_err(Failure::usage)?;
    let (limits, upstream) = (args.limits()?, args.upstream()?);
    // Each connection uses a file descriptor, and so does each result until its ranks have read it.
    if let Err(error) = raise_open_files() {
        stderr::warn(format_args!("cannot raise the limit on open files: {error}"));
    }
    let (listener, at) = match (passed, &args.socket) {
        (Some(_), at) if at.is_some() || args.mode.is_some() => {
            return Err(Failure::usage(
                "--socket and --mode conflict with the socket that systemd passed; set \
                 ListenSequentialPacket= and SocketMode= in the socket unit",
            ));
        }
        (Some(passed), _) => (passed, "the systemd socket".to_owned()),
        (None, Some(path)) => {
            if path.as_os_str().as_bytes().starts_with(b"unix:") {
                return Err(Failure::usage(format!(
                    "--socket {} must be a path without unix:; only ranks write unix:PATH",
                    path.display()
                )));
            }
            let listener = Listener::bind(path, args.mode.unwrap_or(0o600))
                .map_err(|error| not_served(path, &error))?;
            (listener, path.display().to_string())
        }
        (None, None) => {
            return Err(Failure::usage("no socket path given; pass --socket PATH"));
        }
    };
    let cores = || available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = args.threads.unwrap_or_else(cores);
    let sidecar =
        Sidecar::start(listener, threads, upstream, limits).map_err(|error| not_started(&error))?;
    let beyond = args.aggregator.as_ref().map(|at| format!(", aggregator {at}"));
    let summing = counted(threads, "thread");
    let ready = format!("racksum worker at {at}: {summing}{}", beyond.unwrap_or_default());
    serve(&sidecar, &ready).map_err(|error| Failure::unavailable(cannot_wait(&error)))?;
    drop(sidecar);
    print_or_warn("racksum worker stops");
    Ok(())
}

/// Returns the failure for a socket path that a sidecar cannot bind.
fn not_served(path: &Path, error: &io::Error) -> Failure {
    let at = path.display();
    let why = match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot serve at {at}: another process serves there; choose another --socket, or stop \
             that process"
        ),
        _ => format!("cannot serve at {at}: {}", with_limit(error)),
    };
    Failure::of_serving(why, error)
}

/// Reports that the sidecar is ready, and waits for a signal. Then refuses new jobs, and waits
/// until no job is left or another signal arrives.
fn serve(sidecar: &Sidecar, ready: &str) -> io::Result<()> {
    let runtime = racksum_net::runtime::single_threaded()?;
    runtime.block_on(async {
        let mut signals = Ending::listen()?;
        print_or_warn(ready);
        notify("READY=1");
        signals.next().await;
        notify("STOPPING=1");
        sidecar.drain();
        let jobs = sidecar.jobs();
        if jobs > 0 {
            print_or_warn(&format!(
                "racksum worker is draining: waiting for {} to end; another signal stops it",
                counted(jobs, "job")
            ));
        }
        let over = async {
            while sidecar.jobs() > 0 {
                tokio::time::sleep(DRAIN_POLL).await;
            }
        };
        tokio::select! {
            () = over => {}
            _ = signals.next() => {}
        }
        Ok(())
    })
}

fn notify(state: &str) {
    if let Err(error) = notify_systemd(state) {
        stderr::warn(format_args!("cannot notify systemd of {state}: {error}"));
    }
}

/// How often a draining sidecar checks whether its jobs have ended.
const DRAIN_POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parsed;

    #[test]
    fn jobs_of_several_hosts_join_with_the_mtu_that_the_sidecar_is_given() {
        let line = ["worker", "--socket", "s", "--aggregator", "127.0.0.1:1", "--mtu", "1400"];
        let args: Args = parsed(&line);
        assert_eq!(args.upstream().unwrap().unwrap().mtu, Some(1400));
    }
}
