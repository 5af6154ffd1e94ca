//! Lists of ranks in messages. A list names at most [`MAX_LISTED`] ranks and counts the others.

use alloc::format;
use alloc::string::{String, ToString};

/// Formats ranks as a list: `3, 5, 9`. A peer may name thousands, so the list counts the ranks past
/// [`MAX_LISTED`] instead of naming them.
#[must_use]
pub fn listed(ranks: impl IntoIterator<Item = u16>) -> String {
    let (mut text, mut ranks) = (String::new(), ranks.into_iter());
    for rank in ranks.by_ref().take(MAX_LISTED) {
        text += if text.is_empty() { "" } else { ", " };
        text += &rank.to_string();
    }
    match ranks.count() {
        0 => text,
        more => text + " and " + &more.to_string() + " more",
    }
}

/// Formats ranks with their noun: `rank 3`, or `ranks 3, 5, 9`. Lists them as [`listed`] does.
#[must_use]
pub fn named(ranks: impl IntoIterator<Item = u16>) -> String {
    let mut ranks = ranks.into_iter();
    let (first, second) = (ranks.next(), ranks.next());
    let plural = if second.is_some() { "s" } else { "" };
    format!("rank{plural} {}", listed(first.into_iter().chain(second).chain(ranks)))
}

/// The maximum number of ranks that [`listed`] names.
pub const MAX_LISTED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_names_few_ranks_and_counts_the_rest() {
        assert_eq!(listed([]), "");
        assert_eq!(listed([7]), "7");
        assert_eq!(listed([3, 5, 9]), "3, 5, 9");
        assert_eq!(named([7]), "rank 7");
        assert_eq!(named([3, 5, 9]), "ranks 3, 5, 9");
        assert!(listed(0..64).ends_with("62, 63"), "{}", listed(0..64));
        let long = listed(0..=u16::MAX);
        assert!(long.ends_with("62, 63 and 65472 more"), "{long}");
    }
}
