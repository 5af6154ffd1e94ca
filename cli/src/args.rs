//! Arguments that several subcommands share, and their parsers.

use std::num::IntErrorKind;
use std::ops::RangeInclusive;

use clap::ValueEnum;
use racksum_aggregator::{MAX_SHARDS, MAX_WORLD, bounds};
use racksum_net::interface::{MAX_MTU, MIN_MTU};
use racksum_proto::control::POOL_SLOTS;

/// The last part of every subcommand's help.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  success
  1  the work failed: a wrong sum, a lost rank, ranks that disagree, a timeout
  2  the command line, the configuration or an input is wrong
  3  the network, the aggregator or file descriptors are unavailable: no answer, a refusal, no room
  128 + N  ended by signal N (SIGINT: 130); a server told to stop exits with 0
  141  the reader of standard output has closed it, as `head` does; no message is printed";

/// Parses a size: a whole number of bytes, or of the units K, M, G or T, which are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let bad = || {
        format!(
            "{text:?} is not a size; give a whole number of bytes, optionally with K, M, G or T"
        )
    };
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

/// Returns a parser of whole numbers in a range. Every error names the range; clap's own parser
/// does not name it if the text is not a number.
pub(crate) fn number<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let (min, max) = (range.start(), range.end());
        let number = match text.parse::<u64>() {
            Ok(number) => Some(number).filter(|number| range.contains(number)),
            Err(error) => {
                let negative = text.strip_prefix('-').map(str::parse::<u64>);
                let is_whole = *error.kind() == IntErrorKind::PosOverflow
                    || negative.is_some_and(|negative| match negative {
                        Ok(_) => true,
                        Err(error) => *error.kind() == IntErrorKind::PosOverflow,
                    });
                if !is_whole {
                    return Err(format!(
                        "must be a whole number without a unit, from {min} to {max}"
                    ));
                }
                None
            }
        };
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("must be from {min} to {max}"))
    }
}

/// Range of a job's number of ranks.
pub(crate) const WORLDS: RangeInclusive<u64> = 1..=MAX_WORLD as u64;
/// Range of a rank's number.
pub(crate) const RANKS: RangeInclusive<u64> = 0..=MAX_WORLD as u64 - 1;
/// Range of an aggregator's number of shards.
pub(crate) const SHARDS: RangeInclusive<u64> = 1..=MAX_SHARDS as u64;
/// Range of a thread count. A much larger count would need more memory mappings than the kernel
/// allows a process.
pub(crate) const THREADS: RangeInclusive<u64> = 1..=1024;
/// Range of a sidecar's limits on jobs and ranks.
pub(crate) const PLACES: RangeInclusive<u64> = 1..=1 << 18;
/// Range of a timeout in seconds, up to a year.
pub(crate) const SECONDS: RangeInclusive<u64> = 1..=365 * 24 * 3600;
/// Range of a path's MTU in bytes.
pub(crate) const MTUS: RangeInclusive<u64> = MIN_MTU as u64..=MAX_MTU as u64;
/// Range of a block's length in elements. `Descriptor::with_block` rejects lengths that are not
/// powers of two.
pub(crate) const BLOCKS: RangeInclusive<u64> = 32..=1024;
/// Range of an unsigned 32-bit number.
pub(crate) const ANY_U32: RangeInclusive<u64> = 0..=u32::MAX as u64;

/// Returns the range of a numeric key in an aggregator's configuration.
pub(crate) fn of_configuration(key: &str) -> RangeInclusive<u64> {
    bounds(key).unwrap_or(0..=u64::MAX)
}

/// Parses the number of slots that a rank requests; 0 lets the aggregator choose.
pub(crate) fn slots(text: &str) -> Result<u32, String> {
    if text == "0" {
        return Ok(0);
    }
    let (least, most) = POOL_SLOTS.into_inner();
    let slots = number(least.into()..=most.into());
    slots(text).map_err(|why| format!("{why}, or 0 to let the aggregator choose"))
}

/// Parses a share from 0 to 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Text for people.
    Text,
    /// JSON for programs, one object per line.
    Json,
}

/// How results reach the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fanout {
    /// Multicast to ranks that a multicast ping reaches, and a copy to every other rank. Any host
    /// on the network can join the group and read results, unless datagrams are encrypted
    /// (--data-auth aead).
    Auto,
    /// Multicast only; ranks that multicast does not reach are refused.
    Multicast,
    /// One copy per rank.
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

/// Parses the arguments of a subcommand, the first of which is its name.
#[cfg(test)]
pub(crate) fn parsed<A: clap::Args>(line: &[&str]) -> A {
    let command = A::augment_args(clap::Command::new("racksum"));
    A::from_arg_matches(&command.try_get_matches_from(line).unwrap()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_refused_with_its_range() {
        let read = number::<u8>(1..=64);
        assert_eq!(read("64"), Ok(64));
        for wrong in ["0", "65", "300", "-1", "99999999999999999999", "-99999999999999999999"] {
            assert_eq!(read(wrong).unwrap_err(), "must be from 1 to 64", "{wrong}");
        }
        for wrong in ["", "x", "1.5", "5s", "-", "-x"] {
            let why = "must be a whole number without a unit, from 1 to 64";
            assert_eq!(read(wrong).unwrap_err(), why, "{wrong}");
        }
    }

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
