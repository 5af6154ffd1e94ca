//! The arithmetic of [`racksum_proto::arith`] in vector registers, at memory speed.
//!
//! [`fold`] reduces received contributions, and [`codec`] scans and converts tensors. No function
//! allocates. At every [`Level`], the results have exactly the bits that the protocol defines.

pub mod codec;
pub mod fold;
mod level;
mod number;
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::Level;
