//! The keys of a job, and the sealers and openers that a shard derives from them.

use racksum_net::NetError;
use racksum_net::auth::{Opener, Sealer, new_key};
use racksum_proto::aggregator::Config;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::ids::Rank;

/// The keys of one generation of a job. They are created when the generation starts, and are never
/// written to disk.
#[derive(Debug, Clone)]
pub(crate) struct JobKeys {
    auth: DataAuth,
    /// The key of each rank's datagrams, and the key of the aggregator's datagrams.
    keys: Option<(Vec<Key>, Key)>,
}

impl JobKeys {
    /// Generates keys for a job, if its datagrams are authenticated.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub(crate) fn new(auth: DataAuth, world: u16) -> Result<Self, NetError> {
        let make = || -> Result<_, NetError> {
            Ok(((0..world).map(|_| new_key()).collect::<Result<_, _>>()?, new_key()?))
        };
        let keys = (auth != DataAuth::None).then(make).transpose()?;
        Ok(Self { auth, keys })
    }

    /// Returns the keys that a rank receives, if datagrams are authenticated.
    pub(crate) fn keys_of(&self, rank: Rank) -> Option<Keys> {
        let (up, down) = self.keys.as_ref()?;
        Some(Keys { up: *up.get(rank.index())?, down: *down })
    }

    /// Replaces a rank's key, so that data sealed with the old key is rejected.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub(crate) fn renew(&mut self, rank: Rank) -> Result<(), NetError> {
        if let Some((up, _)) = &mut self.keys
            && let Some(key) = up.get_mut(rank.index())
        {
            *key = new_key()?;
        }
        Ok(())
    }

    /// Returns the sealer for the datagrams of a shard, if datagrams are authenticated.
    pub(crate) fn sealer(&self, config: &Config) -> Option<Sealer> {
        let (_, down) = self.keys.as_ref()?;
        Sealer::of_shard(self.auth, down, config.shard)
    }

    /// Returns the openers for the datagrams that a shard receives, by rank; empty if datagrams are
    /// not authenticated.
    pub(crate) fn openers(&self, config: &Config) -> Vec<Opener> {
        (0..config.world).filter_map(|rank| self.opener(config, Rank(rank))).collect()
    }

    /// Returns the opener for the datagrams that a shard receives from one rank, if datagrams are
    /// authenticated.
    pub(crate) fn opener(&self, config: &Config, rank: Rank) -> Option<Opener> {
        let (up, _) = self.keys.as_ref()?;
        let up = up.get(rank.index())?;
        Opener::of_rank(self.auth, up, config.generation, rank, config.shard)
    }
}
