//! From a caller's first packet to its connection: who is answered, for how long, and what is
//! logged of that.

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::lifeline::silence;
use racksum_net::quic::quinn;
use racksum_proto::time::Span;
use tokio::time::timeout;

use crate::control_stream::JOIN_TIMEOUT;
use crate::door::{Doors, Needed, Party, Place};

/// How long a caller may send nothing in the middle of a handshake.
const SILENCE: Span = Span::from_secs(2);

/// Callers of whom nothing is known: those that were not answered, found no place, or failed to
/// shake hands. All in one, since anybody may bring about all of them.
pub(crate) static STRANGERS: LogLimit = LogLimit::new(3);
/// Answers a caller's packet. Returns the handshake that it begins, and its place, unless the
/// caller is to show first that it hears, or finds no place, in the handshake or after it. Where
/// `knows` says that identities are known, the latter turns out only then.
pub(crate) fn answer(
    incoming: quinn::Incoming,
    doors: &Doors,
    knows: bool,
) -> Option<(quinn::Connecting, (Place, Needed))> {
    let from = incoming.remote_address();
    let party = Party::new(None, from.ip());
    // Nothing is logged of an address that has not shown that it hears, and what is sent to it is
    // no longer than what came.
    if !incoming.remote_address_validated() {
        if doors.handshakes.has_room(&party) {
            // A caller that cannot be asked is gone already.
            drop(incoming.retry());
        } else {
            incoming.ignore();
        }
        return None;
    }
    let note = |why| STRANGERS.note(|left_out| tracing::warn!(%from, left_out, "{why}"));
    let has_room = knows || doors.strangers.has_room(&party);
    if !has_room && doors.strangers.is_full() {
        note("refused: too many connections have not joined");
        incoming.refuse();
        return None;
    }
    let place = if has_room { doors.handshakes.enter(party) } else { None };
    let Some(place) = place else {
        note("not answered: too many connections of its address have not joined");
        // QUIC calls again by itself, so that an honest host that is early has its turn.
        incoming.ignore();
        return None;
    };
    // A caller that cannot be accepted is gone already.
    Some((incoming.accept().ok()?, place))
}

/// Sees a handshake to its end. Returns nothing if its caller falls silent, takes too long, or has
/// to give its place to another.
pub(crate) async fn shake_hands(
    connecting: quinn::Connecting,
    (place, mut needed): (Place, Needed),
) -> Option<Result<(quinn::Connection, Place), quinn::ConnectionError>> {
    // The connection before the handshake's end, on which nothing is said yet: it tells what has
    // come.
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
