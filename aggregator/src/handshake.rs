//! The handshake of a caller, from its first packet to its connection: admission, timeouts, and
//! logging.

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::lifeline::silence;
use racksum_net::quic::quinn;
use racksum_proto::time::Span;
use tokio::time::timeout;

use crate::caller_limits::{CallerKey, CallerLimits, Permit, Revoked};
use crate::control_stream::JOIN_TIMEOUT;

/// How long a caller may be silent during a handshake.
const SILENCE: Span = Span::from_secs(2);

/// The log limit for unknown callers: those that were not answered, got no permit, or failed the
/// handshake. One limit covers them all, since anyone can cause such entries.
pub(crate) static STRANGERS: LogLimit = LogLimit::new(3);
/// Answers a caller's packet. Returns the handshake and its permit. Returns `None` if the caller's
/// address is not validated yet, if no permit is free, if too many callers have not joined, or if
/// the packet is invalid. If `knows` is true, callers have identities, and the limit on callers
/// that have not joined is applied once the identity is known.
pub(crate) fn answer(
    incoming: quinn::Incoming,
    limits: &CallerLimits,
    knows: bool,
) -> Option<(quinn::Connecting, (Permit, Revoked))> {
    let from = incoming.remote_address();
    let key = CallerKey::new(None, from.ip());
    // An unvalidated address causes no log entry, and gets no reply longer than its packet.
    if !incoming.remote_address_validated() {
        if limits.handshakes.has_room(&key) {
            // A retry fails only for an address that is already validated.
            drop(incoming.retry());
        } else {
            incoming.ignore();
        }
        return None;
    }
    let note = |why| STRANGERS.note(|left_out| tracing::warn!(%from, left_out, "{why}"));
    let has_room = knows || limits.unjoined.has_room(&key);
    if !has_room && limits.unjoined.is_full() {
        note("connection refused: too many connections have not joined");
        incoming.refuse();
        return None;
    }
    let permit = if has_room { limits.handshakes.acquire(key) } else { None };
    let Some(permit) = permit else {
        note("connection ignored: too many connections from this address have not joined");
        // QUIC clients resend by themselves, so an honest caller gets its turn later.
        incoming.ignore();
        return None;
    };
    // A failed accept means that the caller's packet is invalid or too old.
    Some((incoming.accept().ok()?, permit))
}

/// Completes a handshake. Returns `None` if the caller falls silent, takes too long, or has to give
/// its permit to another caller.
pub(crate) async fn shake_hands(
    connecting: quinn::Connecting,
    (permit, mut revoked): (Permit, Revoked),
) -> Option<Result<(quinn::Connection, Permit), quinn::ConnectionError>> {
    // Use the connection before the handshake ends, to count received packets. Nothing is sent on
    // it yet.
    let (connection, done) = connecting.into_0rtt().ok()?;
    tokio::select! {
        done = timeout(JOIN_TIMEOUT, done) => {
            done.ok()?;
            Some(match connection.close_reason() {
                None => Ok((connection, permit)),
                Some(cause) => Err(cause),
            })
        }
        () = revoked.wait() => None,
        () = silence(&connection, SILENCE) => None,
    }
}
