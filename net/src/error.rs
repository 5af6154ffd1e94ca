//! Errors of this crate, with messages that state what failed and, where possible, what to do.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use quinn::ConnectionError;

use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;

use crate::aside::AsideError;
use crate::interface::MIN_MTU;

/// Error of this crate. Its message states what failed, at which address, file or interface, and,
/// where possible, what to do.
///
/// The message already contains the cause. So the cause is a plain field and not the
/// `Error::source`: a printed chain of errors would repeat it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// Another socket holds the port.
    #[error("{}", port_taken(*addr, PORT))]
    PortTaken {
        /// The address to bind.
        addr: SocketAddr,
    },
    /// The address belongs to no interface of this host.
    #[error(
        "cannot bind {addr}: no interface of this host has this address; choose one that \
         `ip address` lists"
    )]
    AddressNotHere {
        /// The address to bind.
        addr: SocketAddr,
    },
    /// The kernel does not permit this user to bind the port.
    #[error("{}", port_not_permitted(*addr, PORT))]
    PortNotPermitted {
        /// The address to bind.
        addr: SocketAddr,
    },
    /// Binding failed in another way.
    #[error("cannot bind {addr}: {}", with_limit(cause))]
    Bind {
        /// The address to bind.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The kernel did not create the socket.
    #[error("cannot open a UDP socket for {addr}: {}", with_limit(cause))]
    Socket {
        /// The address that the socket was for.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The kernel refused a socket option that the protocol needs.
    #[error("cannot set {option} on the UDP socket for {addr}: {cause}")]
    Option {
        /// The option's C name.
        option: &'static str,
        /// The address that the socket was for.
        addr: SocketAddr,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The interface's MTU is too small.
    #[error(
        "MTU {mtu} is too small; racksum needs at least {MIN_MTU} bytes, so raise the MTU of the \
         interface, and `mtu` if it is set"
    )]
    MtuTooSmall {
        /// The MTU in bytes.
        mtu: usize,
    },
    /// The address given as a multicast group is not a multicast address.
    #[error(
        "{group} is not a multicast group; choose one in 239.0.0.0/8 or ff15::/16, or turn \
         multicast off with `racksum aggregator --fanout unicast`"
    )]
    NotMulticast {
        /// The address that was given as a group.
        group: SocketAddr,
    },
    /// The bind address of a member socket differs from the group's address.
    #[error("a receiver of multicast must bind to its group's address {group}, not to {bind}")]
    MemberBind {
        /// The group.
        group: SocketAddr,
        /// The address to bind.
        bind: SocketAddr,
    },
    /// The interface cannot be used for multicast.
    #[error(
        "cannot use {interface} for multicast: {cause}; choose another interface, or turn \
         multicast off with `racksum aggregator --fanout unicast`"
    )]
    Multicast {
        /// The name of the interface.
        interface: String,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// No usable interface matches the pattern.
    #[error(
        "no usable interface matches {pattern:?}; interfaces that are up and have an address: \
         {usable}"
    )]
    NoInterface {
        /// The interface pattern that the caller passed.
        pattern: String,
        /// The names of the usable interfaces, comma separated, or "none".
        usable: String,
    },
    /// The pattern names no interface at all.
    #[error(
        "the interface pattern {pattern:?} names nothing; write prefixes as in eth,ens, exact \
         names as in =eth0, or exclusions as in ^docker,lo"
    )]
    EmptyPattern {
        /// The interface pattern that the caller passed.
        pattern: String,
    },
    /// An address beyond loopback was used without an identity and without `insecure`.
    #[error("{}", unprotected(*addr, "`identity`"))]
    Unprotected {
        /// The address to listen on or to connect to.
        addr: SocketAddr,
    },
    /// The peer did not answer in time.
    #[error("{}{}", unanswered(*addr, *waited, *narrow), advice(*narrow))]
    NobodyThere {
        /// The address of the peer.
        addr: SocketAddr,
        /// How long this side waited for an answer.
        waited: Span,
        /// The path's MTU, if it is known to be too small.
        narrow: Option<usize>,
    },
    /// The peer runs another program or another version of racksum.
    #[error(
        "the peer at {addr} does not speak {}; check the port, and that both sides run the same \
         release of racksum",
        crate::quic::PROTOCOL
    )]
    WrongProtocol {
        /// The address of the peer.
        addr: SocketAddr,
    },
    /// The connection failed in another way before it was established.
    #[error("cannot connect to {addr}: {}", PeerText::of(cause))]
    Connect {
        /// The address of the peer.
        addr: SocketAddr,
        /// The error of QUIC or of the peer.
        cause: ConnectionError,
    },
    /// The peer rejects our certificate.
    #[error(
        "{addr} rejected this identity: its certificate {why}; inspect it with `racksum identity \
         show`, and have the authority that both sides trust issue another"
    )]
    IdentityRejected {
        /// The address of the peer.
        addr: SocketAddr,
        /// The reason for the rejection.
        why: &'static str,
    },
    /// The peer requires an identity, and we have none.
    #[error(
        "{addr} requires an identity, and this process has none; set `identity` to a file issued \
         by the authority of that aggregator, and leave `insecure` out"
    )]
    NoIdentity {
        /// The address of the peer.
        addr: SocketAddr,
    },
    /// The peer has no identity and shows a self-signed certificate.
    #[error(
        "{addr} has no identity, only a self-signed certificate; start it with an `identity` from \
         this side's authority and without `insecure`, or start both sides without identities"
    )]
    NoneShown {
        /// The address of the peer, which may have called this side or been called by it.
        addr: SocketAddr,
    },
    /// We reject the peer's certificate.
    #[error(
        "rejected the certificate of {addr}: it {why}; both sides need identities from the same \
         authority, and the side that listens needs role aggregator"
    )]
    CertificateRejected {
        /// The address of the peer.
        addr: SocketAddr,
        /// The reason for the rejection.
        why: &'static str,
    },
    /// An identity was given together with `insecure`, which trusts everyone.
    #[error(
        "`identity` conflicts with `insecure`, which accepts every peer; leave one of them out"
    )]
    InsecureIdentity,
    /// A file cannot be read, or does not hold the expected identity, authority or certificates.
    #[error("{what} {}: {why}", path.display())]
    IdentityFile {
        /// The expected content of the file.
        what: FileKind,
        /// The file's path.
        path: PathBuf,
        /// The defect of the file, or the reason why it cannot be read.
        why: String,
    },
    /// A file could not be opened because this process or the host has no free descriptor.
    #[error("cannot open {what} {}: {}", path.display(), with_limit(cause))]
    NoDescriptor {
        /// The expected content of the file.
        what: FileKind,
        /// The file's path.
        path: PathBuf,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// Access to a file hung or failed, for example on an unreachable network file system.
    #[error("{0}")]
    Aside(#[from] AsideError),
    /// QUIC cannot connect to the address, for example because its port is 0.
    #[error("cannot connect to {addr}: {reason}")]
    NotCallable {
        /// The address.
        addr: SocketAddr,
        /// The error of QUIC.
        reason: String,
    },
    /// A certificate could not be created.
    #[error("cannot create a certificate: {reason}")]
    Certificate {
        /// The error of the certificate library.
        reason: String,
    },
    /// TLS cannot be set up, or the system provides no randomness for a key.
    #[error("cannot set up TLS: {reason}")]
    Tls {
        /// The reason, such as the error of the TLS library.
        reason: String,
    },
}

/// Expected content of a certificate file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FileKind {
    /// The identity of a node.
    #[error("identity")]
    Identity,
    /// An authority.
    #[error("authority")]
    Authority,
    /// Certificates of an identity or of an authority.
    #[error("certificates")]
    Certificates,
}

impl FileKind {
    /// Creates the error for a file that cannot be read or does not hold the expected content.
    pub(crate) fn wrong(self, path: &Path, why: impl Into<String>) -> NetError {
        NetError::IdentityFile { what: self, path: path.into(), why: why.into() }
    }
}

impl NetError {
    /// Returns whether the caller's input caused the error. If so, a retry with the same input
    /// fails again.
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

    /// Returns the names of the caller's options that caused the error, if they are known.
    #[must_use]
    pub const fn options(&self) -> &'static [&'static str] {
        match self {
            Self::Unprotected { .. } => &["aggregator"],
            Self::IdentityFile { .. }
            | Self::Certificate { .. }
            | Self::IdentityRejected { .. } => &["identity"],
            Self::InsecureIdentity => &["identity", "insecure"],
            Self::NoIdentity { .. } => &["insecure"],
            Self::NoInterface { .. } | Self::EmptyPattern { .. } => &["interface"],
            _ => &[],
        }
    }

    /// Returns the message without the advice of [`NetError::NobodyThere`]. The messages of other
    /// errors stay unchanged.
    #[must_use]
    pub fn without_advice(&self) -> String {
        match self {
            Self::NobodyThere { addr, waited, narrow } => unanswered(*addr, *waited, *narrow),
            other => other.to_string(),
        }
    }

    /// Returns the address of the peer, if the error is about the peer or about reaching it. For
    /// [`NetError::Unprotected`], the address may be this side's own.
    #[must_use]
    pub const fn called(&self) -> Option<SocketAddr> {
        match *self {
            Self::Unprotected { addr }
            | Self::NobodyThere { addr, .. }
            | Self::WrongProtocol { addr }
            | Self::Connect { addr, .. }
            | Self::IdentityRejected { addr, .. }
            | Self::NoIdentity { addr }
            | Self::NoneShown { addr }
            | Self::CertificateRejected { addr, .. }
            | Self::NotCallable { addr, .. } => Some(addr),
            _ => None,
        }
    }

    /// Returns the message with the given names for the port option and the identity option.
    #[must_use]
    pub fn message_with_options(&self, port: &str, identity: &str) -> String {
        match self {
            Self::PortTaken { addr } => port_taken(*addr, port),
            Self::PortNotPermitted { addr } => port_not_permitted(*addr, port),
            Self::Unprotected { addr } => unprotected(*addr, identity),
            other => other.to_string(),
        }
    }

    /// Converts an error of `bind` for `addr`.
    pub(crate) fn bind(addr: SocketAddr, cause: io::Error) -> Self {
        match cause.kind() {
            io::ErrorKind::AddrInUse => Self::PortTaken { addr },
            io::ErrorKind::AddrNotAvailable => Self::AddressNotHere { addr },
            io::ErrorKind::PermissionDenied => Self::PortNotPermitted { addr },
            _ => Self::Bind { addr, cause },
        }
    }
}

/// Formats a system error. If this process has too many open files, names the limit to raise.
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

/// Default name of the option that sets the port.
const PORT: &str = "--port";

fn port_taken(addr: SocketAddr, option: &str) -> String {
    format!(
        "cannot bind {addr}: address in use; choose another port with {option}, or stop the \
         process that holds it"
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
        "cannot use {addr}: without an identity only loopback addresses are allowed; set {option} \
         to an identity file (see `racksum identity --help`), or set `insecure` if you trust every \
         host that can reach this network"
    )
}

/// Converts a span to seconds, rounded to a tenth.
fn seconds(span: Span) -> f64 {
    (span.as_millis() as f64 / 100.0).round() / 10.0
}

/// Formats the message for a peer that does not answer, without advice. Includes the path's MTU if
/// it is too small.
fn unanswered(addr: SocketAddr, waited: Span, narrow: Option<usize>) -> String {
    let text = format!("no answer from {addr} within {} s", seconds(waited));
    match narrow {
        None => text,
        Some(mtu) => format!(
            "{text}; the path passes no IP packet larger than {mtu} bytes, and racksum needs \
             {MIN_MTU}"
        ),
    }
}

/// Returns the advice for a peer that does not answer.
const fn advice(narrow: Option<usize>) -> &'static str {
    match narrow {
        None => "; check the address, that the aggregator runs, and that no firewall drops UDP",
        Some(_) => ", so raise the MTU of the links on this path",
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
        assert!(sentence(None).contains("; check the address"), "{}", sentence(None));
        let narrow = sentence(Some(1000));
        assert!(narrow.contains("larger than 1000 bytes") && narrow.contains("raise the MTU"));
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
        let taken = "cannot bind 127.0.0.1:7000: address in use; choose another port with --port";
        assert!(sentence(libc::EADDRINUSE).starts_with(taken));
        assert!(sentence(libc::EADDRNOTAVAIL).contains("no interface of this host"));
        assert!(sentence(libc::EACCES).contains("1024 or above"));
        assert!(sentence(libc::ENOMEM).starts_with("cannot bind 127.0.0.1:7000: "));
    }
}
