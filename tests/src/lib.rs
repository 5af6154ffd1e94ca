//! End-to-end tests of racksum over real sockets, one module per subject.
//!
//! An aggregator and its ranks run in threads of the test. `rig` starts them, `oracle` computes the
//! expected bits, and `impostor` is a rank that a test controls. Tests that need processes or
//! network namespaces are in `cli/tests`. All code here is for tests only.

#[cfg(test)]
mod impostor;
#[cfg(test)]
mod initials;
#[cfg(test)]
mod inputs;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod ports;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod waiters;
#[cfg(test)]
mod waits;

#[cfg(test)]
mod attack;
#[cfg(test)]
mod blocks;
#[cfg(test)]
mod determinism;
#[cfg(test)]
mod disagreement;
#[cfg(test)]
mod endings;
#[cfg(test)]
mod failover;
#[cfg(test)]
mod flight;
#[cfg(test)]
mod flood;
#[cfg(test)]
mod jobs;
#[cfg(test)]
mod joining;
#[cfg(test)]
mod missing;
#[cfg(test)]
mod mixture;
#[cfg(test)]
mod moves;
#[cfg(test)]
mod queues;
#[cfg(test)]
mod reductions;
#[cfg(test)]
mod rejoin;
#[cfg(test)]
mod sealed;
#[cfg(test)]
mod sidecars;
#[cfg(test)]
mod strangers;
#[cfg(test)]
mod survivors;
#[cfg(test)]
mod tree;
