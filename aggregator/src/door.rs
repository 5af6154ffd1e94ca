//! Limits on callers that have not joined yet.
//!
//! A connection costs its caller a few datagrams, and this side memory and time until the caller
//! has said what it wants. So an address has few places at a time for such connections, and when
//! all are taken, whoever has most of them gives one up to an address that has fewer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Places of all addresses together.
pub(crate) const PLACES: usize = 512;
/// Places of one address: more ranks than most hosts have. Who finds none calls again.
pub(crate) const PLACES_OF_ONE: usize = 64;

/// Hands out places.
#[derive(Debug, Clone)]
pub(crate) struct Door(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    most: usize,
    most_of_one: usize,
    taken: usize,
    next: u64,
    /// The places of each address, the oldest first, and how each is told to be given up.
    by_address: BTreeMap<IpAddr, BTreeMap<u64, oneshot::Sender<()>>>,
    /// How many places each address has.
    counts: BTreeSet<(usize, IpAddr)>,
}

/// A place, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    door: Door,
    of: IpAddr,
    number: u64,
    needed: oneshot::Receiver<()>,
}

impl Door {
    /// A door with so many places, and so many for one address.
    pub(crate) fn new(most: usize, most_of_one: usize) -> Self {
        let (by_address, counts) = Default::default();
        let inside = Inside { most, most_of_one, taken: 0, next: 0, by_address, counts };
        Self(Arc::new(Mutex::new(inside)))
    }

    /// How many places an address has taken.
    pub(crate) fn taken_by(&self, addr: IpAddr) -> usize {
        self.lock().count(network(addr))
    }

    /// Whether an address would be given a place.
    pub(crate) fn has_room(&self, addr: IpAddr) -> bool {
        self.lock().has_room(network(addr))
    }

    /// Takes a place for an address, if there is one.
    pub(crate) fn enter(&self, addr: IpAddr) -> Option<Place> {
        let (of, mut inside) = (network(addr), self.lock());
        if !inside.has_room(of) {
            return None;
        }
        if inside.taken >= inside.most {
            inside.free_one();
        }
        let number = inside.next;
        inside.next += 1;
        let (tell, needed) = oneshot::channel();
        inside.change(of, |places| drop(places.insert(number, tell)));
        Some(Place { door: self.clone(), of, number, needed })
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Waits until another address needs the place.
    pub(crate) async fn needed(&mut self) {
        // The sender goes only with the place.
        drop((&mut self.needed).await);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let number = self.number;
        self.door.lock().change(self.of, |places| drop(places.remove(&number)));
    }
}

impl Inside {
    fn count(&self, of: IpAddr) -> usize {
        self.by_address.get(&of).map_or(0, BTreeMap::len)
    }

    fn has_room(&self, of: IpAddr) -> bool {
        let own = self.count(of);
        let largest = self.counts.last().map_or(0, |(count, _)| *count);
        own < self.most_of_one && (self.taken < self.most || own + 1 < largest)
    }

    /// Frees the oldest place of the address that has most.
    fn free_one(&mut self) {
        let Some((_, of)) = self.counts.last().copied() else { return };
        let mut freed = None;
        self.change(of, |places| freed = places.pop_first());
        if let Some((_, tell)) = freed {
            // It may be about to be given back.
            tell.send(()).unwrap_or_default();
        }
    }

    /// Changes the places of an address, and the counts with them.
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

/// Returns the address that limits apply to: for IPv6 the /64, since a host has all of it.
fn network(addr: IpAddr) -> IpAddr {
    match addr.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Takes as many places as it is given, of that many tries.
    fn take(door: &Door, addr: IpAddr, tries: usize) -> Vec<Place> {
        (0..tries).filter_map(|_| door.enter(addr)).collect()
    }

    #[test]
    fn an_address_has_few_places_and_they_come_back() {
        let door = Door::new(8, 3);
        let held = take(&door, v4(1), 9);
        assert_eq!((held.len(), door.has_room(v4(1)), door.has_room(v4(2))), (3, false, true));
        drop(held);
        assert_eq!((door.taken_by(v4(1)), take(&door, v4(1), 9).len()), (0, 3));
        let inside = door.lock();
        assert_eq!((inside.taken, inside.by_address.len(), inside.counts.len()), (0, 0, 0));
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address() {
        let door = Door::new(8, 2);
        let addr = |text: &str| text.parse::<IpAddr>().unwrap();
        let _held = [door.enter(addr("2001:db8::1")), door.enter(addr("2001:db8::ffff:0:2"))];
        assert!(door.enter(addr("2001:db8::3")).is_none());
        assert!(door.enter(addr("2001:db8:0:1::3")).is_some());
        assert_eq!(door.taken_by(addr("::ffff:10.0.0.1")), door.taken_by(v4(1)));
    }

    #[tokio::test]
    async fn when_all_places_are_taken_whoever_has_most_gives_up_its_oldest() {
        let door = Door::new(100, 40);
        let mut floods: Vec<_> = (1..=50).map(|addr| (addr, take(&door, v4(addr), 40))).collect();
        // A newcomer has as many as the others have each before it is refused.
        for addr in 1..=50 {
            floods.push((addr, take(&door, v4(addr), 40)));
        }
        let joins = take(&door, v4(200), 40);
        assert!(!joins.is_empty(), "the first is let in");
        assert_eq!(door.lock().taken, 100);
        let most = (1..=50).map(|addr| door.taken_by(v4(addr))).max().unwrap();
        assert!(joins.len() + 1 >= most, "{} of {most}", joins.len());
        // The first that came was the first to go, and giving its place back frees no other's.
        let (_, oldest) = &mut floods[0];
        oldest[0].needed().await;
        drop(oldest.remove(0));
        assert_eq!(door.lock().taken, 100);
    }

    #[test]
    fn random_callers_never_take_more_than_there_is() {
        let (door, mut held, mut seed) = (Door::new(32, 8), Vec::new(), 1u64);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let draw = seed >> 33;
            if draw % 3 == 0 && !held.is_empty() {
                drop(held.swap_remove(usize::try_from(draw).unwrap() % held.len()));
            } else {
                held.extend(door.enter(v4(u8::try_from(draw % 9).unwrap())));
            }
            let inside = door.lock();
            let counts: BTreeSet<_> =
                inside.by_address.iter().map(|(addr, places)| (places.len(), *addr)).collect();
            assert_eq!(counts, inside.counts);
            let taken: usize = counts.iter().map(|(count, _)| count).sum();
            assert_eq!(taken, inside.taken);
            assert!(taken <= 32 && counts.iter().all(|(count, _)| (1..=8).contains(count)));
        }
    }
}
