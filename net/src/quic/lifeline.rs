//! Lifelines: TCP connections that distinguish a dead peer from a silent one.
//!
//! A killed process sends nothing, but neither does a process that is stopped or cut off. The host
//! of a killed process, however, closes its sockets. So an idle TCP connection accompanies the QUIC
//! connection: QUIC shows that the process answers, and the TCP connection closes when the process
//! dies.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use racksum_proto::auth::Key;
use racksum_proto::time::Span;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Interval, MissedTickBehavior, interval, timeout};

use super::duration;
use crate::alive::Alive;

/// Result of opening a lifeline.
#[derive(Debug)]
pub enum Lifeline {
    /// The lifeline is open.
    Laid(TcpStream),
    /// The host refused the connection, so the peer's process has probably died.
    Cut,
    /// The lifeline cannot be opened. The peer may still be alive, for example behind a firewall.
    Impossible,
}

/// Waits until the peer is dead: its host has closed or refused the lifeline, and the connection
/// then receives nothing for a moment. Never returns if there is no lifeline, or if the peer keeps
/// sending after the lifeline has closed.
///
/// A closed lifeline alone proves nothing, because an attacker who forges a TCP reset can close it.
pub async fn dead(connection: &quinn::Connection, lifeline: impl Future<Output = Lifeline>) {
    match lifeline.await {
        Lifeline::Laid(lifeline) => closed(Alive::new(lifeline)).await,
        Lifeline::Cut => {}
        Lifeline::Impossible => pending().await,
    }
    tokio::select! {
        () = silence(connection, SILENCE) => {}
        () = running(DOUBT) => pending().await,
    }
}

/// Opens the lifeline that the aggregator at `to` offers. The offer contains a port, and a token
/// that identifies the rank. While the aggregator is silent, this function tries TCP connections to
/// `to`: a refused connection means that the process died before it made an offer. The host of a
/// process that is only stopped still accepts connections.
pub async fn lay_offered(
    connection: &quinn::Connection,
    to: SocketAddr,
    offered: impl Future<Output = Option<(u16, Key)>>,
) -> Lifeline {
    let mut offered = std::pin::pin!(offered);
    loop {
        tokio::select! {
            offered = &mut offered => return match offered {
                Some((port, token)) => lay(to, port, token).await,
                None => Lifeline::Impossible,
            },
            () = silence(connection, FIRST_MESSAGE) => {}
        }
        if let Ok(Err(error)) = timeout(duration(PATIENCE), TcpStream::connect(to)).await
            && is_cut(&error)
        {
            return Lifeline::Cut;
        }
    }
}

/// Listens for lifelines at `addr`, or at another port if that one is taken.
///
/// # Errors
///
/// Returns the kernel's error.
pub async fn listen(mut addr: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(addr).await {
        Ok(listener) => Ok(listener),
        Err(_) => {
            addr.set_port(0);
            TcpListener::bind(addr).await
        }
    }
}

/// Opens a lifeline to a port of the aggregator at `to`. The `token` identifies the rank. Without a
/// lifeline, this side detects late that the aggregator's process has died.
pub async fn lay(mut to: SocketAddr, port: u16, token: Key) -> Lifeline {
    to.set_port(port);
    let connect = async {
        let mut stream = TcpStream::connect(to).await?;
        keep_alive(&stream)?;
        stream.write_all(&token.0).await?;
        Ok::<_, io::Error>(stream)
    };
    match timeout(duration(PATIENCE), connect).await {
        Ok(Ok(stream)) => Lifeline::Laid(stream),
        Ok(Err(error)) if is_cut(&error) => Lifeline::Cut,
        Ok(Err(_)) | Err(_) => Lifeline::Impossible,
    }
}

/// Returns whether the error means that no process listens at the port.
fn is_cut(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// Reads the token that identifies a lifeline; returns `None` if it does not arrive in time.
pub async fn token_of(mut stream: TcpStream) -> Option<(Key, TcpStream)> {
    keep_alive(&stream).ok()?;
    let mut token = [0; Key::LEN];
    timeout(duration(PATIENCE), stream.read_exact(&mut token)).await.ok()?.ok()?;
    Some((Key(token), stream))
}

/// Turns on TCP keep-alive, so that firewalls on the path do not drop an idle connection.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let every = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
    SockRef::from(stream).set_tcp_keepalive(&every)
}

/// Waits until a lifeline is closed or receives data. Data also ends the lifeline, because a side
/// that went on reading would let the peer waste its time.
async fn closed(mut lifeline: Alive<TcpStream>) {
    // End of stream, an error and unexpected data all end the lifeline.
    let _read = lifeline.read(&mut [0]).await;
}

/// Waits for the time `long`, not counting any time in which this process did not run.
async fn running(long: Span) {
    let mut ticker = ticker();
    for _ in 0..=long.0 / TICK.0 {
        ticker.tick().await;
    }
}

/// Waits until no datagram has arrived for `long`. Time in which this process did not run does not
/// count, because the process could not receive then.
pub async fn silence(connection: &quinn::Connection, long: Span) {
    let mut ticker = ticker();
    let (mut received, mut silent) = (connection.stats().udp_rx.datagrams, 0);
    while silent <= long.0 / TICK.0 {
        ticker.tick().await;
        let datagrams = connection.stats().udp_rx.datagrams;
        silent = if datagrams == received { silent + 1 } else { 0 };
        received = datagrams;
    }
}

/// Returns a timer with the period [`TICK`]. It does not make up for missed ticks.
fn ticker() -> Interval {
    let mut ticker = interval(duration(TICK));
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticker
}

/// Interval between checks for received datagrams.
const TICK: Span = Span::from_millis(100);
/// Length of the silence that confirms a death: more than two QUIC keep-alive intervals.
const SILENCE: Span = Span::from_millis(1200);
/// Silence of the aggregator before its offer, after which this side tries a TCP connection to the
/// aggregator's host.
const FIRST_MESSAGE: Span = Span::from_secs(2);
/// Time to wait for a silence of [`SILENCE`] once the lifeline is closed or refused.
const DOUBT: Span = Span::from_secs(4);
/// Timeout for opening a lifeline.
const PATIENCE: Span = Span::from_secs(2);
/// Interval of TCP keep-alives on an idle lifeline.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::{Connection, Credentials, connect, server};

    /// Connects a caller to a server. Returns the server's runtime, connection and lifeline, and
    /// the caller, which dies with its runtime.
    fn called() -> (tokio::runtime::Runtime, quinn::Connection, TcpStream, Caller) {
        let runtime =
            || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (own, callers) = (runtime().unwrap(), runtime().unwrap());
        let credentials = || Credentials::new(None, false).unwrap();
        let (endpoint, listener) = own.block_on(async {
            let endpoint = server("127.0.0.1:0".parse().unwrap(), &credentials()).unwrap();
            let listener = listen(endpoint.local_addr().unwrap()).await.unwrap();
            (endpoint, listener)
        });
        let (to, port) = (endpoint.local_addr().unwrap(), listener.local_addr().unwrap().port());
        let token = Key([7; Key::LEN]);
        let accepted = own.spawn(async move { endpoint.accept().await.unwrap().await.unwrap() });
        let caller = callers.block_on(async {
            let connection = connect(to, &credentials(), Span::from_secs(5)).await.unwrap();
            let Lifeline::Laid(lifeline) = lay(to, port, token).await else {
                panic!("the lifeline did not open")
            };
            (connection, lifeline)
        });
        let (served, stream) = own.block_on(async {
            let (stream, _) = listener.accept().await.unwrap();
            (accepted.await.unwrap(), stream)
        });
        let (received, stream) = own.block_on(token_of(stream)).unwrap();
        assert_eq!(received, token);
        (own, served, stream, Caller { runtime: callers, held: caller })
    }

    struct Caller {
        runtime: tokio::runtime::Runtime,
        held: (Connection, TcpStream),
    }

    #[test]
    fn who_dies_is_missed_soon() {
        let (own, served, stream, caller) = called();
        // The caller's host closes its sockets, and the caller sends nothing more.
        let Caller { runtime, held: (connection, lifeline) } = caller;
        runtime.shutdown_background();
        drop(lifeline);
        let dies = dead(&served, async { Lifeline::Laid(stream) });
        own.block_on(async { timeout(Duration::from_secs(4), dies).await }).unwrap();
        drop(connection);
    }

    #[test]
    fn who_dies_before_it_has_said_anything_is_missed_soon() {
        // Roles are swapped here: the caller that dies stands for the aggregator, which offers
        // nothing.
        let (own, served, stream, caller) = called();
        let Caller { runtime, held } = caller;
        runtime.shutdown_background();
        let offered = lay_offered(&served, served.remote_address(), pending());
        let dies = dead(&served, offered);
        own.block_on(async { timeout(Duration::from_secs(6), dies).await }).unwrap();
        drop((held, stream));
    }

    #[test]
    fn who_is_stopped_before_its_first_word_is_waited_for() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held } = caller;
        runtime.shutdown_background();
        // The host of a stopped process still accepts connections for it.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let offer = async {
            tokio::time::sleep(Duration::from_millis(5500)).await;
            Some((to.port(), Key([7; Key::LEN])))
        };
        let laid = own.block_on(lay_offered(&served, to, offer));
        assert!(matches!(laid, Lifeline::Laid(_)), "{laid:?}");
        drop((held, stream, listener));
    }

    #[test]
    fn what_this_process_misses_while_it_is_stopped_itself_is_no_silence() {
        let (own, served, stream, caller) = called();
        let quiet = own.spawn(async move { silence(&served, FIRST_MESSAGE).await });
        // Blocks the runtime's only thread while the peer keeps sending.
        for _ in 0..2 {
            own.spawn(async { std::thread::sleep(Duration::from_millis(2200)) });
            std::thread::sleep(Duration::from_millis(2450));
            assert!(!quiet.is_finished());
        }
        drop((caller, stream));
    }

    #[test]
    fn who_dies_is_missed_although_this_process_is_stopped_meanwhile() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held: (connection, lifeline) } = caller;
        runtime.shutdown_background();
        drop(lifeline);
        let dies = own.spawn(async move { dead(&served, async { Lifeline::Laid(stream) }).await });
        std::thread::sleep(Duration::from_millis(300));
        own.spawn(async { std::thread::sleep(Duration::from_millis(4500)) });
        std::thread::sleep(Duration::from_millis(7500));
        assert!(dies.is_finished());
        drop(connection);
    }

    #[test]
    fn who_offers_a_lifeline_and_dies_is_missed_soon() {
        let (own, served, stream, caller) = called();
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let laid = own.block_on(lay(nobody, nobody.port(), Key([7; Key::LEN])));
        assert!(matches!(laid, Lifeline::Cut), "{laid:?}");
        let Caller { runtime, held } = caller;
        runtime.shutdown_background();
        own.block_on(async {
            timeout(Duration::from_secs(4), dead(&served, async { laid })).await
        })
        .unwrap();
        drop((held, stream));
    }

    #[test]
    fn who_speaks_on_is_not_dead_although_its_lifeline_ends() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held: (connection, lifeline) } = caller;
        drop(lifeline);
        let dies = dead(&served, async { Lifeline::Laid(stream) });
        let died = own.block_on(async { timeout(Duration::from_secs(6), dies).await });
        assert!(died.is_err());
        drop((connection, runtime));
    }

    #[test]
    fn a_lifeline_that_something_is_said_on_is_cut_and_ends_nothing() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held: (connection, mut lifeline) } = caller;
        let dies = own.spawn(async move { dead(&served, async { Lifeline::Laid(stream) }).await });
        let sends = async {
            while lifeline.write_all(&[7; 1024]).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let cut = runtime.block_on(async { timeout(Duration::from_secs(20), sends).await });
        cut.expect("a lifeline that carries data is closed");
        let died = own.block_on(async { timeout(Duration::from_secs(6), dies).await });
        assert!(died.is_err(), "the peer still sends on its QUIC connection");
        drop((connection, runtime));
    }

    #[test]
    fn who_is_only_silent_is_not_dead() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held } = caller;
        // Simulates a stopped process: its sockets stay open.
        runtime.shutdown_background();
        let dies = dead(&served, async { Lifeline::Laid(stream) });
        let died = own.block_on(async { timeout(Duration::from_secs(3), dies).await });
        assert!(died.is_err());
        drop(held);
    }
}
