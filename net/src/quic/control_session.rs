//! What a rank says to an aggregator and hears of it, on a connection for as long as it is one: a
//! worker's conversation, or that of an aggregator with its parent.

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

/// Who calls an aggregator.
#[derive(Debug)]
pub struct Caller {
    /// The address of this host to call from, unless any will do.
    pub from: Option<IpAddr>,
    /// Who it is, and whom it believes.
    pub credentials: Credentials,
    /// How long the aggregator may take to answer.
    pub patience: Span,
}

/// How a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// It never began: nobody is there, or one side does not believe the other.
    #[error("{0}")]
    Unconnected(#[from] NetError),
    /// Nothing was heard of the aggregator for too long.
    #[error("{SILENT}")]
    Silent,
    /// The aggregator ended it, or is gone: a sentence.
    #[error("{0}")]
    Closed(PeerText),
    /// This side has said its last word.
    #[error("left")]
    Parted,
}

impl Ended {
    /// An end for a reason that may quote the aggregator.
    fn of(why: impl fmt::Display) -> Self {
        Self::Closed(PeerText::of(why))
    }
}

/// What is said of an aggregator of which nothing was heard for [`IDLE_TIMEOUT`].
///
/// [`IDLE_TIMEOUT`]: super::IDLE_TIMEOUT
pub const SILENT: &str = "nothing is heard of the aggregator; it is stopped, down or cut off, or \
                          this process was stopped itself";

/// A connection to an aggregator, and the stream by which both talk.
#[derive(Debug)]
pub struct Line {
    connection: Connection,
    to: SocketAddr,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
}

impl Line {
    /// Says something.
    ///
    /// # Errors
    ///
    /// How the conversation has ended.
    pub async fn say(&mut self, word: &FromWorker) -> Result<(), Ended> {
        let said = frames::send(&mut self.send, word).await;
        said.map_err(|error| self.ended(&error))
    }

    /// Returns what the aggregator says next. Whoever stops waiting for that must hang up.
    ///
    /// # Errors
    ///
    /// How the conversation has ended.
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

/// How a conversation has ended, of which `why` is the sign.
fn ended(connection: &Connection, to: SocketAddr, why: &dyn fmt::Display) -> Ended {
    // An aggregator looks at this side's certificate last, when the connection seems made.
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

/// Calls the aggregator at `to`, and says the `first` word; hands on what it says by
/// `hear`, which returns false once nobody listens any more, and says to it what comes of `words`:
/// up to a last word, which is [`LEAVE`] if they end without one. Returns once the conversation is
/// over.
///
/// # Panics
///
/// Outside of a tokio runtime.
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

/// Calls the aggregator at `to`, which is told nothing yet: who gives up the call leaves no trace.
///
/// # Errors
///
/// Why the call came to nothing.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub async fn call(to: SocketAddr, caller: &Caller) -> Result<Line, Ended> {
    let connection = connect_from(caller.from, to, &caller.credentials, caller.patience).await?;
    match connection.quic().open_bi().await {
        Ok((send, recv)) => Ok(Line { connection, to, send, recv }),
        Err(error) => Err(ended(&connection, to, &error)),
    }
}

/// Says the `first` word by a line, and goes on as [`converse`] does.
///
/// # Panics
///
/// Outside of a tokio runtime.
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
    // A task of its own, since reading a frame must not be cancelled half-way.
    let mut reader = tokio::spawn(listen(recv, offered, hear));
    loop {
        tokio::select! {
            why = &mut reader => {
                let why = why.unwrap_or_else(|error| error.to_string());
                return ended(&connection, to, &why);
            }
            () = &mut dead => {
                reader.abort();
                // Should it live, this lies behind what it has yet to read, and undoes it.
                connection.close("gone").await;
                return Ended::of(DEAD);
            }
            word = words.recv() => {
                let word = word.unwrap_or(LEAVE);
                let last = word.is_last();
                let sent = frames::send(&mut send, &word).await;
                if last || sent.is_err() {
                    drop(send.finish());
                    // The aggregator's end of the stream says that it has read the last word.
                    drop(tokio::time::timeout(LAST_PATIENCE, &mut reader).await);
                    reader.abort();
                    connection.close("left").await;
                    return Ended::Parted;
                }
            }
        }
    }
}

/// Asks the aggregator at `to` which ranks wait there for others that could join like this.
///
/// # Errors
///
/// What ended the conversation before there was an answer; the caller's patience is for each of
/// the connection and the answer.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub async fn look(to: SocketAddr, join: Join, caller: &Caller) -> Result<Vec<u16>, Ended> {
    let mut line = call(to, caller).await?;
    let answer = async {
        line.say(&FromWorker::Look(join)).await?;
        match line.hear().await? {
            FromAggregator::Present { ranks } => Ok(ranks),
            said => Err(Ended::of(format!("it answers a look with {said:?}"))),
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("looked").await;
    answer
}

/// Asks the aggregator at `to` what it does; returns the JSON that it says.
///
/// # Errors
///
/// Why there is no answer.
///
/// # Panics
///
/// Outside of a tokio runtime.
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
                        return Err(Ended::of("it says more than any aggregator has to say"));
                    }
                }
                FromAggregator::Refused { reason } => return Err(Ended::of(reason)),
                FromAggregator::WrongVersion { speaks } => {
                    return Err(Ended::of(format!(
                        "it speaks version {speaks} of the protocol, and this program version \
                         {CONTROL_VERSION}; install the same release on both"
                    )));
                }
                said => return Err(Ended::of(format!("it answers a question with {said:?}"))),
            }
        }
    };
    let answer = tokio::time::timeout(duration(caller.patience), answer).await;
    let answer = answer.unwrap_or(Err(Ended::Silent));
    line.connection.close("asked").await;
    answer
}

/// Bytes of the longest status that is taken: that of 1024 jobs with 256 ranks each.
const MAX_STATUS: usize = 128 << 20;

/// Hands on what is said until nothing more is; returns why.
async fn listen(
    mut recv: quinn::RecvStream,
    offered: oneshot::Sender<(u16, racksum_proto::auth::Key)>,
    hear: impl Fn(FromAggregator) -> bool,
) -> String {
    let mut offered = Some(offered);
    loop {
        match frames::recv::<FromAggregator>(&mut recv).await {
            Ok(Some(FromAggregator::Lifeline { port, token })) => {
                // There is one, and nobody waits for another.
                if let Some(offered) = offered.take() {
                    offered.send((port, token)).unwrap_or_default();
                }
            }
            Ok(Some(message)) => {
                // It would have come first after the proof of the data path.
                let of_proof = matches!(
                    message,
                    FromAggregator::Prove { .. } | FromAggregator::Arrived { .. }
                );
                if !of_proof {
                    offered = None;
                }
                if !hear(message) {
                    return "nobody listens any more".to_owned();
                }
            }
            Ok(None) => return HUNG_UP.to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

/// A rank's last word, unless it may come back or goes on elsewhere.
pub const LEAVE: FromWorker = FromWorker::Leave { next_op: None };
/// Why a conversation ends that the aggregator has ended without a word.
const HUNG_UP: &str = "it ended the conversation";
/// Why a conversation ends when the aggregator's host says that it serves no more.
const DEAD: &str = "its process has ended, as its host says";
/// How long the aggregator may take to read the last word.
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
        // Nobody takes lifelines there, and its only thread hears nothing for a while.
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
