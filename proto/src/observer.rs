//! Events of the state machines, for observers: counters, traces and checkers.

use crate::error::OpError;
use crate::ids::{OpId, Rank, WindowId};
use crate::reject::{Reject, Rejects};

/// An event in a state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'a> {
    /// The machine rejected a message. Drivers count the datagrams that they reject themselves.
    Rejected(Reject),
    /// A fragment arrived that had arrived before.
    Duplicate {
        /// The sender.
        from: Rank,
        /// The fragment's window.
        window: WindowId,
        /// The fragment's number.
        fragment: u8,
    },
    /// A rank opened a stretch of windows.
    Opened {
        /// The rank.
        rank: Rank,
        /// The op.
        op: OpId,
    },
    /// A window was folded after all owed contributions had arrived, or the parent's result became
    /// the window's result.
    Folded {
        /// The window.
        window: WindowId,
        /// The mask of blocks that at least one rank contributed.
        union: u64,
        /// The number of ranks that contributed; 1 for the parent's result.
        contributors: u32,
    },
    /// The machine sent a nack for missing fragments or results.
    Nacked {
        /// The recipient of the nack: a rank, or [`Rank::AGGREGATOR`].
        of: Rank,
        /// The first window that the nack requests or, from a worker, the first without a result.
        from: WindowId,
        /// Whether the nack is a probe: its sender has received nothing for a while.
        probe: bool,
    },
    /// Fragments were sent again.
    Again {
        /// The fragments' window.
        window: WindowId,
        /// The mask of the fragments.
        fragments: u64,
    },
    /// A slot was freed: every rank has acknowledged its window.
    Retired {
        /// The window.
        window: WindowId,
    },
    /// An op ended with its result.
    Done {
        /// The op.
        op: OpId,
    },
    /// An op ended with an error.
    Failed {
        /// The op.
        op: OpId,
        /// The cause; `None` at the aggregator, where the cause is a mismatch of descriptors.
        error: Option<&'a OpError>,
    },
}

/// An observer of a state machine. The default method ignores the event and costs nothing.
pub trait Observer {
    /// Handles an event when it happens.
    fn on_event(&mut self, event: &Event<'_>) {
        let _ = event;
    }
}

impl Observer for () {}

/// Counts of events. They belong to the driver, so they outlive the machine that reports the
/// events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCounts {
    /// Windows that were folded.
    pub folds: u64,
    /// Fragments that had arrived before.
    pub duplicates: u64,
    /// Fragments that were sent again.
    pub fragments_again: u64,
    /// Nacks that asked for missing fragments or results.
    pub asks: u64,
    /// Nacks that were probes. [`Self::asks`] includes them.
    pub probes: u64,
    /// Rejected messages and datagrams, by reason.
    pub rejects: Rejects,
}

impl EventCounts {
    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        let Self { folds, duplicates, fragments_again, asks, probes, rejects } = other;
        self.folds += folds;
        self.duplicates += duplicates;
        self.fragments_again += fragments_again;
        self.asks += asks;
        self.probes += probes;
        self.rejects.add(rejects);
    }
}

impl Observer for EventCounts {
    fn on_event(&mut self, event: &Event<'_>) {
        match event {
            Event::Rejected(reject) => self.rejects.count(*reject),
            Event::Duplicate { .. } => self.duplicates += 1,
            Event::Folded { .. } => self.folds += 1,
            Event::Nacked { probe, .. } => {
                self.asks += 1;
                self.probes += u64::from(*probe);
            }
            Event::Again { fragments, .. } => {
                self.fragments_again += u64::from(fragments.count_ones());
            }
            Event::Opened { .. }
            | Event::Retired { .. }
            | Event::Done { .. }
            | Event::Failed { .. } => {}
        }
    }
}

impl<T: Observer + ?Sized> Observer for &mut T {
    fn on_event(&mut self, event: &Event<'_>) {
        (**self).on_event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_by_name() {
        let (mut counts, window) = (EventCounts::default(), WindowId::new(OpId(0), 0));
        let events = [
            Event::Rejected(Reject::Sender),
            Event::Rejected(Reject::Sender),
            Event::Duplicate { from: Rank(0), window, fragment: 3 },
            Event::Folded { window, union: 1, contributors: 2 },
            Event::Nacked { of: Rank(1), from: window, probe: false },
            Event::Nacked { of: Rank::AGGREGATOR, from: window, probe: true },
            Event::Again { window, fragments: 0b1011 },
            Event::Failed { op: OpId(0), error: None },
            Event::Retired { window },
        ];
        events.iter().for_each(|event| counts.on_event(event));
        let EventCounts { folds, duplicates, fragments_again, asks, probes, rejects } = counts;
        assert_eq!([folds, duplicates, fragments_again, asks, probes], [1, 1, 3, 2, 1]);
        assert_eq!((rejects.of(Reject::Sender), rejects.total()), (2, 2));
    }

    #[test]
    fn a_sum_of_counts_counts_the_events_of_both() {
        let mut rejects = Rejects::default();
        rejects.count(Reject::Job);
        let (folds, duplicates, fragments_again, asks, probes) = (1, 2, 3, 4, 5);
        let one = EventCounts { folds, duplicates, fragments_again, asks, probes, rejects };
        let mut sum = one;
        sum.add(&one);
        rejects.count(Reject::Job);
        let (folds, duplicates, fragments_again, asks, probes) = (2, 4, 6, 8, 10);
        assert_eq!(sum, EventCounts { folds, duplicates, fragments_again, asks, probes, rejects });
    }
}
