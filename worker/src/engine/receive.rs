//! Datagrams in: results go straight from the receive buffer into the tensor.

use racksum_proto::error::Reject;
use racksum_proto::wire::{self, Header};
use racksum_proto::worker::Verdict;

use super::Engine;
use crate::fault::Fate;

impl Engine {
    /// Takes what has arrived on any socket. Returns whether anything had.
    pub(super) fn receive(&mut self) -> bool {
        let mut any = false;
        for source in 0..=self.links.groups.len() {
            let Self { links, recv, buffers, .. } = self;
            let socket = if source == 0 { &*links.socket } else { &links.groups[source - 1] };
            // An error here is a peer's ICMP message: silence will tell.
            let count = socket.recv(recv, buffers).unwrap_or(0);
            any |= count > 0;
            for i in 0..count {
                self.take_datagrams(i);
            }
        }
        any
    }

    /// Takes what the kernel handed over as one: datagrams of one sender, `stride` apart.
    fn take_datagrams(&mut self, i: usize) {
        let meta = self.recv.meta(i);
        let buffer = std::mem::take(&mut self.buffers[i]);
        let known = self.links.shards.iter().any(|(addr, _)| *addr == meta.from);
        for datagram in buffer.chunks(meta.stride.max(1)) {
            self.stats.rx_datagrams += 1;
            self.stats.rx_bytes += datagram.len() as u64;
            if !known {
                self.stats.rejects += 1;
                continue;
            }
            let fate = self.faults.as_mut().map_or(Fate::Pass, |[_, dice]| dice.roll());
            for _ in 0..fate.copies() {
                for message in wire::messages(datagram) {
                    self.take_message(message, meta.ce);
                }
            }
        }
        self.buffers[i] = buffer;
    }

    fn take_message(&mut self, message: Result<(Header, &[u8]), Reject>, congested: bool) {
        let (header, body) = match message {
            Ok(message) => message,
            Err(reject) => {
                self.machine.reject(reject, &mut ());
                return;
            }
        };
        let now = self.clock.now();
        let verdict = self.machine.handle_decoded(now, &header, body, congested, &mut ());
        let Verdict::Deliver(delivery) = verdict else { return };
        let op = delivery.window.op;
        let cut = self.machine.config().cut;
        if let Some(payload) = self.payloads.get_mut(&op)
            && let Some(element) = payload.scatter(&delivery, cut, body)
        {
            self.machine.handle_overflow(op, element);
        }
        if delivery.complete {
            self.machine.handle_delivered(now, &delivery, &mut ());
        }
    }
}
