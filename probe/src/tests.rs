//! Agents and a coordinator over loopback.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use racksum_net::quic::{Caller, Connection, Credentials, frames, serve};
use racksum_placer::inventory::{Host, Inventory};
use racksum_placer::topology::Topology;
use racksum_proto::auth::Key;
use racksum_proto::time::Span;

use crate::agent::PATIENCE;
use crate::datagram::{Header, Kind, PING_LEN, TRAIN_LEN, TagKey};
use crate::flow::MOST_UNPROVEN;
use crate::message::{Answer, Busy, Order, PROTOCOL, Train, VERSION};
use crate::node::{Node, Sent};
use crate::survey::{Survey, stays};
use crate::{Agent, MeasureError, Options, measure};

fn credentials() -> Credentials {
    Credentials::new(None, false).unwrap()
}

fn options() -> Options {
    Options { credentials: credentials(), share: 1.0, budget: 1 << 30, samples: None, seed: 1 }
}

/// Starts an agent on a runtime; it serves until the runtime ends.
fn start() -> (SocketAddr, SocketAddr) {
    start_patient(PATIENCE)
}

/// Starts an agent that waits this long for an order.
fn start_patient(patience: Duration) -> (SocketAddr, SocketAddr) {
    let mut agent = Agent::open("127.0.0.1:0".parse().unwrap(), 0, &credentials()).unwrap();
    agent.patience = patience;
    let addrs = (agent.addr().unwrap(), agent.data_addr());
    tokio::spawn(async move { agent.run().await });
    addrs
}

fn host(name: &str, rack: &str, address: SocketAddr) -> Host {
    Host {
        name: name.into(),
        address: Some(address.to_string()),
        labels: [("rack".into(), rack.into())].into(),
        nic_mbit: 200.0,
        cpus: <_>::default(),
        gpus: <_>::default(),
        aggregator: None,
        taints: vec![],
        max_aggregators: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_pairs_of_agents_that_answer_are_measured() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut hosts: Vec<_> =
        (0..4).map(|n| host(&format!("h{n}"), if n < 2 { "a" } else { "b" }, start().0)).collect();
    hosts.push(host("dead", "b", silent.local_addr().unwrap()));
    let inventory = Inventory { levels: vec!["rack".into()], hosts };
    let outcome = measure(&inventory, &options(), |_, _| {}).await.unwrap();
    assert_eq!(outcome.samples.len(), 12);
    for sample in &outcome.samples {
        assert!((0.0..0.5).contains(&sample.loss), "{sample:?}");
        assert!(sample.mbit > 0.0 && sample.rtt_us > 0.0, "{sample:?}");
        assert!(sample.rtt_p99_us >= sample.rtt_us, "{sample:?}");
    }
    let [(name, why)] = &outcome.failed[..] else { panic!("{:?}", outcome.failed) };
    assert_eq!(name, "dead");
    assert!(why.starts_with("no answer from 127.0.0.1:"), "{why}");
    assert_eq!(outcome.unaffordable, 0);
    assert!(outcome.network.links.iter().any(|link| link.of == "h3" && link.up.is_some()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_is_kept() {
    let hosts = (0..3).map(|n| host(&format!("h{n}"), "a", start().0)).collect();
    let inventory = Inventory { levels: vec![], hosts };
    let budget = 12_000_000;
    let outcome = measure(&inventory, &Options { budget, ..options() }, |_, _| {}).await.unwrap();
    assert!(outcome.busiest.bytes <= budget, "{:?}", outcome.busiest);
    assert_eq!(outcome.unaffordable + outcome.samples.len() / 2, 3);
    assert!(outcome.unaffordable > 0);
    assert!(outcome.has_unknown_racks && outcome.network.tree.is_none(), "one pair shows no racks");
    let nothing = measure(&inventory, &Options { budget: 1000, ..options() }, |_, _| {}).await;
    assert!(matches!(nothing, Err(MeasureError::Nothing { .. })), "{nothing:?}");
}

/// Connects to an agent.
async fn call(to: SocketAddr) -> Coordinator {
    let caller = Caller::new(PROTOCOL, &credentials()).unwrap();
    let connection = caller.connect(to, Span::from_secs(5)).await.unwrap();
    let (send, recv) = connection.quic().open_bi().await.unwrap();
    Coordinator { connection, send, recv }
}

struct Coordinator {
    connection: Connection,
    send: racksum_net::quic::quinn::SendStream,
    recv: racksum_net::quic::quinn::RecvStream,
}

impl Coordinator {
    async fn hello(&mut self) -> Answer {
        self.ask(Order::Hello { version: VERSION }).await
    }

    /// Says hello until the agent is free.
    async fn wait(&mut self) {
        while !matches!(self.hello().await, Answer::Hello { .. }) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn ask(&mut self, order: Order) -> Answer {
        frames::send(&mut self.send, &order).await.unwrap();
        frames::recv(&mut self.recv).await.unwrap().unwrap()
    }

    async fn refusal(&mut self, order: Order) -> String {
        match self.ask(order).await {
            Answer::Refused { reason } => reason,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_train_is_sent_only_to_an_agent_that_agrees() {
    let (agent, data) = start();
    let victim = UdpSocket::bind("127.0.0.1:0").unwrap();
    victim.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let to = victim.local_addr().unwrap();
    let mut caller = call(agent).await;
    let wrong = caller.refusal(Order::Hello { version: VERSION + 1 }).await;
    assert!(wrong.contains("install the same release"), "{wrong}");
    let (flow, key) = (1, Key([1; Key::LEN]));
    assert!(caller.refusal(Order::Expect { flow, key, peer: to }).await.contains("hello"));
    assert!(caller.refusal(Order::Stay).await.contains("hello"));
    assert!(matches!(caller.hello().await, Answer::Hello { .. }));
    assert!(matches!(caller.hello().await, Answer::Hello { .. }), "it is served already");
    assert_eq!(caller.ask(Order::Expect { flow, key, peer: to }).await, Answer::Expected);
    let train = Train { bytes: 1_000_000, millis: 100, mbit: 100.0 };
    let why = caller.refusal(Order::Train { flow, train }).await;
    assert!(why.contains("has not answered a ping"), "{why}");
    assert!(victim.recv(&mut [0; 2000]).is_err(), "nothing was sent");
    // The caller knows the key, but not the number that an echo must return.
    let mut echo = [0; PING_LEN];
    Header::new(Kind::Echo, flow, 0, 0).write(&TagKey::new(&key), &mut echo);
    let pings = caller.ask(Order::Ping { flow, count: 500, interval_us: 100 });
    let forged = async {
        for _ in 0..20 {
            victim.send_to(&echo, data).unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (answer, ()) = tokio::join!(pings, forged);
    let Answer::Pinged(pinged) = answer else { panic!("{answer:?}") };
    assert_eq!((pinged.sent, pinged.echoes), (MOST_UNPROVEN, 0));
    let why = caller.refusal(Order::Train { flow, train }).await;
    assert!(why.contains("has not answered a ping"), "{why}");
    let why = caller.refusal(Order::Ping { flow, count: 9, interval_us: u32::MAX }).await;
    assert!(why.contains("100..=10000 microseconds apart"), "{why}");
    for mbit in [0.0, -1.0, 1e-300, 1e300] {
        let train = Train { mbit, ..train };
        assert!(caller.refusal(Order::Train { flow, train }).await.contains("rate"));
    }
    let of_another = caller.refusal(Order::Report { flow: 2, train: 0 }).await;
    assert!(of_another.contains("unknown"), "{of_another}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_serves_one_coordinator_at_a_time() {
    let (agent, _) = start();
    let (mut one, mut other) = (call(agent).await, call(agent).await);
    one.wait().await;
    let Answer::Busy(Busy { holder, .. }) = other.hello().await else { panic!("it is busy") };
    assert!(holder.starts_with("a coordinator without an identity at 127.0.0.1:"), "{holder}");
    let (flow, key) = (7, Key([1; Key::LEN]));
    let expect = || Order::Expect { flow, key, peer: agent };
    assert_eq!(one.ask(expect()).await, Answer::Expected);
    other.refusal(expect()).await;
    other.refusal(Order::Report { flow, train: 0 }).await;
    drop(one);
    other.wait().await;
    // The flow has ended with its coordinator.
    other.refusal(Order::Report { flow, train: 0 }).await;
    assert_eq!(other.ask(expect()).await, Answer::Expected);
}

#[test]
fn a_silent_coordinator_loses_its_agents() {
    let agents = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (agent, _) = agents.block_on(async { start() });
    let stopped = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _silent = stopped.block_on(async {
        let mut silent = call(agent).await;
        silent.wait().await;
        silent
    });
    // From now on, nothing drives the connection of that coordinator.
    agents.block_on(async { call(agent).await.wait().await });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_without_orders_loses_its_agents() {
    let (agent, _) = start_patient(Duration::from_secs(1));
    let (mut idle, mut unserved, silent) =
        (call(agent).await, call(agent).await, call(agent).await);
    idle.wait().await;
    unserved.hello().await;
    for (one, why) in
        [(idle, "no order for 1 s"), (unserved, "no order for 1 s"), (silent, "no order")]
    {
        let ended = one.connection.quic().closed().await.to_string();
        assert!(ended.contains(&format!("the coordinator gave {why}")), "{ended}");
    }
    call(agent).await.wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_waits_keeps_its_agents() {
    let patience = Duration::from_secs(3);
    let hosts = (0..2).map(|n| host(&format!("h{n}"), "a", start_patient(patience).0));
    let inventory = Inventory { levels: vec![], hosts: hosts.collect() };
    let (topology, options) = (Topology::new(&inventory).unwrap(), options());
    let mut survey = Survey::connect(topology, &options).await.unwrap();
    survey.stays = stays(patience / 30);
    survey.hold(tokio::time::sleep(patience * 3 / 2)).await;
    survey.measure_pairs(&|_, _| {}).await;
    let outcome = survey.finish().await;
    assert_eq!((outcome.samples.len(), outcome.failed), (2, vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_learns_why_its_agents_have_hung_up() {
    let hosts = (0..2).map(|n| host(&format!("h{n}"), "a", start_patient(Duration::ZERO).0));
    let inventory = Inventory { levels: vec![], hosts: hosts.collect() };
    let why = measure(&inventory, &options(), |_, _| {}).await.unwrap_err().to_string();
    assert!(why.contains(": the connection to 127.0.0.1:"), "{why}");
    assert!(why.contains("ended: closed by peer: the coordinator gave no order for 0 s"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_measurement_is_refused_while_another_one_has_an_agent() {
    let addrs: Vec<_> = (0..3).map(|_| start().0).collect();
    let hosts = addrs.iter().enumerate().map(|(n, addr)| host(&format!("h{n}"), "a", *addr));
    let inventory = Inventory { levels: vec![], hosts: hosts.collect() };
    let mut other = call(addrs[1]).await;
    other.wait().await;
    let refused = measure(&inventory, &options(), |_, _| {}).await.unwrap_err();
    let why = refused.to_string();
    let expected = "the agent of h1 serves another measurement, of a coordinator without an \
                    identity at 127.0.0.1:";
    assert!(why.starts_with(expected) && why.contains("run this one once that has ended"), "{why}");
    // The refused measurement has let go of the other agents.
    call(addrs[0]).await.wait().await;
    drop(other);
    call(addrs[1]).await.wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_waits_for_a_train_that_its_orders_overtake() {
    let (agent, data) = start();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (flow, key) = (7, Key([1; Key::LEN]));
    let mut caller = call(agent).await;
    caller.wait().await;
    let expect = Order::Expect { flow, key, peer: sender.local_addr().unwrap() };
    assert_eq!(caller.ask(expect).await, Answer::Expected);
    let train = async {
        tokio::time::sleep(Duration::from_millis(60)).await;
        for number in 0..3 {
            let mut datagram = [0; TRAIN_LEN];
            Header::new(Kind::Train, flow, number, 0).write(&TagKey::new(&key), &mut datagram);
            sender.send_to(&datagram, data).unwrap();
        }
    };
    let (answer, ()) = tokio::join!(caller.ask(Order::Report { flow, train: 3 }), train);
    let Answer::Report { pings: 0, train: Some(arrived) } = answer else { panic!("{answer:?}") };
    assert_eq!(arrived.datagrams, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_packet_gets_shorter_replies_than_itself() {
    let (control, _) = start();
    // A caller's first packet is replayed, as by an attacker who states a victim's address.
    let [tap, victim] = [0; 2].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
    tap.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let to = tap.local_addr().unwrap();
    let caller = Caller::new(PROTOCOL, &credentials()).unwrap();
    let calling = tokio::spawn(async move { caller.connect(to, Span::from_secs(60)).await });
    let mut first = [0; 2000];
    let len = tap.recv(&mut first).unwrap();
    victim.send_to(&first[..len], control).unwrap();
    let mut reply = [0; 65_536];
    victim.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut replies = victim.recv(&mut reply).unwrap();
    victim.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    while let Ok(more) = victim.recv(&mut reply) {
        replies += more;
    }
    assert!(len >= 1200 && replies < len, "{replies} bytes in reply to {len}");
    calling.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_reads_no_orders_keeps_no_coordinator_waiting() {
    let agent = serve("127.0.0.1:0".parse().unwrap(), &credentials(), PROTOCOL).unwrap();
    let address = agent.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let connection = agent.accept().await.unwrap().accept().unwrap().await.unwrap();
        let (mut send, mut recv) = connection.accept_bi().await.unwrap();
        assert!(frames::recv::<Order>(&mut recv).await.unwrap().is_some());
        let hello = Answer::Hello { version: VERSION, data_port: 9 };
        frames::send(&mut send, &hello).await.unwrap();
        std::future::pending::<()>().await;
    });
    let caller = Caller::new(PROTOCOL, &credentials()).unwrap();
    let node = Node::connect("h".into(), &address, &caller).await.unwrap();
    // Far more than the agent has room for.
    for _ in 0..100_000 {
        node.stay().await;
    }
    let order = node.report(1, Sent { pings: 0, train: 0 }).await;
    let why = "the agent reads no orders; start it again, or exclude it";
    assert_eq!(order.unwrap_err().why, why);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hosts_with_one_agent_are_named() {
    let (agent, _) = start();
    let hosts = ["h1", "h2"].map(|name| host(name, "a", agent));
    let inventory = Inventory { levels: vec![], hosts: hosts.into() };
    let why = measure(&inventory, &options(), |_, _| {}).await.unwrap_err().to_string();
    assert!(why.starts_with("h1 and h2 have the same agent, 127.0.0.1:"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_reply_is_longer_than_its_request() {
    let (control, data) = start();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    for (to, len) in [(data, 100), (data, 1200), (control, 100), (control, 1100)] {
        for first in [0u8, 0xc0, b'R'] {
            let request = vec![first; len];
            socket.send_to(&request, to).unwrap();
            let mut reply = [0; 65_536];
            while let Ok(got) = socket.recv(&mut reply) {
                assert!(got <= len, "{got} bytes in reply to {len}");
            }
        }
    }
}
