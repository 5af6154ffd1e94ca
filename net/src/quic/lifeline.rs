//! Whether the other side of a connection is dead, or only silent.
//!
//! A process that is killed says nothing, and neither does one that is stopped or cut off. But its
//! host closes what it held: so beside the QUIC connection, which shows that the process answers,
//! there is one of TCP that carries nothing, and is closed by the host when the process dies.

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

/// A lifeline, or why there is none.
#[derive(Debug)]
pub enum Lifeline {
    /// It is laid.
    Laid(TcpStream),
    /// Whoever offered it, or was to, is not there any more, as it seems.
    Cut,
    /// It cannot be had, which says nothing of the other side: a firewall may be between.
    Impossible,
}

/// Waits until the other side of a connection is dead: its host has closed the lifeline, and
/// nothing was heard on the connection for a moment. Never without a lifeline, nor once the other
/// side has spoken on although it was closed.
///
/// A closed lifeline alone would not do, since whoever can forge its end would end a connection.
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

/// Lays the lifeline that the aggregator at `to` offers first of all, with the port, and the token
/// by which it knows whose it is. One that dies before it has said so, and could not be told from
/// one that offers none, is silent, and nobody listens where it was called. For one that is only
/// stopped, its host still takes connections.
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
            () = silence(connection, FIRST_WORD) => {}
        }
        if let Ok(Err(error)) = timeout(duration(PATIENCE), TcpStream::connect(to)).await
            && is_cut(&error)
        {
            return Lifeline::Cut;
        }
    }
}

/// Where lifelines end: at `addr`, or at another port if that is not to be had.
///
/// # Errors
///
/// What the kernel said.
pub async fn listen(mut addr: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(addr).await {
        Ok(listener) => Ok(listener),
        Err(_) => {
            addr.set_port(0);
            TcpListener::bind(addr).await
        }
    }
}

/// Lays a lifeline to a port of the aggregator at `to`, which knows whose it is by `token`. If it
/// cannot be had within a moment, death is missed late.
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

/// Whether the host says that nobody listens there.
fn is_cut(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionRefused
}

/// Reads whose lifeline it is; none if that is not said within a moment.
pub async fn token_of(mut stream: TcpStream) -> Option<(Key, TcpStream)> {
    keep_alive(&stream).ok()?;
    let mut token = [0; Key::LEN];
    timeout(duration(PATIENCE), stream.read_exact(&mut token)).await.ok()?.ok()?;
    Some((Key(token), stream))
}

/// What is between the two must not forget a connection that carries nothing.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let every = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
    SockRef::from(stream).set_tcp_keepalive(&every)
}

/// Waits until a lifeline is closed, or the other side says something on it: it is cut then, since
/// reading what means nothing would cost this side as much time as the other likes.
async fn closed(mut lifeline: Alive<TcpStream>) {
    // Either way it is of no more use.
    let _read = lifeline.read(&mut [0]).await;
}

/// Waits for so long, not counting the time for which this process was kept from running.
async fn running(long: Span) {
    let mut looks = looks();
    for _ in 0..=long.0 / TICK.0 {
        looks.tick().await;
    }
}

/// Waits until nothing was heard for so long, of which this process must have run all the time:
/// while it was kept from that, it heard nothing of those who spoke.
pub async fn silence(connection: &quinn::Connection, long: Span) {
    let mut looks = looks();
    let (mut heard, mut silent) = (connection.stats().udp_rx.datagrams, 0);
    while silent <= long.0 / TICK.0 {
        looks.tick().await;
        let datagrams = connection.stats().udp_rx.datagrams;
        silent = if datagrams == heard { silent + 1 } else { 0 };
        heard = datagrams;
    }
}

/// Looks whether something was heard, none of which is made up for.
fn looks() -> Interval {
    let mut looks = interval(duration(TICK));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}

/// How often it is looked whether something was heard.
const TICK: Span = Span::from_millis(100);
/// How long a silence is before it is believed: more than two signs of life missed.
const SILENCE: Span = Span::from_millis(1200);
/// How long an aggregator may be silent before its first word until it is looked whether it lives.
const FIRST_WORD: Span = Span::from_secs(2);
/// How long a silence is waited for once the lifeline is closed.
const DOUBT: Span = Span::from_secs(4);
/// How long laying a lifeline may take.
const PATIENCE: Span = Span::from_secs(2);
/// How often a lifeline shows whatever is between that it is used.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quic::{Connection, Credentials, connect, server};

    /// A served connection and the lifeline of its caller, whose runtime is the caller's life.
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
            let Lifeline::Laid(lifeline) = lay(to, port, token).await else { panic!("is laid") };
            (connection, lifeline)
        });
        let (served, stream) = own.block_on(async {
            let (stream, _) = listener.accept().await.unwrap();
            (accepted.await.unwrap(), stream)
        });
        let (said, stream) = own.block_on(token_of(stream)).unwrap();
        assert_eq!(said, token);
        (own, served, stream, Caller { runtime: callers, held: caller })
    }

    struct Caller {
        runtime: tokio::runtime::Runtime,
        held: (Connection, TcpStream),
    }

    #[test]
    fn who_dies_is_missed_soon() {
        let (own, served, stream, caller) = called();
        // Its host closes what it held, and it says nothing any more.
        let Caller { runtime, held: (connection, lifeline) } = caller;
        runtime.shutdown_background();
        drop(lifeline);
        let dies = dead(&served, async { Lifeline::Laid(stream) });
        own.block_on(async { timeout(Duration::from_secs(4), dies).await }).unwrap();
        drop(connection);
    }

    #[test]
    fn who_dies_before_it_has_said_anything_is_missed_soon() {
        // Seen from the other side, the caller offers nothing and is gone.
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
        // As for a process that is stopped, its host takes connections for it.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let word = async {
            tokio::time::sleep(Duration::from_millis(5500)).await;
            Some((to.port(), Key([7; Key::LEN])))
        };
        let laid = own.block_on(lay_offered(&served, to, word));
        assert!(matches!(laid, Lifeline::Laid(_)), "{laid:?}");
        drop((held, stream, listener));
    }

    #[test]
    fn what_this_process_misses_while_it_is_stopped_itself_is_no_silence() {
        let (own, served, stream, caller) = called();
        let quiet = own.spawn(async move { silence(&served, FIRST_WORD).await });
        // The only thread of the runtime, which the other side speaks to all the time.
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
        let speaks = async {
            while lifeline.write_all(&[7; 1024]).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let cut = runtime.block_on(async { timeout(Duration::from_secs(20), speaks).await });
        cut.expect("nobody reads what is said on a lifeline");
        let died = own.block_on(async { timeout(Duration::from_secs(6), dies).await });
        assert!(died.is_err(), "it speaks on by its connection");
        drop((connection, runtime));
    }

    #[test]
    fn who_is_only_silent_is_not_dead() {
        let (own, served, stream, caller) = called();
        let Caller { runtime, held } = caller;
        // As if it were stopped: what it holds stays open.
        runtime.shutdown_background();
        let dies = dead(&served, async { Lifeline::Laid(stream) });
        let died = own.block_on(async { timeout(Duration::from_secs(3), dies).await });
        assert!(died.is_err());
        drop(held);
    }
}
