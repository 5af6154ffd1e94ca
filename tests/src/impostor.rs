//! A rank that a test controls: it joins and sends only when the test makes it do so.

use std::net::{SocketAddr, UdpSocket};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::quic::quinn::ConnectionError::{Reset, TimedOut};
use racksum_net::quic::{Connection, Credentials, connect, frames, quinn};
use racksum_proto::control::{
    CONTROL_VERSION, FromAggregator, FromWorker, Join, OnRankLoss, Welcome,
};
use racksum_proto::ids::Generation;
use racksum_proto::loss::Loss;
use racksum_proto::time::Span;
use rustix::process::setpriority_process;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::rig::Rig;

/// A control connection and a data socket that send only when the test asks them to.
pub(crate) struct Impostor {
    runtime: Handle,
    connection: Option<Connection>,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    pub(crate) socket: UdpSocket,
    shards: Vec<SocketAddr>,
    /// Ends the thread that drives the connection.
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Impostor {
    /// Connects to the aggregator, but sends no message yet.
    pub(crate) fn connect(rig: &Rig) -> Self {
        let driver = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let runtime = driver.handle().clone();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || drop(driver.block_on(ended)));
        let addr = rig.aggregator.addr();
        let (connection, send, recv) = runtime.block_on(async {
            let credentials = Credentials::new(None, false).unwrap();
            let patience = Span::from_secs(5);
            let connection = connect(addr, &credentials, patience).await.unwrap();
            let (send, recv) = connection.quic().open_bi().await.unwrap();
            (connection, send, recv)
        });
        let socket = UdpSocket::bind((addr.ip(), 0)).unwrap();
        let shards = rig.aggregator.data_addrs();
        let (connection, end, thread) = (Some(connection), Some(end), Some(thread));
        Self { runtime, connection, send, recv, socket, shards, end, thread }
    }

    /// Returns the join message of a rank with this data socket.
    pub(crate) fn wish(&self, job: &str, rank: u16, world: u16) -> Join {
        Join {
            version: CONTROL_VERSION,
            job: job.into(),
            generation: Generation(0),
            secret: None,
            begun_by: None,
            rank,
            world,
            lanes: 1,
            data_ports: vec![self.socket.local_addr().unwrap().port()],
            aggregates: false,
            receive_buffer: 1 << 20,
            max_datagram: 1472,
            multicast: false,
            data_auth: None,
            stripe: (0, 1),
            pool_slots: 0,
            wait: false,
            on_rank_loss: OnRankLoss::Abort,
            may_move: false,
            rejoin: false,
            resume: None,
        }
    }

    pub(crate) fn send_message(&mut self, message: &FromWorker) {
        self.runtime.block_on(frames::send(&mut self.send, message)).unwrap();
    }

    /// Lowers the priority of the thread that drives the connection.
    pub(crate) fn give_way(&self) {
        self.runtime.spawn(async { give_way() });
    }

    /// Sends a control message again and again, as fast as the aggregator reads, until `enough`
    /// returns true, or until the connection ends.
    pub(crate) fn send_message_until(
        &mut self,
        message: &FromWorker,
        enough: impl Fn() -> bool,
    ) -> Result<(), String> {
        let Self { runtime, send, .. } = self;
        let pause = Duration::from_millis(100);
        runtime.block_on(async {
            while !enough() {
                // After a timeout, continue the same send, so that no message is cut short.
                let mut sending = std::pin::pin!(frames::send(send, message));
                loop {
                    match tokio::time::timeout(pause, &mut sending).await {
                        Ok(sending) => break sending.map_err(|error| error.to_string())?,
                        Err(_) if enough() => return Ok(()),
                        Err(_) => {}
                    }
                }
            }
            Ok(())
        })
    }

    /// Returns whether this rank, or another rank of its job, was lost because the aggregator heard
    /// nothing from it for too long. The connection must have failed.
    pub(crate) fn was_silent(&mut self) -> bool {
        let connection = self.connection.as_ref().unwrap();
        // An aggregator that has given up on a connection answers further packets with a reset.
        if let Some(TimedOut | Reset) = connection.quic().close_reason() {
            return true;
        }
        while let Some(message) = self.recv_message() {
            if let FromAggregator::PeerLost { why, .. } = message {
                return why == Loss::Silent;
            }
        }
        false
    }

    /// Writes arbitrary bytes to the control stream.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        self.runtime.block_on(self.send.write_all(bytes)).unwrap();
    }

    /// Returns the aggregator's next message other than `Lifeline`, or `None` after the last.
    pub(crate) fn recv_message(&mut self) -> Option<FromAggregator> {
        let Self { runtime, recv, .. } = self;
        loop {
            let received = runtime.block_on(async {
                tokio::time::timeout(Duration::from_secs(10), frames::recv(recv)).await
            });
            match received.expect("the aggregator must send a message within 10 s").ok().flatten() {
                Some(FromAggregator::Lifeline { .. }) => {}
                received => return received,
            }
        }
    }

    /// Joins; returns the welcome once ops may start.
    pub(crate) fn join(&mut self, join: Join) -> Welcome {
        self.send_message(&FromWorker::Join(join));
        self.granted()
    }

    /// Waits until ops may start after a join that was already sent; returns the welcome.
    pub(crate) fn granted(&mut self) -> Welcome {
        let mut welcome = None;
        loop {
            match self.recv_message() {
                Some(FromAggregator::Welcome(granted)) => welcome = Some(granted),
                Some(FromAggregator::Ready { .. }) => return welcome.unwrap(),
                Some(FromAggregator::Waiting { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Asks for the status, as the first message of the connection; returns the JSON.
    pub(crate) fn status(&mut self) -> String {
        self.send_message(&FromWorker::AskStatus { version: CONTROL_VERSION });
        let mut json = String::new();
        loop {
            match self.recv_message() {
                Some(FromAggregator::Status { part, more }) => {
                    json.push_str(&part.0);
                    if !more {
                        return json;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Sends a join that the aggregator refuses; returns the reason.
    pub(crate) fn refused(&mut self, join: Join) -> String {
        self.send_message(&FromWorker::Join(join));
        match self.recv_message() {
            Some(FromAggregator::Refused { reason }) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Sends a datagram to a shard.
    pub(crate) fn send(&self, shard: usize, datagram: &[u8]) {
        self.socket.send_to(datagram, self.shards[shard]).unwrap();
    }

    /// Closes the connection without a leave message.
    pub(crate) fn vanish(self) {
        drop(self);
    }
}

/// Lowers the priority of this thread and the threads that it starts. Attackers stand in for
/// another host, so they should not take cores from the aggregator and other tenants.
pub(crate) fn give_way() {
    setpriority_process(None, 19).unwrap();
}

impl Drop for Impostor {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.runtime.block_on(connection.close("vanishes"));
        }
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
