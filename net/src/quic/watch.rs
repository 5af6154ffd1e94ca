//! Whether the other side of a connection lives, is dead, or is silent.
//!
//! A process that is killed says nothing, and neither does one that is stopped or cut off. But the
//! host of a dead one answers a datagram to a port that nobody holds any more (RFC 1122: ICMP port
//! unreachable). So whoever is silent for a moment is knocked at: a refusal is death, and anything
//! else is patience.

use std::io::ErrorKind;
use std::net::SocketAddr;

use racksum_proto::time::Span;
use tokio::net::UdpSocket;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{duration, endpoint};

/// Waits until the other side of a connection is dead: it is silent, and its host says that nobody
/// holds the port of `door` any more. That is one that it holds as long as it lives.
///
/// A refusal alone would not do, since whoever can forge one would end a connection.
pub async fn dead(connection: &quinn::Connection, door: SocketAddr) {
    let mut tick = interval(duration(TICK));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut heard, mut since) = (0, Instant::now());
    let mut knocker: Option<Knocker> = None;
    loop {
        let now = tick.tick().await;
        let datagrams = connection.stats().udp_rx.datagrams;
        if datagrams != heard {
            (heard, since, knocker) = (datagrams, now, None);
        } else if now.saturating_duration_since(since) >= duration(SILENCE) {
            if knocker.is_none() {
                knocker = Knocker::new(door).await;
            }
            if knocker.as_ref().is_some_and(Knocker::is_refused) {
                return;
            }
        }
    }
}

/// Knocks at a port.
struct Knocker {
    socket: UdpSocket,
}

impl Knocker {
    /// None if this host has no way there, which is no sign of death.
    async fn new(door: SocketAddr) -> Option<Self> {
        let local = SocketAddr::new(endpoint::local_for(door), 0);
        let socket = UdpSocket::bind(local).await.ok()?;
        socket.connect(door).await.ok()?;
        Some(Self { socket })
    }

    /// Knocks. Whether an earlier knock was refused.
    fn is_refused(&self) -> bool {
        // An empty datagram, which is none of any protocol's. The kernel tells the fate of one in
        // the answer to the next.
        let sent = self.socket.try_send(&[]);
        sent.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    }
}

/// How often it is looked whether something was heard.
const TICK: Span = Span::from_millis(200);
/// How long a silence is before it is doubted: more than two signs of life missed.
const SILENCE: Span = Span::from_millis(1200);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_port_that_nobody_holds_refuses_and_one_that_somebody_holds_does_not() {
        let held = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let knocker = Knocker::new(held.local_addr().unwrap()).await.unwrap();
        for _ in 0..3 {
            assert!(!knocker.is_refused());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        drop(held);
        let mut refused = false;
        for _ in 0..100 {
            refused |= knocker.is_refused();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(refused);
    }
}
