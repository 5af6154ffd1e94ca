//! The keys of a job, and what a shard makes of them.

use racksum_net::NetError;
use racksum_net::auth::{Opener, Sealer, new_key};
use racksum_proto::aggregator::Config;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::ids::Rank;

/// The keys of one life of a job. They are made when it starts and are never written anywhere.
#[derive(Debug, Clone)]
pub(crate) struct JobKeys {
    auth: DataAuth,
    /// For what the ranks send, by rank, and for what the aggregator sends.
    keys: Option<(Vec<Key>, Key)>,
}

impl JobKeys {
    /// New keys for a job, if its datagrams are authenticated.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub(crate) fn new(auth: DataAuth, world: u16) -> Result<Self, NetError> {
        let make = || -> Result<_, NetError> {
            Ok(((0..world).map(|_| new_key()).collect::<Result<_, _>>()?, new_key()?))
        };
        let keys = (auth != DataAuth::None).then(make).transpose()?;
        Ok(Self { auth, keys })
    }

    /// What a rank is given.
    pub(crate) fn keys_of(&self, rank: Rank) -> Option<Keys> {
        let (up, down) = self.keys.as_ref()?;
        Some(Keys { up: *up.get(rank.index())?, down: *down })
    }

    /// Gives a rank another key, so that nothing that was sent under the one before is taken.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub(crate) fn renew(&mut self, rank: Rank) -> Result<(), NetError> {
        if let Some((up, _)) = &mut self.keys
            && let Some(key) = up.get_mut(rank.index())
        {
            *key = new_key()?;
        }
        Ok(())
    }

    /// For what the shard of a configuration sends.
    pub(crate) fn sealer(&self, config: &Config) -> Option<Sealer> {
        let (_, down) = self.keys.as_ref()?;
        Sealer::of_shard(self.auth, down, config.shard)
    }

    /// For what the shard of a configuration hears, by rank; none where nothing is authenticated.
    pub(crate) fn openers(&self, config: &Config) -> Vec<Opener> {
        (0..config.world).filter_map(|rank| self.opener(config, Rank(rank))).collect()
    }

    /// The same of one rank.
    pub(crate) fn opener(&self, config: &Config, rank: Rank) -> Option<Opener> {
        let (up, _) = self.keys.as_ref()?;
        let up = up.get(rank.index())?;
        Opener::of_rank(self.auth, up, config.generation, rank, config.shard)
    }
}
