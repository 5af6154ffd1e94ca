//! The probe that shows which ranks of a job receive its multicast group.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::registry::{Seat, Shared, lock};

/// The interval between probes of a multicast group.
const PROBE_PERIOD: Duration = Duration::from_millis(20);

/// Probes a job's group until every listening rank has received a probe, or the probes run out.
pub(crate) async fn probe(registry: Shared, seat: Seat) {
    let mut tick = interval(PROBE_PERIOD);
    // Each probe needs its full interval, even after this thread was delayed.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let probes = lock(&registry).probes();
    for _ in 0..probes {
        tick.tick().await;
        if !lock(&registry).probe(&seat) {
            return;
        }
    }
    tick.tick().await;
    lock(&registry).end_probe(&seat);
}
