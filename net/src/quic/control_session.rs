//! Control sessions: the messages between a rank and an aggregator over one QUIC connection. The
//! rank is a worker, or an aggregator that contributes to its parent.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use quinn::ConnectionError;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join};
use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use super::endpoint::{Connection, connect_from};
use super::{Credentials, duration, frames, lifeline};
use crate::NetError;

/// Settings with which a rank calls an aggregator.
#[derive(Debug)]
pub struct Caller {
    /// Local address to call from; `None` lets the kernel choose.
    pub from: Option<IpAddr>,
    /// Identity of the caller, and the certificates it trusts.
    pub credentials: Credentials,
    /// How long the aggregator may take to answer.
    pub patience: Span,
}

/// Reason why a control session ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The session never began: nobody answered, or one side rejected the other's certificate.
    #[error("{0}")]
    Unconnected(#[from] NetError),
    /// The aggregator was silent for too long.
    #[error("{SILENT}")]
    Silent,
    /// The aggregator closed the session or died; the text is a sentence.
    #[error("{0}")]
    Closed(PeerText),
    /// This side has sent its last message.
    #[error("left")]
    Parted,
}

impl Ended {
    /// Returns an end whose reason may quote the aggregator.
    fn of(why: impl fmt::Display) -> Self {
        Self::Closed(PeerText::of(why))
    }
}

/// Error text for an aggregator that was silent for [`IDLE_TIMEOUT`].
///
/// [`IDLE_TIMEOUT`]: super::IDLE_TIMEOUT
pub const SILENT: &str = "the aggregator is silent; it is suspended, down or unreachable, or this \
                          process was suspended";

/// Connection to an aggregator, with the stream of its control messages.
#[derive(Debug)]
pub struct Line {
    connection: Connection,
    to: SocketAddr,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
}

impl Line {
    /// Sends a message.
    ///
    /// # Errors
    ///
    /// Returns how the session ended.
    pub async fn say(&mut self, word: &FromWorker) -> Result<(), Ended> {
        let said = frames::send(&mut self.send, word).await;
        said.map_err(|error| self.ended(&error))
    }

    /// Receives the aggregator's next message. If the caller cancels this future, it must close the
    /// connection.
    ///
    /// # Errors
    ///
    /// Returns how the session ended.
    pub async fn hear(&mut self) -> Result<FromAggregator, Ended> {
        match frames::recv(&mut self.recv).await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.ended(&HUNG_UP)),
            Err(error) => Err(self.ended(&error)),
        }
    }

    fn ended(&self, why: &dyn fmt::Display) -> Ended {
        ended(&self.connection, self.to, why)
    }
}

/// Returns how a session ended; `why` applies if the connection gives no better reason.
fn ended(connection: &Connection, to: SocketAddr, why: &dyn fmt::Display) -> Ended {
    // The aggregator verifies this side's certificate last, when the handshake seems complete here.
    match connection.why_ended(to) {
        Some(NetError::Connect { cause: ConnectionError::TimedOut, .. }) => Ended::Silent,
        Some(NetError::Connect { cause: ConnectionError::ApplicationClosed(close), .. })
            if !close.reason.is_empty() =>
        {
            Ended::of(String::from_utf8_lossy(&close.reason))
        }
        Some(error @ (NetError::NotBelieved { .. } | NetError::NoIdentity { .. })) => error.into(),
        _ => Ended::of(why),
    }
}

/// Connects to the aggregator at `to`, sends the message `first`, and runs the session until it
/// ends. Passes the aggregator's messages to `hear`, which returns false to end the session. Sends
/// the messages from `words` up to a last one, which is [`LEAVE`] if the channel closes without
/// one.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn converse(
    to: SocketAddr,
    first: FromWorker,
    caller: &Caller,
    words: UnboundedReceiver<FromWorker>,
    hear: impl Fn(FromAggregator) -> bool + Send + 'static,
) -> Ended {
    match call(to, caller).await {
        Ok(line) => talk(line, first, words, hear).await,
        Err(ended) => ended,
    }
}

/// Connects to the aggregator at `to` without sending a message yet. A caller that gives up now
/// leaves no trace at the aggregator.
///
/// # Errors
///
/// Returns why the call failed.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn call(to: SocketAddr, caller: &Caller) -> Result<Line, Ended> {
    let connection = connect_from(caller.from, to, &caller.credentials, caller.patience).await?;
    match connection.quic().open_bi().await {
        Ok((send, recv)) => Ok(Line { connection, to, send, recv }),
        Err(error) => Err(ended(&connection, to, &error)),
    }
}

/// Sends the message `first` on an open line, and then runs the session like [`converse`].
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn talk(
    mut line: Line,
    first: FromWorker,
    mut words: UnboundedReceiver<FromWorker>,
    hear: impl Fn(FromAggregator) -> bool + Send + 'static,
) -> Ended {
    if let Err(ended) = line.say(&first).await {
        return ended;
    }
    let Line { connection, to, mut send, recv } = line;
    let (offered, lifeline) = oneshot::channel();
    let quic = connection.quic().clone();
    let lifeline = lifeline::lay_offered(&quic, to, async { lifeline.await.ok() });
    let mut dead = std::pin::pin!(lifeline::dead(&quic, lifeline));
    // Frames are read in a separate task, because cancelling a read would lose part of a frame.
    let mut reader = tokio::spawn(listen(recv, offered, hear));
    loop {
        tokio::select! {
            why = &mut reader => {
                let why = why.unwrap_or_else(|error| error.to_string());
                return ended(&connection, to, &why);
            }
            () = &mut dead => {
                reader.abort();
                // An aggregator that is alive after all handles this close after the messages it
                // has not read yet, and so drops the rank.
                connection.close("gone").await;
                return Ended::of(DEAD);
            }
            word = words.recv() => {
                let word = word.unwrap_or(LEAVE);
                let last = word.is_last();
                let sent = frames::send(&mut send, &word).await;
                if last || sent.is_err() {
                    drop(send.finish());
                    // The aggregator ends its stream once it has read the last message.
                    drop(tokio::time::timeout(LAST_PATIENCE, &mut reader).await);
                    reader.abort();
                    connection.close("left").await;
                    return Ended::Parted;
                }
            }
        }
    }
}

/// Asks the aggregator at `to` which ranks of the job in `join` wait there for others to join.
///
/// # Errors
///
/// Returns how the session ended if there was no answer. Connecting and answering may each take the
/// caller's `patience`.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn look(to: SocketAddr, join: Join, caller: &Caller) -> Result<Vec<u16>, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.say(&FromWorker::Look(join)).await?;
        match line.hear().await? {
            FromAggregator::Present { ranks } => Ok(ranks),
            said => Err(Ended::of(format!(
                "the aggregator answered a query for waiting ranks with {said:?}"
            ))),
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("looked").await;
    answer
}

/// Requests the status of the aggregator at `to`; returns it as JSON.
///
/// # Errors
///
/// Returns why there was no answer.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn ask_status(to: SocketAddr, caller: &Caller) -> Result<String, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.say(&FromWorker::AskStatus { version: CONTROL_VERSION }).await?;
        let mut json = String::new();
        loop {
            match line.hear().await? {
                FromAggregator::Status { part, more } => {
                    json += &part.0;
                    if !more {
                        return Ok(json);
                    }
                    if json.len() > MAX_STATUS {
                        return Err(Ended::of("the aggregator sent more than a status can hold"));
                    }
                }
                FromAggregator::Refused { reason } => return Err(Ended::of(reason)),
                FromAggregator::WrongVersion { speaks } => {
                    return Err(Ended::of(format!(
                        "the aggregator speaks protocol version {speaks}, and this program version \
                         {CONTROL_VERSION}; install the same release on both"
                    )));
                }
                said => {
                    return Err(Ended::of(format!(
                        "the aggregator answered a status request with {said:?}"
                    )));
                }
            }
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("asked").await;
    answer
}

/// Size limit of a status in bytes: that of 1024 jobs with 256 ranks each.
const MAX_STATUS: usize = 128 << 20;

/// Passes received messages on until the session ends; returns the reason.
async fn listen(
    mut recv: quinn::RecvStream,
    offered: oneshot::Sender<(u16, racksum_proto::auth::Key)>,
    hear: impl Fn(FromAggregator) -> bool,
) -> String {
    let mut offered = Some(offered);
    loop {
        match frames::recv::<FromAggregator>(&mut recv).await {
            Ok(Some(FromAggregator::Lifeline { port, token })) => {
                // Only the first offer counts; a later one has no receiver.
                if let Some(offered) = offered.take() {
                    offered.send((port, token)).unwrap_or_default();
                }
            }
            Ok(Some(message)) => {
                // An offer comes right after the proof of the data path, so any other message rules
                // it out.
                let of_proof = matches!(
                    message,
                    FromAggregator::Prove { .. } | FromAggregator::Arrived { .. }
                );
                if !of_proof {
                    offered = None;
                }
                if !hear(message) {
                    return "the receiver of its messages is gone".to_owned();
                }
            }
            Ok(None) => return HUNG_UP.to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Last message of a rank that neither comes back nor moves to another aggregator.
pub const LEAVE: FromWorker = FromWorker::Leave { next_op: None };
/// Reason for a session that the aggregator ended without a message.
const HUNG_UP: &str = "the peer closed the control stream";
/// Reason for a session whose aggregator has died: its host refuses or closes the lifeline.
const DEAD: &str = "its process exited";
/// How long the aggregator may take to read the last message.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::super::server;
    use super::*;

    const JOIN: &str = r#"{"version":1,"job":{"name":"train","group":""},"generation":0,"rank":1,
        "world":2,"lanes":1,
        "data_ports":[40112],"receive_buffer":4194304,"max_datagram":1472,"multicast":true,
        "stripe":[0,1],"pool_slots":0,"wait":false,"on_rank_loss":"abort","may_move":false,
        "relays":false,"rejoin":false,"resume":null}"#;

    #[test]
    fn one_that_was_taken_for_dead_is_told_so() {
        let credentials = || Credentials::new(None, false).unwrap();
        let runtime =
            || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (own, theirs) = (runtime().unwrap(), runtime().unwrap());
        // This server accepts no lifelines, and its only thread blocks for a while.
        let endpoint =
            theirs.block_on(async { server("127.0.0.1:0".parse().unwrap(), &credentials()) });
        let endpoint = endpoint.unwrap();
        let to = endpoint.local_addr().unwrap();
        let served = theirs.spawn(async move {
            let connection = endpoint.accept().await.unwrap().await.unwrap();
            let (_send, mut recv) = connection.accept_bi().await.unwrap();
            let joined = frames::recv::<FromWorker>(&mut recv).await.unwrap();
            assert!(matches!(joined, Some(FromWorker::Join(_))), "{joined:?}");
            std::thread::sleep(Duration::from_secs(6));
            connection.closed().await
        });
        let (_words, words) = tokio::sync::mpsc::unbounded_channel();
        let caller =
            Caller { from: None, credentials: credentials(), patience: Span::from_secs(5) };
        let join = FromWorker::Join(serde_json::from_str(JOIN).unwrap());
        let ended = own.block_on(converse(to, join, &caller, words, |_| true));
        assert_eq!(ended.to_string(), DEAD);
        own.shutdown_background();
        let end = theirs.block_on(served).unwrap();
        assert!(
            matches!(&end, ConnectionError::ApplicationClosed(close) if close.reason == "gone"),
            "{end:?}"
        );
    }
}
