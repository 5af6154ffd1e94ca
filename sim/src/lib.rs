//! A discrete-event simulator that runs the protocol's own code, packet by packet.
//!
//! [`node`] wraps the two state machines of `racksum-proto` with tensors and slots, as the real
//! drivers do, but with the scalar reference arithmetic. There is no second implementation of
//! the protocol here.

pub mod node;

#[cfg(test)]
mod pair;
