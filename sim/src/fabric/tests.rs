//! Queues and links against what theory says of them.

use super::*;
use crate::link::LinkConfig;
use crate::random::Random;
use crate::workload::duration;

#[derive(Debug)]
enum Event {
    Arrival(Arrival),
    /// A source sends its next packet over a link.
    Send(LinkId),
}

impl From<Arrival> for Event {
    fn from(arrival: Arrival) -> Self {
        Self::Arrival(arrival)
    }
}

/// A packet with the time at which it was sent and its flow.
type Packet = (Picos, usize);

const BYTES: u32 = 1500;
const LINK: LinkConfig = LinkConfig::lossless(10_000_000_000, Picos::from_micros(1));
const TAKES: Picos = Picos(1_200_000);

/// Sends packets over the link of a worker to its switch after these times, one after another, and
/// returns the mean time that they wait in its queue, in transmissions.
fn mean_wait(packets: usize, mut pause: impl FnMut() -> Picos) -> f64 {
    let topology = TwoLayers { racks: 1, workers_per_rack: 1, worker: LINK, uplink: LINK }.build();
    let link = LinkId(0);
    let mut engine = Engine::<Event>::default();
    let mut fabric = Fabric::<Packet>::new(topology);
    engine.schedule(pause(), Event::Send(link));
    let (mut sent, mut waited) = (0, 0u128);
    while let Some(event) = engine.next_event() {
        let now = engine.now();
        match event {
            Event::Send(link) => {
                let packet =
                    Framed { packet: (now, 0), bytes: BYTES, priority: 0, is_marked: false };
                assert!(fabric.send(&mut engine, link, packet));
                sent += 1;
                if sent < packets {
                    engine.schedule(now + pause(), Event::Send(link));
                }
            }
            Event::Arrival(arrival) => {
                let (at, _) = fabric.take(&mut engine, arrival).packet;
                waited += u128::from(now.since(at + TAKES + LINK.delay).0);
            }
        }
    }
    assert_eq!(fabric.unsound(), None);
    waited as f64 / packets as f64 / TAKES.0 as f64
}

#[test]
fn poisson_arrivals_wait_as_in_m_d_1() {
    for load in [0.3, 0.5, 0.8, 0.9] {
        let mut random = Random::new(1);
        let mean = TAKES.0 as f64 / load;
        let wait = mean_wait(2_000_000, || {
            let uniform = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
            duration::from_units(-mean * (1.0 - uniform).ln(), Picos(1)).unwrap()
        });
        // Pollaczek and Khinchine: load / (2 (1 - load)) services.
        let expected = load / (2.0 * (1.0 - load));
        assert!((wait / expected - 1.0).abs() < 0.02, "load {load}: {wait}, expected {expected}");
    }
}

#[test]
fn regular_arrivals_below_the_rate_do_not_wait() {
    assert!(mean_wait(1000, || TAKES).abs() < 1e-12);
    assert!(mean_wait(1000, || Picos(TAKES.0 * 3 / 2)).abs() < 1e-12);
    // At twice the rate, packet n waits for n / 2 others.
    let wait = mean_wait(1001, || Picos(TAKES.0 / 2));
    assert!((wait - 250.0).abs() < 1e-6, "{wait}");
}

#[test]
fn equal_flows_into_one_link_end_together() {
    let (flows, packets) = (8_usize, 500_u64);
    let topology =
        TwoLayers { racks: 1, workers_per_rack: flows + 1, worker: LINK, uplink: LINK }.build();
    let receiver = NodeId(flows);
    let to_receiver = |link: &Link| link.to == receiver;
    let last_hop = LinkId(topology.links().iter().position(to_receiver).unwrap());
    let first_hops: Vec<_> = (0..flows)
        .map(|flow| topology.links().iter().position(|link| link.from == NodeId(flow)).unwrap())
        .collect();
    let mut engine = Engine::<Event>::default();
    let mut fabric = Fabric::<Packet>::new(topology);
    for _ in 0..packets {
        for (flow, link) in first_hops.iter().enumerate() {
            let packet =
                Framed { packet: (Picos::ZERO, flow), bytes: BYTES, priority: 0, is_marked: false };
            fabric.send(&mut engine, LinkId(*link), packet);
        }
    }
    let (mut ends, mut received) = (vec![Picos::ZERO; flows], vec![0; flows]);
    while let Some(event) = engine.next_event() {
        let Event::Arrival(arrival) = event else { continue };
        let framed = fabric.take(&mut engine, arrival);
        if arrival.0 == last_hop {
            ends[framed.packet.1] = engine.now();
            received[framed.packet.1] += 1;
        } else {
            fabric.send(&mut engine, last_hop, framed);
        }
    }
    assert_eq!(received, vec![packets; flows]);
    // The link is busy from the first packet's arrival to the last packet's end.
    let last = Picos(TAKES.0 * (1 + flows as u64 * packets) + 2 * LINK.delay.0);
    assert_eq!(ends.iter().max(), Some(&last));
    let first = ends.iter().min().unwrap();
    assert!(last.since(*first) <= Picos(TAKES.0 * flows as u64), "{ends:?}");
    // All but the packets of one round wait at the switch.
    let most = fabric.port(last_hop).counts().most_queued / u64::from(BYTES);
    let expected = (flows as u64 - 1) * packets;
    assert!(most.abs_diff(expected) <= flows as u64, "{most} {expected}");
    assert_eq!(fabric.unsound(), None);
}
