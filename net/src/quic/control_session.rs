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
use tokio::task::JoinHandle;

use super::endpoint::{Connection, connect_from};
use super::{Credentials, duration, frames, lifeline};
use crate::NetError;

/// Settings for a rank's call to an aggregator.
#[derive(Debug)]
pub struct CallOptions {
    /// Local address to connect from; `None` lets the kernel choose.
    pub from: Option<IpAddr>,
    /// Identity of the caller, and the certificates it trusts.
    pub credentials: Credentials,
    /// Time that the aggregator may take to answer.
    pub patience: Span,
}

/// Reason why a control session ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The session never began: the aggregator did not answer, or one side rejected the other's
    /// certificate.
    #[error("{0}")]
    Unconnected(#[from] NetError),
    /// The aggregator was silent for too long.
    #[error("{SILENT}")]
    Silent,
    /// The aggregator closed the session, died or broke the protocol; the text states the reason.
    #[error("{0}")]
    Closed(PeerText),
    /// This side has sent its last message.
    #[error("left")]
    Parted,
}

impl Ended {
    /// Creates a [`Closed`](Self::Closed), whose reason may quote the aggregator.
    fn of(why: impl fmt::Display) -> Self {
        Self::Closed(PeerText::of(why))
    }
}

/// Error text for an aggregator that was silent for [`IDLE_TIMEOUT`], or did not answer a query in
/// time.
///
/// [`IDLE_TIMEOUT`]: super::IDLE_TIMEOUT
pub const SILENT: &str = "the aggregator is silent; it is suspended, down or unreachable, or this \
                          process was suspended";

/// Connection to an aggregator, with the stream of its control messages.
#[derive(Debug)]
pub struct ControlConnection {
    connection: Connection,
    to: SocketAddr,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
}

impl ControlConnection {
    /// Sends a message.
    ///
    /// # Errors
    ///
    /// Returns the reason why the session ended.
    pub async fn send(&mut self, message: &FromWorker) -> Result<(), Ended> {
        let sent = frames::send(&mut self.send, message).await;
        sent.map_err(|error| self.ended(&error))
    }

    /// Receives the aggregator's next message. If the caller cancels this future, it must close the
    /// connection, because part of a message may be lost.
    ///
    /// # Errors
    ///
    /// Returns the reason why the session ended.
    pub async fn recv(&mut self) -> Result<FromAggregator, Ended> {
        match frames::recv(&mut self.recv).await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.ended(&STREAM_CLOSED)),
            Err(error) => Err(self.ended(&error)),
        }
    }

    fn ended(&self, why: &dyn fmt::Display) -> Ended {
        ended(&self.connection, self.to, why)
    }
}

/// Returns the reason why a session ended, which is `why` if the connection reports no better
/// reason.
fn ended(connection: &Connection, to: SocketAddr, why: &dyn fmt::Display) -> Ended {
    // The aggregator verifies this side's certificate last, when the handshake already seems
    // complete here. So its rejection may appear only now.
    match connection.why_ended(to) {
        Some(NetError::Connect { cause: ConnectionError::TimedOut, .. }) => Ended::Silent,
        Some(NetError::Connect { cause: ConnectionError::ApplicationClosed(close), .. })
            if !close.reason.is_empty() =>
        {
            Ended::of(String::from_utf8_lossy(&close.reason))
        }
        Some(error @ (NetError::IdentityRejected { .. } | NetError::NoIdentity { .. })) => {
            error.into()
        }
        _ => Ended::of(why),
    }
}

/// Connects to the aggregator at `to`, sends the message `first`, and runs the session until it
/// ends. Passes the aggregator's messages to `on_message`, which returns false to end the session.
/// Sends the messages from `messages` until it has sent a last message, which is [`LEAVE`] if the
/// channel closes first.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn run_session(
    to: SocketAddr,
    first: FromWorker,
    caller: &CallOptions,
    messages: UnboundedReceiver<FromWorker>,
    on_message: impl Fn(FromAggregator) -> bool + Send + 'static,
) -> Ended {
    match call(to, caller).await {
        Ok(line) => run_session_on(line, first, messages, on_message).await,
        Err(ended) => ended,
    }
}

/// Connects to the aggregator at `to` without sending a message yet. A caller that closes the
/// connection before its first message leaves no trace in the aggregator's jobs.
///
/// # Errors
///
/// Returns the reason why the call failed.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn call(to: SocketAddr, caller: &CallOptions) -> Result<ControlConnection, Ended> {
    let connection = connect_from(caller.from, to, &caller.credentials, caller.patience).await?;
    match connection.quic().open_bi().await {
        Ok((send, recv)) => Ok(ControlConnection { connection, to, send, recv }),
        Err(error) => Err(ended(&connection, to, &error)),
    }
}

/// Sends the message `first` on an open connection, and then runs the session like [`run_session`].
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn run_session_on(
    mut line: ControlConnection,
    first: FromWorker,
    mut messages: UnboundedReceiver<FromWorker>,
    on_message: impl Fn(FromAggregator) -> bool + Send + 'static,
) -> Ended {
    if let Err(ended) = line.send(&first).await {
        return ended;
    }
    let ControlConnection { connection, to, mut send, recv } = line;
    let (offered, lifeline) = oneshot::channel();
    let quic = connection.quic().clone();
    let lifeline = lifeline::lay_offered(&quic, to, async { lifeline.await.ok() });
    let mut dead = std::pin::pin!(lifeline::dead(&quic, lifeline));
    // Read frames in a separate task, because cancelling a read would lose part of a frame.
    let mut reader = tokio::spawn(listen(recv, offered, on_message));
    loop {
        tokio::select! {
            why = &mut reader => {
                let why = why.unwrap_or_else(|error| error.to_string());
                return ended(&connection, to, &why);
            }
            () = &mut dead => {
                reader.abort();
                // If the aggregator is alive after all, it handles this close once it has read the
                // earlier messages, and then drops the rank.
                connection.close("gone").await;
                return Ended::of(DEAD);
            }
            message = messages.recv() => {
                let message = message.unwrap_or(LEAVE);
                if message.is_last() {
                    let sent = send_last(&mut send, &message, &mut reader);
                    drop(tokio::time::timeout(LAST_PATIENCE, sent).await);
                } else if frames::send(&mut send, &message).await.is_ok() {
                    continue;
                } else {
                    // Read what the aggregator sent before it closed the stream.
                    drop(tokio::time::timeout(LAST_PATIENCE, &mut reader).await);
                }
                reader.abort();
                connection.close("left").await;
                return Ended::Parted;
            }
        }
    }
}

/// Sends a last message, and waits until the aggregator ends its stream, which it does once it has
/// read the message.
async fn send_last(
    send: &mut quinn::SendStream,
    message: &FromWorker,
    reader: &mut JoinHandle<String>,
) {
    if frames::send(send, message).await.is_ok() {
        drop(send.finish());
        drop(reader.await);
    }
}

/// Asks the aggregator at `to` which ranks of the job in `join` are waiting for the other ranks to
/// join.
///
/// # Errors
///
/// Returns the reason why the session ended without an answer. Connecting and answering may each
/// take up to the caller's `patience`.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn ask_present(
    to: SocketAddr,
    join: Join,
    caller: &CallOptions,
) -> Result<Vec<u16>, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.send(&FromWorker::AskPresent(join)).await?;
        match line.recv().await? {
            FromAggregator::Present { ranks } => Ok(ranks),
            other => Err(Ended::of(format!(
                "the aggregator answered a query for waiting ranks with {other:?}"
            ))),
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("present received").await;
    answer
}

/// Asks the aggregator at `to` whether it would admit `join` now.
///
/// # Errors
///
/// Returns the reason why it would not, or why there was no answer. Connecting and answering may
/// each take up to the caller's `patience`.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn ask_room(to: SocketAddr, join: Join, caller: &CallOptions) -> Result<(), Ended> {
    let answer = ask_once(to, FromWorker::AskRoom(join), caller, caller.patience).await?;
    match answer.ok_or(Ended::Silent)? {
        FromAggregator::Room => Ok(()),
        other => Err(refusal(other)),
    }
}

/// Sends an operator's request to the aggregator at `to`: [`FromWorker::MoveJob`] or
/// [`FromWorker::DrainTo`]. Returns the number of jobs that have moved.
///
/// # Errors
///
/// Returns the aggregator's reason for a refusal, or the reason why there was no answer within
/// `limit`.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn ask_to_move(
    to: SocketAddr,
    request: FromWorker,
    caller: &CallOptions,
    limit: Span,
) -> Result<u16, Ended> {
    let late = || {
        Ended::of(format!(
            "the aggregator has not finished within {} s, so moves that have not begun are \
             cancelled; see `racksum status` for those that have",
            limit.as_millis() / 1_000
        ))
    };
    match ask_once(to, request, caller, limit).await?.ok_or_else(late)? {
        FromAggregator::Moved { jobs } => Ok(jobs),
        other => Err(refusal(other)),
    }
}

/// Calls the aggregator at `to`, sends one message, and returns the answer, or `None` if it does
/// not arrive within `limit`.
async fn ask_once(
    to: SocketAddr,
    message: FromWorker,
    caller: &CallOptions,
    limit: Span,
) -> Result<Option<FromAggregator>, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.send(&message).await?;
        line.recv().await
    };
    let answer = tokio::time::timeout(duration(limit), answer).await;
    line.connection.close("answer received").await;
    answer.ok().transpose()
}

/// Returns the reason for a refusal, from the answer to a request.
fn refusal(answer: FromAggregator) -> Ended {
    match answer {
        FromAggregator::Refused { reason } => Ended::of(reason),
        FromAggregator::WrongVersion { speaks } => wrong_version(speaks),
        FromAggregator::Drain => Ended::of("the aggregator is draining and takes no more jobs"),
        other => Ended::of(format!("the aggregator answered a request with {other:?}")),
    }
}

fn wrong_version(speaks: u16) -> Ended {
    Ended::of(format!(
        "the aggregator speaks protocol version {speaks}, but this program speaks version \
         {CONTROL_VERSION}; install the same release on both"
    ))
}

/// Requests the status of the aggregator at `to`; returns it as JSON.
///
/// # Errors
///
/// Returns the reason why there was no answer.
///
/// # Panics
///
/// Panics outside a tokio runtime.
pub async fn ask_status(to: SocketAddr, caller: &CallOptions) -> Result<String, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.send(&FromWorker::AskStatus { version: CONTROL_VERSION }).await?;
        let mut json = String::new();
        loop {
            match line.recv().await? {
                FromAggregator::Status { part, more } => {
                    json += &part.0;
                    if !more {
                        return Ok(json);
                    }
                    if json.len() > MAX_STATUS {
                        return Err(Ended::of("the aggregator's status exceeds the size limit"));
                    }
                }
                FromAggregator::Refused { reason } => return Err(Ended::of(reason)),
                FromAggregator::WrongVersion { speaks } => return Err(wrong_version(speaks)),
                other => {
                    return Err(Ended::of(format!(
                        "the aggregator answered a status request with {other:?}"
                    )));
                }
            }
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("status received").await;
    answer
}

/// Size limit of a status in bytes, which is enough for 1024 jobs with 256 ranks each.
const MAX_STATUS: usize = 128 << 20;

/// Passes received messages to `on_message` until the session ends; returns the reason why it
/// ended.
async fn listen(
    mut recv: quinn::RecvStream,
    offered: oneshot::Sender<(u16, racksum_proto::auth::Key)>,
    on_message: impl Fn(FromAggregator) -> bool,
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
                // The offer comes right after the proof of the data path. Any other message means
                // that no offer will come.
                let of_proof = matches!(
                    message,
                    FromAggregator::Prove { .. } | FromAggregator::PingSizes { .. }
                );
                if !of_proof {
                    offered = None;
                }
                if !on_message(message) {
                    return "this side no longer accepts messages".to_owned();
                }
            }
            Ok(None) => return STREAM_CLOSED.to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Last message of a rank that neither rejoins nor moves to another aggregator.
pub const LEAVE: FromWorker = FromWorker::Leave { next_op: None };
/// Reason for the end of a session that the aggregator closed without a message.
const STREAM_CLOSED: &str = "it closed the control stream without giving a reason";
/// Reason for the end of a session whose aggregator has died: its host refuses or closes the
/// lifeline.
const DEAD: &str = "its process exited";
/// Time limit for the aggregator to receive and read the last message.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::super::server;
    use super::*;

    const JOIN: &str = r#"{"version":1,"job":{"name":"train","group":""},"generation":0,"rank":1,
        "world":2,"lanes":1,
        "data_ports":[40112],"receive_buffer":4194304,"max_datagram":1472,"multicast":true,
        "stripe":[0,1],"pool_slots":0,"wait":false,"on_rank_loss":"abort","may_move":false,
        "aggregates":false,"rejoin":false,"resume":null}"#;

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
        let (_messages, messages) = tokio::sync::mpsc::unbounded_channel();
        let caller =
            CallOptions { from: None, credentials: credentials(), patience: Span::from_secs(5) };
        let join = FromWorker::Join(serde_json::from_str(JOIN).unwrap());
        let ended = own.block_on(run_session(to, join, &caller, messages, |_| true));
        assert_eq!(ended.to_string(), DEAD);
        own.shutdown_background();
        let end = theirs.block_on(served).unwrap();
        assert!(
            matches!(&end, ConnectionError::ApplicationClosed(close) if close.reason == "gone"),
            "{end:?}"
        );
    }
}
