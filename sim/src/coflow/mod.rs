//! Coflow scheduling: Sincronia, the orders that it is compared with, and a fluid simulation.
//!
//! A coflow is a set of flows that is done when its last flow is, such as a shuffle or an
//! all-reduce. A [`workload::Workload`] puts coflows on one big switch, whose ports are all that
//! they contend for. [`order::Order`] sorts them, above all by [`bssi`], the algorithm of Sincronia
//! (Agarwal et al., "Sincronia: Near-Optimal Network Design for Coflows", SIGCOMM 2018).
//! [`rates::Rates`] turns an order into rates, [`fluid::run`] simulates them, and [`online::run`]
//! does so for coflows that are not known before they arrive. [`trace::Trace`] reads workloads in
//! the public formats.
//!
//! There are no packets here: [`crate::cluster`] simulates those. Everything is in integers, has no
//! randomness and does no I/O, so runs are the same on every machine.

mod admission;
pub mod bssi;
pub mod fluid;
pub mod online;
pub mod order;
pub mod rates;
pub mod trace;
pub mod workload;

#[cfg(test)]
mod tests;
