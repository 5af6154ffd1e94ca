//! The placer chooses hosts for a job's ranks and aggregators by the rates of the links.
//!
//! This crate is pure. It reads no files and no clock, and the same input gives the same plan.
//!
//! An [`inventory::Inventory`] lists the hosts, and a [`topology::Topology`] is the tree of their
//! domains. [`import`] makes inventories from other programs' files. [`network::Links`] holds the
//! rates of the tree's links, as measured or as expected. A [`job::Job`] says what it needs.
//! [`plan::plan`] combines them into a [`plan::Plan`] with the least [`model::step_time`]: hosts
//! for ranks, aggregators, [`standby::Standby`] sets and the aggregators of racks
//! ([`racks::Tree`]). [`present::Present`] is the placement of a job that runs,
//! [`running::remaining`] gives the rates that running jobs leave, and [`rebalance::rebalance`] the
//! moves that are worth it. [`aggregation`] chooses which vertices of
//! a tree should aggregate.
//!
//! ```
//! use racksum_placer::{job::Job, network::Links, plan::plan, topology::Topology};
//!
//! let inventory = toml::from_str(
//!     r#"
//!     levels = ["zone"]
//!     [[hosts]]
//!     name = "h1"
//!     labels = { zone = "a" }
//!     nic_mbit = 10_000
//!     gpus = { h100 = 2 }
//!     [[hosts]]
//!     name = "h2"
//!     labels = { zone = "a" }
//!     nic_mbit = 1_000
//!     gpus = { h100 = 8 }
//!     "#,
//! )?;
//! let job: Job =
//!     toml::from_str("name = 'vision'\nranks = 2\ngpus_per_rank = 1\nbytes = 1_000_000")?;
//! let topology = Topology::new(&inventory)?;
//! let links = Links::new(&topology, &toml::from_str("")?)?;
//! let plan = plan(&topology, &links, &job)?;
//! // Both ranks and the aggregator fit on one host, so nothing crosses a link.
//! assert_eq!(plan.placement.ranks, [2, 0]);
//! assert_eq!(plan.time.total_s(), 0.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod aggregation;
pub mod constraint;
pub mod explain;
pub mod import;
pub mod inventory;
pub mod job;
pub mod model;
pub mod network;
pub mod notes;
pub mod placement;
pub mod plan;
pub mod present;
pub mod problem;
pub mod quantity;
pub mod racks;
mod rank_moves;
pub mod rebalance;
pub mod running;
mod search;
pub mod shards;
pub mod standby;
pub mod survey;
#[cfg(test)]
mod tests;
pub mod topology;
pub mod unmatched;
