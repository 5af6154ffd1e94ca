//! Reports of the rank's own counters to its aggregators, which show them in their status.

use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::control::FromWorker;
use racksum_proto::status::OwnCounters;
use racksum_proto::time::{Span, Time};

use super::Supervisor;

/// The pause before the first report. It doubles with each report up to [`LAST_PAUSE`], so that
/// short jobs report too.
const FIRST_PAUSE: Span = Span::from_secs(1);
const LAST_PAUSE: Span = Span::from_secs(10);

/// The reports so far, and the time of the next.
#[derive(Debug)]
pub(super) struct Reports {
    clock: Clock,
    due: Time,
    pause: Span,
    /// The last report to each aggregator of the current set.
    last: Vec<OwnCounters>,
}

impl Reports {
    /// Begins to report to the aggregators of a session.
    pub(super) fn new() -> Self {
        let clock = Clock::start();
        Self { due: clock.now() + FIRST_PAUSE, clock, pause: FIRST_PAUSE, last: Vec::new() }
    }

    /// Returns the time until the next report.
    pub(super) fn left(&self) -> Duration {
        Duration::from_nanos(self.due.since(self.clock.now()).0)
    }

    /// Returns whether a report is due, and if so schedules the next one.
    fn is_due(&mut self) -> bool {
        let now = self.clock.now();
        let is_due = self.due <= now;
        if is_due {
            self.pause = Span(2 * self.pause.0).min(LAST_PAUSE);
            self.due = now + self.pause;
        }
        is_due
    }
}

impl Supervisor {
    /// Reports the rank's counters to each aggregator, if a report is due and they have changed.
    pub(super) fn report_counters(&mut self) {
        // wire: W-80
        if !self.reports.is_due() {
            return;
        }
        let controls = &*self.membership.controls;
        self.reports.last.resize(controls.len(), OwnCounters::default());
        for ((place, control), last) in (0..).zip(controls).zip(&mut self.reports.last) {
            // Does not wake the threads that wait for ops, because their conditions are the same.
            let counters = self.driver.lock().run(|engine| engine.own_counters(place));
            let Some(counters) = counters.filter(|counters| counters != last) else { continue };
            *last = counters;
            control.send(FromWorker::Counters(counters));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::tests::supervisor;

    #[test]
    fn pauses_between_reports_grow_to_a_bound() {
        let mut reports = Reports::new();
        assert!(!reports.is_due() && reports.left() <= Duration::from_secs(1));
        let mut pauses = Vec::new();
        for _ in 0..6 {
            reports.due = Time(0);
            assert!(reports.is_due() && !reports.is_due());
            pauses.push(reports.pause.as_millis() / 1000);
        }
        assert_eq!(pauses, [2, 4, 8, 10, 10, 10]);
    }

    #[test]
    fn only_counters_that_have_changed_are_reported() {
        let (mut supervisor, [mut sent, mut also]) = supervisor();
        supervisor.reports.due = Time(0);
        supervisor.report_counters();
        assert!(sent.try_recv().is_err() && also.try_recv().is_err());
        // The first aggregator has shown other counters than the rank has now.
        supervisor.reports.last[0].busy_ms = 7;
        supervisor.reports.due = Time(0);
        supervisor.report_counters();
        assert_eq!(sent.try_recv(), Ok(FromWorker::Counters(OwnCounters::default())));
        assert!(sent.try_recv().is_err() && also.try_recv().is_err());
        // No report is due.
        supervisor.reports.last[0].busy_ms = 7;
        supervisor.report_counters();
        assert!(sent.try_recv().is_err());
    }
}
