//! What can go wrong for a caller, one enum per call.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use racksum_net::NetError;
use racksum_net::quic::SILENT;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{Rank, listed};
use racksum_proto::loss::Loss;

use crate::span::span;

/// Why a worker could not connect.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The arguments contradict each other.
    #[error("{why}")]
    Arguments {
        /// The options that they are, by name.
        options: &'static [&'static str],
        /// The contradiction.
        why: String,
    },
    /// The text that was given as an aggregator's address can never be one.
    #[error("{host:?} is no address of an aggregator (HOST:PORT): {why}")]
    NoAddress {
        /// What was given.
        host: String,
        /// Why not.
        why: String,
    },
    /// The name of an aggregator does not resolve, now at least.
    #[error("{}; check its spelling and DNS", unresolved(host, why))]
    Unresolved {
        /// What was given.
        host: String,
        /// What the resolver said.
        why: String,
    },
    /// The host has no way to an aggregator.
    #[error("{}; check the address and the routes", no_way(*to, why))]
    NoWay {
        /// The aggregator's address.
        to: SocketAddr,
        /// What the kernel said.
        why: String,
    },
    /// The control port answers, and datagrams to or from a data port do not pass: a sentence that
    /// names the port, the direction and the size.
    #[error("{0}")]
    Blocked(String),
    /// A socket could not be had, or nobody is there.
    #[error("{0}")]
    Net(#[from] NetError),
    /// The addresses that a name has were called, and none came to anything.
    #[error("{}", each(name, tried, ToString::to_string))]
    Named {
        /// The aggregators as they were given.
        name: String,
        /// What became of each address.
        tried: Vec<Self>,
    },
    /// The aggregator refused the rank.
    #[error("the aggregator refused: {0}")]
    Refused(String),
    /// The aggregator speaks another version of the protocol.
    #[error(
        "the aggregator speaks version {speaks} of the protocol, and this worker version {own}; \
         install the same release on both"
    )]
    Version {
        /// The aggregator's.
        speaks: u16,
        /// The worker's.
        own: u16,
    },
    /// Nobody is there as a sidecar.
    #[error("{}; start `racksum worker --socket` with that path", no_sidecar(path, why))]
    NoSidecar {
        /// Where it was called.
        path: PathBuf,
        /// Why it could not be.
        why: String,
        /// Nobody listens there, now at least.
        absent: bool,
    },
    /// The process that listens at the sidecar's path may be an impostor.
    #[error("the sidecar at {} is not believed: {why}", path.display())]
    ImpostorBeside {
        /// Where it was called.
        path: PathBuf,
        /// Why it is not believed.
        why: String,
    },
    /// The sidecar refused the rank, or has let it go before the job was complete.
    #[error("the sidecar refused: {0}")]
    SidecarRefused(String),
    /// The sidecar is of another release.
    #[error(
        "the sidecar speaks version {speaks} of its protocol, and this rank version {own}; install \
         the same release on both"
    )]
    SidecarVersion {
        /// The sidecar's.
        speaks: u16,
        /// The rank's.
        own: u16,
    },
    /// The aggregator is about to stop, and takes no more jobs.
    #[error("{DRAINING}; name another")]
    Draining,
    /// The world stayed incomplete.
    #[error("{}{elsewhere}", incomplete(missing, *waited))]
    Incomplete {
        /// The ranks that are missing.
        missing: Vec<u16>,
        /// How long the others were waited for.
        waited: Duration,
        /// What became of other aggregators that were tried: `; HOST:PORT: ` and a sentence of
        /// each.
        elsewhere: String,
    },
    /// There was no room for the job for too long.
    #[error("after {} s there was still no room for the job: {why}{elsewhere}", waited.as_secs())]
    NoRoom {
        /// What was in the way: a sentence of the aggregator's.
        why: String,
        /// How long room was waited for, here and at other aggregators.
        waited: Duration,
        /// What became of other aggregators that were tried, as above.
        elsewhere: String,
    },
    /// Nothing was heard of the aggregator for too long.
    #[error("{SILENT}")]
    Silent,
    /// The client was closed, or the attempt given up, before the job was complete.
    #[error("the attempt to connect was given up")]
    GivenUp,
    /// The connection broke before the job was complete.
    #[error("the aggregator closed the connection: {0}")]
    Closed(String),
    /// A rank was lost before the job was complete.
    #[error("the aggregator closed the connection: {}", lost(ranks, *why))]
    PeerLost {
        /// Which.
        ranks: Vec<Rank>,
        /// What became of them.
        why: Loss,
    },
    /// None of several aggregators could be joined.
    #[error("{0}")]
    NoAggregator(String),
    /// The aggregator said something out of turn.
    #[error("the aggregator does not keep to the protocol: {0}")]
    Protocol(String),
    /// This host gave no socket or thread.
    #[error(
        "cannot open a socket or start a thread: {0}; this process may need higher limits on open \
         files (ulimit -n) and on threads (ulimit -u)"
    )]
    Io(#[from] io::Error),
}

impl ConnectError {
    /// What is wrong with the aggregators that the caller has named.
    pub(crate) fn of_aggregators(why: impl Into<String>) -> Self {
        Self::Arguments { options: &["aggregator"], why: why.into() }
    }

    /// Whether it is about what the caller has said, so that the same will never do.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Arguments { .. } | Self::NoAddress { .. } => true,
            Self::Net(error) => error.is_usage(),
            Self::Named { tried, .. } => tried.iter().all(Self::is_usage),
            _ => false,
        }
    }

    /// The options of the caller that it is about, by name, as far as they are known.
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

    /// Whether the same attempt may succeed later: nothing answers yet, or the aggregator was there
    /// and is gone.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        self.is_unanswered()
            || self.is_gone()
            || matches!(self, Self::NoSidecar { absent: true, .. })
    }

    /// What happened, without what is to be done about it: while there are more tries nothing is.
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

    /// Whether no aggregator answered.
    pub(crate) fn is_unanswered(&self) -> bool {
        match self {
            Self::Net(NetError::NobodyThere { .. } | NetError::Connect { .. })
            | Self::Unresolved { .. }
            | Self::NoWay { .. } => true,
            Self::Named { tried, .. } => tried.iter().any(Self::is_unanswered),
            _ => false,
        }
    }

    /// Whether a call has come to nothing because nobody answered in time.
    pub(crate) fn is_silence(&self) -> bool {
        match self {
            Self::Net(NetError::NobodyThere { .. }) => true,
            Self::Named { tried, .. } => tried.iter().all(Self::is_silence),
            _ => false,
        }
    }

    /// Says of calls that came to nothing that they had so long, which the user knows, and not
    /// what each of them had.
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

    /// Whether it is about the call of an address, which it names.
    pub(crate) const fn is_of_address(&self) -> bool {
        match self {
            Self::Net(error) => error.called().is_some(),
            Self::NoWay { .. } => true,
            _ => false,
        }
    }

    /// Whether an aggregator has answered the call, so that another address of it is no better.
    pub(crate) const fn is_answered(&self) -> bool {
        use NetError::{NoIdentity, NoneShown, NotBelieved, Unbelievable};
        matches!(
            self,
            Self::Net(
                NotBelieved { .. } | NoIdentity { .. } | NoneShown { .. } | Unbelievable { .. }
            )
        )
    }

    /// Whether an aggregator was there and is gone, or is about to go.
    pub(crate) const fn is_gone(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::Silent | Self::Draining)
    }

    /// Whether who answers is of another version, or nothing of racksum at all.
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

/// Why an op gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The op was not taken.
    #[error("{0}")]
    Submit(#[from] SubmitError),
    /// The tensor does not have the bytes that the descriptor says.
    #[error("the tensor has {have} bytes, but {elements} elements of {dtype} have {need}")]
    Length {
        /// Bytes of the tensor.
        have: usize,
        /// Elements of the descriptor.
        elements: u64,
        /// The dtype's name.
        dtype: &'static str,
        /// Bytes that they take.
        need: u64,
    },
    /// There is no memory that could be shared.
    #[error("no memory to share with the sidecar: {0}")]
    Memory(String),
    /// A block list that cannot be.
    #[error("{0}")]
    Blocks(String),
    /// The handle is of an op that another client started, or the same before it joined anew.
    #[error(
        "the op was started by another client, where it goes on, but its result is lost: wait \
         for an op at the client that started it"
    )]
    OtherClient,
    /// The op ended without a result.
    #[error("{0}")]
    Op(#[from] OpError),
}

impl Error {
    /// Whether this rank refused the call, which the other ranks may have made.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        match self {
            Self::Submit(error) => error.is_refusal(),
            Self::Length { .. } | Self::Memory(_) | Self::Blocks(_) => true,
            Self::OtherClient | Self::Op(_) => false,
        }
    }
}

/// Says of each address of a name what became of it.
fn each(name: &str, tried: &[ConnectError], say: impl Fn(&ConnectError) -> String) -> String {
    format!("{name}: {}", tried.iter().map(say).collect::<Vec<_>>().join("; "))
}

const DRAINING: &str = "the aggregator refused: it is about to stop and takes no more jobs";

fn unresolved(host: &str, why: &str) -> String {
    format!("the name of the aggregator {host:?} does not resolve: {why}")
}

fn no_way(to: SocketAddr, why: &str) -> String {
    format!("nothing leads from this host to {to}: {why}")
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
        [] => format!("after {waited} s nobody had said that the job is complete"),
        _ => format!("after {waited} s {}", not_joined(missing)),
    }
}

/// Says that ranks are missing, of which there are some.
pub(crate) fn not_joined(missing: &[u16]) -> String {
    let s = if missing.len() == 1 { "" } else { "s" };
    format!("rank{s} {} had not joined", listed(missing.iter().copied()))
}

/// Why a session ends whose job has a next life.
pub(crate) const SUPERSEDED: &str = "a greater generation of the job has begun";

/// The same, with which life has ended which.
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
            (nobody("10.0.0.1:1"), "nobody answered at 10.0.0.1:1 within 5 s", "check the address"),
            (
                ConnectError::Unresolved { host: "x;".into(), why: why() },
                "the name of the aggregator \"x;\" does not resolve: a; b",
                "check its spelling and DNS",
            ),
            (
                ConnectError::NoWay { to, why: why() },
                "nothing leads from this host to 10.0.0.1:1: a; b",
                "check the address and the routes",
            ),
            (
                ConnectError::NoSidecar { path: "/a; b".into(), why: why(), absent: true },
                "no sidecar at /a; b: a; b",
                "start `racksum worker",
            ),
            (
                ConnectError::Draining,
                "the aggregator refused: it is about to stop and takes no more jobs",
                "name another",
            ),
            (ConnectError::Closed(why()), "the aggregator closed the connection: a; b", ""),
        ] {
            assert_eq!(error.without_advice(), what);
            let advice = if advice.is_empty() { String::new() } else { format!("; {advice}") };
            assert!(error.to_string().starts_with(&format!("{what}{advice}")), "{error}");
        }
        let tried = vec![nobody("10.0.0.1:1"), nobody("10.0.0.2:1")];
        let named = ConnectError::Named { name: "agg:1".into(), tried };
        assert_eq!(
            named.without_advice(),
            "agg:1: nobody answered at 10.0.0.1:1 within 5 s; nobody answered at 10.0.0.2:1 \
             within 5 s"
        );
    }

    #[test]
    fn what_a_host_does_not_give_is_named_with_the_limits() {
        let why = ConnectError::from(io::Error::other("too many open files")).to_string();
        assert!(why.starts_with("cannot open a socket or start a thread: too many open"), "{why}");
        assert!(why.contains("(ulimit -n)") && why.contains("(ulimit -u)"), "{why}");
    }
}
