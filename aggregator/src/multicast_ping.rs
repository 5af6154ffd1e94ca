//! The ping that shows which ranks of a job receive multicast.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::registry::{Seat, SharedRegistry, lock};

/// The interval between pings of a multicast group.
const PING_PERIOD: Duration = Duration::from_millis(20);

/// Pings a job's group until every listening rank has received a ping, or the pings run out.
pub(crate) async fn ping(registry: SharedRegistry, seat: Seat) {
    let mut tick = interval(PING_PERIOD);
    // Wait a full interval after each ping, even if this thread has been delayed.
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
