//! Datagrams in: results go straight from the receive buffer into the tensor.

use bytes::BytesMut;
use racksum_net::udp::{RECV_BATCH, Received};
use racksum_proto::error::Reject;
use racksum_proto::time::Time;
use racksum_proto::wire::{self, Header};
use racksum_proto::worker::Verdict;

use super::Engine;
use crate::fault::Fate;

/// How much had arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Haul {
    Nothing,
    /// All that had is taken.
    Some,
    /// A whole batch of some socket: there may be more.
    Batch,
}

impl Haul {
    const fn of(count: usize) -> Self {
        match count {
            0 => Self::Nothing,
            RECV_BATCH => Self::Batch,
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
    pub(super) fn receive(&mut self) -> Haul {
        // An error here is a peer's ICMP message: silence will tell.
        let own = self.links.socket.recv(&mut self.recv, &mut self.buffers).unwrap_or(0);
        let mut received = Haul::of(own);
        for group in 0..self.links.groups.len() {
            loop {
                let Self { links, group_recv, group_buffers, .. } = self;
                let count = links.groups[group].recv(group_recv, group_buffers).unwrap_or(0);
                for i in 0..count {
                    let meta = self.group_recv.meta(i);
                    let buffer = std::mem::take(&mut self.group_buffers[i]);
                    self.take_datagrams(&buffer, &meta);
                    self.group_buffers[i] = buffer;
                }
                received = received.max(Haul::of(count));
                // Without own datagrams there is nothing that these must precede.
                if count < RECV_BATCH || own == 0 {
                    break;
                }
            }
        }
        for i in 0..own {
            let meta = self.recv.meta(i);
            let buffer = std::mem::take(&mut self.buffers[i]);
            self.take_datagrams(&buffer, &meta);
            self.buffers[i] = buffer;
        }
        received
    }

    /// Takes what the kernel handed over as one: datagrams of one sender, `stride` apart.
    fn take_datagrams(&mut self, buffer: &BytesMut, meta: &Received) {
        let now = self.clock.now();
        for datagram in buffer.chunks(meta.stride.max(1)) {
            self.stats.rx_datagrams += 1;
            self.stats.rx_bytes += datagram.len() as u64;
            let fate = self.faults.as_mut().map_or(Fate::Pass, |[_, dice]| dice.roll());
            for _ in 0..fate.copies() {
                for message in wire::messages(datagram) {
                    self.take_message(now, message, meta);
                }
            }
        }
    }

    fn take_message(
        &mut self,
        now: Time,
        message: Result<(Header, &[u8]), Reject>,
        meta: &Received,
    ) {
        let (header, body) = match message {
            Ok(message) => message,
            Err(reject) => {
                self.machine.reject(reject, &mut ());
                return;
            }
        };
        // wire: W-9
        // What is multicast comes from the shard's own address too.
        if self.links.shards.get(usize::from(header.shard)).is_some_and(|s| s.0 != meta.from) {
            self.machine.reject(Reject::Sender, &mut ());
            return;
        }
        let verdict = self.machine.handle_decoded(now, &header, body, meta.ce, &mut ());
        let Verdict::Deliver(delivery) = verdict else { return };
        let op = delivery.window.op;
        if let Some(payload) = self.payloads.get_mut(&op)
            && let Some(element) = payload.scatter(&delivery, body)
        {
            self.machine.handle_overflow(op, element);
        }
        if delivery.complete {
            self.machine.handle_delivered(now, &delivery, &mut ());
        }
    }
}
