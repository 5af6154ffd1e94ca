//! What an aggregator is doing, told on a unix socket to whoever may open it: one JSON object, and
//! the end.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use racksum_net::local::{Name, listen_for_streams};
use racksum_proto::ids::JobId;
use racksum_proto::job_name::JobName;
use racksum_proto::peer_text::PeerText;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::time::{Instant, timeout};

use crate::server::{Shared, lock};
use crate::shard::{ShardReport, ShardStats};

/// How long a shard may take to say how far its jobs are, and a reader to read it.
const PATIENCE: Duration = Duration::from_secs(1);

/// What an aggregator is doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The release that runs.
    #[serde(deserialize_with = "PeerText::string")]
    pub version: String,
    /// Where its control plane is.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// Milliseconds since it started.
    pub up_ms: u64,
    /// The aggregator that it sends its sums to, if it has a parent.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub parent: Option<String>,
    /// Whether it believes everyone.
    pub insecure: bool,
    /// How datagrams are authenticated.
    #[serde(deserialize_with = "PeerText::string")]
    pub data_auth: String,
    /// Most jobs at a time.
    pub max_jobs: u16,
    /// Whether it takes no more jobs, since it is about to stop.
    pub draining: bool,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
    /// Jobs that wait for room, the first first.
    pub queued: Vec<JobName>,
    /// The shards.
    pub shards: Vec<ShardStatus>,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    #[serde(deserialize_with = "PeerText::string")]
    pub job: String,
    /// Which of its groups; empty if it has none.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
    /// Its number here.
    pub id: u32,
    /// Its life.
    pub generation: u32,
    /// How many ranks it has.
    pub world: u16,
    /// How many lanes.
    pub lanes: u8,
    /// The name of its [`JobState`](crate::JobState).
    #[serde(deserialize_with = "PeerText::string")]
    pub state: String,
    /// Milliseconds since its first rank joined.
    pub age_ms: u64,
    /// Ranks that have not joined, or are there no more.
    pub missing: Vec<u16>,
    /// The ranks that it has lost and goes on without.
    pub absent: Vec<u16>,
    /// Milliseconds since a window was last folded, while windows are to be: how long the ranks
    /// that are behind have been waited for.
    pub stalled_ms: Option<u64>,
    /// Its ranks.
    pub ranks: Vec<RankStatus>,
}

/// A rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Its number.
    pub rank: u16,
    /// Its number in datagrams.
    pub number: u16,
    /// The ranks whose sum it sends, if it is an aggregator that has joined for them.
    pub rack: Vec<u16>,
    /// Where its data comes from.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// The name in its certificate.
    #[serde(default, deserialize_with = "PeerText::option")]
    pub identity: Option<String>,
    /// The first op that it has not opened at some shard.
    pub next_op: u32,
    /// Windows that it has opened, over all shards.
    pub opened: u64,
    /// Windows whose results it has, or that had none.
    pub delivered: u64,
    /// Milliseconds since any shard heard it.
    pub silent_ms: u64,
    /// The next window waits for this rank.
    pub behind: bool,
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// Where its data socket is.
    #[serde(deserialize_with = "PeerText::string")]
    pub addr: String,
    /// Datagrams received and sent.
    pub datagrams: [u64; 2],
    /// Bytes of them.
    pub bytes: [u64; 2],
    /// Windows folded.
    pub folds: u64,
    /// Messages that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
    /// Messages that could not be sent.
    pub send_failures: u64,
    /// Datagrams that changed nothing, by reason, where there were any.
    #[serde(deserialize_with = "PeerText::counts")]
    pub rejects: BTreeMap<String, u64>,
    /// Packet buffers in all, and free.
    pub buffers: [usize; 2],
}

impl ShardStatus {
    pub(crate) fn new(addr: String, stats: &ShardStats) -> Self {
        let ShardStats { datagrams, bytes, folds, kernel_drops, send_failures, buffers, .. } =
            *stats;
        let rejects = stats.rejects.iter().filter(|(_, count)| *count > 0);
        let rejects = rejects.map(|(why, count)| (why.name().to_owned(), count)).collect();
        Self { addr, datagrams, bytes, folds, kernel_drops, send_failures, rejects, buffers }
    }
}

impl Status {
    /// Leaves out the jobs of which somebody is not to know.
    pub(crate) fn keep_only(&mut self, may_know: impl Fn(&str) -> bool) {
        self.jobs.retain(|job| may_know(&job.job));
        self.queued.retain(|job| may_know(&job.name));
    }

    /// Its JSON, in parts that each fit a message.
    pub(crate) fn parts(&self) -> Vec<String> {
        let json = serde_json::to_string(self).unwrap_or_default();
        let mut parts = Vec::new();
        let mut rest = &*json;
        while !rest.is_empty() {
            let (part, others) = rest.split_at(rest.floor_char_boundary(MAX_PART));
            parts.push(part.to_owned());
            rest = others;
        }
        parts
    }
}

/// Bytes of a part: written as JSON once more, it has at most six times as many.
const MAX_PART: usize = 8 << 10;

impl JobStatus {
    /// Adds what the shards say of the job's progress.
    pub(crate) fn merge(&mut self, reports: &[ShardReport]) {
        let id = JobId(self.id);
        let all: Vec<_> = reports.iter().filter_map(|report| report.jobs.get(&id)).collect();
        let millis = |span: racksum_proto::time::Span| span.as_millis();
        self.stalled_ms = all.iter().filter_map(|job| job.stalled).map(millis).max();
        for rank in &mut self.ranks {
            let each = || all.iter().filter_map(|job| job.ranks.get(usize::from(rank.number)));
            rank.next_op = each().map(|at| at.next_op.0).max().unwrap_or(0);
            rank.opened = each().map(|at| at.opened).sum();
            rank.delivered = each().map(|at| at.delivered).sum();
            rank.silent_ms = each().map(|at| millis(at.silent)).min().unwrap_or(0);
            rank.behind = each().any(|at| at.behind);
        }
    }
}

/// Milliseconds since a moment.
pub(crate) fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// The socket, which is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct StatusSocket {
    /// Fields are dropped in this order: while the name is there, the socket must listen, or a
    /// successor takes the name for one that was left behind.
    _name: Name,
    listener: UnixListener,
}

impl StatusSocket {
    /// Binds a socket that only its owner may open. One that a dead aggregator left is replaced.
    ///
    /// # Errors
    /// The error of the system; `AddrInUse` if another process serves there.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let (listener, name) = listen_for_streams(path, 0o600)?;
        listener.set_nonblocking(true)?;
        Ok(Self { _name: name, listener: UnixListener::from_std(listener)? })
    }

    /// Tells everyone who opens the socket.
    pub(crate) async fn serve(self, registry: Shared, addr: SocketAddr) {
        loop {
            // What goes wrong with one caller, as with too many open files, is no reason to end.
            let Ok((mut stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(PATIENCE).await;
                continue;
            };
            let registry = Shared::clone(&registry);
            tokio::spawn(async move {
                let json = serde_json::to_vec(&status(&registry, addr).await).unwrap_or_default();
                // A reader that is gone, or does not read, is told nothing.
                drop(timeout(PATIENCE, stream.write_all(&json)).await);
            });
        }
    }
}

/// Gathers what is to be told.
pub(crate) async fn status(registry: &Shared, addr: SocketAddr) -> Status {
    let (mut status, asked) = {
        let registry = lock(registry);
        (registry.status(addr), registry.ask_shards(None))
    };
    let mut reports = Vec::new();
    for report in asked {
        // A shard that does not answer is in the middle of something, or has failed.
        if let Ok(Ok(report)) = timeout(PATIENCE, report).await {
            reports.push(report);
        }
    }
    for job in &mut status.jobs {
        job.merge(&reports);
    }
    status
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::ErrorKind;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_status_socket_listens_until_its_name_is_gone() {
        let name = format!("racksum-status-order-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("socket");
        let socket = StatusSocket::bind(&path).unwrap();
        // Its name stays for as long as the folder is locked.
        let locked = File::open(&folder).unwrap();
        locked.lock().unwrap();
        let dropping = tokio::task::spawn_blocking(move || drop(socket));
        let mut calls = 0;
        loop {
            match UnixStream::connect(&path) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) => panic!("a successor would take the name for a dead one: {error}"),
            }
            calls += 1;
            if calls == 20 {
                locked.unlock().unwrap();
            }
            // Calls that nobody takes fill the queue, of 128.
            let pause = if calls < 20 { 1 } else { 50 };
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        dropping.await.unwrap();
        std::fs::remove_dir(folder).unwrap();
    }
}
