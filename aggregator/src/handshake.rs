//! The handshake of a caller, from its first packet to its connection: admission, timeouts, and
//! logging.

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::lifeline::silence;
use racksum_net::quic::quinn;
use racksum_proto::time::Span;
use tokio::time::timeout;

use crate::control_stream::JOIN_TIMEOUT;
use crate::door::{Doors, Needed, Party, Place};

/// How long a caller may be silent during a handshake.
const SILENCE: Span = Span::from_secs(2);

/// The log limit for unknown callers: those that were not answered, found no place, or failed the
/// handshake. One limit covers them all, since anyone can cause each of these entries.
pub(crate) static STRANGERS: LogLimit = LogLimit::new(3);
/// Answers a caller's packet. Returns the handshake and its place. Returns `None` if the caller
/// must first validate its address, or finds no place for the handshake or after it. If `knows` is
/// true, callers have identities, and places after the handshake are assigned only once the
/// identity is known.
pub(crate) fn answer(
    incoming: quinn::Incoming,
    doors: &Doors,
    knows: bool,
) -> Option<(quinn::Connecting, (Place, Needed))> {
    let from = incoming.remote_address();
    let party = Party::new(None, from.ip());
    // An unvalidated address causes no log entry, and gets no reply longer than its packet.
    if !incoming.remote_address_validated() {
        if doors.handshakes.has_room(&party) {
            // A failed retry means that the caller has already disconnected.
            drop(incoming.retry());
        } else {
            incoming.ignore();
        }
        return None;
    }
    let note = |why| STRANGERS.note(|left_out| tracing::warn!(%from, left_out, "{why}"));
    let has_room = knows || doors.strangers.has_room(&party);
    if !has_room && doors.strangers.is_full() {
        note("connection refused: too many connections have not joined");
        incoming.refuse();
        return None;
    }
    let place = if has_room { doors.handshakes.enter(party) } else { None };
    let Some(place) = place else {
        note("connection ignored: too many connections from its address have not joined");
        // QUIC retries by itself, so an honest host that is too early gets its turn.
        incoming.ignore();
        return None;
    };
    // A failed accept means that the caller has already disconnected.
    Some((incoming.accept().ok()?, place))
}

/// Completes a handshake. Returns `None` if the caller falls silent, takes too long, or has to give
/// its place to another.
pub(crate) async fn shake_hands(
    connecting: quinn::Connecting,
    (place, mut needed): (Place, Needed),
) -> Option<Result<(quinn::Connection, Place), quinn::ConnectionError>> {
    // The connection exists before the handshake ends, so received packets can be counted. Nothing
    // is sent on it yet.
    let (connection, done) = connecting.into_0rtt().ok()?;
    tokio::select! {
        done = timeout(JOIN_TIMEOUT, done) => {
            done.ok()?;
            Some(match connection.close_reason() {
                None => Ok((connection, place)),
                Some(cause) => Err(cause),
            })
        }
        () = needed.wait() => None,
        () = silence(&connection, SILENCE) => None,
    }
}
