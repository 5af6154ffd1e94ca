//! The control stream of a caller: what the aggregator sends on it, and how fast it reads.

use std::time::Duration;

use racksum_net::quic::frames::{self, FrameError};
use racksum_net::quic::quinn;
use racksum_proto::control::{FromAggregator, FromWorker};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

/// How long a handshake may take, and then a connection to say who it is.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a message may wait until a rank has read enough of those before; then it is lost.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a waiting rank is told whom it waits for.
pub(crate) const WAITING_PERIOD: Duration = Duration::from_millis(500);
/// Words of a rank that may wait to be heeded.
const QUEUE: usize = 16;
/// Words that are heeded at once: an aggregator says two of each of its ranks, and the largest jobs
/// have 256.
const AT_ONCE: u32 = 512;
/// After those one is heeded in so much time. A rank has no more to say than a few words an hour.
const PERIOD: Duration = Duration::from_millis(10);

/// What a rank says, read by a task of its own: reading a frame must not be cancelled half-way.
/// Whoever says more than ranks have to say is read no faster than it may be heeded.
pub(crate) struct ControlReader(Receiver<FromWorker>, AbortHandle);

impl ControlReader {
    pub(crate) fn of(mut recv: quinn::RecvStream) -> Self {
        let (heard, words) = channel(QUEUE);
        let reader = tokio::spawn(async move {
            let mut pace = Pace(Instant::now());
            while let Ok(Some(word)) = frames::recv::<FromWorker>(&mut recv).await {
                if let Some(due) = pace.next(Instant::now()) {
                    sleep_until(due).await;
                }
                if heard.send(word).await.is_err() {
                    return;
                }
            }
        });
        Self(words, reader.abort_handle())
    }

    /// Returns the rank's next message, or `None` once the rank has closed the stream or broken the
    /// protocol. It may be dropped before it returns; no message is lost by that.
    pub(crate) async fn next(&mut self) -> Option<FromWorker> {
        self.0.recv().await
    }
}

impl Drop for ControlReader {
    fn drop(&mut self) {
        self.1.abort();
    }
}

/// When all words so far would have been heeded, if one was in each period: the generic cell rate
/// algorithm (ITU-T I.371).
struct Pace(Instant);

impl Pace {
    /// Counts a word. Returns when it may be heeded, if it may not be now.
    fn next(&mut self, now: Instant) -> Option<Instant> {
        self.0 = self.0.max(now) + PERIOD;
        let ahead = self.0 - now;
        let due = now + ahead.checked_sub(PERIOD * AT_ONCE)?;
        (due > now).then_some(due)
    }
}

/// Ends a conversation so that its last words still arrive.
pub(crate) async fn end(connection: &quinn::Connection, mut send: quinn::SendStream) {
    drop(send.finish());
    drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
}

/// Tells the rank something; returns false if it is gone or does not read. What is too long for one
/// message is refused in its place: a rank that hears nothing could not tell what is wrong.
pub(crate) async fn send_message(send: &mut quinn::SendStream, message: &FromAggregator) -> bool {
    let said = async {
        match frames::send(send, message).await {
            // Nothing of it has been sent.
            Err(FrameError::TooLong { len }) => {
                let reason = format!("what the aggregator has to say has {len} bytes, too many");
                tracing::error!("{reason}: this is a bug of racksum");
                frames::send(send, &FromAggregator::Refused { reason }).await
            }
            said => said,
        }
    };
    matches!(timeout(READ_TIMEOUT, said).await, Ok(Ok(())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_says_more_than_ranks_have_to_say_is_heeded_at_a_pace() {
        let start = Instant::now();
        let mut pace = Pace(start);
        let at_once = (0..2 * AT_ONCE).take_while(|_| pace.next(start).is_none()).count();
        assert_eq!(at_once, AT_ONCE as usize);
        // One was counted that is to wait.
        assert_eq!(pace.next(start), Some(start + 2 * PERIOD));
        assert_eq!(pace.next(start + 3 * PERIOD), None);
        // After a quiet time there may be as many at once as at first.
        let later = start + 2 * PERIOD * AT_ONCE;
        assert!((0..AT_ONCE).all(|_| pace.next(later).is_none()));
        assert_eq!(pace.next(later), Some(later + PERIOD));
    }
}
