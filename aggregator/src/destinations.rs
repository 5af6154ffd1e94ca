//! The addresses that a shard sends a job's datagrams to, and the keys that seal them.

use std::net::SocketAddr;

use racksum_net::auth::Sealer;
use racksum_proto::aggregator::Recipient;

/// The recipients of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// All ranks of the job, or one of them.
    Ranks(Recipient),
    /// The parent's shard.
    Parent,
}

/// The addresses and sealers of a job.
#[derive(Debug, Default)]
pub(crate) struct Destinations {
    /// The data address of each rank.
    pub(crate) ranks: Vec<SocketAddr>,
    /// The group that results are multicast to, if any.
    pub(crate) group: Option<SocketAddr>,
    /// Addresses of the ranks that do not receive multicast.
    pub(crate) unicast: Vec<SocketAddr>,
    /// Seals datagrams for the ranks, if datagrams are authenticated.
    pub(crate) sealer: Option<Sealer>,
    /// The address of the parent's shard, if the job has a parent.
    pub(crate) parent: Option<SocketAddr>,
    /// Seals datagrams for the parent, if datagrams are authenticated.
    pub(crate) parent_sealer: Option<Sealer>,
}

impl Destinations {
    /// Returns whether the address belongs to a rank or the parent.
    pub(crate) fn is_peer(&self, addr: SocketAddr) -> bool {
        self.ranks.contains(&addr) || self.parent == Some(addr)
    }

    /// Returns the sealer and the addresses of a message. A message to all ranks goes to the group,
    /// if there is one, and to each rank that does not receive multicast.
    pub(crate) fn to(
        &mut self,
        to: To,
    ) -> (Option<&mut Sealer>, impl Iterator<Item = SocketAddr> + Clone + '_) {
        let Self { ranks, group, unicast, sealer, parent, parent_sealer } = self;
        let (sealer, one, ranks) = match to {
            To::Ranks(Recipient::All) => (sealer, *group, &unicast[..]),
            To::Ranks(Recipient::Rank(rank)) => {
                (sealer, None, ranks.get(rank.index()..=rank.index()).unwrap_or(&[]))
            }
            To::Parent => (parent_sealer, *parent, &[][..]),
        };
        (sealer.as_mut(), one.into_iter().chain(ranks.iter().copied()))
    }

    /// Notes which ranks receive multicast; each of the other ranks gets its own copy of every
    /// result. Drops the group if no rank receives multicast.
    pub(crate) fn set_listeners(&mut self, receives: &[bool]) {
        let unreached = self.ranks.iter().zip(receives).filter(|(_, receives)| !**receives);
        self.unicast = unreached.map(|(addr, _)| *addr).collect();
        if self.unicast.len() == self.ranks.len() {
            self.group = None;
        }
    }
}
