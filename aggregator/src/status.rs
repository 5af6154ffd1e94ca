//! The aggregator's status: gathered here, and written as one JSON object to each client of the
//! status socket.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use racksum_net::local::{Name, listen_for_streams};
use racksum_proto::ids::JobId;
use racksum_proto::status::{AggregatorStatus, JobStatus};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::time::timeout;

use crate::registry::{SharedRegistry, lock};
use crate::shard::ShardReport;

/// The time limit for a shard to report its progress, and for a client to read the status.
const PATIENCE: Duration = Duration::from_secs(1);

/// Splits the JSON of a status into parts that each fit into a message.
pub(crate) fn parts(status: &AggregatorStatus) -> Vec<String> {
    let json = serde_json::to_string(status).unwrap_or_default();
    let mut parts = Vec::new();
    let mut rest = &*json;
    while !rest.is_empty() {
        let (part, others) = rest.split_at(rest.floor_char_boundary(MAX_PART));
        parts.push(part.to_owned());
        rest = others;
    }
    parts
}

/// The maximum size of a part in bytes. Encoded as a JSON string, a part becomes at most six times
/// as long.
const MAX_PART: usize = 8 << 10;

/// Merges the shards' progress reports into the status of a job.
fn merge(job: &mut JobStatus, reports: &[ShardReport]) {
    let id = JobId(job.id);
    let all: Vec<_> = reports.iter().filter_map(|report| report.jobs.get(&id)).collect();
    let millis = |span: racksum_proto::time::Span| span.as_millis();
    job.stalled_ms = all.iter().filter_map(|report| report.stalled).map(millis).max();
    for rank in &mut job.ranks {
        let each = || all.iter().filter_map(|report| report.ranks.get(usize::from(rank.number)));
        rank.next_op = each().map(|at| at.next_op.0).max().unwrap_or(0);
        rank.opened = each().map(|at| at.opened).sum();
        rank.delivered = each().map(|at| at.delivered).sum();
        rank.silent_ms = each().map(|at| millis(at.silent)).min().unwrap_or(0);
        rank.behind = each().any(|at| at.behind);
        each().for_each(|at| {
            rank.contributed += at.contributed;
            rank.results += at.results;
        });
        rank.busy_ms = each().map(|at| millis(at.busy)).max().unwrap_or(0);
        rank.waited_ms = each().map(|at| millis(at.waited)).max().unwrap_or(0);
        rank.round_trip_us = each().filter_map(|at| at.round_trip).map(|trip| trip.0 / 1000).min();
    }
}

/// The status socket, removed on drop.
#[derive(Debug)]
pub(crate) struct StatusSocket {
    /// The name of the socket. Fields drop in declaration order, and the name must be removed
    /// first: if the socket stopped listening while its name existed, a successor would take it for
    /// a stale socket.
    _name: Name,
    listener: UnixListener,
}

impl StatusSocket {
    /// Binds a socket that only its owner may open, and replaces a socket that a dead aggregator
    /// left behind.
    ///
    /// # Errors
    /// Returns the kernel's error, such as `AddrInUse` if another process listens at the path.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let (listener, name) = listen_for_streams(path, 0o600)?;
        listener.set_nonblocking(true)?;
        Ok(Self { _name: name, listener: UnixListener::from_std(listener)? })
    }

    /// Writes the status to every client that opens the socket.
    pub(crate) async fn serve(self, registry: SharedRegistry, addr: SocketAddr) {
        loop {
            // An accept error, such as too many open files, must not end the server.
            let Ok((mut stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(PATIENCE).await;
                continue;
            };
            let registry = SharedRegistry::clone(&registry);
            tokio::spawn(async move {
                let json = serde_json::to_vec(&status(&registry, addr).await).unwrap_or_default();
                // Clients that have disconnected or do not read are ignored.
                drop(timeout(PATIENCE, stream.write_all(&json)).await);
            });
        }
    }
}

/// Gathers the status from the registry and the shards.
pub(crate) async fn status(registry: &SharedRegistry, addr: SocketAddr) -> AggregatorStatus {
    let (mut status, asked) = {
        let registry = lock(registry);
        (registry.status(addr), registry.ask_shards(None))
    };
    let mut reports = Vec::new();
    for report in asked {
        // A shard that does not answer in time is busy, or has failed.
        if let Ok(Ok(report)) = timeout(PATIENCE, report).await {
            reports.push(report);
        }
    }
    for job in &mut status.jobs {
        merge(job, &reports);
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
        // The name of the socket cannot be removed while the folder is locked.
        let locked = File::open(&folder).unwrap();
        locked.lock().unwrap();
        let dropping = tokio::task::spawn_blocking(move || drop(socket));
        let mut calls = 0;
        loop {
            match UnixStream::connect(&path) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) => panic!("a successor would take the socket for a stale one: {error}"),
            }
            calls += 1;
            if calls == 20 {
                locked.unlock().unwrap();
            }
            // Slow down, because calls that have not been accepted yet fill the listen queue of
            // 128.
            let pause = if calls < 20 { 1 } else { 50 };
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        dropping.await.unwrap();
        std::fs::remove_dir(folder).unwrap();
    }
}
