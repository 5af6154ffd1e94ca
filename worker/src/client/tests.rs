use std::net::Ipv4Addr;

use racksum_proto::dtype::DType;
use racksum_proto::error::OpError;
use racksum_proto::ids::JobId;

use super::*;
use crate::engine::tests::Bench;

/// A client whose shard never answers.
fn client() -> Client {
    let Bench { engine, socket, .. } = Bench::new(1, 1, Ipv4Addr::LOCALHOST);
    let shared = Arc::new(Shared::new(engine, socket, Arc::from([])).unwrap());
    let driver = Arc::clone(&shared);
    let welcome = Welcome {
        job: JobId(1),
        data_ports: vec![],
        pool_slots: 8,
        max_ops: 8,
        fragment_payload: 1408,
        in_flight: 1 << 20,
        group: None,
    };
    Client {
        shared,
        welcome,
        shards: 1,
        multicast: false,
        op_timeout: Span::from_secs(60),
        _controls: vec![],
        threads: vec![spawn("drive", move || driver.drive_in_background()).unwrap()],
    }
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
        // A tensor that is shorter than its descriptor says: `check_len` refuses those.
        let data = Data::Owned(vec![0; 4]);
        let mut state = client.shared.lock();
        let bad = state.submit(|engine| engine.submit(descriptor(), data, client.op_timeout));
        client.shared.set_off(state);
        ended(client.wait(client.handle(bad.unwrap())), WHY);
        // The thread may have come too late for its op to start at all.
        match blocked.join().unwrap() {
            Err(Error::Submit(SubmitError::Ended)) => {}
            other => ended(other, WHY),
        }
        ended(waits.join().unwrap(), WHY);
    });
    let after = client.allreduce(&mut tensor(), descriptor());
    assert_eq!(after, Err(Error::Submit(SubmitError::Ended)));
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
    let (result, _) = shared.lock().engine.take(handle.op).unwrap();
    assert_eq!(result, Err(OpError::Ended { why: "the client was closed" }));
}
