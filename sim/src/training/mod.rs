//! Training jobs that share a fabric.
//!
//! A [`Dispatcher`] starts jobs, a [`Process`] per worker says what the worker computes and when it
//! asks for all-reduces, and [`Collectives`] says when these begin. A [`Simulation`] drives all
//! three over a data plane.

mod collectives;
mod dispatch;
mod process;
mod simulation;
#[cfg(test)]
mod tests;

pub use self::collectives::{Chunk, Collectives, Compression, Coordination, Order, Ports, Which};
pub use self::dispatch::{DispatchError, Dispatcher};
pub use self::process::{Action, Process, Step};
pub use self::simulation::{Finished, Inputs, RunError, Simulation};
