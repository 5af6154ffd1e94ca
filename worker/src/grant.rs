//! The grants that a rank gets from all aggregators of its job, combined.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use racksum_net::auth::{Opener, Sealer};
use racksum_proto::control::Welcome;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::OpId;
use racksum_proto::worker::Config;

use crate::control::{Controls, Event};
use crate::engine::{Link, Links};
use crate::error::ConnectError;
use crate::join::{Session, shard_addrs};
use crate::options::ConnectOptions;

/// The combined grants of a session.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) config: Config,
    pub(crate) links: Links,
    /// The grant of the first aggregator.
    pub(crate) welcome: Welcome,
    pub(crate) membership: Membership,
}

/// The connections of a rank to the aggregators of a session.
#[derive(Debug)]
pub(crate) struct Membership {
    /// The control connections. When they are dropped, the rank leaves the job.
    pub(crate) controls: Controls,
    /// Events that arrived while the rank was joining.
    pub(crate) early: VecDeque<(u8, Event)>,
}

/// Combines the grants of all aggregators.
pub(crate) fn grant(options: &ConnectOptions, session: Session) -> Result<Granted, ConnectError> {
    let welcomes = || session.welcomes.iter().map(|(_, welcome)| welcome);
    let first =
        welcomes().next().ok_or_else(|| ConnectError::Protocol("it sent no welcome".into()))?;
    if welcomes().any(|other| other.fragment_payload != first.fragment_payload) {
        return Err(ConnectError::of_aggregators(
            "the paths to the aggregators pass datagrams of different sizes; set `mtu` to the \
             smallest MTU of these paths",
        ));
    }
    if welcomes().any(|other| other.data_ports.len() != first.data_ports.len()) {
        return Err(ConnectError::of_aggregators(
            "the aggregators differ in `racksum aggregator --shards`; start them with the same \
             value",
        ));
    }
    if welcomes().any(|other| other.data_auth != first.data_auth) {
        return Err(ConnectError::of_aggregators(
            "the aggregators differ in `racksum aggregator --data-auth`; start them with the same \
             value",
        ));
    }
    if welcomes().any(|other| other.rank != first.rank) {
        return Err(ConnectError::Protocol("the aggregators number the ranks differently".into()));
    }
    let shards = links(options, &session);
    let cut = Fragmentation::new(usize::from(first.fragment_payload))
        .ok_or_else(|| ConnectError::Protocol("its fragments are too small for a window".into()))?
        .with_trailer(first.data_auth);
    let config = Config {
        job: first.job,
        generation: options.generation,
        rank: first.rank,
        lanes: options.lanes,
        shards: u8::try_from(shards.len()).map_err(|_| {
            ConnectError::Protocol("the aggregators have more than 255 shards".into())
        })?,
        pool_slots: welcomes().map(|welcome| welcome.pool_slots).min().unwrap_or(0),
        max_ops: welcomes().map(|welcome| welcome.max_ops).min().unwrap_or(0),
        cut,
        in_flight: welcomes().map(|welcome| welcome.in_flight).min().unwrap_or(0) as usize,
        first_op: welcomes().map(|welcome| welcome.first_op).max().unwrap_or(OpId(0)),
        may_move: !options.standbys.is_empty(),
        acks_at_rest: welcomes().any(|welcome| welcome.may_move),
        child: None,
    };
    let (welcome, aggregators) = (first.clone(), session.controls.len());
    let Session { mut controls, early, socket, groups, .. } = session;
    controls.stay();
    let links = Links {
        socket: Arc::new(socket),
        groups: groups.into(),
        shards_each: u8::try_from(shards.len() / aggregators.max(1)).unwrap_or(u8::MAX),
        shards,
    };
    Ok(Granted { config, links, welcome, membership: Membership { controls, early } })
}

/// Returns the links to the shards of all aggregators.
fn links(options: &ConnectOptions, session: &Session) -> Vec<Link> {
    let each = session.welcomes.iter().flat_map(|(addr, welcome)| {
        // Reject datagrams that were sealed before this rank rejoined: they were meant for its
        // earlier process.
        let sealed = welcome.sealed.iter().copied().chain(std::iter::repeat(0));
        shard_addrs(*addr, welcome).zip(sealed).map(move |(addr, sealed)| (addr, welcome, sealed))
    });
    let link = |(shard, (addr, welcome, sealed)): (u8, (SocketAddr, &Welcome, u64))| {
        let Welcome { data_auth, job, rank, .. } = *welcome;
        let auth = welcome.keys.as_ref().and_then(|keys| {
            let sealer = Sealer::of_rank(data_auth, keys, rank, shard)?;
            let opener = Opener::of_shard(data_auth, keys, options.generation, shard)?;
            Some((sealer, opener.after(sealed)))
        });
        Link { addr, job, auth }
    };
    (0..=u8::MAX).zip(each).map(link).collect()
}
