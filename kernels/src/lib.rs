//! The arithmetic of [`racksum_proto::arith`] at the speed of memory, in wide registers.
//!
//! [`fold`] reduces what has arrived, and [`codec`] scans and converts what is sent. Nothing
//! allocates, and the bits are those that the protocol defines, at every [`Level`].

pub mod codec;
pub mod fold;
mod level;
mod number;
mod simd;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::Level;
