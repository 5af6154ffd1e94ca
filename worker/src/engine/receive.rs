//! Datagrams in: results go from the receive buffer into the tensor, or from the kernel straight
//! into it.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use bytes::BytesMut;
use racksum_net::udp::{RECV_BATCH, RECV_CAPACITY, Received, RecvRing, UdpSocket};
use racksum_proto::reject::Reject;
use racksum_proto::time::Time;
use racksum_proto::wire::{self, Header, Kind};
use racksum_proto::worker::{Delivery, Verdict};

use super::{Engine, GRACE, Links};
use crate::fault::Fate;

/// Where messages are received to.
pub(super) struct Inbox {
    ring: RecvRing,
    buffers: [BytesMut; RECV_BATCH],
}

impl Inbox {
    pub(super) fn new() -> Self {
        let buffers = [(); RECV_BATCH].map(|()| BytesMut::with_capacity(RECV_CAPACITY));
        Self { ring: RecvRing::new(), buffers }
    }

    /// Receives what is there, `most` messages at most.
    fn receive(&mut self, socket: &UdpSocket, most: usize) -> io::Result<RecvStatus> {
        let count = socket.recv(&mut self.ring, &mut self.buffers[..most])?;
        Ok(RecvStatus::of(count, self.ring.is_full()))
    }
}

/// The inbox of the rank's own socket.
const OWN: usize = 0;
/// That of the sockets of multicast groups.
const GROUP: usize = 1;
/// Results received straight into the tensor between looks at what can be sent.
const BATCH_IN_PLACE: usize = 2;

/// How much had arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RecvStatus {
    Nothing,
    /// All that had is taken.
    Some,
    /// A whole batch of some socket: there may be more.
    Batch,
}

impl RecvStatus {
    const fn of(count: usize, full: bool) -> Self {
        match count {
            0 => Self::Nothing,
            _ if full => Self::Batch,
            _ => Self::Some,
        }
    }
}

impl Engine {
    /// Takes what has arrived on any socket, a batch of the rank's own.
    ///
    /// What a shard sends to this rank alone may say that it comes behind results that were
    /// multicast. The kernel keeps those in another queue, so what is there when the rank's own
    /// batch has been received is taken before it.
    pub(super) fn receive(&mut self) -> RecvStatus {
        let (socket, groups) = (Arc::clone(&self.links.socket), Arc::clone(&self.links.groups));
        if groups.is_empty()
            && let Some(placed) = self.receive_in_place(&socket)
        {
            return placed;
        }
        let own = self.receive_into(OWN, &socket, RECV_BATCH);
        let mut received = own;
        let mut began = None;
        for group in groups.iter() {
            loop {
                let placed = self.receive_in_place(group);
                let taken = placed.unwrap_or_else(|| self.receive_some(group, RECV_BATCH));
                received = received.max(taken);
                // Without own datagrams there is nothing that these must precede.
                if taken < RecvStatus::Batch || own == RecvStatus::Nothing {
                    break;
                }
                // A flood of the group must not hold up all else.
                let now = self.clock.now();
                if now.since(*began.get_or_insert(now)) > GRACE {
                    break;
                }
            }
        }
        if own > RecvStatus::Nothing {
            self.take_messages(OWN);
        }
        received
    }

    /// Takes what has arrived at a group's socket, `most` messages at most.
    fn receive_some(&mut self, socket: &UdpSocket, most: usize) -> RecvStatus {
        let status = self.receive_into(GROUP, socket, most);
        if status > RecvStatus::Nothing {
            self.take_messages(GROUP);
        }
        status
    }

    /// Receives what is there. A socket that fails ends all ops: nothing will come by it any more.
    fn receive_into(&mut self, inbox: usize, socket: &UdpSocket, most: usize) -> RecvStatus {
        self.inboxes[inbox].receive(socket, most).unwrap_or_else(|error| self.give_in(&error))
    }

    /// Ends all ops because a socket has failed.
    pub(super) fn give_in(&mut self, error: &io::Error) -> RecvStatus {
        tracing::error!(%error, "a data socket failed");
        self.end_at_once("a data socket failed");
        RecvStatus::Nothing
    }

    /// Takes the messages of an inbox.
    fn take_messages(&mut self, inbox: usize) {
        for i in 0..self.inboxes[inbox].ring.received().len() {
            let Inbox { ring, buffers } = &mut self.inboxes[inbox];
            let (meta, mut buffer) = (ring.meta(i), std::mem::take(&mut buffers[i]));
            self.take_datagrams(&mut buffer, &meta);
            self.inboxes[inbox].buffers[i] = buffer;
        }
    }

    /// Has the kernel write results straight into the tensor, as long as they come in large pieces
    /// of it: a look at the header says where each belongs, and costs less than one more copy.
    /// Returns how much it was, a batch at most; `None` once there is something else.
    fn receive_in_place(&mut self, socket: &UdpSocket) -> Option<RecvStatus> {
        let mut count = 0;
        while self.in_place && count < BATCH_IN_PLACE {
            let mut head = [0; Header::LEN];
            let peeked = socket.peek(&mut self.inboxes[GROUP].ring, &mut head);
            let meta = match peeked {
                Ok(Some(meta)) => meta,
                Ok(None) => break,
                Err(error) => return Some(self.give_in(&error)),
            };
            if !self.take_in_place(socket, head, &meta) {
                self.receive_some(socket, 1);
            }
            count += 1;
        }
        self.in_place.then_some(RecvStatus::of(count, count == BATCH_IN_PLACE))
    }

    /// Takes the message that begins with `head`, if it is a large piece of a tensor. Returns
    /// whether it was.
    fn take_in_place(
        &mut self,
        socket: &UdpSocket,
        mut head: [u8; Header::LEN],
        meta: &Received,
    ) -> bool {
        let Ok(header) = Header::decode_alone(&head) else { return false };
        let Some(range) = self.place(&header).filter(|range| meta.len == Header::LEN + range.len())
        else {
            return false;
        };
        self.count(meta.len);
        let now = self.clock.now();
        let delivery = self.take_header(now, &header, &[], meta);
        let payload = self.payloads.get_mut(&header.window.op).filter(|_| delivery.is_some());
        let place = payload.map_or(&mut [][..], |payload| payload.data.bytes_mut(range));
        let whole = Header::LEN + place.len();
        if socket.take_peeked(&mut head, place).ok() != Some(whole) {
            // The machine counts on what is not there.
            self.end("the kernel did not hand over a datagram that it had shown");
            return true;
        }
        if let Some(delivery) = delivery {
            self.machine.handle_delivered(now, &delivery, &mut ());
        }
        true
    }

    /// Where in its tensor a result belongs, if it is a large piece of it.
    fn place(&self, header: &Header) -> Option<Range<usize>> {
        if header.kind != Kind::Result || self.faults.is_some() {
            return None;
        }
        // What is yet to be authenticated must not be written into a tensor.
        self.links.shards.get(usize::from(header.shard)).filter(|link| link.auth.is_none())?;
        let payload = self.payloads.get(&header.window.op)?;
        payload.result_in_place(header, self.machine.config().cut)
    }

    /// Counts a datagram of `len` bytes.
    const fn count(&mut self, len: usize) {
        self.stats.rx_datagrams += 1;
        self.stats.rx_bytes += len as u64;
    }

    /// Takes what the kernel handed over as one: datagrams of one sender, `stride` apart.
    fn take_datagrams(&mut self, buffer: &mut BytesMut, meta: &Received) {
        let now = self.clock.now();
        for datagram in buffer.chunks_mut(meta.stride.max(1)) {
            self.count(datagram.len());
            let fate = self.faults.as_mut().map_or(Fate::Pass, |[_, dice]| dice.roll());
            if fate.copies() == 0 {
                continue;
            }
            let messages = match self.links.open(datagram, meta.from) {
                Ok(messages) => messages,
                Err(reject) => {
                    self.machine.reject(reject, &mut ());
                    continue;
                }
            };
            // Doubled behind the authentication, so that the machine sees doubles in any case.
            for _ in 0..fate.copies() {
                for message in wire::messages(messages) {
                    match message {
                        Ok((header, body)) => self.take_message(now, &header, body, meta),
                        Err(reject) => {
                            self.machine.reject(reject, &mut ());
                        }
                    }
                }
            }
        }
    }

    fn take_message(&mut self, now: Time, header: &Header, body: &[u8], meta: &Received) {
        let Some(delivery) = self.take_header(now, header, body, meta) else { return };
        let op = delivery.window.op;
        self.in_place = self.place(header).is_some();
        if let Some(payload) = self.payloads.get_mut(&op)
            && let Some(element) = payload.scatter(&delivery, body)
        {
            self.machine.handle_overflow(op, element);
        }
        if delivery.complete {
            self.machine.handle_delivered(now, &delivery, &mut ());
        }
    }

    /// Hands a message to the machine. Returns what is to be written, of which the machine has not
    /// looked at the body.
    fn take_header(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        meta: &Received,
    ) -> Option<Delivery> {
        // wire: W-9
        // What is multicast comes from the shard's own address too.
        if self.links.shards.get(usize::from(header.shard)).is_some_and(|s| s.addr != meta.from) {
            self.machine.reject(Reject::Sender, &mut ());
            return None;
        }
        match self.machine.handle_decoded(now, header, body, meta.ce, &mut ()) {
            Verdict::Deliver(delivery) => Some(delivery),
            Verdict::Duplicate | Verdict::Control | Verdict::Reject(_) => None,
        }
    }
}

impl Links {
    /// The messages of a datagram that came from an address, if it is authentic.
    fn open<'a>(&mut self, datagram: &'a mut [u8], from: SocketAddr) -> Result<&'a [u8], Reject> {
        // wire: W-9, W-60
        // All messages of a sealed datagram are of the shard whose address it came from.
        if !self.are_sealed() {
            return Ok(datagram);
        }
        let link = self.shards.iter_mut().find(|link| link.addr == from);
        match link.and_then(|link| link.auth.as_mut()) {
            Some((_, opener)) => Ok(opener.open(datagram)?),
            None => Err(Reject::Sender),
        }
    }
}
