//! What an operator configures.

use std::net::IpAddr;

use serde::Deserialize;

/// How results reach the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fanout {
    /// By multicast to the ranks that hear a probe at join, one copy each to the others.
    Auto,
    /// By multicast; a rank that does not hear the probe is refused.
    Multicast,
    /// One copy each.
    Unicast,
}

/// An aggregator's configuration: the defaults, a file, or flags.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address to serve on.
    pub bind: IpAddr,
    /// The UDP port of the control plane; shard `i` takes `port + 1 + i`. 0 lets the system
    /// choose all of them.
    pub port: u16,
    /// How many shards: threads, each with a socket of its own.
    pub shards: u8,
    /// Most slots that a stream of a job is granted.
    pub pool_slots: u32,
    /// MiB of packet buffers that each shard allocates at start, shared equally by the jobs.
    pub pool_mib: u32,
    /// Most jobs at a time.
    pub max_jobs: u16,
    /// Seconds that a job may wait for its last rank, from its first on.
    pub join_timeout_s: u32,
    /// How results reach the ranks.
    pub fanout: Fanout,
    /// Serve beyond loopback without identities.
    pub insecure: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: IpAddr::from([127, 0, 0, 1]),
            port: 7177,
            shards: 1,
            pool_slots: 256,
            pool_mib: 1024,
            max_jobs: 8,
            join_timeout_s: 600,
            fanout: Fanout::Auto,
            insecure: false,
        }
    }
}

/// Why a configuration cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not TOML, or has a key or a value that does not belong.
    #[error("{0}")]
    Parse(String),
    /// A number is out of its range.
    #[error("{key} is {value}, but must be from {min} to {max}")]
    Range {
        /// The key, as in the file; the flag is the same with dashes.
        key: &'static str,
        /// What was given.
        value: u64,
        /// The least it may be.
        min: u64,
        /// The most it may be.
        max: u64,
    },
}

impl Config {
    /// Reads a configuration file; keys it does not have keep their defaults.
    ///
    /// # Errors
    /// A sentence that names the line, the key and what is wrong with it.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let config: Self =
            toml::from_str(text).map_err(|error| ConfigError::Parse(error.to_string()))?;
        config.validate()?;
        Ok(config)
    }

    /// Checks that the numbers are in their ranges.
    ///
    /// # Errors
    /// The first that is not.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let ports = u64::from(u16::MAX) - 1 - u64::from(self.shards);
        for (key, value, min, max) in [
            ("shards", u64::from(self.shards), 1, 64),
            ("pool_slots", u64::from(self.pool_slots), 2, 4096),
            ("pool_mib", u64::from(self.pool_mib), 1, 1 << 20),
            ("max_jobs", u64::from(self.max_jobs), 1, 1024),
            ("join_timeout_s", u64::from(self.join_timeout_s), 1, 7 * 24 * 3600),
            ("port", u64::from(self.port), 0, ports),
        ] {
            if !(min..=max).contains(&value) {
                return Err(ConfigError::Range { key, value, min, max });
            }
        }
        Ok(())
    }

    /// Packet buffers of each shard.
    #[must_use]
    pub fn buffers(&self) -> usize {
        let per_mib = (1 << 20) / racksum_net::udp::RECV_CAPACITY;
        self.pool_mib as usize * per_mib
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_overrides_what_it_names() {
        let config = Config::from_toml("shards = 3\nfanout = \"unicast\"").unwrap();
        assert_eq!((config.shards, config.fanout), (3, Fanout::Unicast));
        assert_eq!(config.pool_slots, Config::default().pool_slots);
    }

    #[test]
    fn unknown_keys_and_bad_numbers_are_named() {
        let ConfigError::Parse(text) = Config::from_toml("\nshrads = 3").unwrap_err() else {
            panic!("not a parse error")
        };
        assert!(text.contains("shrads") && text.contains("line 2"), "{text}");
        let error = Config::from_toml("shards = 0").unwrap_err().to_string();
        assert_eq!(error, "shards is 0, but must be from 1 to 64");
    }
}
