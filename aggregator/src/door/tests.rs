use super::*;

fn v4(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// Returns a caller without an identity.
fn stranger(addr: IpAddr) -> Party {
    Party::new(None, addr)
}

/// Tries to take `tries` places and returns those it gets.
fn take(door: &Door, party: &Party, tries: usize) -> Vec<(Place, Needed)> {
    (0..tries).filter_map(|_| door.enter(party.clone())).collect()
}

/// Returns the number of places of a caller, from all addresses.
fn taken_by(door: &Door, party: &Party) -> usize {
    door.lock().callers.get(&party.who).map_or(0, |places| places.taken)
}

#[test]
fn an_address_has_few_places_and_they_come_back() {
    let door = Door::new(8, 3);
    let [one, two] = [1, 2].map(|last| stranger(v4(last)));
    let held = take(&door, &one, 9);
    assert_eq!((held.len(), door.has_room(&one), door.has_room(&two)), (3, false, true));
    drop(held);
    assert_eq!((taken_by(&door, &one), take(&door, &one, 9).len()), (0, 3));
    let inside = door.lock();
    assert_eq!((inside.taken, inside.callers.len(), inside.counts.len()), (0, 0, 0));
}

#[test]
fn a_network_of_ipv6_counts_as_one_address() {
    let door = Door::new(8, 2);
    let of = |text: &str| stranger(text.parse().unwrap());
    let _held = [door.enter(of("2001:db8::1")), door.enter(of("2001:db8::ffff:0:2"))];
    assert!(door.enter(of("2001:db8::3")).is_none());
    assert!(door.enter(of("2001:db8:0:1::3")).is_some());
    assert_eq!(of("::ffff:10.0.0.1").who, stranger(v4(1)).who);
}

#[tokio::test]
async fn when_all_places_are_taken_whoever_has_most_gives_up_its_oldest() {
    let door = Door::new(100, 40);
    let mut floods: Vec<_> = (1..=50).map(|addr| take(&door, &stranger(v4(addr)), 40)).collect();
    // A new caller gets as many places as each other caller has before it is refused.
    for addr in 1..=50 {
        floods.push(take(&door, &stranger(v4(addr)), 40));
    }
    let joins = take(&door, &stranger(v4(200)), 40);
    assert!(!joins.is_empty(), "the first is let in");
    assert_eq!(door.lock().taken, 100);
    let most = (1..=50).map(|addr| taken_by(&door, &stranger(v4(addr)))).max().unwrap();
    assert!(joins.len() + 1 >= most, "{} of {most}", joins.len());
    // The oldest place was freed first, and giving it back frees no other place.
    let oldest = &mut floods[0];
    oldest[0].1.wait().await;
    drop(oldest.remove(0));
    assert_eq!(door.lock().taken, 100);
}

#[test]
fn an_identity_has_no_more_places_for_calling_from_many_addresses() {
    let door = Door::new(100, 40);
    let flood = |addr| Party::new(Some("flood"), v4(addr));
    let of_flood: Vec<_> = (1..=200).flat_map(|addr| take(&door, &flood(addr), 1)).collect();
    assert_eq!(of_flood.len(), 100, "each of its addresses has one");
    // The team calls from one host.
    let team = Party::new(Some("team"), v4(1));
    let of_team = take(&door, &team, 10);
    assert_eq!((of_team.len(), taken_by(&door, &team)), (10, 10));
    // The team's host has more places than any other, but keeps them during the flood.
    let more: Vec<_> = (201..=255).flat_map(|addr| take(&door, &flood(addr), 1)).collect();
    assert_eq!((more.len(), taken_by(&door, &team)), (0, 10));
}

#[tokio::test]
async fn the_addresses_of_an_identity_share_its_places() {
    let door = Door::new(10, 40);
    let [one, other] = [1, 2].map(|last| Party::new(Some("team"), v4(last)));
    let mut of_one = take(&door, &one, 40);
    assert_eq!((of_one.len(), take(&door, &one, 1).len()), (10, 0));
    assert_eq!(take(&door, &other, 40).len(), 5);
    of_one[0].1.wait().await;
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
            let addr = v4(u8::try_from(draw % 9).unwrap());
            let identity = ["one", "other"].get(usize::try_from(draw / 9 % 3).unwrap());
            held.extend(door.enter(Party::new(identity.copied(), addr)));
        }
        let inside = door.lock();
        let counts: BTreeSet<_> =
            inside.callers.iter().map(|(who, places)| (places.taken, who.clone())).collect();
        assert_eq!(counts, inside.counts);
        let taken: usize = counts.iter().map(|(count, _)| count).sum();
        assert_eq!(taken, inside.taken);
        assert!(taken <= 32 && counts.iter().all(|(count, _)| *count > 0));
        for places in inside.callers.values() {
            let counts: BTreeSet<_> =
                places.by_address.iter().map(|(of, places)| (places.len(), *of)).collect();
            assert_eq!(counts, places.counts);
            assert_eq!(counts.iter().map(|(count, _)| count).sum::<usize>(), places.taken);
            assert!(counts.iter().all(|(count, _)| (1..=8).contains(count)));
        }
    }
}
