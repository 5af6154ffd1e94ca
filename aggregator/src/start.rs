//! The start of an aggregator: the configuration is checked, sockets are opened, packet buffers are
//! allocated, and the shards' threads and the control thread begin.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use racksum_net::clock::Clock;
use racksum_net::quic::{Credentials, server as endpoint};
use tokio::sync::watch;

use crate::config::{Config, Fanout, host_mib};
use crate::error::StartError;
use crate::failure::Failure;
use crate::registry::Registry;
use crate::shard::{ShardHandle, connect_shards};
use crate::status::StatusSocket;
use crate::{Aggregator, expiry, parent_session, server, wall_clock};

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
        let drain_requested = watch::Sender::new(false);
        let serving = server::serve(
            endpoint.clone(),
            Arc::clone(&registry),
            server::MAX_STRANGERS,
            failure.subscribe(),
            change_authorities.subscribe(),
            drain_requested.clone(),
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
            drain_requested,
            change_authorities,
            control,
            failure,
            warnings,
        })
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
pub(crate) fn any_number() -> u32 {
    let hash = RandomState::new().build_hasher().finish();
    u32::try_from(hash >> 32).unwrap_or(0)
}
