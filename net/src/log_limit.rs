//! Rate limits for log lines that anyone who can reach this host can trigger.

use std::sync::{Mutex, PoisonError};

use racksum_proto::time::{Span, Time};

use crate::clock::Clock;

/// Rate limit for one kind of log line: a burst of up to `most` lines, then `most` lines a minute.
///
/// ```
/// # use racksum_net::log_limit::LogLimit;
/// static REFUSED: LogLimit = LogLimit::new(1);
/// // `left_out` is the number of lines suppressed since the last written one, or `None`.
/// REFUSED.note(|left_out| println!("refused, and {} times before", left_out.unwrap_or(0)));
/// ```
#[derive(Debug)]
pub struct LogLimit {
    most: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Number of lines that may be written now.
    left: u32,
    /// Time of the last refill.
    filled: Option<Time>,
    left_out: u64,
}

impl LogLimit {
    /// Creates a limit with a burst of `most` lines, which must be at least 1.
    #[must_use]
    pub const fn new(most: u32) -> Self {
        Self { most, state: Mutex::new(State { left: most, filled: None, left_out: 0 }) }
    }

    /// Calls `line` to write a line, if the limit allows one. The argument is the number of lines
    /// suppressed since the last written one. It is `None` if there were none, because a log omits
    /// fields that are `None`.
    pub fn note(&self, line: impl FnOnce(Option<u64>)) {
        if let Some(left_out) = self.admit(Clock::start().now()) {
            line(Some(left_out).filter(|lines| *lines > 0));
        }
    }

    fn admit(&self, now: Time) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let filled = *state.filled.get_or_insert(now);
        let period = MINUTE.0 / u64::from(self.most.max(1));
        let periods = now.since(filled).0 / period;
        if periods > 0 {
            state.filled = Some(filled + Span(periods * period));
            let more = u32::try_from(periods).unwrap_or(u32::MAX);
            state.left = state.left.saturating_add(more).min(self.most);
        }
        if state.left == 0 {
            state.left_out += 1;
            return None;
        }
        state.left -= 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

const MINUTE: Span = Span::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_repeat_are_counted_and_not_written() {
        let limit = LogLimit::new(2);
        let at = |s| limit.admit(Time(7) + Span::from_secs(s));
        assert_eq!((at(0), at(0), at(0), at(29)), (Some(0), Some(0), None, None));
        assert_eq!((at(30), at(30)), (Some(2), None));
        // The limit allows two lines a minute, however many are offered.
        let written: Vec<_> = (60..360).filter_map(at).collect();
        assert_eq!(written.len(), 10);
        assert_eq!(written.iter().sum::<u64>() + 10, 1 + 300 - 29);
        // A quiet time restores the full burst.
        assert_eq!((at(900), at(900), at(900)), (Some(29), Some(0), None));
    }

    #[test]
    fn a_line_is_told_of_lines_that_were_left_out_and_of_none_else() {
        let limit = LogLimit::new(1);
        let mut logged = Vec::new();
        limit.note(|left_out| logged.push(left_out));
        assert_eq!(logged, [None]);
        let later = limit.state.lock().unwrap().filled.unwrap();
        assert_eq!(limit.admit(later), None);
        limit.state.lock().unwrap().left = 1;
        limit.note(|left_out| logged.push(left_out));
        assert_eq!(logged, [None, Some(1)]);
    }
}
