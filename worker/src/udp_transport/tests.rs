use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::task::{Context, Poll, Wake};

use racksum_net::udp::UdpSocket;
use racksum_proto::call::{Call, Collective};
use racksum_proto::dtype::{DType, WireType};
use racksum_proto::error::OpError;
use racksum_proto::wire::{Header, Kind, OpenDecoder};

use super::*;
use crate::client::{Client, Connecting, Handle};
use crate::engine::tests::{Bench, arrived, fail, send};
use crate::engine::{Next, Readable};
use crate::join::tests::welcome;
use crate::tensor::tests::{region_of, regions_of};

/// A client and its transport.
struct Rank {
    client: Client,
    transport: Arc<UdpTransport>,
}

impl Deref for Rank {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Rank {
    fn driver(&self) -> &Driver {
        &self.transport.driver
    }
}

/// Returns a client whose shard never answers.
fn client() -> Rank {
    rig().client
}

/// A client of two lanes, whose shard sends only the datagrams of the test.
struct Rig {
    client: Rank,
    /// The address where the client receives.
    socket: SocketAddr,
    shard: UdpSocket,
}

fn rig() -> Rig {
    let Bench { engine, socket, mut shards, .. } = Bench::new(1, 2, Ipv4Addr::LOCALHOST);
    let driver = Arc::new(Driver::new(engine).unwrap());
    let drives = Arc::clone(&driver);
    let transport = Arc::new(UdpTransport {
        driver,
        welcome: welcome(),
        shards: 1,
        multicast: false,
        op_timeout: Span::from_secs(60),
        turn: Mutex::default(),
        senders: ControlSenders::default(),
        stop: Mailbox::new().sender(),
        left: Mutex::new(channel().1),
        threads: vec![spawn("drive", move || drives.drive_in_background()).unwrap()],
    });
    let client = Client::over(Arc::clone(&transport) as Arc<dyn Transport>);
    let client = Rank { client, transport };
    Rig { client, socket: socket.local_addr(), shard: shards.remove(0) }
}

/// Returns the ops that the client has opened at a shard since the last call, with their
/// descriptors.
fn opens(shard: &UdpSocket) -> Vec<(OpId, Descriptor)> {
    let opens = arrived(shard).into_iter().filter(|(header, _)| header.kind == Kind::Open);
    let mut decoder = OpenDecoder::new();
    let mut opened = |(header, body): (Header, Vec<u8>)| {
        (header.window.op, decoder.decode(&body, false).unwrap().descriptor)
    };
    opens.map(&mut opened).collect()
}

const ELEMENTS: u64 = 1000;

fn descriptor() -> Descriptor {
    Descriptor::sum(ELEMENTS, DType::F32)
}

fn tensor() -> Vec<u8> {
    1f32.to_le_bytes().repeat(1000)
}

fn ended<T: std::fmt::Debug>(result: Result<T, Error>, why: &str) {
    match result {
        Err(Error::Op(OpError::Ended { why: got })) if got == why => {}
        other => panic!("the op must end because of {why:?}: {other:?}"),
    }
}

#[test]
fn a_panic_of_the_engine_ends_every_op_with_an_error() {
    const WHY: &str = "a thread of the client panicked";
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| client.reduce(&mut tensor(), descriptor()));
        let waits = scope.spawn(|| handle.wait());
        // The tensor is shorter than its descriptor requires. `check_len` would refuse it.
        let data = Data::Owned(vec![0; 4]);
        let mut state = client.driver().lock();
        let bad =
            state.submit(|engine| engine.start(descriptor(), data, client.transport.op_timeout));
        client.driver().set_off(state);
        ended(client.transport.finish(bad.unwrap()), WHY);
        // The thread may have been too late to start its op.
        match blocked.join().unwrap() {
            Err(Error::Submit(SubmitError::Ended { why })) if why == WHY => {}
            other => ended(other, WHY),
        }
        ended(waits.join().unwrap(), WHY);
    });
    let after = client.reduce(&mut tensor(), descriptor());
    assert_eq!(after, Err(Error::Submit(SubmitError::Ended { why: WHY.into() })));
    assert!(client.driver().lock().is_idle());
}

#[test]
fn an_op_of_a_client_that_was_dropped_ends_with_an_error() {
    let client = client();
    let handle: Handle<Vec<u8>> = client.submit(tensor(), descriptor()).unwrap();
    drop(client);
    assert!(handle.ends_within(HOUR));
    let closed = Error::Submit(SubmitError::Ended { why: "the client was closed".into() });
    assert_eq!(handle.wait(), Err(closed));
}

#[test]
fn an_op_whose_handle_is_dropped_goes_on_and_keeps_nothing() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let op = handle.op;
    drop(handle);
    assert!(client.driver().lock().engine.is_in_flight(op), "the op must continue");
    client.driver().lock().run(|engine| engine.end("the test is over"));
    assert!(client.driver().lock().engine.take(op).is_none());
}

#[test]
fn closing_a_client_ends_what_is_in_flight() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let driver = Arc::clone(&client.transport.driver);
    drop(client);
    let Finished { result, .. } = driver.lock().engine.take(handle.op).unwrap();
    assert_eq!(result, Err(OpError::Ended { why: "the client was closed".into() }));
}

/// A thread that sleeps until an op ends, while the test's thread drives.
struct Sleeper {
    driver: Arc<Driver>,
    rank: SocketAddr,
    shard: UdpSocket,
    op: OpId,
    thread: JoinHandle<()>,
}

impl Sleeper {
    fn start() -> Self {
        let Bench { engine, socket, mut shards, .. } = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
        let driver = Arc::new(Driver::new(engine).unwrap());
        let rank = socket.local_addr();
        let mut state = driver.lock();
        let data = Data::Owned(tensor());
        let op = state.submit(|engine| engine.start(descriptor(), data, span(HOUR))).unwrap();
        state.driving = true;
        drop(state);
        let sleeps = Arc::clone(&driver);
        let thread = spawn("sleeps", move || {
            drop(sleeps.await_that(sleeps.lock(), |state| !state.engine.is_in_flight(op)));
        });
        while driver.lock().asleep == 0 {
            std::thread::yield_now();
        }
        Self { driver, rank, shard: shards.remove(0), op, thread: thread.unwrap() }
    }

    /// Sends a failure that ends the op.
    fn end_op(&self) {
        send(&self.shard, self.rank, &fail(self.op, 0));
    }

    /// Returns whether the thread ends within the time limit. Meanwhile, calls `pass` repeatedly.
    fn wakes(&self, mut pass: impl FnMut()) -> bool {
        let clock = Clock::start();
        let start = clock.now();
        while !self.thread.is_finished() && clock.now().since(start) < Span::from_secs(200) {
            pass();
        }
        self.thread.is_finished()
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn who_sleeps_is_told_what_another_threads_submit_came_upon() {
    let sleeper = Sleeper::start();
    sleeper.end_op();
    sleeper.driver.set_off(sleeper.driver.lock());
    assert!(sleeper.wakes(|| std::thread::sleep(Duration::from_millis(1))));
}

#[test]
fn a_driver_that_is_never_idle_lets_those_look_whom_it_has_woken() {
    let sleeper = Sleeper::start();
    sleeper.end_op();
    let mut state = Some(sleeper.driver.lock());
    assert!(sleeper.wakes(|| {
        send(&sleeper.shard, sleeper.rank, b"noise");
        state = state.take().map(|mut state| {
            sleeper.driver.advance(Readable::ALL, &mut state);
            sleeper.driver.wait(Next::Step, None, state).0
        });
    }));
}

#[test]
fn waiting_for_a_while_ends_with_the_op_or_with_the_while() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let while_ = Duration::from_millis(20);
    assert!(!handle.ends_within(Duration::ZERO));
    assert!(!handle.ends_within(while_));
    std::thread::scope(|scope| {
        // One of these threads drives, and the others sleep.
        let waiting = [(); 3].map(|()| scope.spawn(|| handle.ends_within(HOUR)));
        client.driver().with_engine(|engine| engine.end("the test is over"));
        assert_eq!(waiting.map(|thread| thread.join().unwrap()), [true; 3]);
    });
    assert!(handle.ends_within(Duration::ZERO));
    ended(handle.wait(), "the test is over");
}

#[test]
fn a_task_that_awaits_an_op_is_woken_when_it_ends() {
    let client = client();
    let handle: Handle<Vec<f32>> = client.submit(vec![1.0; 1000], descriptor()).unwrap();
    let (woken, is_woken) = channel();
    let waker = Waker::from(Arc::new(Notifier(woken)));
    let mut awaited = std::pin::pin!(handle);
    let mut context = Context::from_waker(&waker);
    assert!(awaited.as_mut().poll(&mut context).is_pending());
    assert!(is_woken.try_recv().is_err(), "the task was woken before the op ended");
    client.driver().with_engine(|engine| engine.end("the test is over"));
    is_woken.recv_timeout(HOUR).unwrap();
    match awaited.poll(&mut context) {
        Poll::Ready(result) => ended(result, "the test is over"),
        Poll::Pending => panic!("the op has ended, but its future is pending"),
    }
}

/// A waker that sends a message.
struct Notifier(Sender<()>);

impl Wake for Notifier {
    fn wake(self: Arc<Self>) {
        self.0.send(()).unwrap();
    }
}

#[test]
fn a_client_that_was_closed_takes_no_ops() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    client.close();
    client.close();
    ended(handle.wait(), "the client was closed");
    let refused = client.submit(tensor(), descriptor()).unwrap_err();
    assert_eq!(refused, Error::Submit(SubmitError::Ended { why: "the client was closed".into() }));
}

/// An owner that sends a message when it is dropped.
struct Owner(Sender<()>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
    }
}

#[test]
fn the_owner_of_a_tensor_is_kept_until_its_op_has_ended() {
    let client = client();
    let (gone, is_gone) = channel();
    let region = region_of(tensor(), Owner(gone));
    // No thread waits for the op.
    drop(client.submit(region, descriptor()).unwrap());
    assert!(is_gone.try_recv().is_err(), "the owner was dropped before the op ended");
    client.driver().with_engine(|engine| engine.end("the test is over"));
    is_gone.recv_timeout(HOUR).unwrap();
}

#[test]
fn an_attempt_to_connect_can_be_given_up() {
    let nobody =
        UdpSocket::open(&racksum_net::udp::UdpConfig::new((Ipv4Addr::LOCALHOST, 0).into()));
    let options = ConnectOptions::new(nobody.unwrap().local_addr().to_string(), "job");
    let connecting = Connecting::new();
    let cancel = connecting.cancel_handle();
    cancel.cancel();
    let given_up = connecting.run(&options).unwrap_err();
    assert!(matches!(given_up, ConnectError::GivenUp), "{given_up}");
}

#[test]
fn an_attempt_to_connect_whose_future_is_dropped_is_given_up() {
    let nobody =
        UdpSocket::open(&racksum_net::udp::UdpConfig::new((Ipv4Addr::LOCALHOST, 0).into()));
    let options = ConnectOptions::new(nobody.unwrap().local_addr().to_string(), "job");
    let connecting = Connecting::new();
    let awaited = connecting.awaited();
    let mut joined = Box::pin(connecting.run_async(options));
    let mut context = Context::from_waker(Waker::noop());
    assert!(joined.as_mut().poll(&mut context).is_pending());
    drop(joined);
    // The attempt keeps another reference to this text as long as it runs.
    while !awaited.is_alone() {
        std::thread::yield_now();
    }
}

#[test]
fn a_call_that_is_refused_is_opened_as_such_and_has_a_number() {
    // wire: W-70
    let Rig { client, socket, shard } = rig();
    let call = Call { number: 5, collective: Collective::Broadcast, root: 1 };
    let broadcast = Descriptor { call, ..descriptor() };
    let refusals = [
        client.submit(vec![0u8; 5], broadcast).unwrap_err(),
        client.submit(tensor(), Descriptor { lane: 7, ..broadcast }).unwrap_err(),
        client.submit(tensor(), Descriptor { wire: WireType::I64, ..broadcast }).unwrap_err(),
    ];
    assert!(refusals.iter().all(Error::is_refusal), "{refusals:?}");
    client.refuse(call).unwrap();
    let fifth = client.submit(tensor(), broadcast).unwrap();
    assert_eq!(fifth.op, OpId(4));
    let mut opened = Vec::new();
    while opened.len() < 5 {
        opened.extend(opens(&shard));
    }
    let refused = Descriptor::refused(call);
    assert!(refused.to_string().contains("rejected"), "{refused}");
    let of = |op| if op < 4 { refused } else { broadcast };
    let expected: Vec<_> = (0..5).map(|op| (OpId(op), of(op))).collect();
    assert_eq!(opened, expected);
    // The engine keeps no outcome of a refused op, because no thread waits for it.
    send(&shard, socket, &fail(OpId(0), 0));
    client.driver().with_engine(|engine| engine.end("the test is over"));
    assert!((0..4).all(|op| client.driver().lock().engine.take(OpId(op)).is_none()));
}

#[test]
fn ops_on_the_same_memory_take_turns_whatever_lanes_they_are_in() {
    let Rig { client, socket, shard } = rig();
    let len = tensor().len();
    let ranges = [0..len, 4..len + 4, 8..len + 8, len + 8..2 * len];
    let parts = regions_of([tensor(), tensor()].concat(), ranges);
    let lanes = [1, 0, 1, 1];
    let elements = [1000, 1000, 1000, 998];
    let handles: Vec<_> = parts
        .into_iter()
        .zip(lanes)
        .zip(elements)
        .map(|((part, lane), elements)| {
            let descriptor = Descriptor { lane, ..Descriptor::sum(elements, DType::F32) };
            client.submit(part, descriptor).unwrap()
        })
        .collect();
    let mut opened = Vec::new();
    let mut begun = |upto: usize| {
        while opened.len() < upto {
            opened.extend(opens(&shard).into_iter().map(|(op, _)| op.0));
        }
        // By now, an op that begins too early would have been opened too.
        opened.clone()
    };
    assert_eq!(begun(1), [0]);
    send(&shard, socket, &fail(OpId(0), 0));
    assert_eq!(begun(2), [0, 1]);
    drop(handles);
    send(&shard, socket, &fail(OpId(1), 0));
    assert_eq!(begun(4), [0, 1, 2, 3], "the last op only waits for its lane");
}

#[test]
fn what_is_spent_of_an_ops_time_is_not_had_again() {
    let client = client();
    let spent = Span(client.transport.op_timeout.0 - Span::from_millis(50).0);
    let op = client.transport.submit_folded(tensor().into(), descriptor(), 0..4, spent);
    let op = op.unwrap();
    let error = client.transport.finish(op).unwrap_err();
    assert!(matches!(error, Error::Op(OpError::Timeout { .. })), "{error}");
}
