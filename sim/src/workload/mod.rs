//! The work of training jobs.
//!
//! A job computes and sends as its [`profile`] says.
//! Jobs come from an [`arrivals`] file.
//! Jobs run on the workers that [`placement`] chooses.
//! A job may instead replay an execution [`graph`].
//! Graphs come from the traces that [`chakra`] reads.
//!
//! Everything here is pure: parsers take text or bytes, and errors name the line or the node. The
//! caller reads the files and adds their names. Durations are in picoseconds, and all randomness
//! comes from a seed.

pub mod arrivals;
pub mod chakra;
pub mod duration;
pub mod graph;
pub mod placement;
pub mod profile;

#[cfg(test)]
mod shared_data;
