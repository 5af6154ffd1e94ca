//! The output port at the start of a link, with a queue that has strict priorities.

use std::collections::VecDeque;

use super::queue::StrictPriority;
use crate::engine::Picos;
use crate::link::LinkConfig;

/// A packet with what the fabric must know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Framed<P> {
    /// The packet's own fields.
    pub packet: P,
    /// Size on the wire in bytes, with everything that takes time there.
    pub bytes: u32,
    /// Smaller numbers go first.
    pub priority: u32,
    /// Whether a queue was longer than its mark.
    pub is_marked: bool,
}

/// The outcome of handing a packet to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handed {
    /// The port took it. `wake` is when the port must next be asked for an arrival, if it has no
    /// earlier request outstanding.
    Taken {
        /// The time of the next arrival.
        wake: Option<Picos>,
    },
    /// The queue was full.
    Dropped,
}

/// Totals of a port over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PortCounts {
    /// Packets whose transmission has begun.
    pub packets: u64,
    /// The bytes of these packets.
    pub bytes: u64,
    /// Packets that were handed to the port.
    pub handed: u64,
    /// The bytes of these packets.
    pub handed_bytes: u64,
    /// Packets that found the queue full.
    pub dropped: u64,
    /// The bytes of these packets.
    pub dropped_bytes: u64,
    /// Packets that were marked here.
    pub marked: u64,
    /// The greatest number of bytes that waited.
    pub most_queued: u64,
    /// The time spent in transmission.
    pub busy: Picos,
    /// Packets that were sent at once although others waited.
    pub idled: u64,
}

/// An output port: packets that wait, the one in transmission, and those on the way.
///
/// The port needs one event per packet, at its arrival. Transmissions that begin between two events
/// are worked out at the second one, at the times at which they began.
#[derive(Debug)]
pub struct Port<P> {
    config: LinkConfig,
    queue: StrictPriority<Framed<P>>,
    queued_bytes: u64,
    /// The end of the transmission that was last begun.
    free_at: Picos,
    /// Packets in or after transmission, with the times at which they arrive.
    on_the_way: VecDeque<(Picos, Framed<P>)>,
    counts: PortCounts,
}

impl<P: Copy> Port<P> {
    /// Creates an idle port.
    #[must_use]
    pub fn new(config: LinkConfig) -> Self {
        Self {
            config,
            queue: StrictPriority::default(),
            queued_bytes: 0,
            free_at: Picos::ZERO,
            on_the_way: VecDeque::new(),
            counts: PortCounts::default(),
        }
    }

    /// Returns what the port has done so far.
    #[must_use]
    pub const fn counts(&self) -> PortCounts {
        self.counts
    }

    /// Returns the bytes that wait at `now`.
    pub fn queued_bytes(&mut self, now: Picos) -> u64 {
        self.advance(now);
        self.queued_bytes
    }

    /// Hands a packet to the port.
    pub fn hand(&mut self, now: Picos, mut packet: Framed<P>) -> Handed {
        self.advance(now);
        self.counts.handed += 1;
        self.counts.handed_bytes += u64::from(packet.bytes);
        let was_asleep = self.on_the_way.is_empty();
        if self.free_at <= now {
            self.counts.idled += u64::from(!self.queue.is_empty());
            self.transmit(now, packet);
        } else {
            let queued = self.queued_bytes + u64::from(packet.bytes);
            if queued > self.config.queue_bytes {
                self.counts.dropped += 1;
                self.counts.dropped_bytes += u64::from(packet.bytes);
                return Handed::Dropped;
            }
            if self.queued_bytes > self.config.mark_bytes {
                packet.is_marked = true;
                self.counts.marked += 1;
            }
            self.queued_bytes = queued;
            self.counts.most_queued = self.counts.most_queued.max(queued);
            self.queue.push(packet.priority, packet);
        }
        let wake = self.on_the_way.front().map(|(at, _)| *at).filter(|_| was_asleep);
        Handed::Taken { wake }
    }

    /// Takes the packet that arrives at `now`, and returns it with the time of the next arrival.
    pub fn take(&mut self, now: Picos) -> (Framed<P>, Option<Picos>) {
        self.advance(now);
        let (at, packet) = self.on_the_way.pop_front().expect("the port asked for this event");
        debug_assert_eq!(at, now, "a packet arrives when the port said");
        (packet, self.on_the_way.front().map(|(at, _)| *at))
    }

    /// Returns whether the packets and bytes that the port was handed are those that it sent,
    /// dropped or holds, whether it sent those of a priority in order, and whether it never idled
    /// while packets waited.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let Self { counts, queue, queued_bytes, .. } = self;
        counts.handed == counts.packets + counts.dropped + queue.len() as u64
            && counts.handed_bytes == counts.bytes + counts.dropped_bytes + queued_bytes
            && counts.idled == 0
            && queue.reordered() == 0
    }

    /// Begins the transmissions that are due by `now`.
    fn advance(&mut self, now: Picos) {
        while self.free_at <= now {
            let Some(packet) = self.queue.pop() else { return };
            self.queued_bytes -= u64::from(packet.bytes);
            self.transmit(self.free_at, packet);
        }
    }

    fn transmit(&mut self, begins: Picos, packet: Framed<P>) {
        let takes = self.config.takes(u64::from(packet.bytes));
        self.free_at = begins + takes;
        self.on_the_way.push_back((self.free_at + self.config.delay, packet));
        self.counts.packets += 1;
        self.counts.bytes += u64::from(packet.bytes);
        self.counts.busy = self.counts.busy + takes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port at 1 Gbit/s with a delay of 10 us. 125 bytes take 1 us.
    fn port(queue_bytes: u64, mark_bytes: u64) -> Port<char> {
        let delay = Picos::from_micros(10);
        Port::new(LinkConfig { rate_bps: 1_000_000_000, delay, queue_bytes, mark_bytes })
    }

    const fn packet(packet: char, priority: u32) -> Framed<char> {
        Framed { packet, bytes: 125, priority, is_marked: false }
    }

    const fn micros(micros: u64) -> Picos {
        Picos::from_micros(micros)
    }

    /// Takes all packets, and returns them with their arrivals in microseconds.
    fn arrivals(port: &mut Port<char>, mut wake: Option<Picos>) -> Vec<(u64, char)> {
        let mut all = vec![];
        while let Some(at) = wake {
            let (framed, next) = port.take(at);
            all.push((at.as_micros(), framed.packet));
            wake = next;
        }
        all
    }

    #[test]
    fn packets_leave_one_after_the_other() {
        let mut port = port(u64::MAX, u64::MAX);
        let wake = port.hand(Picos::ZERO, packet('a', 0));
        assert_eq!(wake, Handed::Taken { wake: Some(micros(11)) });
        assert_eq!(port.hand(Picos::ZERO, packet('b', 0)), Handed::Taken { wake: None });
        assert_eq!(port.hand(micros(5), packet('c', 0)), Handed::Taken { wake: None });
        assert_eq!(arrivals(&mut port, Some(micros(11))), [(11, 'a'), (12, 'b'), (16, 'c')]);
        let PortCounts { packets, bytes, busy, most_queued, .. } = port.counts();
        assert_eq!((packets, bytes, busy, most_queued), (3, 375, micros(3), 125));
    }

    #[test]
    fn smaller_priorities_go_first_but_interrupt_nothing() {
        let mut port = port(u64::MAX, u64::MAX);
        for (at, packet) in
            [(0, packet('a', 9)), (0, packet('b', 9)), (0, packet('c', 5)), (0, packet('d', 5))]
        {
            _ = port.hand(micros(at), packet);
        }
        // At 1 us, `c` begins before `e` arrives; no event said so.
        _ = port.hand(Picos(1_000_001), packet('e', 0));
        // At 2 us, the port is free before `f` arrives.
        _ = port.hand(micros(2), packet('f', 0));
        let all = arrivals(&mut port, Some(micros(11)));
        let order: String = all.iter().map(|(_, packet)| packet).collect();
        assert_eq!(order, "acefdb");
        assert_eq!(all.last(), Some(&(16, 'b')));
    }

    #[test]
    fn a_full_queue_drops_and_a_long_one_marks() {
        let mut port = port(250, 100);
        let mut hand = |at, name| port.hand(micros(at), packet(name, 0)) == Handed::Dropped;
        // The first is in transmission, two wait.
        assert_eq!(['a', 'b', 'c', 'd'].map(|name| hand(0, name)), [false, false, false, true]);
        assert!(!hand(1, 'e'));
        assert_eq!((port.counts().dropped, port.counts().marked), (1, 2));
        assert_eq!(port.queued_bytes(micros(1)), 250);
        assert_eq!(port.queued_bytes(micros(2)), 125);
        assert!(arrivals(&mut port, Some(micros(11))).len() == 4);
    }

    #[test]
    fn an_ideal_link_takes_no_time() {
        let mut port = Port::new(LinkConfig::lossless(u64::MAX, Picos::ZERO));
        let wake = port.hand(micros(3), packet('a', 0));
        assert_eq!(wake, Handed::Taken { wake: Some(micros(3)) });
        assert_eq!(port.hand(micros(3), packet('b', 0)), Handed::Taken { wake: None });
        assert_eq!(arrivals(&mut port, Some(micros(3))), [(3, 'a'), (3, 'b')]);
    }
}
