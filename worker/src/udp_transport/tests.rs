use std::net::{Ipv4Addr, SocketAddr};

use racksum_net::udp::UdpSocket;
use racksum_proto::call::{Call, Collective};
use racksum_proto::dtype::{DType, WireType};
use racksum_proto::error::OpError;
use racksum_proto::wire::{Header, Kind, OpenDecoder};

use super::*;
use crate::engine::tests::{Bench, arrived, fail, send};
use crate::join::tests::welcome;
use crate::tensor::tests::{region_of, regions_of};

/// Returns a client whose shard never answers.
fn client() -> Client {
    rig().client
}

/// A client of two lanes, whose shard sends only the datagrams of the test.
struct Rig {
    client: Client,
    /// The address where the client receives.
    socket: SocketAddr,
    shard: UdpSocket,
}

fn rig() -> Rig {
    let Bench { engine, socket, mut shards, .. } = Bench::new(1, 2, Ipv4Addr::LOCALHOST);
    let shared = Arc::new(Driver::new(engine).unwrap());
    let driver = Arc::clone(&shared);
    let client = Client {
        shared,
        welcome: welcome(),
        shards: 1,
        multicast: false,
        op_timeout: Span::from_secs(60),
        turn: Mutex::default(),
        senders: ControlSenders::default(),
        stop: Mailbox::new().sender(),
        threads: vec![spawn("drive", move || driver.drive_in_background()).unwrap()],
    };
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
        other => panic!("{other:?}, and not {why:?}"),
    }
}

#[test]
fn a_panic_of_the_engine_ends_every_op_with_an_error() {
    const WHY: &str = "a thread of the client panicked";
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| client.allreduce(&mut tensor(), descriptor()));
        let waits = scope.spawn(|| client.wait(handle));
        // The tensor is shorter than its descriptor requires. `check_len` would refuse it.
        let data = Data::Owned(vec![0; 4]);
        let mut state = client.shared.lock();
        let bad = state.submit(|engine| engine.start(descriptor(), data, client.op_timeout));
        client.shared.set_off(state);
        ended(client.wait::<Vec<u8>>(client.handle(bad.unwrap())), WHY);
        // The thread may have been too late to start its op.
        match blocked.join().unwrap() {
            Err(Error::Submit(SubmitError::Ended { why })) if why == WHY => {}
            other => ended(other, WHY),
        }
        ended(waits.join().unwrap(), WHY);
    });
    let after = client.allreduce(&mut tensor(), descriptor());
    assert_eq!(after, Err(Error::Submit(SubmitError::Ended { why: WHY.into() })));
    assert!(client.shared.lock().is_idle());
}

#[test]
fn an_op_of_another_client_is_not_waited_for() {
    let (one, other) = (client(), client());
    let handle = one.submit(tensor(), descriptor()).unwrap();
    assert_eq!(other.wait(handle), Err(Error::OtherClient));
    let handle = one.submit(tensor(), descriptor()).unwrap();
    drop(one);
    assert_eq!(other.wait(handle), Err(Error::OtherClient));
}

#[test]
fn an_op_whose_handle_is_dropped_goes_on_and_keeps_nothing() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let op = handle.op;
    drop(handle);
    assert!(client.shared.lock().engine.is_in_flight(op), "other ranks need it");
    client.shared.lock().run(|engine| engine.end("the test is over"));
    assert!(client.shared.lock().engine.take(op).is_none());
}

#[test]
fn closing_a_client_ends_what_is_in_flight() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let shared = Arc::clone(&client.shared);
    drop(client);
    let Finished { result, .. } = shared.lock().engine.take(handle.op).unwrap();
    assert_eq!(result, Err(OpError::Ended { why: "the client was closed".into() }));
}

/// A thread that sleeps until an op ends, while the test's thread drives.
struct Sleeper {
    shared: Arc<Driver>,
    rank: SocketAddr,
    shard: UdpSocket,
    op: OpId,
    thread: JoinHandle<()>,
}

impl Sleeper {
    fn start() -> Self {
        let Bench { engine, socket, mut shards, .. } = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
        let shared = Arc::new(Driver::new(engine).unwrap());
        let rank = socket.local_addr();
        let mut state = shared.lock();
        let data = Data::Owned(tensor());
        let op = state.submit(|engine| engine.start(descriptor(), data, span(HOUR))).unwrap();
        state.driving = true;
        drop(state);
        let sleeps = Arc::clone(&shared);
        let thread = spawn("sleeps", move || {
            drop(sleeps.await_that(sleeps.lock(), |state| !state.engine.is_in_flight(op)));
        });
        while shared.lock().asleep == 0 {
            std::thread::yield_now();
        }
        Self { shared, rank, shard: shards.remove(0), op, thread: thread.unwrap() }
    }

    /// Sends a failure that ends the op.
    fn end_op(&self) {
        send(&self.shard, self.rank, &fail(self.op, 0));
    }

    /// Returns whether the thread ends within the time limit. `pass` runs again and again
    /// meanwhile.
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
    sleeper.shared.set_off(sleeper.shared.lock());
    assert!(sleeper.wakes(|| std::thread::sleep(Duration::from_millis(1))));
}

#[test]
fn a_driver_that_is_never_idle_lets_those_look_whom_it_has_woken() {
    let sleeper = Sleeper::start();
    sleeper.end_op();
    let mut state = Some(sleeper.shared.lock());
    assert!(sleeper.wakes(|| {
        send(&sleeper.shard, sleeper.rank, b"noise");
        state = state.take().map(|state| sleeper.shared.step(None, state));
    }));
}

#[test]
fn waiting_for_a_while_ends_with_the_op_or_with_the_while() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    let other = self::client();
    let while_ = Duration::from_millis(20);
    assert_eq!(other.ends_within(&handle, while_), Err(Error::OtherClient));
    assert_eq!(client.ends_within(&handle, Duration::ZERO), Ok(false));
    assert_eq!(client.ends_within(&handle, while_), Ok(false));
    std::thread::scope(|scope| {
        // One of these threads drives, and the others sleep.
        let waiting = [(); 3].map(|()| scope.spawn(|| client.ends_within(&handle, HOUR)));
        client.shared.tell(|engine| engine.end("the test is over"));
        assert_eq!(waiting.map(|thread| thread.join().unwrap()), [(); 3].map(|()| Ok(true)));
    });
    assert_eq!(client.ends_within(&handle, Duration::ZERO), Ok(true));
    ended(client.wait(handle), "the test is over");
}

#[test]
fn a_client_that_was_closed_takes_no_ops() {
    let client = client();
    let handle = client.submit(tensor(), descriptor()).unwrap();
    client.close();
    client.close();
    ended(client.wait(handle), "the client was closed");
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
    let (gone, is_gone) = std::sync::mpsc::channel();
    let region = region_of(tensor(), Owner(gone));
    // No thread waits for the op.
    drop(client.submit(region, descriptor()).unwrap());
    assert!(is_gone.try_recv().is_err(), "the op needs it");
    client.shared.tell(|engine| engine.end("the test is over"));
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
fn a_call_that_is_refused_is_opened_as_such_and_has_a_number() {
    // wire: W-70
    let Rig { client, socket, shard } = rig();
    let call = Call { number: 5, collective: Collective::Broadcast, root: 1 };
    let broadcast = Descriptor { call, ..descriptor() };
    let refusals = [
        client.submit(vec![0; 5], broadcast).unwrap_err(),
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
    assert_eq!(refused.to_string(), "a call that it refused (its own error says why)");
    let of = |op| if op < 4 { refused } else { broadcast };
    let expected: Vec<_> = (0..5).map(|op| (OpId(op), of(op))).collect();
    assert_eq!(opened, expected);
    // No thread waits for a refused op, whatever its outcome.
    send(&shard, socket, &fail(OpId(0), 0));
    client.shared.tell(|engine| engine.end("the test is over"));
    assert!((0..4).all(|op| client.shared.lock().engine.take(OpId(op)).is_none()));
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
        // The exchanges so far gave later ops enough time to begin too early.
        opened.clone()
    };
    assert_eq!(begun(1), [0]);
    send(&shard, socket, &fail(OpId(0), 0));
    assert_eq!(begun(2), [0, 1]);
    drop(handles);
    send(&shard, socket, &fail(OpId(1), 0));
    assert_eq!(begun(4), [0, 1, 2, 3], "the last only lies behind another in its lane");
}

#[test]
fn what_is_spent_of_an_ops_time_is_not_had_again() {
    let client = client();
    let spent = Span(client.op_timeout.0 - Span::from_millis(50).0);
    let handle = client.submit_folded(tensor(), descriptor(), 0..4, spent).unwrap();
    assert!(client.ends_within(&handle, Duration::from_secs(300)).unwrap());
    let error = client.wait(handle).unwrap_err();
    assert!(matches!(error, Error::Op(OpError::Timeout { .. })), "{error}");
}
