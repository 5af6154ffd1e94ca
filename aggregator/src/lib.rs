//! The aggregator: receives the ranks' block-sparse streams over UDP, folds them window by window
//! in rank order, and sends the sums back.
//!
//! A shard is one thread with one socket. Each shard runs the aggregator half of `racksum-proto`
//! for every job, and owns packet buffers that it allocates at start. Ranks join by calling the
//! control server over QUIC. `racksum-proto` makes the protocol's decisions, and `racksum-net`
//! makes the system calls. Read [`Aggregator`] and [`Config`] first.

mod admission;
mod admit_rule;
mod arena;
mod caller_limits;
mod caller_session;
mod config;
mod control_stream;
mod destinations;
mod expiry;
mod failure;
mod handshake;
mod job_keys;
mod lifelines;
mod multicast_ping;
mod network;
mod parent_session;
mod paths;
mod queue;
mod quotas;
mod rank_session;
mod registry;
mod server;
mod shard;
mod slots;
mod status;
mod wall_clock;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

pub use admit_rule::Admit;
pub use config::{Config, ConfigError, Fanout, MAX_SHARDS, bind_address, bounds, host_mib};
use failure::Failure;
use racksum_net::clock::Clock;
use racksum_net::quic::{Credentials, change_credentials, quinn, server as endpoint};
use racksum_net::{NetError, with_limit};
pub use registry::MAX_LANES;
use registry::{Registry, SharedRegistry, lock};
pub use shard::ShardStats;
use shard::{ShardHandle, connect_shards};
pub use slots::MAX_WORLD;
use status::StatusSocket;
use tokio::sync::watch;

/// The reason why an aggregator did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A socket could not be opened, or an identity could not be read.
    #[error("{0}")]
    Net(#[from] NetError),
    /// The status socket could not be bound.
    #[error(
        "cannot bind the status socket {}: {}; choose another path with --status-socket",
        path.display(), with_limit(cause)
    )]
    StatusSocket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The system refuses to give this process more memory.
    #[error("{}", no_memory(*mib, Options::USUAL.memory))]
    Memory {
        /// The requested packet buffers of each shard, in MiB.
        mib: usize,
    },
    /// A thread, or the descriptor that wakes it, could not be created.
    #[error(
        "cannot create a thread or its descriptors: {0}; raise the limits on threads (ulimit -u) \
         and on open files (ulimit -n)"
    )]
    Thread(#[from] io::Error),
    /// The parent's address is unusable, and a retry would not help.
    #[error("--parent: {0}")]
    Parent(String),
    /// Multicast is required, but the bind address is not the address of one interface.
    #[error("--fanout multicast needs --bind with the address of one interface, not {0}")]
    NoMulticast(std::net::IpAddr),
    /// Multicast is required, but the interface does not support it.
    #[error("--fanout multicast is not possible: {0}")]
    Multicast(NetError),
}

/// The names of the options that start an aggregator, for use in error messages.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The name of the port option.
    pub port: &'static str,
    /// The name of the identity file option.
    pub identity: &'static str,
    /// The names of the options that set the amount of memory; may be empty.
    pub memory: &'static [&'static str],
}

impl Options {
    /// The options of `racksum aggregator`.
    pub const USUAL: Self =
        Self { port: "--port", identity: "`identity`", memory: &["--pool-mib", "--shards"] };
}

impl StartError {
    /// Returns the error message for a user of these options.
    #[must_use]
    pub fn message_with_options(&self, options: &Options) -> String {
        match self {
            Self::Net(error) => error.message_with_options(options.port, options.identity),
            Self::Config(error) => error.message_with_options(options.memory),
            Self::Memory { mib } => no_memory(*mib, options.memory),
            other => other.to_string(),
        }
    }
}

fn no_memory(mib: usize, options: &[&str]) -> String {
    let lower = match options {
        [] => String::new(),
        options => format!("lower {}, or ", options.join(" or ")),
    };
    format!(
        "cannot allocate {mib} MiB of packet buffers for each shard; {lower}raise the limit on \
         this process's memory (ulimit -v)"
    )
}

/// A running aggregator. Dropping it stops it.
#[derive(Debug)]
pub struct Aggregator {
    addr: SocketAddr,
    registry: SharedRegistry,
    endpoint: quinn::Endpoint,
    /// The current credentials: this aggregator's identity, and the authorities that it trusts.
    credentials: Arc<Mutex<Credentials>>,
    /// Signals that an authority is no longer trusted.
    change_authorities: watch::Sender<()>,
    control: Option<JoinHandle<()>>,
    failure: Failure,
    warnings: Vec<String>,
}

impl Aggregator {
    /// Starts the shards and the control server, and returns once they are ready.
    ///
    /// # Errors
    /// The configuration is invalid, or a resource is not available.
    pub fn start(mut config: Config) -> Result<Self, StartError> {
        config.validate()?;
        let smaller = host_mib().map_or(Ok(None), |mib| config.fit_memory(mib))?;
        let clock = Clock::start();
        let interface = racksum_net::interface::interface_of(config.bind);
        if config.fanout == Fanout::Multicast && interface.is_none() {
            return Err(StartError::NoMulticast(config.bind));
        }
        let runtime = racksum_net::runtime::single_threaded()?;
        let credentials = Credentials::of_aggregator(config.identity.as_deref(), config.insecure)?;
        let bind = SocketAddr::new(config.bind, config.port);
        let mut warnings = runtime.block_on(check_parent(&config, &credentials))?;
        warnings.extend(smaller);
        let endpoint = {
            let _entered = runtime.enter();
            endpoint(bind, &credentials)?
        };
        let addr = endpoint.local_addr()?;
        let status = config.status_socket.as_deref().map(|path| {
            let _entered = runtime.enter();
            let cannot = |cause| StartError::StatusSocket { path: path.into(), cause };
            StatusSocket::bind(path).map_err(cannot)
        });
        let status = status.transpose()?;
        let failure = Failure::new();
        let shards = start_shards(&config, clock, &failure)?;
        let can_multicast = match interface
            .map(|interface| shards.iter().try_for_each(|shard| shard.set_multicast(&interface)))
        {
            Some(Ok(())) => true,
            Some(Err(why)) if config.fanout == Fanout::Multicast => {
                return Err(StartError::Multicast(why));
            }
            // Without multicast, each rank is sent its own copy of the results.
            Some(Err(_)) | None => false,
        };
        let registry = Registry::new(config, shards, can_multicast, any_number());
        let registry = Arc::new(Mutex::new(registry));
        let change_authorities = watch::Sender::new(());
        let serving = server::serve(
            endpoint.clone(),
            Arc::clone(&registry),
            server::MAX_STRANGERS,
            failure.subscribe(),
            change_authorities.subscribe(),
        );
        let status_server = status.map(|status| status.serve(Arc::clone(&registry), addr));
        let credentials = Arc::new(Mutex::new(credentials));
        let expiry = expiry::watch(Arc::clone(&credentials));
        let control = failure.spawn("control".into(), move || {
            // These tasks run until `serving` ends and the runtime is dropped.
            let _status_server = status_server.map(|status_server| runtime.spawn(status_server));
            let _watching = runtime.spawn(wall_clock::watch(clock));
            let _reminding = runtime.spawn(expiry);
            runtime.block_on(serving);
        })?;
        let control = Some(control);
        Ok(Self {
            addr,
            registry,
            endpoint,
            credentials,
            change_authorities,
            control,
            failure,
            warnings,
        })
    }

    /// Returns the address of the control plane, which workers connect to.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns each shard's counters, which may be slightly out of date.
    #[must_use]
    pub fn stats(&self) -> Vec<ShardStats> {
        lock(&self.registry).shards().iter().map(ShardHandle::stats).collect()
    }

    /// Returns the addresses of the shards' data sockets.
    #[must_use]
    pub fn data_addrs(&self) -> Vec<SocketAddr> {
        lock(&self.registry).shards().iter().map(|shard| shard.addr).collect()
    }

    /// Returns the current configuration.
    #[must_use]
    pub fn config(&self) -> Config {
        lock(&self.registry).config().clone()
    }

    /// Applies another configuration. Running jobs keep what they were granted. If an authority is
    /// no longer trusted, callers that have not joined must connect again. Returns the
    /// configuration keys that differ but need a restart; those keep their old values.
    ///
    /// # Errors
    /// The new credentials cannot be used; the configuration is unchanged.
    pub fn reload(&self, reload: Reload) -> Result<Vec<&'static str>, StartError> {
        let Reload { config, fixed, credentials } = reload;
        let Some(credentials) = credentials else {
            lock(&self.registry).reconfigure(config);
            return Ok(fixed);
        };
        change_credentials(&self.endpoint, &credentials)?;
        lock(&self.registry).reconfigure(config);
        let mut before = self.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        if !credentials.accept_all_of(&before) {
            self.change_authorities.send_replace(());
        }
        *before = credentials;
        Ok(fixed)
    }

    /// Stops accepting jobs, and asks the ranks of running jobs to move to another aggregator. Jobs
    /// without a standby are served until they end; [`Self::jobs`] returns how many jobs are left.
    pub fn drain(&self) {
        lock(&self.registry).drain();
    }

    /// Waits until no connection is open.
    pub async fn idle(&self) {
        self.endpoint.wait_idle().await;
    }

    /// Returns why the aggregator stopped serving, if one of its threads has failed. After such a
    /// failure, the control server closes the connections of all ranks.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.failure.subscribe().borrow().clone()
    }

    /// Waits until one of the threads fails, possibly forever. Returns the reason for the failure.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        match failure.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(why)) => why.clone(),
            // The channel cannot close, because `self` holds the sender.
            _ => std::future::pending().await,
        }
    }

    /// Returns the number of jobs.
    #[must_use]
    pub fn jobs(&self) -> usize {
        lock(&self.registry).jobs()
    }

    /// Returns warnings about degraded resources, such as small receive buffers. A warning that
    /// several shards share appears once.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let registry = lock(&self.registry);
        let all = registry.shards().iter().filter_map(|shard| shard.shortfall.clone());
        let all: BTreeSet<_> = all.collect();
        self.warnings.iter().cloned().chain(all).collect()
    }
}

/// A new configuration for a running aggregator, with the credentials that it names.
#[derive(Debug)]
pub struct Reload {
    config: Config,
    fixed: Vec<&'static str>,
    /// The new credentials; `None` if the new configuration removes the identity, which needs a
    /// restart. Until then the present identity stays in use, even if its file no longer exists.
    credentials: Option<Credentials>,
}

impl Reload {
    /// Checks a configuration against the `running` one, and reads the identity file again. The
    /// read may block forever, for example on an unreachable network file system. Do not call this
    /// function from a thread that other threads wait for.
    ///
    /// # Errors
    /// The configuration is invalid, or the identity file cannot be used.
    pub fn read(mut config: Config, running: &Config) -> Result<Self, StartError> {
        config.validate()?;
        // Ignore the warning about smaller pools: it was reported when the aggregator started.
        let _smaller = host_mib().map_or(Ok(None), |mib| config.fit_memory(mib))?;
        let fixed = config.fixed_changes(running);
        let stays = config.identity.is_none() && running.identity.is_some();
        let config = config.with_fixed_of(running);
        let read = || Credentials::of_aggregator(config.identity.as_deref(), config.insecure);
        let credentials = if stays { None } else { Some(read()?) };
        Ok(Self { config, fixed, credentials })
    }
}

impl Drop for Aggregator {
    fn drop(&mut self) {
        lock(&self.registry).stop();
        self.endpoint.close(0u32.into(), b"the aggregator stops");
        if let Some(control) = self.control.take() {
            // Ignore a panic of the control thread: the panic hook has already printed it.
            drop(control.join());
        }
    }
}

/// Checks that the parent, if there is one, can be called with these credentials. Returns a warning
/// if the parent's address cannot be resolved yet.
async fn check_parent(
    config: &Config,
    credentials: &Credentials,
) -> Result<Vec<String>, StartError> {
    let Some(parent) = &config.parent else { return Ok(Vec::new()) };
    match parent_session::find(SocketAddr::new(config.bind, config.port), parent).await {
        Ok(addrs) => {
            addrs.into_iter().try_for_each(|to| credentials.check(to))?;
            Ok(Vec::new())
        }
        Err(parent_session::NotFound::Temporary(why)) => {
            Ok(vec![format!("{why}; this aggregator tries again for each job")])
        }
        Err(parent_session::NotFound::Permanent(why)) => Err(StartError::Parent(why)),
    }
}

/// Starts the shards on the ports after the control port, or on any free ports if the control port
/// is 0.
fn start_shards(
    config: &Config,
    clock: Clock,
    failure: &Failure,
) -> Result<Vec<ShardHandle>, StartError> {
    let shards = (0..config.shards)
        .map(|shard| {
            let port = match config.port {
                0 => 0,
                port => port + 1 + u16::from(shard),
            };
            let bind = SocketAddr::new(config.bind, port);
            let number = usize::from(shard);
            ShardHandle::start(bind, number, config.buffers(), clock, failure)
        })
        .collect::<Result<Vec<_>, StartError>>()?;
    connect_shards(&shards);
    // A failed allocation elsewhere would abort the process, so check that enough memory is left.
    let no_memory = |_| StartError::Memory { mib: config.pool_mib as usize };
    Vec::<u8>::new().try_reserve_exact(HEADROOM).map_err(no_memory)?;
    Ok(shards)
}

/// The bytes of memory that must remain free after the packet buffers are allocated.
const HEADROOM: usize = 64 << 20;

/// Returns a random start for the job numbers, so that a restarted aggregator does not repeat
/// earlier ones. The randomness comes from the seed of a hash table.
fn any_number() -> u32 {
    let hash = RandomState::new().build_hasher().finish();
    u32::try_from(hash >> 32).unwrap_or(0)
}

#[cfg(test)]
mod tests;
