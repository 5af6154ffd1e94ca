//! The errors that callers get, one enum for each kind of call.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use racksum_net::NetError;
use racksum_net::quic::SILENT;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;
use racksum_proto::rank_list::named;

use crate::span::span;

/// The reason why a worker could not connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// An argument is invalid, or arguments contradict each other.
    #[error("{why}")]
    Arguments {
        /// The options at fault, by name.
        options: &'static [&'static str],
        /// The fault, as a sentence.
        why: String,
    },
    /// The text given as an aggregator's address is malformed.
    #[error("{host:?} is not an aggregator address (HOST:PORT): {why}")]
    NoAddress {
        /// The address as it was given.
        host: String,
        /// The reason why it is invalid.
        why: String,
    },
    /// The name of an aggregator does not resolve, at least for now.
    #[error("{}; check its spelling and DNS", unresolved(host, why))]
    Unresolved {
        /// The address as it was given.
        host: String,
        /// The error of the resolver.
        why: String,
    },
    /// The host has no route to an aggregator.
    #[error("{}; check the address and the routes", no_way(*to, why))]
    NoWay {
        /// The aggregator's address.
        to: SocketAddr,
        /// The error of the kernel.
        why: String,
    },
    /// The control port answers, but datagrams to or from a data port do not pass. The text names
    /// the port, the direction and the size.
    #[error("{0}")]
    Blocked(String),
    /// A network error: for example a socket cannot be opened, or no peer answers.
    #[error("{0}")]
    Net(#[from] NetError),
    /// The addresses of a name were tried, and no attempt succeeded.
    #[error("{}", each(name, tried, ToString::to_string))]
    Named {
        /// The aggregators as they were given.
        name: String,
        /// The error of each address.
        tried: Vec<Self>,
    },
    /// The aggregator refused the rank.
    #[error("the aggregator refused: {0}")]
    Refused(String),
    /// The aggregator speaks another version of the protocol.
    #[error(
        "the aggregator speaks protocol version {theirs}, but this worker speaks version {own}; \
         install the same release on both"
    )]
    Version {
        /// The aggregator's version.
        theirs: u16,
        /// The worker's version.
        own: u16,
    },
    /// No sidecar can be reached.
    #[error("{}; start `racksum worker --socket` with that path", no_sidecar(path, why))]
    NoSidecar {
        /// The path of the sidecar's socket.
        path: PathBuf,
        /// The reason why the call failed.
        why: String,
        /// Whether no process listens at the path, at least for now.
        absent: bool,
    },
    /// The process that listens at the sidecar's path may be an impostor.
    #[error("the sidecar at {} is not trusted: {why}", path.display())]
    UntrustedSidecar {
        /// The path of the sidecar's socket.
        path: PathBuf,
        /// The reason why it is not trusted.
        why: String,
    },
    /// The sidecar refused the rank, or dropped it before all ranks had joined.
    #[error("the sidecar refused: {0}")]
    SidecarRefused(String),
    /// The sidecar is from another release.
    #[error(
        "the sidecar speaks protocol version {theirs}, but this rank speaks version {own}; \
         install the same release on both"
    )]
    SidecarVersion {
        /// The sidecar's version.
        theirs: u16,
        /// The rank's version.
        own: u16,
    },
    /// The aggregator is about to stop and takes no more jobs.
    #[error("{DRAINING}; use another aggregator")]
    Draining,
    /// Some ranks of the job did not join in time.
    #[error("{}{elsewhere}", incomplete(missing, *waited))]
    Incomplete {
        /// The missing ranks.
        missing: Vec<u16>,
        /// How long this rank waited for the others.
        waited: Duration,
        /// The outcome at other aggregators that were tried: `; HOST:PORT: ` and a sentence for
        /// each.
        elsewhere: String,
    },
    /// The job waited too long for room.
    #[error("no room for the job within {} s: {why}{elsewhere}", waited.as_secs())]
    NoRoom {
        /// The aggregator's reason, as a sentence.
        why: String,
        /// How long this rank waited for room, here and at other aggregators.
        waited: Duration,
        /// The outcome at other aggregators that were tried, in the format of `Incomplete`.
        elsewhere: String,
    },
    /// The aggregator was silent for too long.
    #[error("{SILENT}")]
    Silent,
    /// The client was closed, or the attempt was cancelled, before all ranks had joined.
    #[error("the attempt to connect was cancelled")]
    GivenUp,
    /// The connection broke before all ranks had joined.
    #[error("lost the connection to the aggregator: {0}")]
    Closed(String),
    /// A rank was lost before all ranks had joined.
    #[error("the aggregator closed the connection: {}", lost(ranks, *why))]
    PeerLost {
        /// The lost ranks.
        ranks: Vec<Rank>,
        /// The cause of the loss.
        why: Loss,
    },
    /// None of several aggregators could be joined.
    #[error("{0}")]
    NoAggregator(String),
    /// The aggregator violated the protocol.
    #[error("the aggregator violated the protocol: {0}")]
    Protocol(String),
    /// This host cannot provide a socket or a thread.
    #[error(
        "cannot open a socket or start a thread: {0}; raise the limits on open files (ulimit -n) \
         and on threads (ulimit -u)"
    )]
    Io(#[from] io::Error),
}

impl ConnectError {
    /// Returns an error about the aggregators that the caller named.
    pub(crate) fn of_aggregators(why: impl Into<String>) -> Self {
        Self::Arguments { options: &["aggregator"], why: why.into() }
    }

    /// Returns whether the caller's input is wrong. A retry with the same input then always fails.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Arguments { .. } | Self::NoAddress { .. } => true,
            Self::Net(error) => error.is_usage(),
            Self::Named { tried, .. } => tried.iter().all(Self::is_usage),
            _ => false,
        }
    }

    /// Returns the names of the caller's options that the error is about, if they are known.
    #[must_use]
    pub fn options(&self) -> &'static [&'static str] {
        match self {
            Self::Arguments { options, .. } => options,
            Self::NoAddress { .. } | Self::Unresolved { .. } => &["aggregator"],
            Self::Net(error) => error.options(),
            Self::Named { tried, .. } => tried.first().map_or(&[], Self::options),
            _ => &[],
        }
    }

    /// Returns whether the same attempt may succeed later: the peer does not answer yet, or the
    /// aggregator was reachable and is gone.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        self.is_unanswered()
            || self.is_gone()
            || matches!(self, Self::NoSidecar { absent: true, .. })
    }

    /// Describes what happened, without advice. The user need not act while retries continue.
    pub(crate) fn without_advice(&self) -> String {
        match self {
            Self::Net(error) => error.without_advice(),
            Self::Named { name, tried } => each(name, tried, Self::without_advice),
            Self::Unresolved { host, why } => unresolved(host, why),
            Self::NoWay { to, why } => no_way(*to, why),
            Self::NoSidecar { path, why, .. } => no_sidecar(path, why),
            Self::Draining => DRAINING.to_owned(),
            other => other.to_string(),
        }
    }

    /// Returns whether an aggregator could not be reached, at least at one of its addresses.
    pub(crate) fn is_unanswered(&self) -> bool {
        match self {
            Self::Net(NetError::NobodyThere { .. } | NetError::Connect { .. })
            | Self::Unresolved { .. }
            | Self::NoWay { .. } => true,
            Self::Named { tried, .. } => tried.iter().any(Self::is_unanswered),
            _ => false,
        }
    }

    /// Returns whether a call failed because nothing answered in time.
    pub(crate) fn is_silence(&self) -> bool {
        match self {
            Self::Net(NetError::NobodyThere { .. }) => true,
            Self::Named { tried, .. } => tried.iter().all(Self::is_silence),
            _ => false,
        }
    }

    /// Replaces the timeouts of unanswered calls with `limit`. The user knows that limit, but not
    /// the timeout of each call.
    pub(crate) fn within(self, limit: Duration) -> Self {
        match self {
            Self::Net(NetError::NobodyThere { addr, narrow, .. }) => {
                NetError::NobodyThere { addr, waited: span(limit), narrow }.into()
            }
            Self::Named { name, tried } => {
                let tried = tried.into_iter().map(|error| error.within(limit)).collect();
                Self::Named { name, tried }
            }
            other => other,
        }
    }

    /// Returns whether the error is about a call to an address, and names that address.
    pub(crate) const fn is_of_address(&self) -> bool {
        match self {
            Self::Net(error) => error.called().is_some(),
            Self::NoWay { .. } => true,
            _ => false,
        }
    }

    /// Returns whether an aggregator answered the call. Calls to its other addresses would then
    /// fail with the same error.
    pub(crate) const fn is_answered(&self) -> bool {
        use NetError::{CertificateRejected, IdentityRejected, NoIdentity, NoneShown};
        matches!(
            self,
            Self::Net(
                IdentityRejected { .. }
                    | NoIdentity { .. }
                    | NoneShown { .. }
                    | CertificateRejected { .. }
            )
        )
    }

    /// Returns whether an aggregator was reachable and is gone, or is about to stop.
    pub(crate) const fn is_gone(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::Silent | Self::Draining)
    }

    /// Returns whether the peer has another version of racksum, or is another program.
    #[must_use]
    pub fn is_other_version(&self) -> bool {
        match self {
            Self::Version { .. }
            | Self::SidecarVersion { .. }
            | Self::Net(NetError::WrongProtocol { .. }) => true,
            Self::Named { tried, .. } => tried.iter().any(Self::is_other_version),
            _ => false,
        }
    }
}

/// The reason why an op has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The op was not started.
    #[error("{0}")]
    Submit(#[from] SubmitError),
    /// The length of the tensor does not match the descriptor.
    #[error("the tensor has {have} bytes, but {elements} elements of {dtype} have {need}")]
    Length {
        /// The length of the tensor in bytes.
        have: usize,
        /// The number of elements in the descriptor.
        elements: u64,
        /// The dtype's name.
        dtype: &'static str,
        /// The bytes that these elements take.
        need: u64,
    },
    /// Memory to share with the sidecar cannot be allocated.
    #[error("cannot allocate memory to share with the sidecar: {0}")]
    Memory(String),
    /// The block list is invalid.
    #[error("{0}")]
    Blocks(String),
    /// The op ended without a result.
    #[error("{0}")]
    Op(#[from] OpError),
}

impl Error {
    /// Returns whether this rank refused the call. The other ranks may have made the same call.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        match self {
            Self::Submit(error) => error.is_refusal(),
            Self::Length { .. } | Self::Memory(_) | Self::Blocks(_) => true,
            Self::Op(_) => false,
        }
    }
}

/// Describes the outcome at each address of a name.
fn each(name: &str, tried: &[ConnectError], describe: impl Fn(&ConnectError) -> String) -> String {
    format!("{name}: {}", tried.iter().map(describe).collect::<Vec<_>>().join("; "))
}

const DRAINING: &str = "the aggregator refused: it is draining and takes no more jobs";

fn unresolved(host: &str, why: &str) -> String {
    format!("the name of the aggregator {host:?} does not resolve: {why}")
}

fn no_way(to: SocketAddr, why: &str) -> String {
    format!("no route from this host to {to}: {why}")
}

fn no_sidecar(path: &Path, why: &str) -> String {
    format!("no sidecar at {}: {why}", path.display())
}

fn lost(ranks: &[Rank], why: Loss) -> OpError {
    OpError::PeerLost { ranks: ranks.to_vec(), why }
}

fn incomplete(missing: &[u16], waited: Duration) -> String {
    let waited = match waited.as_secs() {
        0 => format!("{:.1}", waited.as_secs_f64()),
        seconds => seconds.to_string(),
    };
    match missing {
        [] => format!("after {waited} s the job had still not started"),
        _ => format!("after {waited} s {}", not_joined(missing)),
    }
}

/// Returns a text that names the missing ranks, of which there must be at least one.
pub(crate) fn not_joined(missing: &[u16]) -> String {
    format!("{} had not joined", named(missing.iter().copied()))
}

/// The reason why a session ends when a greater generation of its job begins.
pub(crate) const SUPERSEDED: &str = "a greater generation of the job has begun";

/// Returns [`SUPERSEDED`] with a text that names both generations.
pub(crate) fn superseded(lives: &str) -> String {
    format!("{SUPERSEDED}: {lives}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_told_apart_from_what_to_do_about_it_wherever_a_sentence_has_a_semicolon() {
        let nobody = |addr: &str| {
            let (addr, waited) = (addr.parse().unwrap(), racksum_proto::time::Span::from_secs(5));
            ConnectError::from(NetError::NobodyThere { addr, waited, narrow: None })
        };
        let why = || "a; b".to_owned();
        let to = "10.0.0.1:1".parse().unwrap();
        for (error, what, advice) in [
            (nobody("10.0.0.1:1"), "no answer from 10.0.0.1:1 within 5 s", "check the address"),
            (
                ConnectError::Unresolved { host: "x;".into(), why: why() },
                "the name of the aggregator \"x;\" does not resolve: a; b",
                "check its spelling and DNS",
            ),
            (
                ConnectError::NoWay { to, why: why() },
                "no route from this host to 10.0.0.1:1: a; b",
                "check the address and the routes",
            ),
            (
                ConnectError::NoSidecar { path: "/a; b".into(), why: why(), absent: true },
                "no sidecar at /a; b: a; b",
                "start `racksum worker",
            ),
            (
                ConnectError::Draining,
                "the aggregator refused: it is draining and takes no more jobs",
                "use another aggregator",
            ),
            (ConnectError::Closed(why()), "lost the connection to the aggregator: a; b", ""),
        ] {
            assert_eq!(error.without_advice(), what);
            let advice = if advice.is_empty() { String::new() } else { format!("; {advice}") };
            assert!(error.to_string().starts_with(&format!("{what}{advice}")), "{error}");
        }
        let tried = vec![nobody("10.0.0.1:1"), nobody("10.0.0.2:1")];
        let named = ConnectError::Named { name: "agg:1".into(), tried };
        assert_eq!(
            named.without_advice(),
            "agg:1: no answer from 10.0.0.1:1 within 5 s; no answer from 10.0.0.2:1 within 5 s"
        );
    }

    #[test]
    fn what_a_host_does_not_give_is_named_with_the_limits() {
        let why = ConnectError::from(io::Error::other("too many open files")).to_string();
        assert!(why.starts_with("cannot open a socket or start a thread: too many open"), "{why}");
        assert!(why.contains("(ulimit -n)") && why.contains("(ulimit -u)"), "{why}");
    }
}
