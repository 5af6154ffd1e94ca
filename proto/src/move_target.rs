//! The aggregators that an operator moves a job to.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::peer_text::PeerText;

/// The aggregators that a job moves to: one, or several over which its windows are spread. The list
/// may come from a peer, so its reader calls [`check`](Self::check).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MoveTarget {
    /// Each aggregator's `HOST:PORT`. Unprintable characters in a peer's text are escaped, and no
    /// host has a name with a backslash.
    #[serde(deserialize_with = "PeerText::list")]
    pub hosts: Vec<String>,
}

impl MoveTarget {
    /// The maximum number of aggregators: a worker waits on their sockets in one system call.
    pub const MAX_HOSTS: usize = 62;
    /// The maximum length of `HOST:PORT` in bytes: a DNS name of 253 bytes and a port.
    pub const MAX_HOST: usize = 253 + 6;

    /// Checks that there is at least one aggregator, that there are not too many, and that none is
    /// listed twice.
    ///
    /// # Errors
    /// Returns a sentence that says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let (hosts, most) = (&self.hosts, Self::MAX_HOSTS);
        if hosts.is_empty() || hosts.len() > most {
            let count = hosts.len();
            return Err(format!("a job moves to 1 to {most} aggregators, not to {count}"));
        }
        if let Some(long) = hosts.iter().find(|host| host.len() > Self::MAX_HOST) {
            let (len, most) = (long.len(), Self::MAX_HOST);
            return Err(format!("an aggregator's HOST:PORT has {len} bytes, but at most {most}"));
        }
        match hosts.iter().enumerate().find(|(at, host)| hosts[..*at].contains(host)) {
            Some((_, twice)) => Err(format!("the aggregator {twice} is listed twice")),
            None => Ok(()),
        }
    }
}

impl fmt::Display for MoveTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hosts.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use super::*;

    fn target(hosts: &[&str]) -> MoveTarget {
        MoveTarget { hosts: hosts.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn a_list_that_no_rank_could_use_is_refused() {
        assert_eq!(target(&["a:1"]).check(), Ok(()));
        assert_eq!(target(&["a:1", "a:2"]).check(), Ok(()));
        let many: Vec<String> = (0..63).map(|port| format!("a:{port}")).collect();
        let long = "x".repeat(MoveTarget::MAX_HOST + 1);
        for (wrong, why) in [
            (target(&[]), "a job moves to 1 to 62 aggregators, not to 0"),
            (MoveTarget { hosts: many }, "a job moves to 1 to 62 aggregators, not to 63"),
            (target(&["a:1", "b:1", "a:1"]), "the aggregator a:1 is listed twice"),
            (
                MoveTarget { hosts: vec![long] },
                "an aggregator's HOST:PORT has 260 bytes, but at most 259",
            ),
        ] {
            assert_eq!(wrong.check().unwrap_err(), why);
        }
    }
}
