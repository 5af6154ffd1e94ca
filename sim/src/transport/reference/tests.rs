use super::*;
use crate::fabric::{NodeId, TwoLayers};
use crate::link::LinkConfig;

#[derive(Debug)]
enum Event {
    Arrival(Arrival),
    Overdue(Overdue),
}

impl From<Arrival> for Event {
    fn from(arrival: Arrival) -> Self {
        Self::Arrival(arrival)
    }
}

impl From<Overdue> for Event {
    fn from(overdue: Overdue) -> Self {
        Self::Overdue(overdue)
    }
}

/// Runs one collective of several jobs, each with these workers, and returns the time at which each
/// job's last worker ended.
fn run(
    racks: TwoLayers,
    config: Config,
    jobs: &[&[usize]],
    packets: u32,
) -> (Vec<Picos>, Counts, Fabric<Packet>) {
    let topology = racks.build();
    let mut engine = Engine::<Event>::default();
    let mut reference = Reference::new(config);
    for (salt, workers) in (0..).zip(jobs) {
        let workers: Vec<_> = workers.iter().map(|worker| NodeId(*worker)).collect();
        reference.add_job(topology.tree(&workers, salt).unwrap()).unwrap();
    }
    let mut fabric = Fabric::new(topology);
    let mut ends = vec![Picos::ZERO; jobs.len()];
    let mut net = Net { engine: &mut engine, fabric: &mut fabric };
    for (job, _) in (0..).zip(jobs) {
        for worker in 0..reference.workers(job) {
            reference.begin(&mut net, Member { job, worker }, packets);
        }
    }
    let mut left: usize = jobs.iter().map(|workers| workers.len()).sum();
    while let Some(event) = net.engine.next_event() {
        match event {
            Event::Arrival(arrival) => {
                let packet = net.fabric.take(net.engine, arrival);
                if let Some(member) = reference.arrive(&mut net, packet) {
                    ends[member.job as usize] = net.engine.now();
                    left -= 1;
                }
            }
            Event::Overdue(overdue) => reference.overdue(&mut net, overdue),
        }
    }
    assert_eq!(left, 0, "every worker ends");
    (ends, reference.counts(), fabric)
}

const MICRO: Picos = Picos::from_micros(1);

fn two_racks(workers_per_rack: usize, gbit: u64) -> TwoLayers {
    let link = LinkConfig::lossless(gbit * 1_000_000_000, MICRO);
    TwoLayers { racks: 2, workers_per_rack, worker: link, uplink: link }
}

fn config(slots: u32) -> Config {
    Config { format: Format::new(Some(9000), None).unwrap(), slots, timeout: None }
}

#[test]
fn packets_have_the_sizes_of_the_study() {
    let format = |wire_bytes, elements| {
        Format::new(wire_bytes, elements).map(|it| (it.wire_bytes, it.elements))
    };
    assert_eq!(format(Some(9000), None), Some((9000, 2229)));
    assert_eq!(format(None, Some(64)), Some((338, 64)));
    assert_eq!(format(None, Some(256)), Some((1106, 256)));
    assert_eq!(format(None, None), Some((1500, 256)));
    assert_eq!(format(Some(1500), Some(256)), Some((1500, 256)));
    assert_eq!(format(Some(81), None), None);
    assert_eq!(format(Some(84), None), None);
    assert_eq!(format(Some(338), Some(65)), None);
    assert_eq!(format(None, Some(u32::MAX)), None);
    assert_eq!(Format::new(Some(9000), None).unwrap().packets(2230), 2);
}

#[test]
fn one_packet_takes_the_time_of_its_hops() {
    let (ends, counts, _) = run(two_racks(1, 100), config(512), &[&[0, 1]], 1);
    // Up two links and down two, each with a transmission of 720 ns and a delay of 1 us.
    assert_eq!(ends, [Picos(4 * 1_720_000)]);
    // Two workers up to their racks, two racks to the core, and back.
    assert_eq!((counts.sent, counts.hops, counts.folded), (2, 8, 4));
}

#[test]
fn the_window_limits_the_rate_up_to_the_round_trip() {
    // A round trip of 4 x 1.72 us holds 9.56 packets of 720 ns.
    let takes = 720_000;
    let round_trip = 4 * (takes + MICRO.0);
    let packets = 100_000;
    for slots in [1, 2, 5, 9, 10, 11, 64, 512] {
        let (ends, ..) = run(two_racks(1, 100), config(slots), &[&[0, 1]], packets);
        let by_window = u64::from(packets.div_ceil(slots)) * round_trip;
        let expected = by_window.max(u64::from(packets) * takes);
        let error = ends[0].0 as f64 / expected as f64 - 1.0;
        assert!(error.abs() < 2e-4, "{slots} slots: {error}");
    }
}

#[test]
fn one_stream_leaves_a_rack_whatever_the_number_of_its_workers() {
    let packets = 1000;
    let (ends, counts, fabric) =
        run(two_racks(4, 10), config(128), &[&[0, 1, 2, 3, 4, 5, 6, 7]], packets);
    let takes = 7_200_000;
    assert_eq!(ends, [Picos(u64::from(packets) * takes + 3 * takes + 4 * MICRO.0)]);
    assert_eq!(counts.folded, u64::from(packets) * (8 + 2));
    let links = fabric.topology().links().iter().enumerate();
    for (link, _) in links {
        let counts = fabric.port(LinkId(link)).counts();
        assert_eq!((counts.packets, counts.dropped), (u64::from(packets), 0));
        assert_eq!(counts.busy, Picos(u64::from(packets) * takes));
    }
}

#[test]
fn equal_jobs_share_a_link_equally() {
    let packets = 20_000;
    let jobs: [&[usize]; 4] = [&[0, 1]; 4];
    let (ends, ..) = run(two_racks(1, 10), config(128), &jobs, packets);
    let all = 4 * u64::from(packets) * 7_200_000;
    for end in ends {
        let error = end.0 as f64 / all as f64 - 1.0;
        assert!(error.abs() < 0.01, "{error}");
    }
}

#[test]
fn lost_packets_are_sent_again_and_counted_once() {
    // The core's links hold few of the packets of four racks' worth of workers.
    let mut racks = two_racks(4, 10);
    racks.uplink = LinkConfig { queue_bytes: 20_000, ..racks.uplink };
    let config = Config { timeout: Some(Picos::from_millis(1)), ..config(32) };
    let packets = 500;
    let jobs: [&[usize]; 3] = [&[0, 1, 4, 5], &[2, 3, 6, 7], &[0, 3, 5, 6]];
    let (_, counts, _) = run(racks, config, &jobs, packets);
    assert!(counts.dropped > 100 && counts.sent_again > 100, "{counts:?}");
    // Each switch counted each child's packet once: two racks with two workers, and the core.
    assert_eq!(counts.folded, 3 * u64::from(packets) * (4 + 2));
    assert_eq!(counts.sent, 3 * 4 * u64::from(packets));
}
