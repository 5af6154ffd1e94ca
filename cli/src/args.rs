//! Arguments that more than one subcommand takes, and how they are read.

use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;
use racksum_aggregator::{MAX_SHARDS, MAX_WORLD, bounds};
use racksum_net::interface::{MAX_MTU, MIN_MTU};
use racksum_proto::control::POOL_SLOTS;

/// What the help of each subcommand ends with.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  the work failed: a wrong sum, a lost rank, ranks that disagree, a timeout
  2  the command line, the configuration or an input is wrong
  3  the network or the aggregator could not be had: no answer, an unknown name, a refusal
  128 + N  ended by signal N, as 130 by SIGINT; an aggregator or sidecar told to stop ends with 0
  141  nobody reads standard output any more, as where `head` has enough: nothing is said";

/// Reads a size: plain bytes, or with K, M, G or T for powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is no size: give bytes, or a number with K, M, G or T");
    let (digits, unit) = match text.trim().to_ascii_uppercase() {
        upper if upper.ends_with('K') => (text.len() - 1, 1 << 10),
        upper if upper.ends_with('M') => (text.len() - 1, 1 << 20),
        upper if upper.ends_with('G') => (text.len() - 1, 1 << 30),
        upper if upper.ends_with('T') => (text.len() - 1, 1 << 40),
        _ => (text.len(), 1),
    };
    let number: u64 = text.get(..digits).ok_or_else(bad)?.trim().parse().map_err(|_| bad())?;
    number.checked_mul(unit).ok_or_else(bad)
}

/// Reads how many ranks there are.
pub(crate) fn world() -> RangedU64ValueParser<u16> {
    RangedU64ValueParser::new().range(1..=u64::from(MAX_WORLD))
}

/// Reads how many shards an aggregator has.
pub(crate) fn shards() -> RangedU64ValueParser<u8> {
    RangedU64ValueParser::new().range(1..=u64::from(MAX_SHARDS))
}

/// Reads how many threads there are.
pub(crate) fn threads() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MAX_THREADS)
}

/// Most threads: more of them would need more mappings than a process may have.
const MAX_THREADS: u64 = 1024;

/// Reads how many jobs or ranks a sidecar may have.
pub(crate) fn places() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 18)
}

/// Reads a number that has bounds in the configuration of an aggregator.
pub(crate) fn of_configuration<T>(key: &str) -> RangedU64ValueParser<T>
where
    T: TryFrom<u64> + Clone + Send + Sync,
{
    RangedU64ValueParser::new().range(bounds(key).unwrap_or(0..=u64::MAX))
}

/// Reads how many slots a rank asks for: 0 leaves it to the aggregator.
pub(crate) fn slots(text: &str) -> Result<u32, String> {
    let slots: u32 = text.parse().map_err(|_| format!("{text:?} is no number of slots"))?;
    if slots == 0 || POOL_SLOTS.contains(&slots) {
        return Ok(slots);
    }
    let (least, most) = POOL_SLOTS.into_inner();
    Err(format!("{slots} is not in {least}..={most}; 0 leaves it to the aggregator"))
}

/// Reads the MTU of a path.
pub(crate) fn mtu() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(MIN_MTU as u64..=MAX_MTU as u64)
}

/// Reads a share from 0 to 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(format!("{share} is not in 0..1")) }
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// For programs: one JSON object a line.
    Json,
}

/// How results reach the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fanout {
    /// Multicast where a probe gets through, copies elsewhere. Anybody on the network can join
    /// the group and read results, unless datagrams are sealed (--data-auth aead).
    Auto,
    /// Multicast only; a rank that it does not reach is refused.
    Multicast,
    /// One copy each.
    Unicast,
}

impl From<Fanout> for racksum_aggregator::Fanout {
    fn from(fanout: Fanout) -> Self {
        match fanout {
            Fanout::Auto => Self::Auto,
            Fanout::Multicast => Self::Multicast,
            Fanout::Unicast => Self::Unicast,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_binary_units() {
        assert_eq!(size("100"), Ok(100));
        assert_eq!(size("4k"), Ok(4096));
        assert_eq!(size("100M"), Ok(100 << 20));
        assert_eq!(size("5T"), Ok(5 << 40));
        for bad in ["", "K", "-1", "1.5M", "5P", "99999999999G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
