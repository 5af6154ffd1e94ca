//! Attacks by an admitted tenant. Each attack runs during the ops of another tenant, and prints a
//! line of figures: the bytes that the attacker sent and received, and the other tenant's ops
//! before and during the attack. `RACKSUM_ATTACK_S` sets how many seconds each attack lasts.

use std::net::UdpSocket;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use racksum_net::auth::Sealer;
use racksum_net::clock::Clock;
use racksum_net::udp::Transmit;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{FromWorker, Join, Welcome};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::{Fragmentation, Geometry, WINDOW_BYTES};
use racksum_proto::ids::{Generation, OpId, Rank, WindowId};
use racksum_proto::time::Span;
use racksum_proto::wire::{Header, Kind, NackEntries, NackEntry, OpenEncoder, Opening};
use racksum_worker::Client;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::impostor::{Impostor, give_way};
use crate::rig::{Rig, in_a_process_of_its_own, with_retries};
use crate::strangers::{datagram, header};

/// Default duration of an attack, in seconds.
const LASTS: u64 = 1;
/// Number of ranks of the other tenant's job.
const WORLD: u16 = 2;
/// Number of elements of the other tenant's ops: 64 KiB of i32.
const ELEMENTS: u64 = 16 << 10;
/// Number of windows of the attacker's op.
const WINDOWS: u32 = 64;

/// The only rank of a job. It sends its own data but acknowledges nothing.
struct Attacker {
    impostor: Impostor,
    welcome: Welcome,
    sealer: Option<Sealer>,
    /// Socket to send on instead of sending to the shard, if set. Sending to a peer that no thread
    /// reads gives the host the same work as an attack, and the aggregator none.
    aside: Option<UdpSocket>,
    /// Bytes sent to the shard.
    sent: u64,
}

impl Attacker {
    fn join(rig: &Rig) -> Self {
        let mut impostor = Impostor::connect(rig);
        let wish = impostor.wish("attacker", 0, 1);
        let welcome = impostor.join(Join { receive_buffer: 8 << 20, max_datagram: 65_507, ..wish });
        let sealer =
            welcome.keys.and_then(|keys| Sealer::of_rank(welcome.data_auth, &keys, Rank(0), 0));
        Self { impostor, welcome, sealer, aside: None, sent: 0 }
    }

    fn send(&mut self, header: &Header, body: &[u8]) {
        let plain = datagram(header, body);
        let mut sealed = Vec::new();
        if let Some(sealer) = &mut self.sealer {
            let nowhere = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
            sealer.seal(&Transmit::new(nowhere, &plain, plain.len()), &mut sealed);
        }
        let bytes = if self.sealer.is_some() { &sealed } else { &plain };
        match &self.aside {
            // Ignore errors, because no thread reads these datagrams.
            Some(nobody) => drop(nobody.send(bytes)),
            None => {
                self.impostor.send(0, bytes);
                self.sent += bytes.len() as u64;
            }
        }
    }

    fn header(&self, kind: Kind, index: u32) -> Header {
        let window = WindowId::new(OpId(0), index);
        Header { kind, window, ..header(self.welcome.job, Generation(0), Rank(0)) }
    }

    /// Opens an op and sends all of it, so that there are results to request.
    fn work(&mut self) {
        let sum = Descriptor::sum(u64::from(WINDOWS) * WINDOW_BYTES as u64 / 4, DType::F32);
        let mut body = [0; 1200];
        let windows = (0..WINDOWS).map(|_| Opening::of(true));
        let (len, _) = OpenEncoder::new().encode(&sum, None, windows, false, &mut body);
        self.send(&self.header(Kind::Open, 0), &body[..len]);
        let payload = usize::from(self.welcome.fragment_payload);
        let cut = Fragmentation::new(payload).expect("an aggregator grants a valid fragment size");
        let mask = Geometry::new(&sum).full_mask(0);
        let window = vec![1; WINDOW_BYTES];
        for index in 0..WINDOWS {
            for (fragment, body) in (0..).zip(window.chunks(cut.payload())) {
                self.send(&Header { mask, fragment, ..self.header(Kind::Data, index) }, body);
            }
            // Pause, because a receive buffer holds only a part of the op.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Requests every result of the op with one nack.
    fn ask(&mut self) {
        let all = [0, WINDOWS]
            .map(|index| NackEntry { window: WindowId::new(OpId(0), index), fragments: 0 });
        let mut body = [0; 64];
        let len = NackEntries::encode(all.into_iter(), &mut body);
        self.send(&self.header(Kind::Nack, 0), &body[..len]);
    }
}

/// Returns a socket whose peer is never read.
fn nobody() -> UdpSocket {
    let bound = || UdpSocket::bind("127.0.0.1:0").unwrap();
    let (from, to) = (bound(), bound());
    from.connect(to.local_addr().unwrap()).unwrap();
    // The leak keeps the receiver open, because sends to a closed port would fail.
    Box::leak(Box::new(to));
    from
}

/// Runs `start` on the first core, and later threads on the other cores, if there are any. The
/// aggregator that `start` starts then has a core to itself, as on another host. With shared cores,
/// the figures would depend on the scheduler.
fn apart<T>(start: impl FnOnce() -> T) -> T {
    let all = sched_getaffinity(None).unwrap();
    let on = |is_ours: &dyn Fn(usize) -> bool| {
        let mut cores = CpuSet::new();
        let ours = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core) && is_ours(*core));
        ours.for_each(|core| cores.set(core));
        if cores.count() > 0 {
            sched_setaffinity(None, &cores).unwrap();
        }
    };
    let first = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)).unwrap();
    on(&|core| core == first);
    let started = start();
    on(&|core| core != first);
    started
}

/// The ops of the other tenant.
struct Ops {
    /// Durations of the ops, in ascending order.
    took: Vec<Span>,
    lasted: Span,
}

impl Ops {
    fn run(client: &Client, rank: u16, lasts: Span) -> Self {
        let clock = Clock::start();
        let start = clock.now();
        let mut took = Vec::new();
        loop {
            let began = clock.now();
            let mut tensor = vec![0; usize::try_from(4 * ELEMENTS).unwrap()];
            client.reduce(&mut tensor, Descriptor::sum(ELEMENTS, DType::I32)).unwrap();
            took.push(clock.now().since(began));
            // Rank 0 decides when to stop, so that all ranks end after the same op.
            let over = rank == 0 && clock.now().since(start) > lasts;
            let mut over = i32::from(over).to_le_bytes();
            client.reduce(&mut over, Descriptor::sum(1, DType::I32)).unwrap();
            if over != [0; 4] {
                took.sort_unstable();
                return Self { took, lasted: clock.now().since(start) };
            }
        }
    }

    /// Returns a percentile of the durations in microseconds.
    fn quantile(&self, percent: usize) -> u64 {
        self.took[(self.took.len() - 1) * percent / 100].0 / 1000
    }

    fn a_second(&self) -> f64 {
        self.took.len() as f64 / (self.lasted.0 as f64 / 1e9)
    }
}

/// The state of the other tenant, as the attacker sees it.
#[derive(Default)]
struct Other {
    /// Whether the ops before the attack have ended.
    rested: AtomicBool,
    /// Whether the ops during the attack have ended.
    done: AtomicBool,
}

/// Aborts this process if the thread panics, because other threads would wait for it. No other test
/// is affected, because this one has a process of its own.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Other {
    /// Runs quiet ops, then `between`, and then ops under attack.
    fn run(&self, rig: &Rig, between: impl Fn() + Sync) -> [Ops; 2] {
        let ops = |client: &Client, rank| {
            let _ends_all = EndsAll;
            let quiet = Ops::run(client, rank, lasts());
            self.rested.store(true, SeqCst);
            between();
            let attacked = Ops::run(client, rank, lasts());
            self.done.store(true, SeqCst);
            [quiet, attacked]
        };
        rig.ranks("other", WORLD, |_| {}, ops).swap_remove(0)
    }
}

/// Returns the duration of each of the two phases, the quiet ops and the attack.
fn lasts() -> Span {
    let seconds = std::env::var("RACKSUM_ATTACK_S").map_or(LASTS, |text| text.parse().unwrap());
    Span::from_secs(seconds)
}

/// The results of an attack.
struct Figures {
    /// Bytes that the attacker sent and received, including its own op; `None` if the attack gets
    /// no answers.
    bytes: Option<[u64; 2]>,
    ops: [Ops; 2],
}

impl Figures {
    fn print(&self, name: &str, rig: &Rig) {
        let Self { bytes, ops: [quiet, attacked] } = self;
        print!("attack={name} seconds={}", lasts().0 / Span::from_secs(1).0);
        if let Some([received, sent]) = bytes {
            print!(" bytes_in={received} bytes_out={sent}");
        }
        println!(
            " quiet_p50_us={} quiet_p99_us={} attacked_p50_us={} attacked_p99_us={} \
             throughput_share={:.3} kernel_drops={}",
            quiet.quantile(50),
            quiet.quantile(99),
            attacked.quantile(50),
            attacked.quantile(99),
            attacked.a_second() / quiet.a_second(),
            rig.aggregator.stats().iter().map(|shard| shard.kernel_drops).sum::<u64>(),
        );
        assert!(
            !quiet.took.is_empty() && !attacked.took.is_empty(),
            "an op must end in each phase"
        );
    }
}

/// Runs an attack, first while the other tenant is idle, to count the bytes, and then during its
/// ops. Calls `attack` `rate` times a second, or as often as possible if there is no rate. Before
/// the attack, during the tenant's quiet ops, the attacker sends the same messages to a socket that
/// is never read. The two measurements then differ by the aggregator's work, not by the attacker's
/// use of the cores.
fn run(name: &str, rate: Option<u64>, attack: impl Fn(&mut Attacker) + Sync) -> Figures {
    let rig = apart(|| Rig::start(|config| config.data_auth = Some(DataAuth::Mac)));
    let mut attacker = Attacker::join(&rig);
    let phases = Barrier::new(usize::from(WORLD) + 1);
    let other = Other::default();
    let (ops, bytes) = std::thread::scope(|scope| {
        let ranks = scope.spawn(|| {
            other.run(&rig, || {
                phases.wait();
                phases.wait();
            })
        });
        let _ends_all = EndsAll;
        let clock = Clock::start();
        let attack_until = |attacker: &mut Attacker, over: &dyn Fn(Span) -> bool| {
            let (start, mut calls) = (clock.now(), 0);
            while !over(clock.now().since(start)) {
                let due = rate.map_or(calls + 64, |rate| {
                    clock.now().since(start).0 * rate / Span::from_secs(1).0
                });
                while calls < due {
                    attack(attacker);
                    calls += 1;
                }
                if rate.is_some() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        attacker.aside = Some(nobody());
        attack_until(&mut attacker, &|_| other.rested.load(SeqCst));
        attacker.aside = None;
        phases.wait();
        let sent = || rig.aggregator.stats().iter().map(|shard| shard.bytes.sent).sum::<u64>();
        // Wait, because the counters include earlier sends only after a moment.
        std::thread::sleep(Duration::from_millis(300));
        let before = sent();
        attacker.work();
        attack_until(&mut attacker, &|since| since > lasts());
        std::thread::sleep(Duration::from_millis(300));
        let bytes = [attacker.sent, sent() - before];
        phases.wait();
        attack_until(&mut attacker, &|_| other.done.load(SeqCst));
        (ranks.join().unwrap(), bytes)
    });
    let figures = Figures { bytes: Some(bytes), ops };
    figures.print(name, &rig);
    figures
}

/// Attacks by requesting all results `rate` times a second, or as often as possible without a rate.
/// Acknowledges none of them.
fn ask_again_and_again(name: &str, rate: Option<u64>) {
    let [received, sent] = run(name, rate, Attacker::ask).bytes.unwrap();
    // Allow for the initial value of the aggregator's budget, and for its growth over time.
    let more = 8 * WINDOW_BYTES as u64 + (1 << 20);
    assert!(
        sent <= 2 * received + more,
        "the aggregator sent {sent} bytes in answer to {received} bytes"
    );
}

/// Runs an attack by ranks that send control messages without end. Returns an error if a rank fell
/// silent because the machine gave its threads no time.
fn send_without_end(name: &str, ranks: u16, message: &FromWorker) -> Result<(), String> {
    let rig = apart(|| Rig::start(|config| config.pool_mib = 256));
    // Each rank joins as soon as it has connected, because the aggregator refuses a caller that
    // delays its join.
    let join = |rank| {
        let mut sender = Impostor::connect(&rig);
        let join = sender.wish("attacker", rank, ranks);
        sender.send_message(&FromWorker::Join(join));
        sender
    };
    let mut senders: Vec<_> = (0..ranks).map(join).collect();
    for sender in &mut senders {
        sender.granted();
        sender.give_way();
    }
    let (other, lost) = (Other::default(), Mutex::new(None));
    let rested = Barrier::new(usize::from(WORLD + ranks));
    let ops = std::thread::scope(|scope| {
        let ops = scope.spawn(|| {
            other.run(&rig, || {
                rested.wait();
            })
        });
        for sender in &mut senders {
            let (other, rested, lost) = (&other, &rested, &lost);
            scope.spawn(move || {
                let _ends_all = EndsAll;
                give_way();
                rested.wait();
                // The send blocks while the aggregator does not read, and gives up once the ops
                // have ended.
                let sent = sender.send_message_until(message, || other.done.load(SeqCst));
                if let Err(why) = sent {
                    assert!(sender.was_silent(), "the aggregator ended the attack: {why}");
                    *lost.lock().unwrap() = Some(why);
                }
            });
        }
        ops.join().unwrap()
    });
    match lost.into_inner().unwrap() {
        Some(why) => Err(why),
        None => {
            Figures { bytes: None, ops }.print(name, &rig);
            Ok(())
        }
    }
}

#[test]
fn a_tenant_that_repeats_a_small_ask_is_sent_no_more_than_twice_what_it_sends() {
    let test = "attack::a_tenant_that_repeats_a_small_ask_is_sent_no_more_than_twice_what_it_sends";
    in_a_process_of_its_own(test, || ask_again_and_again("asks", Some(500)));
}

#[test]
fn a_tenant_that_asks_as_fast_as_it_can_leaves_others_their_share() {
    let test = "attack::a_tenant_that_asks_as_fast_as_it_can_leaves_others_their_share";
    in_a_process_of_its_own(test, || ask_again_and_again("asks-at-line-rate", None));
}

#[test]
fn ranks_that_say_words_without_end_leave_others_their_share() {
    let test = "attack::ranks_that_say_words_without_end_leave_others_their_share";
    in_a_process_of_its_own(test, || {
        with_retries(|| send_without_end("words", 64, &FromWorker::PingArrived));
    });
}
