use super::*;

fn v4(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// Returns a caller without an identity.
fn stranger(addr: IpAddr) -> CallerKey {
    CallerKey::new(None, addr)
}

/// Tries to take `tries` permits and returns those it gets.
fn take(limit: &CallerLimit, caller: &CallerKey, tries: usize) -> Vec<(Permit, Revoked)> {
    (0..tries).filter_map(|_| limit.acquire(caller.clone())).collect()
}

/// Returns the number of permits that a caller holds at all its addresses.
fn taken_by(limit: &CallerLimit, caller: &CallerKey) -> usize {
    limit.lock().callers.get(&caller.who).map_or(0, |permits| permits.taken)
}

#[test]
fn an_address_has_few_places_and_they_come_back() {
    let limit = CallerLimit::new(8, 3);
    let [one, two] = [1, 2].map(|last| stranger(v4(last)));
    let held = take(&limit, &one, 9);
    assert_eq!((held.len(), limit.has_room(&one), limit.has_room(&two)), (3, false, true));
    drop(held);
    assert_eq!((taken_by(&limit, &one), take(&limit, &one, 9).len()), (0, 3));
    let holders = limit.lock();
    assert_eq!((holders.taken, holders.callers.len(), holders.counts.len()), (0, 0, 0));
}

#[test]
fn a_network_of_ipv6_counts_as_one_address() {
    let limit = CallerLimit::new(8, 2);
    let of = |text: &str| stranger(text.parse().unwrap());
    let _held = [limit.acquire(of("2001:db8::1")), limit.acquire(of("2001:db8::ffff:0:2"))];
    assert!(limit.acquire(of("2001:db8::3")).is_none());
    assert!(limit.acquire(of("2001:db8:0:1::3")).is_some());
    assert_eq!(of("::ffff:10.0.0.1").who, stranger(v4(1)).who);
}

#[tokio::test]
async fn when_all_places_are_taken_whoever_has_most_gives_up_its_oldest() {
    let limit = CallerLimit::new(100, 40);
    let mut floods: Vec<_> = (1..=50).map(|addr| take(&limit, &stranger(v4(addr)), 40)).collect();
    // A new caller is refused only once it has about as many permits as every other caller.
    for addr in 1..=50 {
        floods.push(take(&limit, &stranger(v4(addr)), 40));
    }
    let joins = take(&limit, &stranger(v4(200)), 40);
    assert!(!joins.is_empty(), "the new caller gets permits");
    assert_eq!(limit.lock().taken, 100);
    let most = (1..=50).map(|addr| taken_by(&limit, &stranger(v4(addr)))).max().unwrap();
    assert!(joins.len() + 1 >= most, "{} of {most}", joins.len());
    // The oldest permit was revoked first, and giving it back frees no other permit.
    let oldest = &mut floods[0];
    oldest[0].1.wait().await;
    drop(oldest.remove(0));
    assert_eq!(limit.lock().taken, 100);
}

#[test]
fn an_identity_has_no_more_places_for_calling_from_many_addresses() {
    let limit = CallerLimit::new(100, 40);
    let flood = |addr| CallerKey::new(Some("flood"), v4(addr));
    let of_flood: Vec<_> = (1..=200).flat_map(|addr| take(&limit, &flood(addr), 1)).collect();
    assert_eq!(of_flood.len(), 100, "half of the addresses have one permit each");
    // The team calls from one host.
    let team = CallerKey::new(Some("team"), v4(1));
    let of_team = take(&limit, &team, 10);
    assert_eq!((of_team.len(), taken_by(&limit, &team)), (10, 10));
    // The team's host has more permits than any other, but keeps them during the flood.
    let more: Vec<_> = (201..=255).flat_map(|addr| take(&limit, &flood(addr), 1)).collect();
    assert_eq!((more.len(), taken_by(&limit, &team)), (0, 10));
}

#[tokio::test]
async fn the_addresses_of_an_identity_share_its_places() {
    let limit = CallerLimit::new(10, 40);
    let [one, other] = [1, 2].map(|last| CallerKey::new(Some("team"), v4(last)));
    let mut of_one = take(&limit, &one, 40);
    assert_eq!((of_one.len(), take(&limit, &one, 1).len()), (10, 0));
    assert_eq!(take(&limit, &other, 40).len(), 5);
    of_one[0].1.wait().await;
}

#[test]
fn random_callers_never_take_more_than_there_is() {
    let (limit, mut held, mut seed) = (CallerLimit::new(32, 8), Vec::new(), 1u64);
    for _ in 0..20_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let draw = seed >> 33;
        if draw % 3 == 0 && !held.is_empty() {
            drop(held.swap_remove(usize::try_from(draw).unwrap() % held.len()));
        } else {
            let addr = v4(u8::try_from(draw % 9).unwrap());
            let identity = ["one", "other"].get(usize::try_from(draw / 9 % 3).unwrap());
            held.extend(limit.acquire(CallerKey::new(identity.copied(), addr)));
        }
        let holders = limit.lock();
        let counts: BTreeSet<_> =
            holders.callers.iter().map(|(who, permits)| (permits.taken, who.clone())).collect();
        assert_eq!(counts, holders.counts);
        let taken: usize = counts.iter().map(|(count, _)| count).sum();
        assert_eq!(taken, holders.taken);
        assert!(taken <= 32 && counts.iter().all(|(count, _)| *count > 0));
        for permits in holders.callers.values() {
            let counts: BTreeSet<_> =
                permits.by_address.iter().map(|(of, permits)| (permits.len(), *of)).collect();
            assert_eq!(counts, permits.counts);
            assert_eq!(counts.iter().map(|(count, _)| count).sum::<usize>(), permits.taken);
            assert!(counts.iter().all(|(count, _)| (1..=8).contains(count)));
        }
    }
}
