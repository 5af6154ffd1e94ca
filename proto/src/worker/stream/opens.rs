//! Decides in which stretches a stream opens its windows, and which windows it opens again.

use core::ops::Range;

use super::progress::Progress;
use crate::ids::OpId;
use crate::sequence::StreamOp;
use crate::worker::Config;

/// The opens of a stream.
#[derive(Debug)]
pub(super) struct Opens {
    /// The first position whose open must be sent again, if any.
    again_from: Option<u64>,
    /// The minimum size of the next stretch, in windows; it doubles after each stretch of an op.
    stretch: u64,
    max_stretch: u64,
    /// Whether the worker belongs to a child aggregator. Such a worker opens even a short stretch
    /// while it awaits no result, because further sums may need earlier results first.
    is_child: bool,
}

impl Opens {
    pub(super) fn new(config: &Config) -> Self {
        // The limit on scanning ahead covers all shards together, so the stretches get shorter with
        // more shards.
        let most = (Self::MAX_STRETCH / u64::from(config.shards.max(1))).max(1);
        let reach = config.child.map_or(u64::MAX, |child| u64::from(child.slots));
        let max_stretch = most.min(reach / 4).max(1);
        Self {
            again_from: None,
            stretch: Self::MIN_STRETCH.min(max_stretch),
            max_stretch,
            is_child: config.child.is_some(),
        }
    }

    /// Notes that the aggregator lacks opens, starting with that of `position`.
    pub(super) fn note_lacked(&mut self, position: u64) {
        self.again_from = Some(self.again_from.map_or(position, |from| from.min(position)));
    }

    /// Returns windows to open, all of one op: either windows whose opens the aggregator lacks, or
    /// the next stretch, once it is long enough or ends its op.
    pub(super) fn poll(&mut self, progress: &mut Progress) -> Option<(StreamOp, Range<u64>)> {
        loop {
            // The results of windows before the cursor have arrived, so the aggregator does not
            // lack the opens of these windows.
            let (from, to) = match self.again_from.map(|from| from.max(progress.cursor())) {
                Some(from) if from < progress.opened() => (from, progress.opened()),
                _ => {
                    self.again_from = None;
                    self.next_stretch(progress)?
                }
            };
            let entry = *progress.ops().at(from)?;
            if !entry.failed {
                return Some((entry, from..to.min(entry.end())));
            }
            self.again_from = Some(entry.end());
        }
    }

    fn next_stretch(&mut self, progress: &mut Progress) -> Option<(u64, u64)> {
        loop {
            let from = progress.opened();
            let entry = *progress.ops().at(from)?;
            if entry.failed {
                // The op failed before any of it was opened.
                progress.skip_failed();
                continue;
            }
            if from == entry.base {
                self.stretch = Self::MIN_STRETCH.min(self.max_stretch);
            }
            let to = progress.openable(&entry);
            let waits = !self.is_child || progress.awaits();
            let is_short = waits && to < entry.end() && to < from + self.stretch;
            return (!is_short && from < to).then_some((from, to));
        }
    }

    /// Notes that an open of the windows of `op` before `end` is sent.
    pub(super) fn note_sent(&mut self, op: OpId, end: u64, progress: &mut Progress) {
        if progress.note_opened(op, end) {
            self.stretch = (self.stretch * 2).min(self.max_stretch);
        }
        let is_again = self.again_from.is_some() && end < progress.opened();
        self.again_from = is_again.then_some(end);
    }

    /// The number of windows in an op's first stretch; stretches double up to
    /// [`Self::MAX_STRETCH`].
    const MIN_STRETCH: u64 = 4;
    /// The maximum size of a stretch: larger stretches would save too little to justify the wait.
    const MAX_STRETCH: u64 = 64;
}
