//! Counts and plurals for messages.

use alloc::format;
use alloc::string::String;
use core::fmt::Display;

/// Formats a count with its noun: `1 rank`, `2 ranks`.
///
/// ```
/// # use racksum_proto::counted::counted;
/// assert_eq!(counted(1u16, "rank"), "1 rank");
/// assert_eq!(counted(0usize, "rank"), "0 ranks");
/// ```
pub fn counted<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    let plural = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Returns the verb that agrees with the count: `is` for one, otherwise `are`.
pub fn are<N: PartialEq + From<u8>>(number: N) -> &'static str {
    if number == N::from(1) { "is" } else { "are" }
}
