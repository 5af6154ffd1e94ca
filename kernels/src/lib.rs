//! The arithmetic of [`racksum_proto::arith`] in vector registers, at memory speed.
//!
//! [`fold`] reduces received contributions, and [`codec`] scans and converts tensors. [`shared`]
//! gives access to memory that other processes may write. No kernel allocates. At every [`Level`],
//! the results have exactly the bits that the protocol defines.

pub mod codec;
mod copy;
pub mod fold;
mod level;
mod number;
pub mod shared;
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::Level;
