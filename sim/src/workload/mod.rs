//! The work of training jobs: layer profiles, arrivals, execution graphs and placements.
//!
//! A job comes from an [`arrivals`] file, computes and sends as its [`profile`] says, and runs on
//! the workers that [`placement`] chooses. A job may instead replay an execution [`graph`], which
//! [`chakra`] and [`goal`] read from traces.
//!
//! Everything here is pure: parsers take text or bytes, and errors name the line or the node. The
//! caller reads the files and adds their names. Durations are in picoseconds, and all randomness
//! comes from a seed.

pub mod arrivals;
pub mod chakra;
pub mod duration;
pub mod goal;
pub mod graph;
pub mod placement;
pub mod profile;

#[cfg(test)]
pub(crate) mod shared_data;
