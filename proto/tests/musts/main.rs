//! Tests for the numbered items of `docs/wire.md` that need a state machine or arithmetic. Items
//! about codecs are tested next to the codecs. `counters` has the tests of the status instead.

#[path = "../support/mod.rs"]
mod support;

mod aggregator;
mod congestion;
mod counters;
mod ends;
mod layout;
mod nacks;
mod opens;
mod rank;
mod recovery;
mod shard;
mod tree;
mod worker;
