//! A caller's control stream: sending messages, and reading at a limited rate.

use std::time::Duration;

use racksum_net::quic::frames::{self, FrameError};
use racksum_net::quic::quinn;
use racksum_proto::control::{FromAggregator, FromWorker};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

/// The time limit for a handshake, and for the first message after it.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for sending a message. A rank that does not read earlier messages within this
/// time is lost.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval at which a waiting rank is told which ranks are missing.
pub(crate) const WAITING_PERIOD: Duration = Duration::from_millis(500);
/// The maximum number of a rank's messages that wait to be handled.
const QUEUE: usize = 16;
/// The number of messages handled without delay: an aggregator sends two for each of its ranks, and
/// the largest jobs have 256 ranks.
const AT_ONCE: u32 = 512;
/// The interval at which messages beyond `AT_ONCE` are handled. A well-behaved rank sends one every
/// ten seconds, and a few more an hour.
const PERIOD: Duration = Duration::from_millis(10);

/// A reader of a rank's messages. It runs in its own task, because reading a frame must not be
/// cancelled half-way. It reads no faster than `Pace` allows.
pub(crate) struct ControlReader(Receiver<FromWorker>, AbortHandle);

impl ControlReader {
    pub(crate) fn of(mut recv: quinn::RecvStream) -> Self {
        let (sender, receiver) = channel(QUEUE);
        let reader = tokio::spawn(async move {
            let mut pace = Pace(Instant::now());
            while let Ok(Some(message)) = frames::recv::<FromWorker>(&mut recv).await {
                if let Some(due) = pace.next(Instant::now()) {
                    sleep_until(due).await;
                }
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        });
        Self(receiver, reader.abort_handle())
    }

    /// Returns the rank's next message, or `None` once the rank has closed the stream or broken the
    /// protocol. Dropping the future before it completes loses no message.
    pub(crate) async fn next(&mut self) -> Option<FromWorker> {
        self.0.recv().await
    }
}

impl Drop for ControlReader {
    fn drop(&mut self) {
        self.1.abort();
    }
}

/// The time by which all messages so far would have been handled at a rate of one per period, as in
/// the generic cell rate algorithm (ITU-T I.371).
struct Pace(Instant);

impl Pace {
    /// Counts a message. Returns the time at which to handle it, or `None` if it may be handled
    /// now.
    fn next(&mut self, now: Instant) -> Option<Instant> {
        self.0 = self.0.max(now) + PERIOD;
        let ahead = self.0 - now;
        let due = now + ahead.checked_sub(PERIOD * AT_ONCE)?;
        (due > now).then_some(due)
    }
}

/// Ends a conversation after giving its last messages time to arrive.
pub(crate) async fn end(connection: &quinn::Connection, mut send: quinn::SendStream) {
    drop(send.finish());
    drop(timeout(JOIN_TIMEOUT, connection.closed()).await);
}

/// Sends a message to a rank; returns false if the rank has disconnected or does not read. A
/// message too long for one frame is replaced by a refusal, so that the rank learns the reason.
pub(crate) async fn send_message(send: &mut quinn::SendStream, message: &FromAggregator) -> bool {
    let sending = async {
        match frames::send(send, message).await {
            // The stream is intact, because no part of the oversized message was sent.
            Err(FrameError::TooLong { len }) => {
                let reason = format!(
                    "the aggregator's message of {len} bytes exceeds the limit for one message"
                );
                tracing::error!("{reason}; this is a bug in racksum");
                frames::send(send, &FromAggregator::Refused { reason }).await
            }
            result => result,
        }
    };
    matches!(timeout(READ_TIMEOUT, sending).await, Ok(Ok(())))
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
        // The call above has counted one message that has to wait.
        assert_eq!(pace.next(start), Some(start + 2 * PERIOD));
        assert_eq!(pace.next(start + 3 * PERIOD), None);
        // After an idle period the full burst is available again.
        let later = start + 2 * PERIOD * AT_ONCE;
        assert!((0..AT_ONCE).all(|_| pace.next(later).is_none()));
        assert_eq!(pace.next(later), Some(later + PERIOD));
    }
}
