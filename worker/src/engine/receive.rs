//! Reception of datagrams. Results go from the receive buffer into the tensor, or from the kernel
//! straight into it.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use bytes::BytesMut;
use racksum_net::udp::{RECV_BATCH, RECV_CAPACITY, Received, RecvRing, UdpSocket};
use racksum_proto::reject::Reject;
use racksum_proto::time::Time;
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{self, Header, Kind};
use racksum_proto::worker::Delivery;

use super::{Engine, GRACE, Links};
use crate::fault::Fate;
use crate::tensor::TensorBytesMut;

/// The buffers that datagrams are received into. The kernel may join several datagrams of one
/// sender in a buffer.
pub(super) struct Inbox {
    ring: RecvRing,
    buffers: [BytesMut; RECV_BATCH],
}

impl Inbox {
    pub(super) fn new() -> Self {
        let buffers = [(); RECV_BATCH].map(|()| BytesMut::with_capacity(RECV_CAPACITY));
        Self { ring: RecvRing::new(), buffers }
    }

    /// Receives datagrams that have arrived into at most `most` buffers.
    fn receive(&mut self, socket: &UdpSocket, most: usize) -> io::Result<RecvStatus> {
        let count = socket.recv(&mut self.ring, &mut self.buffers[..most])?;
        Ok(RecvStatus::of(count, self.ring.is_full()))
    }
}

/// The index of the inbox of the rank's own socket.
const OWN: usize = 0;
/// The index of the inbox that the multicast sockets share.
const GROUP: usize = 1;
/// The maximum number of results to receive straight into the tensor before the engine sends again.
const BATCH_IN_PLACE: usize = 2;

/// The sockets that may hold datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Readable {
    /// Whether the rank's own socket may hold datagrams.
    pub(crate) own: bool,
    /// Whether any multicast socket may hold datagrams.
    pub(crate) groups: bool,
}

impl Readable {
    pub(crate) const ALL: Self = Self { own: true, groups: true };
    pub(crate) const NONE: Self = Self { own: false, groups: false };
}

/// The amount of data that a receive call found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RecvStatus {
    Nothing,
    /// The call took everything that had arrived.
    Some,
    /// The call took a full batch from some socket, so more may have arrived.
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
    /// Takes datagrams that have arrived: at most one batch from the rank's own socket, if it is
    /// readable, and those of the multicast sockets. Reads the multicast sockets even if only the
    /// rank's own socket is readable.
    ///
    /// A shard's unicast message may follow multicast results and refer to them, but the kernel
    /// queues the two separately. The engine therefore receives its own batch first and handles it
    /// last, after all multicast datagrams.
    pub(super) fn receive(&mut self, readable: Readable) -> RecvStatus {
        if readable == Readable::NONE {
            return RecvStatus::Nothing;
        }
        let (socket, groups) = (Arc::clone(&self.links.socket), Arc::clone(&self.links.groups));
        if groups.is_empty()
            && let Some(placed) = self.receive_in_place(&socket)
        {
            return placed;
        }
        let own = match readable.own {
            true => self.receive_into(OWN, &socket, RECV_BATCH),
            false => RecvStatus::Nothing,
        };
        let mut received = own;
        let mut began = None;
        for group in groups.iter() {
            loop {
                let placed = self.receive_in_place(group);
                let taken = placed.unwrap_or_else(|| self.receive_some(group, RECV_BATCH));
                received = received.max(taken);
                // Order matters only if datagrams have arrived on the rank's own socket.
                if taken < RecvStatus::Batch || own == RecvStatus::Nothing {
                    break;
                }
                // A flood of multicast datagrams must not block all other work.
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

    /// Receives datagrams from a socket into at most `most` buffers of the group inbox, and handles
    /// them.
    fn receive_some(&mut self, socket: &UdpSocket, most: usize) -> RecvStatus {
        let status = self.receive_into(GROUP, socket, most);
        if status > RecvStatus::Nothing {
            self.take_messages(GROUP);
        }
        status
    }

    /// Receives datagrams into at most `most` buffers of an inbox. If the socket fails, ends all
    /// ops, because the socket can receive no more datagrams.
    fn receive_into(&mut self, inbox: usize, socket: &UdpSocket, most: usize) -> RecvStatus {
        self.inboxes[inbox].receive(socket, most).unwrap_or_else(|error| self.give_in(&error))
    }

    /// Ends all ops because a socket has failed.
    pub(super) fn give_in(&mut self, error: &io::Error) -> RecvStatus {
        tracing::error!(%error, "a data socket failed");
        self.end_at_once("a data socket failed");
        RecvStatus::Nothing
    }

    /// Handles the datagrams in an inbox.
    fn take_messages(&mut self, inbox: usize) {
        for i in 0..self.inboxes[inbox].ring.received().len() {
            let Inbox { ring, buffers } = &mut self.inboxes[inbox];
            let (meta, mut buffer) = (ring.meta(i), std::mem::take(&mut buffers[i]));
            self.take_datagrams(&mut buffer, &meta);
            self.inboxes[inbox].buffers[i] = buffer;
        }
    }

    /// Receives results straight into the tensor while they arrive in large pieces. The engine
    /// peeks at each header to find the place, which costs less than another copy. Takes at most
    /// [`BATCH_IN_PLACE`] datagrams. Returns `None` if the last message was not such a result.
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

    /// Takes the message that begins with `head` if it is a large piece of a tensor. Returns
    /// whether the message was taken.
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
        let place = payload.map(|payload| payload.data.bytes_mut(range));
        let place = place.unwrap_or(TensorBytesMut::Own(&mut []));
        let whole = Header::LEN + place.len();
        if place.receive(socket, &mut head).ok() != Some(whole) {
            // End all ops, because the machine has recorded a delivery that did not arrive.
            self.end("the kernel lost a datagram between the peek and the receive");
            return true;
        }
        if let Some(delivery) = delivery {
            self.machine.handle_delivered(now, &delivery, &mut self.events);
        }
        true
    }

    /// Returns the range of the tensor that a result fills, if the result can be received in place.
    fn place(&self, header: &Header) -> Option<Range<usize>> {
        if header.kind != Kind::Result || self.faults.is_some() {
            return None;
        }
        // A sealed datagram must be authenticated before it reaches a tensor.
        self.links.shards.get(usize::from(header.shard)).filter(|link| link.auth.is_none())?;
        let payload = self.payloads.get(&header.window.op)?;
        payload.result_in_place(header, self.machine.config().cut)
    }

    /// Counts a received datagram of `len` bytes.
    const fn count(&mut self, len: usize) {
        self.stats.rx_datagrams += 1;
        self.stats.rx_bytes += len as u64;
    }

    /// Handles datagrams of one sender, which the kernel joined in one buffer. Each has
    /// `meta.stride` bytes; the last may be shorter.
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
                    self.events.rejects.count(reject);
                    continue;
                }
            };
            // Fault injection duplicates messages after authentication, which would reject the
            // duplicates as replays.
            for _ in 0..fate.copies() {
                for message in wire::messages(messages) {
                    match message {
                        Ok((header, body)) => self.take_message(now, &header, body, meta),
                        Err(reject) => self.events.rejects.count(reject),
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
            self.machine.handle_delivered(now, &delivery, &mut self.events);
        }
    }

    /// Passes a message to the machine, unless it names a shard at another address than its
    /// sender's. Returns the delivery to write, if any. The machine has not examined the body of a
    /// delivery.
    fn take_header(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        meta: &Received,
    ) -> Option<Delivery> {
        // wire: W-9
        // A shard sends multicast messages from its own address too.
        if self.links.shards.get(usize::from(header.shard)).is_some_and(|s| s.addr != meta.from) {
            self.events.rejects.count(Reject::Sender);
            return None;
        }
        match self.machine.handle_decoded(now, header, body, meta.ce, &mut self.events) {
            Verdict::Store(delivery) => Some(delivery),
            Verdict::Duplicate | Verdict::Control | Verdict::Reject(_) => None,
        }
    }
}

impl Links {
    /// Returns the messages of a datagram. Rejects the datagram if datagrams are authenticated and
    /// this one is not authentic.
    fn open<'a>(&mut self, datagram: &'a mut [u8], from: SocketAddr) -> Result<&'a [u8], Reject> {
        // wire: W-9, W-60
        // All messages of a sealed datagram belong to the shard at its source address.
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
