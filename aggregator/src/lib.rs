//! Placeholder.

pub mod kernel;
