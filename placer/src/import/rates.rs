//! The rates of network interfaces, which topology files do not have.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::hostlist::{HostlistError, MOST_NAMES, expand};
use crate::inventory::MBIT;

/// The rate of the network interfaces of all hosts, or of some.
///
/// ```
/// use racksum_placer::import::NicRate;
///
/// let rate: NicRate = "n[1-4]=25000".parse()?;
/// assert_eq!((rate.hosts.map(|hosts| hosts.len()), rate.mbit), (Some(4), 25_000.0));
/// # Ok::<(), racksum_placer::import::NicRateError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct NicRate {
    /// The hosts. `None` stands for all hosts that no other rate names.
    pub hosts: Option<Vec<String>>,
    /// The rate in Mbit/s.
    pub mbit: f64,
}

/// The error for a text that is no rate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NicRateError {
    /// The rate is not a number, or too small or too large.
    #[error(
        "{0:?} is not a rate; give a number of Mbit/s from 0.001 to 1e9, as in 25000 or \
         n[1-4]=25000"
    )]
    Rate(String),
    /// The list of hosts is malformed.
    #[error("{0}")]
    Hosts(#[from] HostlistError),
}

impl FromStr for NicRate {
    type Err = NicRateError;

    fn from_str(text: &str) -> Result<Self, NicRateError> {
        let (hosts, rate) = match text.rsplit_once('=') {
            Some((hosts, rate)) => (Some(expand(hosts, &mut MOST_NAMES.clone())?), rate),
            None => (None, text),
        };
        let mbit = rate.parse().ok().filter(|mbit| MBIT.contains(mbit));
        Ok(Self { hosts, mbit: mbit.ok_or_else(|| NicRateError::Rate(text.into()))? })
    }
}

/// Returns a function from a host's name and its rate in a file to its rate. A later rate replaces
/// an earlier one.
pub(super) fn by_host(rates: &[NicRate]) -> impl Fn(&str, Option<f64>) -> Option<f64> + use<> {
    let default = rates.iter().rfind(|rate| rate.hosts.is_none()).map(|rate| rate.mbit);
    let named = rates
        .iter()
        .flat_map(|rate| rate.hosts.iter().flatten().map(|host| (host.clone(), rate.mbit)));
    let named: BTreeMap<_, _> = named.collect();
    move |host, own| named.get(host).copied().or(own).or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(text: &str) -> NicRate {
        text.parse().unwrap()
    }

    #[test]
    fn a_rate_of_named_hosts_wins_over_that_of_the_file_and_that_over_the_rate_of_all() {
        let of = by_host(&[rate("n[1-2]=100"), rate("25000"), rate("n2=50")]);
        let of_none = |host| of(host, None);
        assert_eq!(["n1", "n2", "n3"].map(of_none), [100.0, 50.0, 25_000.0].map(Some));
        assert_eq!(["n2", "n3"].map(|host| of(host, Some(7.0))), [50.0, 7.0].map(Some));
        assert_eq!(by_host(&[rate("n1=100")])("n2", None), None);
    }

    #[test]
    fn a_text_that_is_no_rate_is_refused() {
        for text in ["", "fast", "0", "-1", "nan", "inf", "1e300", "1e-300", "n1=", "25G"] {
            assert_eq!(text.parse::<NicRate>(), Err(NicRateError::Rate(text.into())));
        }
        let why = "n[2-1]=5".parse::<NicRate>().unwrap_err().to_string();
        assert_eq!(why, "\"n[2-1]\": the range 2-1 counts down; write the lower number first");
    }
}
