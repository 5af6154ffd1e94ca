//! Control path: QUIC connections on which ranks join jobs, receive keys and show that they are
//! alive.
//!
//! [`server`] and [`connect`] create endpoints from [`Credentials`]: this side's identity and the
//! certificates it trusts. Both sides always show a certificate; an [`Authority`] issues the
//! trusted ones. [`frames`] sends and receives messages on the streams. Endpoints need a tokio
//! runtime.

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
    CallOptions, ControlConnection, Ended, LEAVE, SILENT, ask_present, ask_room, ask_status,
    ask_to_move, call, run_session, run_session_on,
};
pub use endpoint::{
    Caller, Connection, change_credentials, connect, connect_from, not_connected, serve, server,
};
pub use identity::Identity;
/// The QUIC implementation, re-exported because its connections and streams appear in this
/// interface.
pub use quinn;
pub use trust::Credentials;

/// ALPN name that both sides must offer in the handshake: racksum's control messages, version 1.
pub const PROTOCOL: &str = "racksum/1";

/// DNS name in every aggregator's certificate, which clients require. The certificate proves that a
/// server is an aggregator; its address proves nothing.
const NAME: &str = "racksum";

/// Interval at which an idle connection sends a keep-alive.
pub const KEEP_ALIVE: Span = Span::from_millis(500);

/// Silence after which a connection is closed. The limit tolerates a short network outage, or a
/// process that is stopped for several seconds; [`lifeline`] detects dead processes sooner.
pub const IDLE_TIMEOUT: Span = Span::from_secs(20);

const fn duration(span: Span) -> Duration {
    Duration::from_nanos(span.0)
}

#[cfg(test)]
mod tests;
