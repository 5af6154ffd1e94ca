//! From a caller's first packet to its connection: who is answered, for how long, and what is
//! logged of that.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use racksum_net::log_limit::LogLimit;
use racksum_net::quic::lifeline::silence;
use racksum_net::quic::quinn;
use racksum_proto::time::Span;
use tokio::time::timeout;

use crate::door::{Door, Place};
use crate::server::JOIN_TIMEOUT;

/// How long a caller may send nothing in the middle of a handshake.
const SILENCE: Span = Span::from_secs(2);

/// Callers that were not answered, or found no place to prove their data paths.
pub(crate) static REFUSED: LogLimit = LogLimit::new(1);
/// Handshakes that failed: the ranks of a host may hold identities of another authority.
pub(crate) static NOT_CONNECTED: LogLimit = LogLimit::new(4);
/// Joins that were refused: the ranks of a large job may all be told the same at once.
pub(crate) static NOT_JOINED: LogLimit = LogLimit::new(64);

/// Answers a caller's packet. Returns the handshake that it begins, and its place, unless the
/// caller is to show first that it hears, or finds no place: beside `most` connections, or because
/// too many of its address have not said what they want.
pub(crate) fn answer(
    incoming: quinn::Incoming,
    door: &Door,
    known: &Known,
    most: usize,
) -> Option<(quinn::Connecting, Place)> {
    let from = incoming.remote_address();
    // Nothing is logged of an address that has not shown that it hears, and what is sent to it is
    // no longer than what came.
    if !incoming.remote_address_validated() {
        if door.has_room(from.ip()) {
            // A caller that cannot be asked is gone already.
            drop(incoming.retry());
        } else {
            incoming.ignore();
        }
        return None;
    }
    if known.count() + door.taken_by(from.ip()) >= most {
        REFUSED.note(|left_out| {
            tracing::warn!(%from, left_out, "refused: too many connections have not joined");
        });
        incoming.refuse();
        return None;
    }
    let Some(place) = door.enter(from.ip()) else {
        REFUSED.note(|left_out| {
            let why = "too many connections of its address have not said what they want";
            tracing::warn!(%from, left_out, "not answered: {why}");
        });
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
    mut place: Place,
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
        () = place.needed() => None,
        () = silence(&connection, SILENCE) => None,
    }
}

/// How many connections there are that have said what they want.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known(Arc<AtomicUsize>);

/// One of them, until it is dropped.
pub(crate) struct One(Known);

impl Known {
    fn count(&self) -> usize {
        self.0.load(Relaxed)
    }

    /// Counts one more.
    pub(crate) fn one_more(self) -> One {
        self.0.fetch_add(1, Relaxed);
        One(self)
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Relaxed);
    }
}
