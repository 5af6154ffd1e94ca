//! Replay protection: records which datagrams were accepted.

/// Record of the numbers of a sender's accepted datagrams. Each number is accepted at most once,
/// and only if it is not too far behind the highest accepted number.
///
/// A datagram carries the lower half of its number. The receiver infers the upper half that brings
/// the number nearest to the highest accepted one (RFC 4303, appendix A2).
#[derive(Debug, Clone)]
pub(super) struct ReplayWindow {
    /// The number after the highest accepted one.
    end: u64,
    /// One bit per number, at the index `number % LEN`.
    taken: Box<[u64; Self::WORDS]>,
}

impl ReplayWindow {
    /// Size of the window: a number is accepted only if it trails the highest accepted number by
    /// less than this. Results arrive on two sockets, and one of them may be read thousands of
    /// datagrams later than the other.
    const LEN: u64 = 64 * Self::WORDS as u64;
    const WORDS: usize = 128;

    pub(super) fn new() -> Self {
        Self { end: 0, taken: Box::new([0; Self::WORDS]) }
    }

    /// Creates a window in which all numbers before `end` count as accepted.
    pub(super) fn after(end: u64) -> Self {
        Self { end, taken: Box::new([u64::MAX; Self::WORDS]) }
    }

    /// Returns the number whose lower half is `low`, or `None` if it was accepted before or is too
    /// old.
    pub(super) fn number(&self, low: u32) -> Option<u64> {
        const HALF: u64 = 1 << 31;
        const SPAN: u64 = 1 << 32;
        let near = (self.end & !(SPAN - 1)) | u64::from(low);
        let number = if near + HALF < self.end {
            near.checked_add(SPAN)?
        } else if near > self.end + HALF && near >= SPAN {
            near - SPAN
        } else {
            near
        };
        (!self.has(number)).then_some(number)
    }

    /// Checks whether a number was accepted or is too old to check.
    fn has(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        number < self.end && (number + Self::LEN < self.end || self.taken[word] & bit != 0)
    }

    /// Marks a number as accepted.
    pub(super) fn take(&mut self, number: u64) {
        if number >= self.end {
            // Clear the bits of the skipped numbers, which have not arrived. A jump of `LEN` or
            // more clears all bits.
            for skipped in self.end.max((number + 1).saturating_sub(Self::LEN))..=number {
                let (word, bit) = Self::place(skipped);
                self.taken[word] &= !bit;
            }
            self.end = number + 1;
        }
        let (word, bit) = Self::place(number);
        self.taken[word] |= bit;
    }

    const fn place(number: u64) -> (usize, u64) {
        ((number % Self::LEN / 64) as usize, 1 << (number % 64))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn low(number: u64) -> u32 {
        u32::try_from(number & u64::from(u32::MAX)).unwrap()
    }

    /// Offers a number and returns whether it was accepted.
    fn offer(window: &mut ReplayWindow, number: u64) -> bool {
        let Some(found) = window.number(low(number)) else { return false };
        assert_eq!(found, number, "the window infers the upper half");
        window.take(number);
        true
    }

    #[test]
    fn each_number_is_taken_once_in_any_order() {
        let mut window = ReplayWindow::new();
        for number in [0, 3, 1, 8000, 2, 8191, 4, 8192] {
            assert!(offer(&mut window, number), "{number}");
            assert!(!offer(&mut window, number), "{number} again");
        }
        assert!(!offer(&mut window, 0), "0 is too old to check");
        assert!(offer(&mut window, 100), "100 is late but still within the window");
        assert!(offer(&mut window, 1_000_000));
        assert!(!offer(&mut window, 8193), "8193 is far behind the highest number");
        assert!(!offer(&mut window, 1_000_000 - 8192));
        assert!(offer(&mut window, 1_000_000 - 8191));
    }

    #[test]
    fn numbers_go_on_beyond_what_a_datagram_carries() {
        let mut window = ReplayWindow::new();
        let start = (1 << 32) - 5;
        // A sender must stay less than 2^31 numbers ahead of the last accepted number.
        for step in 0..4 {
            assert!(offer(&mut window, step * start / 4));
        }
        for number in (start..start + 10).rev() {
            assert!(offer(&mut window, number), "{number}");
        }
        for number in start..start + 10 {
            assert!(!offer(&mut window, number), "{number}");
        }
    }

    proptest! {
        #[test]
        fn a_window_agrees_with_a_set(steps in vec(-20_000_i64..20_000, 1..200)) {
            let mut window = ReplayWindow::new();
            let mut taken = BTreeSet::new();
            let mut at = 1_u64 << 32;
            for number in (0..4).map(|step| step << 30) {
                prop_assert!(offer(&mut window, number));
                taken.insert(number);
            }
            for step in steps {
                at = at.checked_add_signed(step).unwrap();
                let end = taken.last().map_or(0, |last| last + 1);
                let fresh = at + ReplayWindow::LEN >= end && !taken.contains(&at);
                prop_assert_eq!(offer(&mut window, at), fresh, "{} of {}", at, end);
                if fresh {
                    taken.insert(at);
                }
            }
        }
    }
}
