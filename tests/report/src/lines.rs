//! Counts log lines.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Runs `work` and returns the number of lines that it logs on this thread at `level` or a more
/// severe level.
pub fn lines_logged(level: Level, work: impl FnOnce()) -> usize {
    let written = Arc::<AtomicUsize>::default();
    tracing::subscriber::with_default(Lines { level, written: Arc::clone(&written) }, work);
    written.load(Relaxed)
}

struct Lines {
    level: Level,
    written: Arc<AtomicUsize>,
}

impl Subscriber for Lines {
    fn enabled(&self, line: &Metadata<'_>) -> bool {
        *line.level() <= self.level
    }

    fn event(&self, _: &Event<'_>) {
        self.written.fetch_add(1, Relaxed);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_level_or_more_severe_are_counted() {
        let log = || {
            tracing::error!("one");
            tracing::warn!("two");
            tracing::info!("three");
        };
        assert_eq!(lines_logged(Level::WARN, log), 2);
        assert_eq!(lines_logged(Level::TRACE, log), 3);
    }
}
