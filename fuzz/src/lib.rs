//! The bodies of the fuzz targets. [`datagram`] runs the decoders of the wire layout, and
//! [`machines`] runs both state machines of the protocol in a small job.
//!
//! The bodies are here and not in the targets, so that `proto/tests/fuzz_corpus.rs` can run them on
//! stable Rust and without a sanitizer. A body takes arbitrary bytes, and panics if the code breaks
//! a guarantee. `fuzz/README.md` explains how to run the targets.

mod cluster;
pub mod datagram;
pub mod machines;
mod script;
