//! The data plane of CoInNetFlow's simulator: SwitchML's slots and versions, with switches that
//! aggregate.
//!
//! A worker sends packet *o* of a collective in slot *o* mod *slots*, with a version that changes
//! each time the slot is used again. A switch counts the children from which it has the packet of a
//! slot and version. Once it has all, the sum goes up, or down from the top of the job's tree. The
//! result of packet *o* clocks out packet *o* + *slots*.
//!
//! Reference: Ho, *Network Optimizations for Distributed Training*, KAUST 2023, and the code of its
//! simulator; Sapio et al., *Scaling Distributed Machine Learning with In-Network Aggregation*,
//! NSDI 2021.

use crate::engine::{Engine, Picos};
use crate::fabric::{Arrival, Branch, Fabric, Framed, LinkId, Tree};

/// The number of children whose packets a switch can sum.
pub const MOST_CHILDREN: usize = 64;

/// The sizes of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// Bytes on the wire of each packet, with preamble, headers and gap.
    pub wire_bytes: u32,
    /// Elements of 4 bytes that a packet carries.
    pub elements: u32,
}

impl Format {
    /// Bytes on the wire that carry no elements: preamble 8, Ethernet 14, IP 20, UDP 8, SwitchML
    /// 16, checksum 4, gap 12.
    pub const HEADER_BYTES: u32 = 82;

    /// Returns the sizes that the original study's parameters give: the size on the wire, the
    /// number of elements, both, or neither (1500 and 256). With both, a packet takes the whole
    /// size even if its elements do not fill it. `None` if a packet would have no elements or not
    /// hold them.
    #[must_use]
    pub fn new(wire_bytes: Option<u32>, elements: Option<u32>) -> Option<Self> {
        let held = |wire_bytes: u32| wire_bytes.checked_sub(Self::HEADER_BYTES).map(|it| it / 4);
        let (wire_bytes, elements) = match (wire_bytes, elements) {
            (None, None) => (1500, 256),
            (Some(wire_bytes), None) => (wire_bytes, held(wire_bytes)?),
            (None, Some(elements)) => {
                (elements.checked_mul(4)?.checked_add(Self::HEADER_BYTES)?, elements)
            }
            (Some(wire_bytes), Some(elements)) => (wire_bytes, elements),
        };
        (elements > 0 && held(wire_bytes)? >= elements).then_some(Self { wire_bytes, elements })
    }

    /// Returns the number of packets for a number of elements.
    #[must_use]
    pub const fn packets(&self, elements: u64) -> u64 {
        elements.div_ceil(self.elements as u64)
    }
}

/// A packet of the data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    job: u32,
    /// Number of the collective within its job.
    collective: u32,
    /// Number of the packet within the collective.
    offset: u32,
    /// The node of the job's tree to which this hop leads.
    to: u16,
    /// The sender's place among the children of `to`, if the packet goes up.
    child: u8,
    direction: Direction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// A worker of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// The job's number.
    pub job: u32,
    /// The worker's place among the workers of the job.
    pub worker: u16,
}

/// An event of the transport: a packet's result may be overdue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overdue {
    member: Member,
    collective: u32,
    offset: u32,
}

/// Parameters of the data plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The sizes of packets.
    pub format: Format,
    /// Packets that a worker may have in flight.
    pub slots: u32,
    /// The time after which a worker sends a packet again. `None` never does.
    pub timeout: Option<Picos>,
}

/// The data plane of all jobs.
#[derive(Debug)]
pub struct Reference {
    config: Config,
    jobs: Vec<Job>,
    counts: Counts,
}

/// Totals over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Arrivals of packets at nodes.
    pub hops: u64,
    /// Packets that workers sent, without those sent again.
    pub sent: u64,
    /// Packets that workers sent again.
    pub sent_again: u64,
    /// Packets that found a full queue.
    pub dropped: u64,
    /// Contributions of children that switches counted.
    pub folded: u64,
    /// Packets of whose collective and slot the switch or worker had gone on.
    pub stale: u64,
    /// Contributions that a switch had already counted.
    pub twice: u64,
}

#[derive(Debug)]
struct Job {
    tree: Tree,
    /// Per node of the tree: its place among the children of its parent.
    child: Vec<u8>,
    /// The slots of switches, by node of the tree. None at workers.
    slots: Vec<Vec<Slot>>,
    /// Workers come first in the tree.
    workers: Vec<Sender>,
    priority: u32,
    /// Contributions that switches counted, and those that they must count until the job ends.
    folded: u64,
    must_fold: u64,
}

/// A slot of a switch.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Collective and offset, plus one so that zero means unused.
    key: u64,
    /// A bit for each child whose contribution is in.
    seen: u64,
    has_result: bool,
}

/// The packets that a worker has in flight.
#[derive(Debug, Default)]
struct Sender {
    collective: u32,
    packets: u32,
    received: u32,
    /// Per slot: the offset in flight, or one past the last if none is.
    in_flight: Vec<u32>,
}

/// The parts that the transport drives.
#[derive(Debug)]
pub struct Net<'a, E> {
    /// The event queue.
    pub engine: &'a mut Engine<E>,
    /// The ports.
    pub fabric: &'a mut Fabric<Packet>,
}

impl Reference {
    /// Creates a data plane without jobs.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { config, jobs: vec![], counts: Counts::default() }
    }

    /// Returns the totals so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Adds a job whose workers aggregate over a tree, and returns its number. `None` if a switch
    /// has more than 64 children in it.
    pub fn add_job(&mut self, tree: Tree) -> Option<u32> {
        let number = u32::try_from(self.jobs.len()).ok()?;
        let mut child = vec![0; tree.nodes.len()];
        for node in &tree.nodes {
            for (place, branch) in node.children.iter().enumerate() {
                child[branch.to] = u8::try_from(place).ok().filter(|_| place < MOST_CHILDREN)?;
            }
        }
        let slots = tree.nodes.iter().map(|node| {
            let slots = if node.children.is_empty() { 0 } else { 2 * self.config.slots };
            vec![Slot::default(); slots as usize]
        });
        let slots = slots.collect();
        let workers = tree.nodes.iter().filter(|node| node.children.is_empty());
        let workers = workers.map(|_| Sender::default()).collect();
        self.jobs.push(Job { tree, child, slots, workers, priority: 0, folded: 0, must_fold: 0 });
        Some(number)
    }

    /// Frees the memory of a job that has finished. Returns whether its switches have counted each
    /// contribution exactly once.
    pub fn remove_job(&mut self, job: u32) -> bool {
        let job = &mut self.jobs[job as usize];
        let is_exact = job.folded == job.must_fold;
        job.slots = vec![];
        job.workers.iter_mut().for_each(|sender| *sender = Sender::default());
        is_exact
    }

    /// Returns the number of packets of a collective over some elements.
    ///
    /// # Panics
    /// If there are 2^32 or more.
    #[must_use]
    pub fn packets(&self, elements: u64) -> u32 {
        let packets = self.config.format.packets(elements);
        u32::try_from(packets).expect("a tensor has fewer than 2^32 packets")
    }

    /// Returns the number of workers of a job.
    ///
    /// # Panics
    /// If there are 2^16 or more.
    #[must_use]
    pub fn workers(&self, job: u32) -> u16 {
        let workers = self.jobs[job as usize].workers.len();
        u16::try_from(workers).expect("a job has fewer than 65,536 workers")
    }

    /// Sets the priority of the packets that a job's workers send from now on.
    pub fn set_priority(&mut self, job: u32, priority: u32) {
        self.jobs[job as usize].priority = priority;
    }

    /// Lets a worker begin its next collective. All workers of a job begin the same ones in the
    /// same order.
    pub fn begin<E: From<Arrival> + From<Overdue>>(
        &mut self,
        net: &mut Net<'_, E>,
        member: Member,
        packets: u32,
    ) {
        let slots = self.config.slots;
        let job = &mut self.jobs[member.job as usize];
        if member.worker == 0 {
            // Each node but the root contributes.
            job.must_fold += u64::from(packets) * (job.tree.nodes.len() as u64 - 1);
        }
        let sender = &mut job.workers[usize::from(member.worker)];
        debug_assert_eq!(sender.received, sender.packets, "one collective at a time");
        sender.collective += 1;
        (sender.packets, sender.received) = (packets, 0);
        let first = packets.min(slots);
        sender.in_flight.clear();
        sender.in_flight.extend((0..slots).map(|slot| if slot < first { slot } else { packets }));
        for offset in 0..first {
            self.send(net, member, offset);
        }
    }

    /// Handles the arrival of a packet. Returns the worker whose collective this ends.
    pub fn arrive<E: From<Arrival> + From<Overdue>>(
        &mut self,
        net: &mut Net<'_, E>,
        packet: Framed<Packet>,
    ) -> Option<Member> {
        self.counts.hops += 1;
        let Packet { job, to, direction, .. } = packet.packet;
        let Job { slots, workers, .. } = &self.jobs[job as usize];
        if slots.is_empty() {
            // A copy of a packet whose result has ended the job.
            self.counts.stale += 1;
            return None;
        }
        let is_worker = usize::from(to) < workers.len();
        match direction {
            Direction::Down if is_worker => self.receive(net, packet.packet),
            Direction::Down => {
                self.spread(net, packet);
                None
            }
            Direction::Up => {
                self.fold(net, packet);
                None
            }
        }
    }

    /// Handles an overdue packet, which is sent again if its result has not arrived.
    pub fn overdue<E: From<Arrival> + From<Overdue>>(
        &mut self,
        net: &mut Net<'_, E>,
        Overdue { member, collective, offset }: Overdue,
    ) {
        let sender = &self.jobs[member.job as usize].workers[usize::from(member.worker)];
        let slot = (offset % self.config.slots) as usize;
        if sender.collective == collective && sender.in_flight.get(slot) == Some(&offset) {
            self.counts.sent_again += 1;
            self.counts.sent -= 1;
            self.send(net, member, offset);
        }
    }

    fn send<E: From<Arrival> + From<Overdue>>(
        &mut self,
        net: &mut Net<'_, E>,
        member: Member,
        offset: u32,
    ) {
        let job = &self.jobs[member.job as usize];
        let place = usize::from(member.worker);
        let collective = job.workers[place].collective;
        let parent = job.tree.nodes[place].parent.expect("jobs of one worker send nothing");
        let packet = Packet {
            job: member.job,
            collective,
            offset,
            to: place_of(parent),
            child: job.child[place],
            direction: Direction::Up,
        };
        let priority = job.priority;
        self.counts.sent += 1;
        self.transmit(net, parent.link, packet, priority);
        if let Some(timeout) = self.config.timeout {
            net.engine.schedule(
                net.engine.now() + timeout,
                Overdue { member, collective, offset }.into(),
            );
        }
    }

    /// Counts a child's contribution at a switch.
    fn fold<E: From<Arrival>>(&mut self, net: &mut Net<'_, E>, packet: Framed<Packet>) {
        let Packet { job, collective, offset, to, child, .. } = packet.packet;
        let place = usize::from(to);
        let Job { tree, slots, child: children, folded, .. } = &mut self.jobs[job as usize];
        let node = &tree.nodes[place];
        // Slot and version.
        let index = (offset % (2 * self.config.slots)) as usize;
        let slot = &mut slots[place][index];
        let key = (u64::from(collective) << 32 | u64::from(offset)) + 1;
        if slot.key > key {
            self.counts.stale += 1;
            return;
        }
        if slot.key < key {
            *slot = Slot { key, seen: 0, has_result: false };
        }
        let all = u64::MAX >> (64 - node.children.len());
        let was_complete = slot.seen == all;
        let is_new = slot.seen & (1 << child) == 0;
        slot.seen |= 1 << child;
        if is_new {
            self.counts.folded += 1;
            *folded += 1;
        } else {
            self.counts.twice += 1;
        }
        if slot.seen != all {
            return;
        }
        match node.parent {
            None if !was_complete => {
                slot.has_result = true;
                self.spread(net, packet);
            }
            // The child lacks a result that it should have: the switch keeps a copy.
            _ if slot.has_result => {
                let branch = node.children[usize::from(child)];
                let down =
                    Packet { to: place_of(branch), direction: Direction::Down, ..packet.packet };
                self.transmit(net, branch.link, down, packet.priority);
            }
            Some(parent) => {
                let up = Packet { to: place_of(parent), child: children[place], ..packet.packet };
                self.transmit(net, parent.link, up, packet.priority);
            }
            None => unreachable!("a complete slot at the top has its result"),
        }
    }

    /// Sends a result to all children of a switch.
    fn spread<E: From<Arrival>>(&mut self, net: &mut Net<'_, E>, packet: Framed<Packet>) {
        let Packet { job, collective, offset, to, .. } = packet.packet;
        let place = usize::from(to);
        let Job { tree, slots, .. } = &mut self.jobs[job as usize];
        let slot = &mut slots[place][(offset % (2 * self.config.slots)) as usize];
        if slot.key == (u64::from(collective) << 32 | u64::from(offset)) + 1 {
            slot.has_result = true;
        }
        for branch in 0..tree.nodes[place].children.len() {
            let branch = self.jobs[job as usize].tree.nodes[place].children[branch];
            let down = Packet { to: place_of(branch), direction: Direction::Down, ..packet.packet };
            self.transmit(net, branch.link, down, packet.priority);
        }
    }

    /// Takes a result at a worker, and sends the packet that it clocks out.
    fn receive<E: From<Arrival> + From<Overdue>>(
        &mut self,
        net: &mut Net<'_, E>,
        packet: Packet,
    ) -> Option<Member> {
        let slots = self.config.slots;
        let member = Member { job: packet.job, worker: packet.to };
        let sender = &mut self.jobs[packet.job as usize].workers[usize::from(packet.to)];
        let in_flight = &mut sender.in_flight[(packet.offset % slots) as usize];
        if sender.collective != packet.collective || *in_flight != packet.offset {
            self.counts.stale += 1;
            return None;
        }
        sender.received += 1;
        let next = packet.offset.saturating_add(slots).min(sender.packets);
        *in_flight = next;
        if next < sender.packets {
            self.send(net, member, next);
        } else if sender.received == sender.packets {
            return Some(member);
        }
        None
    }

    fn transmit<E: From<Arrival>>(
        &mut self,
        net: &mut Net<'_, E>,
        link: LinkId,
        packet: Packet,
        priority: u32,
    ) {
        let bytes = self.config.format.wire_bytes;
        let framed = Framed { packet, bytes, priority, is_marked: false };
        if !net.fabric.send(net.engine, link, framed) {
            self.counts.dropped += 1;
        }
    }
}

fn place_of(branch: Branch) -> u16 {
    u16::try_from(branch.to).expect("a job's tree has fewer than 65,536 nodes")
}

#[cfg(test)]
mod tests;
