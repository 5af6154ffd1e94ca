//! A builder for the options with which a rank joins a job.

use std::path::PathBuf;
use std::time::Duration;

use racksum_proto::auth::{DataAuth, Key};
use racksum_proto::control::OnRankLoss;
use racksum_proto::ids::Generation;
use racksum_worker as worker;
use racksum_worker::{Client, ConnectError, Connecting};

/// The options with which a rank joins a job.
///
/// ```
/// use std::time::Duration;
/// use racksum::{ConnectOptions, ConnectError};
///
/// // No aggregator listens on port 9 of this host.
/// let options = ConnectOptions::new("127.0.0.1:9", "my-job")
///     .rank(1)
///     .world(4)
///     .join_timeout(Duration::from_millis(600));
/// let error = options.connect().unwrap_err();
/// assert!(!error.is_usage(), "{error}");
///
/// let twice = ConnectOptions::new("a:7177,a:7177", "my-job").connect();
/// assert!(matches!(twice, Err(ConnectError::Arguments { .. })));
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct ConnectOptions {
    aggregators: String,
    options: worker::ConnectOptions,
}

impl ConnectOptions {
    /// Creates options with defaults: rank 0 of a job with one rank.
    ///
    /// `aggregators` is the `HOST:PORT` of an aggregator. `A+B` spreads the job over two
    /// aggregators, and `A,B` moves it to B when A fails. `unix:PATH` joins through the sidecar of
    /// this host. All ranks must pass the same aggregators in the same order.
    pub fn new(aggregators: impl Into<String>, job: impl Into<String>) -> Self {
        Self { aggregators: aggregators.into(), options: worker::ConnectOptions::new("", job) }
    }

    /// Sets the number of this rank. Ranks are numbered from 0.
    pub const fn rank(mut self, rank: u16) -> Self {
        self.options.rank = rank;
        self
    }

    /// Sets the number of ranks in the job.
    pub const fn world(mut self, world: u16) -> Self {
        self.options.world = world;
        self
    }

    /// Sets how many of the job's ranks are on this host. A sidecar waits for that many ranks to
    /// join. The default is all ranks.
    pub const fn local_world(mut self, local_world: u16) -> Self {
        self.options.local_world = Some(local_world);
        self
    }

    /// Sets the name of this client's process group within the job. Each group has its own ops.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.options.group = group.into();
        self
    }

    /// Sets the generation, which numbers the lives of the job. A restarted job must have a greater
    /// generation than before. The new life ends the earlier one only if it proves to be the same
    /// job, for example by the same [`secret`](Self::secret).
    pub const fn generation(mut self, generation: u32) -> Self {
        self.options.generation = Generation(generation);
        self
    }

    /// Sets the secret that all lives of the job share.
    pub const fn secret(mut self, secret: Key) -> Self {
        self.options.secret = Some(secret);
        self
    }

    /// Sets the number of lanes. Ops in lower-numbered lanes go first. The default is 1.
    pub const fn lanes(mut self, lanes: u8) -> Self {
        self.options.lanes = lanes;
        self
    }

    /// Sets whether results may arrive by multicast. The default is true.
    pub const fn multicast(mut self, multicast: bool) -> Self {
        self.options.multicast = multicast;
        self
    }

    /// Sets the identity file, which the rank needs to join aggregators beyond loopback. With an
    /// identity, the rank joins only aggregators that the file's authorities certify.
    pub fn identity(mut self, path: impl Into<PathBuf>) -> Self {
        self.options.identity = Some(path.into());
        self
    }

    /// Sets whether the rank may join aggregators beyond loopback without an identity. Anyone on
    /// the path can then read and change the sums.
    pub const fn insecure(mut self, insecure: bool) -> Self {
        self.options.insecure = insecure;
        self
    }

    /// Sets how datagrams must be authenticated. The default is the aggregator's choice.
    pub const fn data_auth(mut self, data_auth: DataAuth) -> Self {
        self.options.data_auth = Some(data_auth);
        self
    }

    /// Sets whether the rank waits while an aggregator has no room for the job. Otherwise the rank
    /// is refused.
    pub const fn wait(mut self, wait: bool) -> Self {
        self.options.wait = wait;
        self
    }

    /// Sets whether this rank rejoins a job that it left between two ops. The rank resumes with
    /// the op [`Grant::first_op`](crate::Grant::first_op).
    pub const fn rejoin(mut self, rejoin: bool) -> Self {
        self.options.rejoin = rejoin;
        self
    }

    /// Sets how the job reacts to the loss of a rank. All ranks must choose the same reaction.
    pub const fn on_rank_loss(mut self, on_rank_loss: OnRankLoss) -> Self {
        self.options.on_rank_loss = on_rank_loss;
        self
    }

    /// Sets how long to wait for an aggregator, for room and for the other ranks. The default is
    /// 300 s.
    pub const fn join_timeout(mut self, timeout: Duration) -> Self {
        self.options.join_timeout = timeout;
        self
    }

    /// Sets how long an op may take. The default is 60 s.
    pub const fn op_timeout(mut self, timeout: Duration) -> Self {
        self.options.op_timeout = timeout;
        self
    }

    /// Sets the MTU of the path in bytes. The default is the MTU of the interface.
    pub const fn mtu(mut self, mtu: usize) -> Self {
        self.options.mtu = Some(mtu);
        self
    }

    /// Sets which interfaces of this host the rank may use to reach aggregators, in the syntax of
    /// NCCL's `NCCL_SOCKET_IFNAME`. The default is the kernel's choice.
    pub fn interface(mut self, pattern: impl Into<String>) -> Self {
        self.options.interface = Some(pattern.into());
        self
    }

    /// Joins the job, and returns once all its ranks have joined.
    ///
    /// # Errors
    /// Returns [`ConnectError`] if the job cannot be joined, or is not complete in time.
    pub fn connect(&self) -> Result<Client, ConnectError> {
        Client::connect(&self.parsed()?)
    }

    /// Joins the job like [`connect`](Self::connect), on a separate thread, so that the future
    /// needs no particular runtime. Dropping the future cancels the attempt.
    ///
    /// # Errors
    /// Returns the errors of [`connect`](Self::connect).
    pub async fn connect_async(&self) -> Result<Client, ConnectError> {
        Connecting::new().run_async(self.parsed()?).await
    }

    fn parsed(&self) -> Result<worker::ConnectOptions, ConnectError> {
        let named = worker::ConnectOptions::parse(&self.aggregators, "")?;
        let (aggregators, standbys) = (named.aggregators, named.standbys);
        Ok(worker::ConnectOptions { aggregators, standbys, ..self.options.clone() })
    }
}
