//! The outcome of handling a datagram.

use crate::reject::Reject;

/// Tells a driver what to do with a datagram. `P` is the place of a payload in the driver's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict<P> {
    /// The driver must store the body, a fragment of a window, at this place.
    Store(P),
    /// The fragment has already arrived.
    Duplicate,
    /// The machine has handled the datagram; the driver has nothing to store.
    Control,
    /// The datagram was rejected and changed nothing but a counter.
    Reject(Reject),
}
