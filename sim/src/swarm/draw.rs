//! Draws a plan from a seed. Every rate, size and count is random, and some are extreme.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::geometry::{Fragmentation, Geometry};
use racksum_proto::ids::Rank;
use racksum_proto::time::Span;
use racksum_proto::wire::Header;

use crate::engine::Picos;
use crate::fault::{Effect, Leg, Match, Rule};
use crate::host::Host;
use crate::inputs::{Inputs, Values};
use crate::link::LinkConfig;
use crate::plan::{Absence, JobPlan, Missing, Move, Network, OpPlan, Pause, Plan, PortPlan};
use crate::random::Random;

/// Draws the plan of `seed`.
#[must_use]
pub fn plan(seed: u64) -> Plan {
    let random = Random::new(seed);
    let mut network = network(&mut random.child("network"));
    let mut schedule = random.child("schedule");
    network.quantum = 1 << schedule.within(12..=24);
    network.work = Picos(if schedule.once_in(2) { 0 } else { schedule.below(400_000) });
    let mut jobs = jobs(&random, &network);
    jobs.iter_mut().for_each(|job| job.share = schedule.pick(&[0.01, 0.2, 0.5, 1.0]));
    let mut plan = Plan::new(seed, network, jobs);
    let mut faults = random.child("rules");
    // Faults stay mild when a rank is missing, because heavy loss would make live ranks look
    // missing.
    let harsh = plan.jobs.iter().all(|job| job.missing.is_none());
    plan.faults = rules(&plan, &mut faults, if harsh { 300_000 } else { 20_000 });
    if harsh && faults.once_in(3) {
        let pauses = 1 + faults.below(3);
        let pause = |_| Pause::draw(&plan, &mut faults, BUSY, Picos::from_millis(200));
        plan.pauses = (0..pauses).map(pause).collect();
    }
    if harsh && random.child("moves").once_in(5) {
        let spreads = &mut random.child("moves").nth(4);
        plan.moves = moves(&plan, &mut random.child("moves").nth(1), spreads);
        plan.prepares = random.child("moves").nth(2).once_in(2);
        plan.cancels = random.child("moves").nth(3).below(3);
    }
    if random.child("noise").once_in(4) {
        let noise = random.child("noise").across(1..=500);
        plan.noise = u32::try_from(noise).expect("the number is at most 500");
    }
    plan
}

/// Draws a variant of a plan with the same inputs, but with other faults, another network, other
/// slots and another cut.
pub(super) fn other(plan: &Plan, random: &mut Random) -> Plan {
    let network = network(random);
    let mut other = Plan::new(random.bits(), network, plan.jobs.clone());
    for job in &mut other.jobs {
        job.pool_slots = slots(random);
        job.cut = cut(random);
        job.in_flight = network.shard.receive_buffer / usize::from(job.world);
    }
    other.faults = rules(&other, random, 100_000);
    other
}

fn network(random: &mut Random) -> Network {
    let rate =
        |random: &mut Random| 1_000_000 * random.pick(&[100, 1_000, 10_000, 25_000, 100_000]);
    let delay = Picos(random.across(1_000_000..=1_000_000_000));
    let queue_bytes = if random.once_in(4) { u64::MAX } else { random.across(1 << 17..=1 << 23) };
    let mark_bytes = if random.once_in(2) { u64::MAX } else { random.across(1 << 14..=1 << 20) };
    let service = if random.once_in(2) { 0 } else { random.below(2_000_000) };
    let receive_buffer = 1 << random.within(18..=23);
    let send_buffer = if random.once_in(2) { usize::MAX } else { 1 << random.within(12..=22) };
    let mut port = |worker: bool| {
        let rate_bps = rate(random);
        // A host waits until its network card can send, so only the switch drops datagrams.
        let up = LinkConfig { mark_bytes, ..LinkConfig::lossless(rate_bps, delay) };
        let down = LinkConfig { rate_bps, delay, queue_bytes, mark_bytes };
        let service = Picos(if worker { service } else { service / 4 });
        PortPlan { up, down, receive_buffer, send_buffer, service }
    };
    let (worker, shard) = (port(true), port(false));
    let shards = random.pick(&[1, 1, 1, 2, 2, 3, 4]);
    let multicast = random.once_in(2);
    let own_numbers = random.once_in(2);
    let (quantum, work) = (1 << 24, Picos::ZERO);
    Network { shards, own_numbers, worker, shard, multicast, quantum, work }
}

fn jobs(random: &Random, network: &Network) -> Vec<JobPlan> {
    let count = if random.child("jobs").once_in(6) { 2 } else { 1 };
    (0..count).map(|i| job(&mut random.child("job").nth(i), network)).collect()
}

fn job(random: &mut Random, network: &Network) -> JobPlan {
    let world = if random.once_in(25) { random.within(17..=64) } else { random.across(1..=16) };
    let world = u16::try_from(world).expect("the number is at most 64");
    let max_ops = u16::try_from(random.across(1..=8)).expect("the number is at most 8");
    let mut job = JobPlan {
        lanes: random.pick(&[1, 1, 2, 3]),
        pool_slots: slots(random),
        max_ops,
        in_flight: network.shard.receive_buffer / usize::from(world),
        results_in_flight: network.worker.receive_buffer,
        ..JobPlan::new(world, cut(random))
    };
    let ops = 1 + random.below(6);
    job.missing = (world > 1 && random.once_in(30)).then(|| missing(random, world, ops));
    let mut start = Picos::ZERO;
    let skew = random.pick(&[Picos::ZERO, Picos::from_micros(100), Picos::from_millis(5)]);
    for number in 0..ops {
        let mut op = op(random, &job, start, skew);
        if job.missing.is_some() {
            op.timeout = Span::from_millis(1_500);
        }
        // A job with a missing rank has no disagreements: the rank that should disagree may be the
        // missing one, and never call the op.
        if job.missing.is_none() && world > 1 && number < 3 && random.once_in(16) {
            let rank = Rank(
                u16::try_from(random.below(u64::from(world)))
                    .expect("a rank is below the number of ranks"),
            );
            let other = odd(random, &job, op.descriptor);
            op.odd = (other != op.descriptor).then_some((rank, other));
        }
        job.ops.push(op);
        start = start + Picos(random.below(Picos::from_millis(3).0));
    }
    job
}

fn missing(random: &mut Random, world: u16, ops: u64) -> Missing {
    let rank = Rank(
        u16::try_from(random.below(u64::from(world))).expect("a rank is below the number of ranks"),
    );
    let absence = if random.once_in(2) {
        Absence::Calls(usize::try_from(random.below(ops)).expect("a plan has few ops"))
    } else {
        Absence::Dies(Picos(random.below(BUSY.0)))
    };
    Missing { rank, absence }
}

fn op(random: &mut Random, job: &JobPlan, start: Picos, skew: Picos) -> OpPlan {
    let descriptor = descriptor(random, job);
    let inputs = Inputs {
        seed: random.bits(),
        density_ppm: random.pick(&[0, 10_000, 100_000, 500_000, 1_000_000, 1_000_000]),
        aligned: random.once_in(4),
        values: random.pick(&[Values::Wide, Values::Wide, Values::Wild]),
    };
    let late = |_| start + Picos(random.below(skew.0 + 1));
    let mut starts: Vec<_> = (0..job.world).map(late).collect();
    if random.once_in(8) {
        let straggler = usize::try_from(random.below(u64::from(job.world)))
            .expect("a rank is below the number of ranks");
        starts[straggler] = start + Picos(random.below(Picos::from_millis(200).0));
    }
    OpPlan { descriptor, inputs, timeout: Span::from_secs(60), starts, odd: None }
}

fn descriptor(random: &mut Random, job: &JobPlan) -> Descriptor {
    let dtype = if random.once_in(2) { DType::F32 } else { random.pick(&DType::ALL) };
    let wires: Vec<_> = WireType::ALL.into_iter().filter(|wire| wire.carries(dtype)).collect();
    let wire = if random.once_in(2) { dtype.native_wire() } else { random.pick(&wires) };
    let reduction = random.pick(&Reduction::ALL);
    let lane = u8::try_from(random.below(u64::from(job.lanes))).expect("a lane is a u8");
    let block_log2 = random.pick(&[5, 5, 6, 7, 8, 8, 10]);
    let mut descriptor =
        Descriptor { wire, reduction, lane, block_log2, ..Descriptor::sum(0, dtype) };
    descriptor.elements = elements(random, &descriptor, job.world);
    descriptor
}

/// Draws a number of elements: none, one, close to a block or a window, or up to 100 windows.
fn elements(random: &mut Random, descriptor: &Descriptor, world: u16) -> u64 {
    let block = descriptor.block_elements() as u64;
    let window = Geometry::new(descriptor).window_elements() as u64;
    let most = MAX_BYTES / (u64::from(world) * descriptor.dtype.size() as u64);
    let elements = match random.below(10) {
        0 => random.below(2),
        1 => block - 1 + random.below(3),
        2 => window - 1 + random.below(3),
        3 => 2 * window + random.below(window),
        4 => random.across(1..=window),
        _ => random.across(window..=(100 * window).max(window + 1)),
    };
    elements.min(most)
}

/// Draws a variant of `descriptor`. For a few small tensors, the variant is the same.
fn odd(random: &mut Random, job: &JobPlan, descriptor: Descriptor) -> Descriptor {
    match random.below(4) {
        0 => Descriptor { tag: descriptor.tag + 1, ..descriptor },
        1 => Descriptor { elements: descriptor.elements / 3 + 2, ..descriptor },
        2 if job.lanes > 1 => Descriptor { lane: (descriptor.lane + 1) % job.lanes, ..descriptor },
        _ => Descriptor {
            reduction: match descriptor.reduction {
                Reduction::Max => Reduction::Min,
                _ => Reduction::Max,
            },
            ..descriptor
        },
    }
}

fn slots(random: &mut Random) -> u32 {
    u32::try_from(random.across(1..=64)).expect("the number is at most 64")
}

/// Draws a cut for an MTU of 1280 to 9000, or for the largest UDP datagrams.
fn cut(random: &mut Random) -> Fragmentation {
    let headers = Header::LEN + IP_AND_UDP_BYTES;
    let payload = match random.below(8) {
        0 => 65_507 - Header::LEN,
        1 | 2 => 1_280 - headers,
        3 | 4 => {
            usize::try_from(random.across(1_280..=9_000)).expect("an MTU fits a usize") - headers
        }
        _ => 1_500 - headers,
    };
    Fragmentation::new(payload).expect("every MTU is at least 1280")
}

fn rules(plan: &Plan, random: &mut Random, worst_loss_ppm: u32) -> Vec<Rule> {
    let mut rules = Vec::new();
    let ppm = |random: &mut Random, worst: u32| {
        u32::try_from(random.across(1_000..=u64::from(worst)))
            .expect("a chance is at most a million")
    };
    for leg in [Leg::Up, Leg::Down] {
        if random.once_in(2) {
            rules.push(Rule::chance(leg, ppm(random, worst_loss_ppm), Effect::Drop));
        }
        if random.once_in(3) {
            let late = Picos::ZERO..Picos(random.across(1_000_000..=200_000_000_000));
            rules.push(Rule::chance(leg, ppm(random, 200_000), Effect::Copy(late)));
        }
        if random.once_in(3) {
            let late = Picos::ZERO..Picos(random.across(1_000_000..=50_000_000_000));
            rules.push(Rule::chance(leg, ppm(random, 200_000), Effect::Delay(late)));
        }
    }
    if worst_loss_ppm > 50_000 && random.once_in(8) {
        rules.push(outage(plan, random));
    }
    rules
}

/// Draws one to four deaths of the shards, while most ops are in flight. Draws none if ranks
/// disagree about an op: a rank that had not received the failure before the move would time out.
fn moves(plan: &Plan, random: &mut Random, spreads: &mut Random) -> Vec<Move> {
    if plan.jobs.iter().flat_map(|job| &job.ops).any(|op| op.odd.is_some()) {
        return Vec::new();
    }
    let mut at = Picos::ZERO;
    let mut next = |_| {
        at = at + Picos(random.below(BUSY.0));
        let lasts = Picos(random.across(1_000_000..=100_000_000_000));
        let spread = Picos(spreads.pick(&[0, 0, 1_000_000_000, 20_000_000_000]));
        // The shards of the next move may die before all ranks have joined them.
        let death = Move { at, lasts, spread };
        at = at + spread + lasts;
        death
    };
    (0..1 + plan.seed % 4).map(&mut next).collect()
}

/// Draws a period in which a host cannot send, cannot receive, or can do neither.
fn outage(plan: &Plan, random: &mut Random) -> Rule {
    let hosts: Vec<Host> = plan.hosts().collect();
    let leg = random.pick(&[Some(Leg::Up), Some(Leg::Down), None]);
    let to = Match { leg, host: Some(random.pick(&hosts)), ..Match::default() };
    let start = Picos(random.below(BUSY.0));
    let end = start + Picos(random.below(Picos::from_millis(300).0));
    Rule { during: start..end, ..Rule::always(to, Effect::Drop) }
}

/// The length of the first part of a run, during which most seeds have ops in flight.
const BUSY: Picos = Picos::from_millis(10);
/// The maximum size of an op's tensors in bytes, summed over all ranks.
const MAX_BYTES: u64 = 2 << 20;
/// The size of the IPv6 and UDP headers of a datagram, in bytes.
const IP_AND_UDP_BYTES: usize = 48;
