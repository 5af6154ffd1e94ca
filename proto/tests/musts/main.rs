//! The numbered items of `docs/wire.md` that need a machine or the arithmetic to be shown; those
//! of the codecs are shown beside them.

#[path = "../support/mod.rs"]
mod support;

mod aggregator;
mod asks;
mod congestion;
mod ends;
mod layout;
mod opens;
mod rank;
mod recovery;
mod shard;
mod tree;
mod worker;
