//! One rank of a distributed run: the flags for its job, rank and connection.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use racksum_proto::auth::DataAuth;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;
use racksum_worker::{ConnectOptions, Faults, aggregator_sets, check_address};

use crate::exit::Failure;
use crate::{args, environment};

/// The flags of a rank of a distributed run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct MemberArgs {
    /// Run one rank of a distributed run at this aggregator, HOST:PORT; needs --rank and --world.
    /// A+B spreads the job over both; with A,B the job moves to B when A fails or drains, and back
    /// to A when B does [env, with --rank and --world: RACKSUM_AGGREGATOR].
    #[arg(
        long,
        value_name = "HOST:PORT",
        value_parser = aggregators,
        requires_all = ["rank", "world"]
    )]
    aggregator: Option<Aggregators>,
    /// Name of the job in a distributed run [default: the name of the subcommand].
    #[arg(long, requires = "rank", value_parser = job)]
    job: Option<String>,
    /// Generation of the job; increase it at each restart.
    #[arg(
        long,
        requires = "rank",
        default_value_t = 0,
        value_parser = args::number::<u32>(args::ANY_U32)
    )]
    generation: u32,
    /// Number of this rank, from 0.
    #[arg(long, requires = "world", value_parser = args::number::<u16>(args::RANKS))]
    rank: Option<u16>,
    /// Number of ranks of the job.
    #[arg(long, requires = "rank", value_parser = args::number::<u16>(args::WORLDS))]
    pub(crate) world: Option<u16>,
    /// Identity file to connect with, as `racksum identity issue` writes it [env:
    /// RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", requires = "rank", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without identities [env: RACKSUM_INSECURE].
    #[arg(long, requires = "rank")]
    insecure: bool,
    /// Interfaces of this host to connect from, in the syntax of NCCL_SOCKET_IFNAME [env:
    /// RACKSUM_INTERFACE].
    #[arg(long, value_name = "NAMES", requires = "rank")]
    interface: Option<String>,
    /// Wait up to --join-timeout for room at the aggregator, instead of failing if there is none.
    #[arg(long, requires = "rank")]
    wait: bool,
    /// Maximum time in seconds until an aggregator answers and has room, and all ranks have joined.
    #[arg(
        long,
        value_name = "S",
        requires = "rank",
        default_value_t = 60,
        value_parser = args::number::<u64>(args::SECONDS)
    )]
    join_timeout: u64,
    /// Data authentication: none, mac or aead. An aggregator with another mode refuses the rank;
    /// without --rank this sets the mode of the aggregator on this host, where `racksum reduce`
    /// defaults to aead [default: the aggregator's setting, which defaults to mac, or to none on
    /// loopback].
    #[arg(long)]
    pub(crate) data_auth: Option<DataAuth>,
}

/// The sets of aggregators of a job, in the order in which a rank tries them.
#[derive(Debug, Clone)]
pub(crate) struct Aggregators(Vec<Vec<String>>);

fn aggregators(text: &str) -> Result<Aggregators, String> {
    let sets = aggregator_sets(text)?;
    // This command shares no memory with a sidecar, so every address must be an aggregator's.
    if text.starts_with("unix:") {
        check_address(text).map_err(|error| error.to_string())?;
    }
    Ok(Aggregators(sets))
}

fn job(name: &str) -> Result<String, String> {
    JobName::from(name).check().map(|()| name.to_owned())
}

/// A rank's place in its job, and its connection options.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) rank: u16,
    pub(crate) world: u16,
    /// The sets of aggregators, in the order in which the rank tries them.
    aggregators: Vec<Vec<String>>,
    job: String,
    generation: Generation,
    identity: Option<PathBuf>,
    pub(crate) insecure: bool,
    pub(crate) data_auth: Option<DataAuth>,
    interface: Option<String>,
    wait: bool,
    join_timeout: Duration,
}

impl MemberArgs {
    /// Returns whether the command line makes this process one rank of a distributed run.
    pub(crate) const fn is_rank(&self) -> bool {
        self.rank.is_some()
    }

    /// Returns this process's place in a distributed run, or `None` if all ranks run on this host.
    /// The job is called `job` unless a flag names it.
    ///
    /// # Errors
    /// A message for the user, if no aggregator is given or a variable is invalid.
    pub(crate) fn member(&self, job: &str) -> Result<Option<Member>, Failure> {
        let Some((rank, world)) = self.rank.zip(self.world) else { return Ok(None) };
        let named = match &self.aggregator {
            Some(named) => Some(named.clone()),
            None => environment::aggregator(aggregators)?,
        };
        let Some(Aggregators(aggregators)) = named else {
            return Err(Failure::usage(
                "--rank and --world start one rank of a distributed run, which needs an \
                 aggregator; set --aggregator HOST:PORT or RACKSUM_AGGREGATOR, or leave the flags \
                 out to run all ranks on this host",
            ));
        };
        let (identity, insecure) = environment::credentials(self.identity.clone(), self.insecure)?;
        Ok(Some(Member {
            rank,
            world,
            aggregators,
            job: self.job.clone().unwrap_or_else(|| job.to_owned()),
            generation: Generation(self.generation),
            identity,
            insecure,
            data_auth: self.data_auth,
            interface: environment::interface(self.interface.clone())?,
            wait: self.wait,
            join_timeout: Duration::from_secs(self.join_timeout),
        }))
    }
}

impl Member {
    /// Returns whether the aggregators of this job may include one at this address.
    pub(crate) fn names(&self, at: SocketAddr) -> bool {
        let end = format!(":{}", at.port());
        self.aggregators.iter().flatten().any(|host| match host.parse::<SocketAddr>() {
            Ok(addr) => addr == at || at.ip().is_unspecified() && addr.port() == at.port(),
            // A host name may resolve to any address.
            Err(_) => host.ends_with(&end),
        })
    }

    /// Returns the connection options. Each op may take `timeout_s` seconds.
    pub(crate) fn options(&self, timeout_s: u64, faults: Faults) -> ConnectOptions {
        let mut sets = self.aggregators.iter().cloned();
        ConnectOptions {
            aggregators: sets.next().unwrap_or_default(),
            standbys: sets.collect(),
            generation: self.generation,
            rank: self.rank,
            world: self.world,
            identity: self.identity.clone(),
            insecure: self.insecure,
            data_auth: self.data_auth,
            interface: self.interface.clone(),
            wait: self.wait,
            join_timeout: self.join_timeout,
            op_timeout: Duration::from_secs(timeout_s),
            faults,
            ..ConnectOptions::new("", self.job.clone())
        }
    }
}
