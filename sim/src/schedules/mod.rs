//! The schedules of CoInNetFlow's study, which decide when jobs may begin their next chunk.
//!
//! They implement the same trait as the schedules of aggregators. A turn is a chunk, and lasts
//! until all workers of its job have the chunk's result.

mod all_at_once;
mod exclusive;
mod sincronia;

#[cfg(test)]
mod tests;

pub use self::all_at_once::AllAtOnce;
pub use self::exclusive::{Exclusive, Rule};
pub use self::sincronia::{Sincronia, Weight};
