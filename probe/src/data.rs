//! The data socket of an agent: echoes pings, counts what arrives, and sends pings and trains.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::BytesMut;
use racksum_net::NetError;
use racksum_net::clock::Clock;
use racksum_net::udp::{
    RECV_BATCH, RECV_CAPACITY, RecvRing, SendRing, Transmit, UdpConfig, UdpSocket, Waker, wait,
};
use racksum_proto::time::{Span, Time};
use tokio::sync::Notify;

use crate::datagram::{Header, Kind, PING_LEN, TRAIN_LEN};
use crate::flow::{Flows, MOST_TRAIN, Reaction};
use crate::message::{Pinged, Train};

/// The data socket and the flows on it. A thread receives until this value is dropped.
#[derive(Debug)]
pub(crate) struct Data {
    shared: Arc<Shared>,
    waker: Waker,
    receiver: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    socket: UdpSocket,
    pub(crate) flows: Flows,
    clock: Clock,
    /// Notified if the socket can no longer receive.
    pub(crate) failed: Notify,
}

impl Data {
    /// Opens the socket and starts the thread that receives.
    pub(crate) fn open(bind: SocketAddr) -> Result<Self, NetError> {
        let send_buffer = SEND_BUFFER;
        let config = UdpConfig { timestamps: true, send_buffer, ..UdpConfig::new(bind) };
        let socket = UdpSocket::open(&config)?;
        let waker = Waker::new().map_err(|cause| NetError::Socket { addr: bind, cause })?;
        let shared = Arc::new(Shared {
            socket,
            flows: Flows::default(),
            clock: Clock::start(),
            failed: Notify::new(),
        });
        let (receiving, stop) = (Arc::clone(&shared), waker.clone());
        let receiver = std::thread::Builder::new()
            .name("probe-data".into())
            .spawn(move || receiving.receive(&stop))
            .map_err(|cause| NetError::Socket { addr: bind, cause })?;
        Ok(Self { shared, waker, receiver: Some(receiver) })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.shared.socket.local_addr()
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        self.waker.wake();
        // The thread has printed its own panic.
        self.receiver.take().map(JoinHandle::join);
    }
}

impl Shared {
    /// Returns the port of the data socket.
    pub(crate) fn port(&self) -> u16 {
        self.socket.local_addr().port()
    }

    fn receive(&self, stop: &Waker) {
        let mut ring = RecvRing::new();
        let mut buffers: Vec<_> =
            (0..RECV_BATCH).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect();
        while !stop.drain() {
            let ready = wait(&[self.socket.as_fd(), stop.as_fd()], None);
            let received = ready.and_then(|_| self.socket.recv(&mut ring, &mut buffers));
            let count = match received {
                Ok(count) => count,
                Err(error) => {
                    tracing::error!(%error, "cannot receive measurements");
                    self.failed.notify_one();
                    return;
                }
            };
            let (now, wall) = (self.clock.now(), self.clock.wall());
            for (buffer, meta) in buffers.iter().zip(ring.received()).take(count) {
                let at = arrival(now, wall, meta.at);
                for datagram in buffer.chunks(meta.stride) {
                    if let Reaction::Echo(header) = self.flows.receive(datagram, meta.from, at) {
                        self.echo(header, at, meta.from);
                    }
                }
            }
        }
    }

    fn echo(&self, header: Header, at: Time, to: SocketAddr) {
        let Some(key) = self.flows.key_of(header.flow) else { return };
        let mut bytes = [0; PING_LEN];
        let held_ns = u32::try_from(self.clock.now().since(at).0).unwrap_or(u32::MAX);
        Header { held_ns, ..header }.write(&key, &mut bytes);
        // An echo that cannot be sent counts as lost.
        drop(self.socket.send_one(to, &bytes));
    }

    /// Sends pings at an interval, and waits for their echoes until none has come for a while.
    /// Returns `None` if the flow has ended.
    pub(crate) fn ping(&self, flow: u64, count: u32, interval: Duration) -> Option<Pinged> {
        let (key, to) = (self.flows.key_of(flow)?, self.flows.with(flow, |it| it.peer())?);
        let mut bytes = [0; PING_LEN];
        let mut pacer = Pacer::start(self.clock);
        for _ in 0..count {
            let at = self.clock.now();
            let Some(header) = self.flows.with(flow, |it| it.next_ping(flow, at))? else { break };
            header.write(&key, &mut bytes);
            drop(self.socket.send_one(to, &bytes));
            pacer.pause(interval);
        }
        let mut missing = self.flows.with(flow, |it| it.missing())?;
        let mut quiet = Duration::ZERO;
        while missing > 0 && quiet < ECHO_PATIENCE {
            std::thread::sleep(POLL);
            let left = self.flows.with(flow, |it| it.missing())?;
            quiet = if left < missing { Duration::ZERO } else { quiet + POLL };
            missing = left;
        }
        self.flows.with(flow, |it| it.pinged())
    }

    /// Sends a train. Returns the number of its datagrams, or `None` if the flow has ended.
    pub(crate) fn train(&self, flow: u64, train: &Train) -> Option<u32> {
        let (key, to) = (self.flows.key_of(flow)?, self.flows.with(flow, |it| it.peer())?);
        let most = u32::try_from(train.bytes / TRAIN_LEN as u64).unwrap_or(u32::MAX);
        let most = most.min(MOST_TRAIN);
        let began = self.clock.now();
        let limit = Span::from_millis(train.millis.into());
        let mut pacer = Pacer::start(self.clock);
        let (mut ring, mut sent) = (SendRing::new(), 0);
        let per_batch = datagrams_in(PACE, train.mbit).clamp(1, MOST_BATCH);
        let mut batch = vec![0; per_batch as usize * TRAIN_LEN];
        while sent < most && self.clock.now().since(began) < limit {
            // The coordinator has hung up if the flow is gone.
            self.flows.with(flow, |_| ())?;
            let count = per_batch.min(most - sent);
            let batch = &mut batch[..count as usize * TRAIN_LEN];
            for (datagram, number) in batch.chunks_mut(TRAIN_LEN).zip(sent..) {
                Header::new(Kind::Train, flow, number, 0).write(&key, datagram);
            }
            let transmit = Transmit::new(to, batch, TRAIN_LEN);
            self.socket.send_patiently(&mut ring, &[transmit], WAITS);
            sent += count;
            pacer.pause(time_of(count, train.mbit));
        }
        Some(sent)
    }
}

/// Returns the monotonic time of an arrival, which the kernel states by the wall clock. The present
/// times of both clocks tell how long ago it was, unless the wall clock was set since: then it
/// counts as now.
fn arrival(now: Time, wall: i64, at: Option<i64>) -> Time {
    let ago = at.and_then(|at| u64::try_from(wall.saturating_sub(at)).ok());
    let ago = ago.filter(|ago| *ago <= MOST_AGO.0).unwrap_or(0);
    Time(now.0.saturating_sub(ago))
}

/// Keeps events at intervals, without adding up the delays of single sleeps.
#[derive(Debug)]
struct Pacer {
    clock: Clock,
    next: Time,
}

impl Pacer {
    fn start(clock: Clock) -> Self {
        Self { clock, next: clock.now() }
    }

    /// Waits until `interval` after the previous wait was due.
    fn pause(&mut self, interval: Duration) {
        let interval = Span(u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX));
        let now = self.clock.now();
        // After a stall, do not catch up with a burst.
        self.next = (self.next + interval).max(now);
        std::thread::sleep(Duration::from_nanos(self.next.since(now).0));
    }
}

/// Returns how many datagrams a rate in Mbit/s sends in a time.
fn datagrams_in(time: Duration, mbit: f64) -> u32 {
    let bytes = time.as_secs_f64() * mbit * 1e6 / 8.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast from float saturates"
    )]
    let datagrams = (bytes / TRAIN_LEN as f64) as u32;
    datagrams
}

/// Returns the time that datagrams take at a rate in Mbit/s.
fn time_of(datagrams: u32, mbit: f64) -> Duration {
    let bits = 8.0 * f64::from(datagrams) * TRAIN_LEN as f64;
    Duration::try_from_secs_f64(bits / (mbit * 1e6)).unwrap_or(Duration::ZERO)
}

/// The longest time for which a datagram waits in the socket.
const MOST_AGO: Span = Span::from_secs(10);
/// A small send buffer, so that a train on a slow interface ends soon after the last send.
const SEND_BUFFER: usize = 256 << 10;
/// Silence after which missing echoes count as lost. Longer than any round trip on a usable path.
const ECHO_PATIENCE: Duration = Duration::from_millis(500);
/// Interval at which missing echoes are counted.
const POLL: Duration = Duration::from_millis(5);
/// The time of one batch of a train. Up to 100 Mbit/s, a batch is one datagram: a batch crosses a
/// virtual link as one packet, and so arrives with one timestamp.
const PACE: Duration = Duration::from_micros(100);
/// The greatest batch of a train: one message of the kernel.
const MOST_BATCH: u32 = 48;
/// A batch waits for room in the send buffer up to this many times 2 ms.
const WAITS: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wall_clock_that_is_set_moves_no_arrival() {
        let (now, second) = (Time(5_000_000_000), 1_000_000_000);
        let arrival = |wall: i64, at: i64| arrival(now, wall, Some(at));
        assert_eq!(arrival(100 * second, 100 * second - 70), Time(now.0 - 70));
        // It was set back or forth between the arrival and the call.
        assert_eq!(arrival(100 * second, 3700 * second), now);
        assert_eq!(arrival(3700 * second, 100 * second), now);
        assert_eq!(arrival(i64::MAX, i64::MIN), now);
        // The host has just booted.
        assert_eq!(super::arrival(Time(3), 100, Some(0)), Time(0));
        assert_eq!(super::arrival(now, 100, None), now);
    }
}
