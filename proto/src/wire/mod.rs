//! The wire layout. `docs/wire.md` is its specification; comments with `W-n` mark the code that
//! implements its numbered rules.
//!
//! Headers and bodies are big-endian; tensor elements are little-endian, as in memory. Decoders
//! check every length before they read, and never panic. Decoded values are valid in themselves, so
//! the state machines make only those checks that depend on their state.

mod header;
mod lists;
mod open;

pub use header::{Flags, Header, Kind, VERSION};
pub use lists::{Disagreement, MissingRanks, NackEntries, NackEntry};
pub use open::{Open, OpenDecoder, OpenEncoder, Opening};

use crate::reject::Reject;

/// Returns the messages of a datagram, in order. A malformed message yields an error, and the rest
/// of the datagram is discarded (wire: W-54).
pub fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<(Header, &[u8]), Reject>> {
    let mut rest = Some(datagram);
    core::iter::from_fn(move || {
        let bytes = rest.take()?;
        Some(Header::decode_first(bytes).map(|(header, body, after)| {
            rest = (!after.is_empty()).then_some(after);
            (header, body)
        }))
    })
}

/// The most windows that a rank may open ahead of a stream's credit.
pub const OPEN_AHEAD: u64 = 2 * Open::MAX_WINDOWS as u64;

/// The size of the `u16` count at the start of a list, in bytes.
const COUNT_LEN: usize = 2;

/// Reads a big-endian `u16` at `at`.
fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Reads a big-endian `u32` at `at`.
fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Reads a big-endian `u64` at `at`.
fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
