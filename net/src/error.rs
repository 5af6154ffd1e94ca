//! What can go wrong at the edge of the host, each as one sentence for the person who must act.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use quinn::ConnectionError;

use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;

use crate::aside::AsideError;
use crate::interface::MIN_MTU;

/// A failure of this crate. Each `Display` says what was wrong, where, and what to do.
///
/// The sentence already contains its cause, so the cause is a plain field and not the
/// `Error::source`: a printed chain would say it twice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// Another socket holds the port.
    #[error("{}", port_taken(*addr, PORT))]
    PortTaken {
        /// What was to be bound.
        addr: SocketAddr,
    },
    /// The address belongs to no interface of this host.
    #[error(
        "cannot bind {addr}: no interface of this host has this address; choose one that \
         `ip address` lists"
    )]
    AddressNotHere {
        /// What was to be bound.
        addr: SocketAddr,
    },
    /// The kernel does not let this user have the port.
    #[error("{}", port_not_permitted(*addr, PORT))]
    PortNotPermitted {
        /// What was to be bound.
        addr: SocketAddr,
    },
    /// Binding failed in another way.
    #[error("cannot bind {addr}: {}", with_limit(cause))]
    Bind {
        /// What was to be bound.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The kernel gave no socket.
    #[error("cannot open a UDP socket for {addr}: {}", with_limit(cause))]
    Socket {
        /// What the socket was for.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The kernel refused a socket option that the protocol needs.
    #[error("cannot set {option} on the UDP socket for {addr}: {cause}")]
    Option {
        /// The option by its C name.
        option: &'static str,
        /// What the socket was for.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The interface carries datagrams that are too small.
    #[error("an MTU of {mtu} is too small; racksum needs at least {MIN_MTU}, so raise the MTU")]
    MtuTooSmall {
        /// The MTU in bytes.
        mtu: usize,
    },
    /// A unicast address where a multicast group belongs.
    #[error(
        "{group} is no multicast group; choose one of 239.0.0.0/8 or ff15::/16, or turn \
         multicast off"
    )]
    NotMulticast {
        /// The address that was given as a group.
        group: SocketAddr,
    },
    /// A member socket was to be bound elsewhere than to its group.
    #[error("a member of {group} must be bound to the group itself, not to {bind}")]
    MemberBind {
        /// The group.
        group: SocketAddr,
        /// What was to be bound.
        bind: SocketAddr,
    },
    /// The interface would not take part in multicast.
    #[error(
        "cannot use {interface} for multicast: {cause}; choose another interface, or turn \
         multicast off"
    )]
    Multicast {
        /// The interface by name.
        interface: String,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// No interface fits the pattern.
    #[error("no usable interface matches {pattern:?}; up and with an address are: {usable}")]
    NoInterface {
        /// The pattern as it was given.
        pattern: String,
        /// The names that could have matched, comma separated, or "none".
        usable: String,
    },
    /// A pattern that names no interface at all.
    #[error(
        "the interface pattern {pattern:?} names nothing; write prefixes as in eth,ens, exact \
         names as in =eth0, or exclusions as in ^docker,lo"
    )]
    EmptyPattern {
        /// The pattern as it was given.
        pattern: String,
    },
    /// An address beyond loopback without an identity.
    #[error("{}", unprotected(*addr, "`identity`"))]
    Unprotected {
        /// Where it was to listen or to connect.
        addr: SocketAddr,
    },
    /// Nothing answered in time.
    #[error("{}{}", unanswered(*addr, *waited, *narrow), advice(*narrow))]
    NobodyThere {
        /// Who was called.
        addr: SocketAddr,
        /// How long an answer was waited for.
        waited: Span,
        /// The path's MTU, if that is known to be too small.
        narrow: Option<usize>,
    },
    /// Something else, or another version of racksum, answered.
    #[error(
        "what answers at {addr} does not speak {}; check the port and that both sides run the \
         same version of racksum",
        crate::quic::PROTOCOL
    )]
    WrongProtocol {
        /// Who was called.
        addr: SocketAddr,
    },
    /// The connection failed in another way before it stood.
    #[error("cannot connect to {addr}: {}", PeerText::of(cause))]
    Connect {
        /// Who was called.
        addr: SocketAddr,
        /// What QUIC said, or the other side.
        cause: ConnectionError,
    },
    /// The other side does not accept our certificate.
    #[error(
        "{addr} does not accept this identity: its certificate {why}; look at it with `racksum \
         identity show`, and have one issued by the authority of both sides"
    )]
    NotBelieved {
        /// Who was called.
        addr: SocketAddr,
        /// What is wrong with our certificate.
        why: &'static str,
    },
    /// The other side wants an identity, and we have none.
    #[error(
        "{addr} serves only who shows an identity, and this process has none; give `identity` a \
         file that the authority of that aggregator has issued, without `insecure`"
    )]
    NoIdentity {
        /// Who was called.
        addr: SocketAddr,
    },
    /// The other side has no identity, and shows a certificate that it has made itself.
    #[error(
        "{addr} shows no identity, only a certificate that it has made itself; start it with an \
         `identity` of this side's authority, without `insecure`, or both sides without identities"
    )]
    NoneShown {
        /// Who called, or was called.
        addr: SocketAddr,
    },
    /// We do not accept the certificate of the other side.
    #[error(
        "the certificate of {addr} is not accepted: it {why}; both sides need identities of one \
         authority, and the one that is called that of an aggregator"
    )]
    Unbelievable {
        /// Who was called.
        addr: SocketAddr,
        /// What is wrong with its certificate.
        why: &'static str,
    },
    /// An identity together with the wish to believe everyone.
    #[error("an identity is of no use with `insecure`, which believes everyone; leave one out")]
    InsecureIdentity,
    /// A file that should hold an identity or an authority does not.
    #[error("{what} {}: {why}", path.display())]
    IdentityFile {
        /// The kind of file that it should be.
        what: FileKind,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file that this process or the host has no descriptor left for.
    #[error("cannot open {what} {}: {}", path.display(), with_limit(cause))]
    NoDescriptor {
        /// The kind of file that it should be.
        what: FileKind,
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// A file that hangs, as on a network file system that is gone.
    #[error("{0}")]
    Aside(#[from] AsideError),
    /// The address is one that QUIC cannot call (port 0, for one).
    #[error("{addr} cannot be called: {reason}")]
    NotCallable {
        /// The address.
        addr: SocketAddr,
        /// What QUIC said.
        reason: String,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate: {reason}")]
    Certificate {
        /// What the certificate library said.
        reason: String,
    },
    /// A certificate and its key cannot be used for TLS.
    #[error("cannot use the certificate for TLS: {reason}")]
    Tls {
        /// What the TLS library said.
        reason: String,
    },
}

/// What a file of certificates should hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FileKind {
    /// The identity of a node.
    #[error("identity")]
    Identity,
    /// An authority.
    #[error("authority")]
    Authority,
    /// Certificates of either.
    #[error("certificates")]
    Certificates,
}

impl FileKind {
    /// A file that does not hold it, and why.
    pub(crate) fn wrong(self, path: &Path, why: impl Into<String>) -> NetError {
        NetError::IdentityFile { what: self, path: path.into(), why: why.into() }
    }
}

impl NetError {
    /// Whether it is about what the caller has said, so that the same will never do.
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::IdentityFile { .. }
                | Self::InsecureIdentity
                | Self::Unprotected { .. }
                | Self::Certificate { .. }
                | Self::NoInterface { .. }
                | Self::EmptyPattern { .. }
        )
    }

    /// The options of the caller that it is about, by name, as far as they are known.
    #[must_use]
    pub const fn options(&self) -> &'static [&'static str] {
        match self {
            Self::Unprotected { .. } => &["aggregator"],
            Self::IdentityFile { .. } | Self::Certificate { .. } | Self::NotBelieved { .. } => {
                &["identity"]
            }
            Self::InsecureIdentity => &["identity", "insecure"],
            Self::NoInterface { .. } | Self::EmptyPattern { .. } => &["interface"],
            _ => &[],
        }
    }

    /// The sentence, without the advice of [`NetError::NobodyThere`]. Other errors keep theirs.
    #[must_use]
    pub fn without_advice(&self) -> String {
        match self {
            Self::NobodyThere { addr, waited, narrow } => unanswered(*addr, *waited, *narrow),
            other => other.to_string(),
        }
    }

    /// Who was called, if the error is about who answered, or that nobody has.
    #[must_use]
    pub const fn called(&self) -> Option<SocketAddr> {
        match *self {
            Self::Unprotected { addr }
            | Self::NobodyThere { addr, .. }
            | Self::WrongProtocol { addr }
            | Self::Connect { addr, .. }
            | Self::NotBelieved { addr, .. }
            | Self::NoIdentity { addr }
            | Self::NoneShown { addr }
            | Self::Unbelievable { addr, .. }
            | Self::NotCallable { addr, .. } => Some(addr),
            _ => None,
        }
    }

    /// The sentence for whoever names the port and the file of the identity by these options.
    #[must_use]
    pub fn told_with(&self, port: &str, identity: &str) -> String {
        match self {
            Self::PortTaken { addr } => port_taken(*addr, port),
            Self::PortNotPermitted { addr } => port_not_permitted(*addr, port),
            Self::Unprotected { addr } => unprotected(*addr, identity),
            other => other.to_string(),
        }
    }

    /// Why `addr` could not be bound, from what `bind` said.
    pub(crate) fn bind(addr: SocketAddr, cause: io::Error) -> Self {
        match cause.kind() {
            io::ErrorKind::AddrInUse => Self::PortTaken { addr },
            io::ErrorKind::AddrNotAvailable => Self::AddressNotHere { addr },
            io::ErrorKind::PermissionDenied => Self::PortNotPermitted { addr },
            _ => Self::Bind { addr, cause },
        }
    }
}

/// An error of the system, and which limit of the process to raise if that was in the way.
///
/// ```
/// # use racksum_net::with_limit;
/// let why = with_limit(&std::io::Error::from_raw_os_error(libc::EMFILE));
/// assert!(why.ends_with("; raise the limit on open files (ulimit -n)"), "{why}");
/// ```
#[must_use]
pub fn with_limit(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EMFILE) => format!("{error}; raise the limit on open files (ulimit -n)"),
        _ => error.to_string(),
    }
}

/// The option that names a port, unless it is said otherwise.
const PORT: &str = "--port";

fn port_taken(addr: SocketAddr, option: &str) -> String {
    format!(
        "cannot bind {addr}: the port is taken; choose another with {option}, or stop the program \
         that holds it"
    )
}

fn port_not_permitted(addr: SocketAddr, option: &str) -> String {
    format!(
        "cannot bind {addr}: permission denied; choose a port of 1024 or above with {option}, or \
         grant CAP_NET_BIND_SERVICE"
    )
}

fn unprotected(addr: SocketAddr, option: &str) -> String {
    format!(
        "refusing {addr}: without an identity only loopback addresses are trusted; give {option} a \
         file (`racksum identity --help` shows how to make one), or set `insecure` if everything \
         that can reach this network may be trusted"
    )
}

/// Seconds, to the tenth.
fn seconds(span: Span) -> f64 {
    (span.as_millis() as f64 / 100.0).round() / 10.0
}

/// That nobody answers, over a path that may be known to be too narrow.
fn unanswered(addr: SocketAddr, waited: Span, narrow: Option<usize>) -> String {
    let told = format!("nobody answered at {addr} within {} s", seconds(waited));
    match narrow {
        None => told,
        Some(mtu) => format!(
            "{told}; the path there passes no IP packet of more than {mtu} bytes, and racksum \
             needs {MIN_MTU}"
        ),
    }
}

/// The advice where nobody answers.
const fn advice(narrow: Option<usize>) -> &'static str {
    match narrow {
        None => "; check the address, that the aggregator runs, and that no firewall drops UDP",
        Some(_) => ", so raise the MTU of its links",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::frames::FrameError;

    #[test]
    fn what_the_other_side_gave_as_a_reason_is_shown_on_one_line_and_not_obeyed() {
        let addr: SocketAddr = "127.0.0.1:7000".parse().unwrap();
        let evil = "gone\n\u{1b}[31m\u{7}".to_owned() + &"x".repeat(1 << 20);
        let closed =
            quinn::ApplicationClose { error_code: 1u32.into(), reason: evil.clone().into() };
        let ended = quinn::ConnectionClose {
            error_code: quinn::TransportErrorCode::PROTOCOL_VIOLATION,
            frame_type: None,
            reason: evil.into(),
        };
        for cause in
            [ConnectionError::ApplicationClosed(closed), ConnectionError::ConnectionClosed(ended)]
        {
            let lost = quinn::WriteError::ConnectionLost(ConnectionError::clone(&cause));
            let unread = quinn::ReadError::ConnectionLost(ConnectionError::clone(&cause));
            for shown in [
                NetError::Connect { addr, cause }.to_string(),
                FrameError::Write(lost).to_string(),
                FrameError::Read(unread).to_string(),
            ] {
                assert!(shown.contains("gone\\n\\u{1b}[31m\\u{7}x"), "{shown:?}");
                assert!(shown.len() < PeerText::MAX + 100, "{}", shown.len());
            }
        }
    }

    #[test]
    fn a_path_that_is_too_narrow_is_said_where_nobody_answers() {
        let (addr, waited) = ("10.0.0.1:7177".parse().unwrap(), Span::from_secs(5));
        let error = |narrow| NetError::NobodyThere { addr, waited, narrow };
        let sentence = |narrow| error(narrow).to_string();
        assert_eq!(
            sentence(None),
            "nobody answered at 10.0.0.1:7177 within 5 s; check the address, that the \
             aggregator runs, and that no firewall drops UDP"
        );
        assert_eq!(
            sentence(Some(1000)),
            "nobody answered at 10.0.0.1:7177 within 5 s; the path there passes no IP packet \
             of more than 1000 bytes, and racksum needs 1280, so raise the MTU of its links"
        );
        for (narrow, last) in [(None, " within 5 s"), (Some(1000), ", and racksum needs 1280")] {
            let what = error(narrow).without_advice();
            assert!(what.ends_with(last), "{what}");
        }
    }

    #[test]
    fn a_failed_bind_becomes_a_sentence_that_says_what_to_do() {
        let addr: SocketAddr = "127.0.0.1:7000".parse().unwrap();
        let sentence =
            |errno| NetError::bind(addr, io::Error::from_raw_os_error(errno)).to_string();
        assert_eq!(
            sentence(libc::EADDRINUSE),
            "cannot bind 127.0.0.1:7000: the port is taken; choose another with --port, or stop \
             the program that holds it"
        );
        assert!(sentence(libc::EADDRNOTAVAIL).contains("no interface of this host"));
        assert!(sentence(libc::EACCES).contains("1024 or above"));
        assert!(sentence(libc::ENOMEM).starts_with("cannot bind 127.0.0.1:7000: "));
    }
}
