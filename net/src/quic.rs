//! The control path: QUIC connections over which jobs are joined, keys given and liveness kept.
//!
//! [`server`] and [`connect`] make endpoints from [`Credentials`]: who we are and whom we believe.
//! Both sides always show a certificate; an [`Authority`] vouches for those that are believed.
//! [`frames`] puts messages onto their streams. Endpoints need a tokio runtime around them.

use std::time::Duration;

use racksum_proto::time::Span;

mod authority;
mod certificate;
mod connection_id;
mod control_session;
mod endpoint;
pub mod frames;
mod identity;
pub mod lifeline;
mod pem_file;
mod trust;

pub use authority::{Authority, Subject};
pub use certificate::{Certificate, Role};
pub use control_session::{
    Caller, Ended, LEAVE, Line, SILENT, ask_status, call, converse, look, talk,
};
pub use endpoint::{Connection, change_credentials, connect, connect_from, not_connected, server};
pub use identity::Identity;
/// The QUIC implementation, whose connections and streams appear in this interface.
pub use quinn;
pub use trust::Credentials;

/// The protocol both sides must name in the handshake (ALPN): racksum's control messages, first
/// version.
pub const PROTOCOL: &str = "racksum/1";

/// The name in every aggregator's certificate and the one that clients ask for. Addresses say where
/// an aggregator is; the certificate says that it is one.
const NAME: &str = "racksum";

/// How often a silent connection shows that it is alive.
pub const KEEP_ALIVE: Span = Span::from_millis(500);

/// How long a connection may hear nothing before it is given up. A process that is only stopped for
/// a while, or a network that is down for a moment, is waited for; see [`lifeline`] for the others.
pub const IDLE_TIMEOUT: Span = Span::from_secs(20);

const fn duration(span: Span) -> Duration {
    Duration::from_nanos(span.0)
}

#[cfg(test)]
mod tests;
