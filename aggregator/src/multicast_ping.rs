//! The ping that shows which ranks of a job receive its multicast group.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::registry::{Seat, Shared, lock};

/// The interval between pings of a multicast group.
const PING_PERIOD: Duration = Duration::from_millis(20);

/// Pings a job's group until every listening rank has received a ping, or the pings run out.
pub(crate) async fn ping(registry: Shared, seat: Seat) {
    let mut tick = interval(PING_PERIOD);
    // Each ping needs its full interval, even after this thread was delayed.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let pings = lock(&registry).pings();
    for _ in 0..pings {
        tick.tick().await;
        if !lock(&registry).ping(&seat) {
            return;
        }
    }
    tick.tick().await;
    lock(&registry).end_pings(&seat);
}
