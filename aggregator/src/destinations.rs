//! Where the datagrams of a job go at a shard, and what they are sealed with.

use std::net::SocketAddr;

use racksum_net::auth::Sealer;
use racksum_proto::aggregator::Recipient;

/// Whom a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    /// The ranks of the job, or one of them.
    Ranks(Recipient),
    /// The shard of the parent.
    Parent,
}

/// The addresses of a job.
#[derive(Debug, Default)]
pub(crate) struct Destinations {
    /// Where each rank's data goes.
    pub(crate) ranks: Vec<SocketAddr>,
    /// The group that results are multicast to, if any.
    pub(crate) group: Option<SocketAddr>,
    /// Ranks that do not hear the group.
    pub(crate) unicast: Vec<SocketAddr>,
    /// Seals what goes to the ranks, if datagrams are authenticated.
    pub(crate) sealer: Option<Sealer>,
    /// The shard of the parent, if there is one.
    pub(crate) parent: Option<SocketAddr>,
    /// Seals what goes there.
    pub(crate) parent_sealer: Option<Sealer>,
}

impl Destinations {
    /// Whether a rank or the parent has an address.
    pub(crate) fn is_peer(&self, addr: SocketAddr) -> bool {
        self.ranks.contains(&addr) || self.parent == Some(addr)
    }

    /// What seals a message, and the addresses it goes to: the group if there is one, then the
    /// ranks that do not hear it; or a single rank, or the parent.
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

    /// Sends copies to the ranks that do not hear the group, which is of no use if that is all.
    pub(crate) fn set_listeners(&mut self, hears: &[bool]) {
        let deaf = self.ranks.iter().zip(hears).filter(|(_, hears)| !**hears);
        self.unicast = deaf.map(|(addr, _)| *addr).collect();
        if self.unicast.len() == self.ranks.len() {
            self.group = None;
        }
    }
}
