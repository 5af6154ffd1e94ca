//! Conversion of durations to the protocol's spans.

use std::time::Duration;

use racksum_proto::time::Span;

/// Converts a duration to a span of at most `u64::MAX` nanoseconds.
pub(crate) fn span(duration: Duration) -> Span {
    Span(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
