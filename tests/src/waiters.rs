//! Crowds of ranks that wait for room, as an attacker could use them to keep others out.
//!
//! `benches/examples/waiters.rs` is a program that uses this module.

use std::net::{IpAddr, SocketAddr};

use racksum_net::quic::{Connection, Credentials, connect_from, frames, quinn};
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join, OnRankLoss};
use racksum_proto::ids::Generation;
use racksum_proto::time::Span;
use tokio::task::JoinSet;

/// Time limit for a caller to connect to the aggregator.
const PATIENCE: Span = Span::from_secs(20);
/// Number of joins in progress at a time.
const AT_ONCE: usize = 16;

/// A rank that waits for room, or for other ranks, until this value is dropped.
#[derive(Debug)]
pub(crate) struct Waiter {
    _connection: Connection,
    _streams: (quinn::SendStream, quinn::RecvStream),
}

/// The results of many calls.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pub(crate) waiting: Vec<Waiter>,
    /// Reasons why the other callers do not wait.
    pub(crate) refused: Vec<String>,
}

/// Makes `count` jobs of two ranks wait for room at an aggregator; only one rank of each job calls.
/// The jobs' names begin with `name`, and the calls come from this host's addresses `from` in turn.
pub(crate) async fn gather(to: SocketAddr, from: &[IpAddr], name: &str, count: usize) -> Waiters {
    let (mut waiters, mut calls) = (Waiters::default(), JoinSet::new());
    for (number, from) in (0..count).zip(from.iter().copied().cycle()) {
        if calls.len() == AT_ONCE {
            waiters.note(calls.join_next().await.and_then(Result::ok));
        }
        let job = format!("{name}-{number}");
        calls.spawn(async move { wait_as(to, from, &job).await });
    }
    while let Some(called) = calls.join_next().await {
        waiters.note(called.ok());
    }
    waiters
}

impl Waiters {
    fn note(&mut self, called: Option<Result<Waiter, String>>) {
        match called {
            Some(Ok(waiter)) => self.waiting.push(waiter),
            Some(Err(why)) => self.refused.push(why),
            None => self.refused.push("the call failed".into()),
        }
    }
}

/// Joins a job of two ranks as rank 0, and returns once the rank waits for room or for rank 1.
async fn wait_as(to: SocketAddr, from: IpAddr, job: &str) -> Result<Waiter, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let credentials = Credentials::new(None, true).map_err(|error| text(&error))?;
    let connection = connect_from(Some(from), to, &credentials, PATIENCE).await;
    let connection = connection.map_err(|error| text(&error))?;
    let (mut send, mut recv) = connection.quic().open_bi().await.map_err(|error| text(&error))?;
    let join = FromWorker::Join(wish(job));
    frames::send(&mut send, &join).await.map_err(|error| text(&error))?;
    loop {
        match frames::recv(&mut recv).await.map_err(|error| text(&error))? {
            Some(FromAggregator::Lifeline { .. }) => {}
            Some(FromAggregator::Queued { .. } | FromAggregator::Waiting { .. }) => {
                return Ok(Waiter { _connection: connection, _streams: (send, recv) });
            }
            other => return Err(format!("{other:?}")),
        }
    }
}

fn wish(job: &str) -> Join {
    Join {
        version: CONTROL_VERSION,
        job: job.into(),
        generation: Generation(0),
        secret: None,
        begun_by: None,
        rank: 0,
        world: 2,
        lanes: 1,
        data_ports: vec![9],
        receive_buffer: 1 << 20,
        max_datagram: 1472,
        multicast: false,
        data_auth: None,
        stripe: (0, 1),
        pool_slots: 0,
        wait: true,
        on_rank_loss: OnRankLoss::Abort,
        may_move: false,
        aggregates: false,
        rejoin: false,
        resume: None,
    }
}
