//! Datagrams in: results go straight from the receive buffer into the tensor.

use racksum_proto::wire::Header;
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
                self.take_message(i);
            }
        }
        any
    }

    /// Takes one message: datagrams of one sender, `stride` apart.
    fn take_message(&mut self, i: usize) {
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
                self.take_datagram(datagram, meta.ce);
            }
        }
        self.buffers[i] = buffer;
    }

    fn take_datagram(&mut self, datagram: &[u8], congested: bool) {
        let now = self.clock.now();
        let verdict = self.machine.handle_datagram(now, datagram, congested, &mut ());
        let Verdict::Deliver(delivery) = verdict else { return };
        let op = delivery.window.op;
        let cut = self.machine.config().cut;
        if let Some(payload) = self.payloads.get_mut(&op)
            && let Some(element) = payload.scatter(&delivery, cut, &datagram[Header::LEN..])
        {
            self.machine.handle_overflow(op, element);
        }
        if delivery.complete {
            self.machine.handle_delivered(now, &delivery, &mut ());
        }
    }
}
