//! Coflow scheduling: Sincronia and the orders that it is compared with.
//!
//! A coflow is a set of flows that is done when its last flow is, such as a shuffle or an
//! all-reduce. A [`workload::Workload`] puts coflows on one big switch, whose ports are all that
//! they contend for. [`order::Order`] sorts them, above all by [`bssi`], the algorithm of Sincronia
//! (Agarwal et al., "Sincronia: Near-Optimal Network Design for Coflows", SIGCOMM 2018).

pub mod bssi;
pub mod fluid;
pub mod order;
pub mod rates;
pub mod trace;
pub mod workload;

#[cfg(test)]
mod tests;
