//! Limits on callers that have not joined yet.
//!
//! A connection costs the caller a few datagrams, but costs the aggregator memory and time. All
//! callers therefore share a fixed number of places. While places are free, every caller gets one.
//! When all are taken, the caller that holds most gives up its oldest to a caller that holds fewer.
//! A caller is an identity with all its addresses, or an address where no identity is known. The
//! addresses of one identity share its places in the same way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::network::network;
use crate::queue::{MAX_WAITING, MAX_WAITING_EACH};

/// The maximum number of concurrent handshakes.
const HANDSHAKES: usize = 512;
/// The maximum number of concurrent handshakes per address, more than the ranks of most hosts. A
/// caller without a place retries.
pub(crate) const HANDSHAKES_OF_ONE: usize = 64;
/// The maximum number of concurrent callers per address that have not joined.
pub(crate) const STRANGERS_OF_ONE: usize = 128;

/// The doors that a caller passes one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Doors {
    /// Callers in a handshake. Their identities are not known yet, so they have places of their own
    /// and take none from identified callers.
    pub(crate) handshakes: Door,
    /// Callers that have not joined: they prove a data path, send a query, are being refused, or
    /// rejoin a job.
    pub(crate) strangers: Door,
    /// Callers that waited for room or had joined, and are being told how that ended.
    pub(crate) partings: Door,
}

impl Doors {
    /// Creates the doors, with `strangers` places for callers that have not joined.
    pub(crate) fn new(strangers: usize) -> Self {
        Self {
            handshakes: Door::new(HANDSHAKES, HANDSHAKES_OF_ONE),
            strangers: Door::new(strangers, STRANGERS_OF_ONE),
            partings: Door::new(MAX_WAITING, MAX_WAITING_EACH),
        }
    }
}

/// A limited number of places for callers.
#[derive(Debug, Clone)]
pub(crate) struct Door(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    most: usize,
    most_of_one: usize,
    taken: usize,
    next: u64,
    callers: BTreeMap<Who, Places>,
    /// Each caller with its number of places, sorted by that number.
    counts: BTreeSet<(usize, Who)>,
}

/// The places of one caller.
#[derive(Debug, Default)]
struct Places {
    taken: usize,
    /// The places of each address, oldest first, with the channel that asks for each place back.
    by_address: BTreeMap<IpAddr, BTreeMap<u64, oneshot::Sender<()>>>,
    /// Each address with its number of places, sorted by that number.
    counts: BTreeSet<(usize, IpAddr)>,
}

/// The key by which callers share a limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Address(IpAddr),
    Identity(String),
}

/// A caller and its address.
#[derive(Debug, Clone)]
pub(crate) struct Party {
    who: Who,
    of: IpAddr,
}

/// A place at a door, given back on drop.
#[derive(Debug)]
pub(crate) struct Place {
    door: Door,
    party: Party,
    number: u64,
}

/// Signals that a place must be given up.
#[derive(Debug)]
pub(crate) struct Needed(oneshot::Receiver<()>);

impl Party {
    /// Creates the party for an address, and for an identity if one is known.
    pub(crate) fn new(identity: Option<&str>, addr: IpAddr) -> Self {
        let of = network(addr);
        let who = identity.map_or(Who::Address(of), |name| Who::Identity(name.to_owned()));
        Self { who, of }
    }
}

impl Door {
    /// Creates a door with `most` places, and `most_of_one` for one address of a caller.
    pub(crate) fn new(most: usize, most_of_one: usize) -> Self {
        let (callers, counts) = Default::default();
        let inside = Inside { most, most_of_one, taken: 0, next: 0, callers, counts };
        Self(Arc::new(Mutex::new(inside)))
    }

    /// Returns whether `party` would be given a place.
    pub(crate) fn has_room(&self, party: &Party) -> bool {
        self.lock().giver(party).is_ok()
    }

    /// Returns whether all places are taken.
    pub(crate) fn is_full(&self) -> bool {
        let inside = self.lock();
        inside.taken >= inside.most
    }

    /// Takes a place, if one is available. The holder must give it up when `Needed` signals.
    pub(crate) fn enter(&self, party: Party) -> Option<(Place, Needed)> {
        let mut inside = self.lock();
        if let Some(giver) = inside.giver(&party).ok()? {
            inside.free_one(&giver);
        }
        let number = inside.next;
        inside.next += 1;
        let (tell, needed) = oneshot::channel();
        inside.change(&party, |places| drop(places.insert(number, tell)));
        Some((Place { door: self.clone(), party, number }, Needed(needed)))
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Needed {
    /// Waits until another caller needs the place. Never returns if the place was given back
    /// before.
    pub(crate) async fn wait(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let number = self.number;
        self.door.lock().change(&self.party, |places| drop(places.remove(&number)));
    }
}

/// No place is available.
struct Full;

impl Inside {
    /// Returns the party that must give up a place to `party`, or `None` while places are free.
    fn giver(&self, party: &Party) -> Result<Option<Party>, Full> {
        let own = self.callers.get(&party.who);
        let own_at = own.and_then(|own| own.by_address.get(&party.of)).map_or(0, BTreeMap::len);
        if own_at >= self.most_of_one {
            return Err(Full);
        }
        if self.taken < self.most {
            return Ok(None);
        }
        let (most, who) = self.counts.last().ok_or(Full)?;
        let largest = self.callers.get(who).and_then(|places| places.largest()).ok_or(Full)?;
        if own.map_or(0, |own| own.taken) + 1 < *most {
            return Ok(Some(Party { who: who.clone(), of: largest.1 }));
        }
        // If this caller itself has most places, its addresses share them.
        let (most, of) = own.and_then(Places::largest).ok_or(Full)?;
        (own_at + 1 < most).then(|| Some(Party { who: party.who.clone(), of })).ok_or(Full)
    }

    /// Frees the oldest place of a party.
    fn free_one(&mut self, giver: &Party) {
        let mut freed = None;
        self.change(giver, |places| freed = places.pop_first());
        if let Some((_, tell)) = freed {
            // The place may be about to be given back.
            tell.send(()).unwrap_or_default();
        }
    }

    /// Changes the places of a party and updates the counts.
    fn change(
        &mut self,
        party: &Party,
        change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<()>>),
    ) {
        let places = self.callers.entry(party.who.clone()).or_default();
        let before = places.taken;
        places.change(party.of, change);
        let after = places.taken;
        if after == 0 {
            self.callers.remove(&party.who);
        }
        self.counts.remove(&(before, party.who.clone()));
        if after > 0 {
            self.counts.insert((after, party.who.clone()));
        }
        self.taken = self.taken + after - before;
    }
}

impl Places {
    /// Returns the address with most places, and their number.
    fn largest(&self) -> Option<(usize, IpAddr)> {
        self.counts.last().copied()
    }

    fn change(&mut self, of: IpAddr, change: impl FnOnce(&mut BTreeMap<u64, oneshot::Sender<()>>)) {
        let places = self.by_address.entry(of).or_default();
        let before = places.len();
        change(places);
        let after = places.len();
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
