//! Limits on callers that have not joined yet.
//!
//! A connection costs the caller a few datagrams, but costs the aggregator memory and time. All
//! callers therefore share a fixed number of permits. While permits are free, every caller gets
//! one, up to a limit per address. When all are taken, the caller that holds the most gives up its
//! oldest permit to a caller that holds fewer. A caller is an identity with all its addresses, or
//! an address without a known identity. The addresses of one identity share its permits in the same
//! way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::network::network;
use crate::queue::{MAX_WAITING, MAX_WAITING_EACH};

/// The maximum number of concurrent handshakes.
const HANDSHAKES: usize = 512;
/// The maximum number of concurrent handshakes per address. Most hosts have fewer ranks. A caller
/// without a permit retries.
pub(crate) const HANDSHAKES_OF_ONE: usize = 64;
/// The maximum number of concurrent callers per address that have not joined.
pub(crate) const UNJOINED_OF_ONE: usize = 128;

/// The limits that apply to a caller, in the order in which it meets them.
#[derive(Debug, Clone)]
pub(crate) struct CallerLimits {
    /// Callers in a handshake. Their identities are unknown, so they have permits of their own
    /// and take none from identified callers.
    pub(crate) handshakes: CallerLimit,
    /// Callers that have not joined: they prove a data path, send a query, are being refused, or
    /// rejoin a job.
    pub(crate) unjoined: CallerLimit,
    /// Callers that waited for room or had joined, and are receiving their last message.
    pub(crate) departing: CallerLimit,
}

impl CallerLimits {
    /// Creates the limits, with `unjoined` permits for callers that have not joined.
    pub(crate) fn new(unjoined: usize) -> Self {
        Self {
            handshakes: CallerLimit::new(HANDSHAKES, HANDSHAKES_OF_ONE),
            unjoined: CallerLimit::new(unjoined, UNJOINED_OF_ONE),
            departing: CallerLimit::new(MAX_WAITING, MAX_WAITING_EACH),
        }
    }
}

/// A limited number of permits for callers.
#[derive(Debug, Clone)]
pub(crate) struct CallerLimit(Arc<Mutex<Holders>>);

/// The callers that hold permits.
#[derive(Debug)]
struct Holders {
    most: usize,
    most_of_one: usize,
    taken: usize,
    next: u64,
    callers: BTreeMap<CallerName, Permits>,
    /// Each caller with its number of permits, sorted by that number.
    counts: BTreeSet<(usize, CallerName)>,
}

/// The permits of one caller.
#[derive(Debug, Default)]
struct Permits {
    taken: usize,
    /// The permits of each address, oldest first. Each permit has a channel that asks for its
    /// return.
    by_address: BTreeMap<IpAddr, BTreeMap<u64, oneshot::Sender<()>>>,
    /// Each address with its number of permits, sorted by that number.
    counts: BTreeSet<(usize, IpAddr)>,
}

/// The name under which a caller's permits are counted: its identity, or the network of its address
/// if the identity is unknown.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum CallerName {
    Address(IpAddr),
    Identity(String),
}

/// A caller, and the network of its address.
#[derive(Debug, Clone)]
pub(crate) struct CallerKey {
    who: CallerName,
    of: IpAddr,
}

/// One of a limited number of permits, given back on drop.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: CallerLimit,
    caller: CallerKey,
    number: u64,
}

/// The signal that a permit must be given up.
#[derive(Debug)]
pub(crate) struct Revoked(oneshot::Receiver<()>);

impl CallerKey {
    /// Creates the key of a caller from its address, and from its identity if that is known.
    pub(crate) fn new(identity: Option<&str>, addr: IpAddr) -> Self {
        let of = network(addr);
        let who =
            identity.map_or(CallerName::Address(of), |name| CallerName::Identity(name.to_owned()));
        Self { who, of }
    }
}

impl CallerLimit {
    /// Creates a limit with `most` permits. Each address of a caller gets at most `most_of_one` of
    /// them.
    pub(crate) fn new(most: usize, most_of_one: usize) -> Self {
        let (callers, counts) = Default::default();
        let holders = Holders { most, most_of_one, taken: 0, next: 0, callers, counts };
        Self(Arc::new(Mutex::new(holders)))
    }

    /// Returns whether `caller` would be given a permit.
    pub(crate) fn has_room(&self, caller: &CallerKey) -> bool {
        self.lock().giver(caller).is_ok()
    }

    /// Returns whether all permits are taken.
    pub(crate) fn is_full(&self) -> bool {
        let holders = self.lock();
        holders.taken >= holders.most
    }

    /// Takes a permit, if one is available. The holder must give it up when `Revoked` signals.
    pub(crate) fn acquire(&self, caller: CallerKey) -> Option<(Permit, Revoked)> {
        let mut holders = self.lock();
        if let Some(giver) = holders.giver(&caller).ok()? {
            holders.free_one(&giver);
        }
        let number = holders.next;
        holders.next += 1;
        let (revoke, revoked) = oneshot::channel();
        holders.change(&caller, |permits| drop(permits.insert(number, revoke)));
        Some((Permit { limit: self.clone(), caller, number }, Revoked(revoked)))
    }

    fn lock(&self) -> MutexGuard<'_, Holders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Revoked {
    /// Waits until another caller needs the permit. Never returns if the permit is given back
    /// first.
    pub(crate) async fn wait(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let number = self.number;
        self.limit.lock().change(&self.caller, |permits| drop(permits.remove(&number)));
    }
}

/// The error for a caller that gets no permit.
struct Full;

impl Holders {
    /// Returns the caller that must give up a permit to `caller`, or `None` while permits are free.
    fn giver(&self, caller: &CallerKey) -> Result<Option<CallerKey>, Full> {
        let own = self.callers.get(&caller.who);
        let own_at = own.and_then(|own| own.by_address.get(&caller.of)).map_or(0, BTreeMap::len);
        if own_at >= self.most_of_one {
            return Err(Full);
        }
        if self.taken < self.most {
            return Ok(None);
        }
        let (most, who) = self.counts.last().ok_or(Full)?;
        let largest = self.callers.get(who).and_then(|permits| permits.largest()).ok_or(Full)?;
        if own.map_or(0, |own| own.taken) + 1 < *most {
            return Ok(Some(CallerKey { who: who.clone(), of: largest.1 }));
        }
        // No other caller has enough permits to give one up, but another address of this caller
        // may.
        let (most, of) = own.and_then(Permits::largest).ok_or(Full)?;
        (own_at + 1 < most).then(|| Some(CallerKey { who: caller.who.clone(), of })).ok_or(Full)
    }

    /// Frees the oldest permit that a caller holds at one address.
    fn free_one(&mut self, giver: &CallerKey) {
        let mut freed = None;
        self.change(giver, |permits| freed = permits.pop_first());
        if let Some((_, revoke)) = freed {
            // Ignore a failed send: the holder is about to give the permit back.
            revoke.send(()).unwrap_or_default();
        }
    }

    /// Changes the permits of a caller and updates the counts.
    fn change(
        &mut self,
        caller: &CallerKey,
        change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<()>>),
    ) {
        let permits = self.callers.entry(caller.who.clone()).or_default();
        let before = permits.taken;
        permits.change(caller.of, change);
        let after = permits.taken;
        if after == 0 {
            self.callers.remove(&caller.who);
        }
        self.counts.remove(&(before, caller.who.clone()));
        if after > 0 {
            self.counts.insert((after, caller.who.clone()));
        }
        self.taken = self.taken + after - before;
    }
}

impl Permits {
    /// Returns the number of permits of the address that holds the most, and that address.
    fn largest(&self) -> Option<(usize, IpAddr)> {
        self.counts.last().copied()
    }

    fn change(&mut self, of: IpAddr, change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<()>>)) {
        let permits = self.by_address.entry(of).or_default();
        let before = permits.len();
        change(permits);
        let after = permits.len();
        if after == 0 {
            self.by_address.remove(&of);
        }
        self.counts.remove(&(before, of));
        if after > 0 {
            self.counts.insert((after, of));
        }
        self.taken = self.taken + after - before;
    }
}

#[cfg(test)]
mod tests;
