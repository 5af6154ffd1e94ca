//! A packet network: nodes, links, and a port at the start of each link.
//!
//! Switches store and forward, and take no time of their own. Each port has one queue with strict
//! priorities that does not preempt. Times are integers of picoseconds, and packets that reach a
//! port at the same time keep the order of their events, so a run depends only on its inputs.

mod port;
mod queue;
mod topology;

#[cfg(test)]
mod tests;

pub use self::port::{Framed, Handed, Port, PortCounts};
pub use self::queue::StrictPriority;
pub use self::topology::{
    Branch, Kind, Link, LinkId, Node, NodeId, Topology, TopologyError, Tree, TreeNode, TwoLayers,
};

use crate::engine::{Engine, Picos};

/// The ports of a topology.
#[derive(Debug)]
pub struct Fabric<P> {
    topology: Topology,
    ports: Vec<Port<P>>,
}

/// An event of the fabric: a packet arrives at the end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival(pub LinkId);

impl<P: Copy> Fabric<P> {
    /// Creates a fabric without packets.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let ports = topology.links().iter().map(|link| Port::new(link.config)).collect();
        Self { topology, ports }
    }

    /// Returns the nodes and links.
    #[must_use]
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the port at the start of a link.
    #[must_use]
    pub fn port(&self, link: LinkId) -> &Port<P> {
        &self.ports[link.0]
    }

    /// Sends a packet over a link. Returns false if its queue is full.
    pub fn send<E: From<Arrival>>(
        &mut self,
        engine: &mut Engine<E>,
        link: LinkId,
        packet: Framed<P>,
    ) -> bool {
        match self.ports[link.0].hand(engine.now(), packet) {
            Handed::Taken { wake } => {
                if let Some(at) = wake {
                    engine.schedule(at, Arrival(link).into());
                }
                true
            }
            Handed::Dropped => false,
        }
    }

    /// Takes the packet of an arrival.
    pub fn take<E: From<Arrival>>(
        &mut self,
        engine: &mut Engine<E>,
        Arrival(link): Arrival,
    ) -> Framed<P> {
        let (packet, wake) = self.ports[link.0].take(engine.now());
        if let Some(at) = wake {
            engine.schedule(at, Arrival(link).into());
        }
        packet
    }

    /// Returns the first link whose port lost, made or reordered packets, or idled while some
    /// waited.
    #[must_use]
    pub fn unsound(&self) -> Option<LinkId> {
        self.ports.iter().position(|port| !port.is_sound()).map(LinkId)
    }

    /// Returns the bytes that wait at the start of a link.
    pub fn queued_bytes(&mut self, now: Picos, link: LinkId) -> u64 {
        self.ports[link.0].queued_bytes(now)
    }
}
