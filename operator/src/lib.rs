//! The Kubernetes operator: places the aggregators of training jobs, and their workers.
//!
//! [`decide`] is pure: it takes an [`crd::AggregatorGroup`] and its surroundings, and returns the
//! next writes. [`controller`] observes and writes. docs/kubernetes.md describes the resource.
#![forbid(unsafe_code)]

pub mod affinity;
pub mod api;
pub mod controller;
pub mod crd;
pub mod decide;
pub mod health;
pub mod lease;
pub mod members;
pub mod objects;
pub mod planning;
pub mod quantity;
pub mod status;
