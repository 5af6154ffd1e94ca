//! Finds out which ranks of a job hear its multicast group.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::registry::{Seat, Shared, lock};

/// How often a multicast group is probed.
const PROBE_PERIOD: Duration = Duration::from_millis(20);

/// Probes a job's group until every rank that listens has heard it, or long enough.
pub(crate) async fn probe(registry: Shared, seat: Seat) {
    let mut tick = interval(PROBE_PERIOD);
    // Each probe is to have its time, also when this thread was kept from running for a while.
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
