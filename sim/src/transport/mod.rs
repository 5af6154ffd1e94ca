//! The data planes that move collectives over a fabric.

pub mod reference;
