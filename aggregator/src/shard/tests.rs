use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use racksum_net::udp::{Received, UdpConfig};
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, OpId, WindowId};
use racksum_proto::path::Datagram;
use racksum_proto::reject::Reject;
use racksum_proto::wire::{Kind, NackEntries, NackEntry, OpenEncoder, Opening};

use super::*;

/// Returns a shard that runs on the thread of the test.
fn shard() -> (Shard, Sender<Command>) {
    let socket = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let (commands, inbox) = channel();
    let shard = Shard {
        socket: Arc::new(socket),
        clock: Clock::start(),
        inbox,
        waker: Waker::new().unwrap(),
        gather: Gather::new(0, LONGEST_PAUSE),
        jobs: BTreeMap::new(),
        schedule: DeficitRoundRobin::new(QUANTUM),
        parent_jobs: BTreeMap::new(),
        proofs: Proofs::default(),
        floods: Floods::default(),
        other_shards: OtherShards::default(),
        arena: Arena::new(2 * RECV_BATCH + 4 * usize::try_from(WINDOWS).unwrap()).unwrap(),
        incoming: Vec::with_capacity(RECV_BATCH),
        recv: RecvRing::new(),
        out: Outbox::new(),
        stats: ShardStats::default(),
        shared: Arc::default(),
        published: Time(0),
        failure: Failure::new(),
        unserved: false,
        more_commands: false,
    };
    (shard, commands)
}

#[test]
fn more_datagrams_in_one_receive_than_a_window_has_are_all_taken() {
    let (mut shard, _commands) = shard();
    for count in [1, udp::MAX_SEGMENTS, udp::MAX_SEGMENTS + 1, 100, 1000] {
        let ack = Header::ping(JobId(7), Generation(0), 0);
        let mut header = [0; Header::LEN];
        ack.encode(&mut header);
        let mut joined = shard.arena.take().unwrap();
        joined.extend_from_slice(&header.repeat(count));
        let from = "127.0.0.1:9".parse().unwrap();
        let meta =
            Received { from, len: joined.len(), stride: Header::LEN, ce: false, tos: 0, at: None };
        shard.incoming = vec![joined];
        let before = shard.stats.events.rejects.of(Reject::Job);
        shard.take_datagrams(Time(0), 0, &meta);
        assert_eq!(shard.stats.events.rejects.of(Reject::Job) - before, count as u64);
        let joined = shard.incoming.remove(0);
        shard.arena.give(joined);
    }
}

#[test]
fn a_shard_that_is_never_idle_shows_its_counters_all_the_same() {
    let (mut shard, commands) = shard();
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"noise", shard.socket.local_addr()).unwrap();
    // Counters are published every 100 ms.
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(shard.turn(), Some(1));
    assert_eq!(shard.shared.lock().unwrap().datagrams.received, 1);
    commands.send(Command::Stop).unwrap();
    assert_eq!(shard.turn(), None);
}

#[test]
fn a_ping_is_answered_alike_where_its_token_is_known_and_not_for_ever() {
    // wire: W-75
    let (mut shard, _commands) = shard();
    let caller = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    caller.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (token, stranger) = (Key([1; Key::LEN]), Key([2; Key::LEN]));
    let arrived = Arc::default();
    assert!(shard.handle_command(Command::Prove(token, Proof::OfCaller(Arc::clone(&arrived)))));
    let at = shard.socket.local_addr();
    let mut ask = |token, size| {
        let (mut bytes, before) = (Vec::new(), shard.stats.datagrams);
        Datagram { token, seen: None, size }.encode(&mut bytes);
        caller.send_to(&bytes, at).unwrap();
        let answers = |shard: &Shard| shard.stats.datagrams.sent - before.sent;
        while shard.stats.datagrams.received == before.received {
            shard.turn().unwrap();
        }
        let mut answer = [0; 2000];
        let answer = (answers(&shard) > 0).then(|| {
            let len = caller.recv(&mut answer).unwrap();
            Datagram::decode(&answer[..len]).unwrap()
        });
        (answer, shard.stats.events.rejects.total())
    };
    let seen = Some(caller.local_addr().unwrap());
    for size in [200, 1472, 900] {
        assert_eq!(ask(token, size), (Some(Datagram { token, seen, size }), 0));
    }
    assert_eq!(arrived.load(std::sync::atomic::Ordering::Relaxed), 1472);
    assert_eq!(ask(stranger, 900), (None, 1));
    let answers = (0..200).filter(|_| ask(token, 200).0.is_some()).count();
    assert_eq!(answers, 125, "three of the 128 answers were already used");
    assert!(shard.handle_command(Command::Proven(token)));
}

/// The number of windows in the op of each job below.
const WINDOWS: u32 = 64;

/// A job of the shard. All of its ranks share one socket of the test.
struct Tenant {
    id: JobId,
    socket: std::net::UdpSocket,
}

impl Tenant {
    fn new(shard: &mut Shard, id: u32, world: u16, share: f64) -> Self {
        let (id, socket) = (JobId(id), std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let config = Config {
            job: id,
            generation: Generation(0),
            world,
            lanes: 1,
            shard: 0,
            shards: 1,
            pool_slots: WINDOWS,
            max_ops: 4,
            cut: Fragmentation::new(1408).unwrap(),
            results_in_flight: 1 << 20,
            moved_at: None,
            weight: None,
            has_parent: false,
        };
        let new = NewJob {
            config,
            ranks: vec![socket.local_addr().unwrap(); world.into()],
            names: (0..world).map(Rank).collect(),
            parent: None,
            group: None,
            job_keys: JobKeys::new(DataAuth::None, world).unwrap(),
            share,
        };
        assert!(shard.handle_command(Command::Add(Box::new(new))));
        Self { id, socket }
    }

    /// Passes a rank's message to the shard.
    fn send_message(&self, shard: &mut Shard, header: Header, body: &[u8]) {
        let mut bytes = [0; Header::LEN];
        let length = u16::try_from(body.len()).unwrap();
        Header { length, ..header }.encode(&mut bytes);
        let mut buffer = shard.arena.take().unwrap();
        buffer.extend_from_slice(&bytes);
        buffer.extend_from_slice(body);
        let (from, len) = (self.socket.local_addr().unwrap(), buffer.len());
        let meta = Received { from, len, stride: len, ce: false, tos: 0, at: None };
        shard.incoming.insert(0, buffer);
        shard.take_datagrams(Time(0), 0, &meta);
        let buffer = shard.incoming.remove(0);
        shard.arena.give(buffer);
    }

    fn header(&self, kind: Kind, rank: u16, index: u32) -> Header {
        let (sender, window) = (Rank(rank), WindowId::new(OpId(0), index));
        Header { kind, sender, window, ..Header::ping(self.id, Generation(0), 0) }
    }

    /// Opens an op at all ranks. Only the first rank sends data, one block for each window.
    fn work(&self, shard: &mut Shard, world: u16) {
        let sum = Descriptor::sum(u64::from(WINDOWS) * 60 * 256, DType::F32);
        for rank in 0..world {
            let mut body = [0; 1200];
            let windows = (0..WINDOWS).map(|_| Opening::of(rank == 0));
            let (len, _) = OpenEncoder::new().encode(&sum, None, windows, false, &mut body);
            self.send_message(shard, self.header(Kind::Open, rank, 0), &body[..len]);
        }
        for index in 0..WINDOWS {
            let header = Header { mask: 1, ..self.header(Kind::Data, 0, index) };
            self.send_message(shard, header, &[0; 1024]);
        }
    }

    /// Reports that a rank lacks all results.
    fn nack(&self, shard: &mut Shard, rank: u16) {
        let entries = [0, WINDOWS]
            .map(|index| NackEntry { window: WindowId::new(OpId(0), index), fragments: 0 });
        let mut body = [0; 100];
        let len = NackEntries::encode(entries.into_iter(), &mut body);
        self.send_message(shard, self.header(Kind::Nack, rank, 0), &body[..len]);
    }
}

/// Gives each job one turn, and returns the number of bytes sent.
fn sent(shard: &mut Shard) -> u64 {
    let before = shard.stats.bytes.sent;
    shard.serve(Time(0));
    shard.stats.bytes.sent - before
}

/// Gives every job turns until no job has work left.
fn settle(shard: &mut Shard) {
    let turns = (0..10_000).take_while(|_| {
        shard.serve(Time(0));
        shard.unserved
    });
    assert!(turns.count() < 10_000, "the work ends");
}

#[test]
fn a_job_that_only_asks_is_answered_within_its_turns_and_another_has_its_own() {
    let (mut shard, _commands) = shard();
    let world = 16;
    let asker = Tenant::new(&mut shard, 1, world, 1.0);
    let other = Tenant::new(&mut shard, 2, 1, 99.0);
    asker.work(&mut shard, world);
    settle(&mut shard);
    // All ranks of the first job request all results at once.
    (0..world).for_each(|rank| asker.nack(&mut shard, rank));
    other.work(&mut shard, 1);
    let folds = |shard: &Shard, id| shard.jobs[&id].events.folds;
    // The other job's results are 64 datagrams of one block each.
    let others = u64::from(WINDOWS) * (1024 + Header::LEN as u64);
    let most = (QUANTUM / 100 + udp::MAX_DATAGRAM) as u64;
    let first = sent(&mut shard);
    assert!(first <= others + most, "{first} bytes in one turn, more than {others} + {most}");
    assert_eq!(folds(&shard, other.id), u64::from(WINDOWS), "the other job has its turn");
    let mut turns = 1;
    while shard.unserved {
        let sent = sent(&mut shard);
        assert!(sent <= most, "{sent} bytes in one turn, more than {most}");
        turns += 1;
        assert!(turns < 1000, "the answers end");
    }
    let again = shard.jobs[&asker.id].events.fragments_again;
    assert_eq!(again, u64::from(world) * u64::from(WINDOWS), "every nack is eventually answered");
}

#[test]
fn a_job_that_is_flooded_by_its_rank_is_not_heard_until_it_has_paid() {
    let (mut shard, _commands) = shard();
    let flooder = Tenant::new(&mut shard, 1, 1, 50.0);
    let other = Tenant::new(&mut shard, 2, 1, 50.0);
    let overdrawn = |shard: &Shard, id| shard.jobs[&id].events.rejects.of(Reject::Overdrawn);
    let mut asks = 0;
    while overdrawn(&shard, flooder.id) == 0 {
        flooder.nack(&mut shard, 0);
        asks += 1;
        assert!(asks < 100_000, "datagrams of a job in debt are eventually rejected");
    }
    other.work(&mut shard, 1);
    assert_eq!(overdrawn(&shard, other.id), 0);
    settle(&mut shard);
    let before = overdrawn(&shard, flooder.id);
    flooder.work(&mut shard, 1);
    assert_eq!(overdrawn(&shard, flooder.id), before, "the job has paid its debt");
    settle(&mut shard);
    for id in [flooder.id, other.id] {
        assert_eq!(shard.jobs[&id].events.folds, u64::from(WINDOWS));
    }
}

#[test]
fn opens_are_no_flood_and_asks_may_be_one() {
    const MANY: usize = 300;
    let overflow = |shard: &mut Shard, ms, drops| {
        let now = Time(0) + Span::from_millis(ms);
        shard.floods.check(now, drops, || true, |_| false)
    };
    let (mut shard, _commands) = shard();
    let tenant = Tenant::new(&mut shard, 1, 1, 100.0);
    tenant.work(&mut shard, 1);
    overflow(&mut shard, 10, 1);
    let sum = Descriptor::sum(u64::from(WINDOWS) * 60 * 256, DType::F32);
    let mut body = [0; 1200];
    let opening = std::iter::once(Opening::of(true));
    let (len, _) = OpenEncoder::new().encode(&sum, None, opening, false, &mut body);
    for _ in 0..MANY {
        tenant.send_message(&mut shard, tenant.header(Kind::Open, 0, 0), &body[..len]);
    }
    assert_eq!(overflow(&mut shard, 20, 2), None);
    (0..MANY).for_each(|_| tenant.nack(&mut shard, 0));
    assert_eq!(overflow(&mut shard, 30, 3), Some(vec![tenant.socket.local_addr().unwrap()]));
}

#[test]
fn a_parent_is_a_peer_as_ranks_are() {
    let [rank, parent, other] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let destinations = Destinations {
        ranks: vec![rank],
        group: None,
        unicast: Vec::new(),
        sealer: None,
        parent: Some(parent),
        parent_sealer: None,
    };
    assert_eq!([rank, parent, other].map(|addr| destinations.is_peer(addr)), [true, true, false]);
}

#[test]
fn data_is_taken_between_commands_however_many_there_are() {
    let (mut shard, commands) = shard();
    let tenant = Tenant::new(&mut shard, 1, 1, 100.0);
    let mut reports = Vec::new();
    for job in [None, Some(tenant.id), Some(JobId(7))].into_iter().cycle().take(2 * MOST_COMMANDS) {
        let (sender, report) = oneshot::channel();
        commands.send(Command::Report(job, sender)).unwrap();
        reports.push(report);
    }
    let to = shard.socket.local_addr();
    tenant.socket.send_to(&[0; Header::LEN], to).unwrap();
    let received = |reports: &mut [oneshot::Receiver<ShardReport>]| {
        reports.iter_mut().map(|report| report.try_recv().map(|it| it.jobs.len())).collect()
    };
    assert_eq!(shard.turn(), Some(1), "the datagram has arrived");
    let counts: Vec<_> = received(&mut reports[..=MOST_COMMANDS]);
    assert_eq!(counts[..3], [Ok(1), Ok(1), Ok(0)], "all jobs, one job, an unknown job");
    assert!(counts[..MOST_COMMANDS].iter().all(Result::is_ok));
    assert!(
        counts[MOST_COMMANDS].is_err() && shard.more_commands,
        "the shard does not sleep while commands wait"
    );
    shard.turn();
    assert!(received(&mut reports[MOST_COMMANDS..]).iter().all(Result::is_ok));
    shard.turn();
    assert!(!shard.more_commands);
}

#[test]
fn counters_outlive_their_job() {
    let (mut shard, _commands) = shard();
    let tenant = Tenant::new(&mut shard, 1, 1, 100.0);
    tenant.work(&mut shard, 1);
    settle(&mut shard);
    let stranger = "127.0.0.1:9".parse().unwrap();
    shard.jobs.get_mut(&tenant.id).unwrap().destinations.ranks = vec![stranger];
    tenant.nack(&mut shard, 0);
    let events = published(&mut shard).events;
    assert_eq!((events.folds, events.rejects.of(Reject::Sender)), (u64::from(WINDOWS), 1));
    shard.remove(tenant.id);
    assert_eq!(published(&mut shard).events, events);
    // The second of these jobs replaces the first, which has the same number.
    for _ in 0..2 {
        let tenant = Tenant::new(&mut shard, 1, 1, 100.0);
        tenant.work(&mut shard, 1);
        settle(&mut shard);
    }
    assert_eq!(published(&mut shard).events.folds, 3 * u64::from(WINDOWS));
}

/// Waits for the next publication, and returns the published counters.
fn published(shard: &mut Shard) -> ShardStats {
    let before = shard.published;
    while shard.published == before {
        shard.publish();
    }
    shard.shared.lock().unwrap().clone()
}
