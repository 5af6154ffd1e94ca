use std::vec;
use std::vec::Vec;

use super::*;
use crate::dtype::DType;
use crate::geometry::Fragmentation;
use crate::ids::Generation;
use crate::verdict::Verdict;
use crate::wire::{Disagreement, Flags, Header, Kind};

fn config() -> Config {
    Config {
        job: JobId(1),
        generation: Generation(0),
        rank: Rank(0),
        lanes: 1,
        shards: 1,
        pool_slots: 4,
        max_ops: 4,
        cut: Fragmentation::new(1408).unwrap(),
        in_flight: 1 << 20,
        first_op: OpId(0),
        may_move: false,
        acks_at_rest: false,
        child: None,
    }
}

fn worker() -> Worker {
    Worker::new(config(), Time(0))
}

/// Returns the ops in the opens that the machine sends.
fn opened(worker: &mut Worker) -> Vec<OpId> {
    let mut out = [0xa5; Header::LEN + 1408];
    let mut ops = Vec::new();
    while let Some(transmit) = worker.poll_transmit(Time(0), &mut out, &mut ()) {
        let Transmit::Datagram { len, .. } = transmit else { continue };
        let (header, _) = Header::decode(&out[..len]).unwrap();
        if header.kind == Kind::Open {
            ops.push(header.window.op);
        }
    }
    ops
}

/// Returns the window that a pure ack names, if the machine sends one.
fn acknowledged(worker: &mut Worker) -> Option<u32> {
    let mut out = [0xa5; Header::LEN + 1408];
    let mut acked = None;
    while let Some(transmit) = worker.poll_transmit(Time(1), &mut out, &mut ()) {
        let Transmit::Datagram { len, .. } = transmit else { continue };
        let (header, _) = Header::decode(&out[..len]).unwrap();
        if header.kind == Kind::Ack {
            acked = Some(header.ack.index);
        }
    }
    acked
}

/// Starts an op with one window for each mask of non-zero blocks.
fn submit(worker: &mut Worker, masks: &[u64]) -> OpId {
    let descriptor = Descriptor::sum(masks.len() as u64 * 60 * 256, DType::F32);
    worker.submit_scanned(Time(0), descriptor, masks.to_vec(), Span::from_secs(1)).unwrap()
}

/// Delivers a one-block result of a window. Its header says that the credit is still at the op's
/// first window.
fn arrive(worker: &mut Worker, window: WindowId, previous: u32) {
    let header = Header {
        kind: Kind::Result,
        window,
        ack: WindowId::new(window.op, 0),
        mask: 1,
        length: 1024,
        previous,
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    let verdict = worker.handle_decoded(Time(1), &header, &[0; 1024], false, &mut ());
    let Verdict::Store(delivery) = verdict else { panic!("{verdict:?}") };
    worker.handle_delivered(Time(1), &delivery, &mut ());
}

#[test]
fn an_op_that_is_scanned_already_is_opened_once_the_one_before_it_failed() {
    let mut worker = worker();
    let timeout = Span::from_secs(1);
    let large = Descriptor::sum(100 * 60 * 256, DType::F32);
    let first = worker.submit(Time(0), large, timeout).unwrap();
    let small = Descriptor::sum(1, DType::F32);
    let second = worker.submit_scanned(Time(0), small, vec![1], timeout).unwrap();
    // Only part of the first op is scanned, and the rest never will be.
    for _ in 0..10 {
        let scan = worker.poll_scan().unwrap();
        worker.handle_scanned(scan, 1);
    }
    assert_eq!(opened(&mut worker), [first]);
    let other = Descriptor { tag: 1, ..large };
    let mut body = [0; Disagreement::LEN];
    Disagreement { one: (Rank(0), large), other: (Rank(1), other) }.encode(&mut body);
    let header = Header {
        kind: Kind::Fail,
        window: WindowId::new(first, 0),
        ack: WindowId::new(first, 0),
        flags: Flags::NONE,
        length: u16::try_from(body.len()).unwrap(),
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    worker.handle_decoded(Time(1), &header, &body, false, &mut ());
    assert_eq!(opened(&mut worker), [second]);
}

#[test]
fn a_run_of_empty_windows_does_not_hold_up_the_scan() {
    const WINDOWS: u32 = 5000;
    // The cases are data in no window, in the first, and in the last.
    for filled in [None, Some(0), Some(WINDOWS - 1)] {
        let mut worker = worker();
        let large = Descriptor::sum(u64::from(WINDOWS) * 60 * 256, DType::F32);
        worker.submit(Time(0), large, Span::from_secs(1)).unwrap();
        let mut scanned = 0;
        while let Some(scan) = worker.poll_scan() {
            worker.handle_scanned(scan, u64::from(filled == Some(scan.index)));
            scanned += 1;
            opened(&mut worker);
        }
        assert_eq!(scanned, WINDOWS, "with data in window {filled:?}");
    }
}

#[test]
fn an_op_that_all_have_ended_elsewhere_is_passed_over_before_it_is_opened_again() {
    let config = Config { may_move: true, ..config() };
    let mut worker = Worker::new(config, Time(0));
    let small = Descriptor::sum(1, DType::F32);
    let submit = |worker: &mut Worker| {
        worker.submit_scanned(Time(0), small, vec![1], Span::from_secs(1)).unwrap()
    };
    let first = submit(&mut worker);
    assert_eq!(opened(&mut worker), [first]);
    let header = |kind, ack| Header {
        kind,
        window: WindowId::new(first, 0),
        ack: WindowId::new(ack, 0),
        mask: 1,
        length: if kind == Kind::Result { 4 } else { 0 },
        previous: Header::NO_PREVIOUS,
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    let verdict =
        worker.handle_decoded(Time(1), &header(Kind::Result, first), &[0; 4], false, &mut ());
    let Verdict::Store(delivery) = verdict else { panic!("{verdict:?}") };
    worker.handle_delivered(Time(1), &delivery, &mut ());
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    assert_eq!(worker.first_kept(), first);
    worker.resume(config, Time(2), &mut ());
    worker.handle_decoded(Time(3), &header(Kind::Credit, OpId(1)), &[], false, &mut ());
    assert!(worker.is_idle());
    let second = submit(&mut worker);
    assert_eq!(opened(&mut worker), [second]);
}

#[test]
fn windows_of_zeros_count_for_acknowledgements_as_they_do_for_the_pool() {
    let mut worker = Worker::new(Config { pool_slots: 16, ..config() }, Time(0));
    let op = submit(&mut worker, &[1, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(opened(&mut worker), [op]);
    arrive(&mut worker, WindowId::new(op, 0), Header::NO_PREVIOUS);
    assert_eq!(acknowledged(&mut worker), None);
    // Only another rank contributes to this window. With it, more than a quarter of the pool is
    // unacknowledged.
    arrive(&mut worker, WindowId::new(op, 5), 0);
    assert_eq!(acknowledged(&mut worker), Some(6));
}

#[test]
fn a_rank_that_the_pool_stops_acknowledges_at_once() {
    // The results fill less than a quarter of the pool, so only the lack of a slot triggers the
    // ack.
    let mut worker = Worker::new(Config { pool_slots: 16, ..config() }, Time(0));
    let mut masks = [0; 20];
    (masks[0], masks[17]) = (1, 1);
    let op = submit(&mut worker, &masks);
    assert_eq!(opened(&mut worker), [op]);
    assert_eq!(acknowledged(&mut worker), None);
    arrive(&mut worker, WindowId::new(op, 0), Header::NO_PREVIOUS);
    assert_eq!(acknowledged(&mut worker), Some(1));
}

/// Delivers the result of an op of one element, with this credit.
fn finish_small(worker: &mut Worker, op: OpId, credit: OpId) {
    let header = Header {
        kind: Kind::Result,
        window: WindowId::new(op, 0),
        ack: WindowId::new(credit, 0),
        mask: 1,
        length: 4,
        previous: Header::NO_PREVIOUS,
        ..Header::ping(JobId(1), Generation(0), 0)
    };
    let verdict = worker.handle_decoded(Time(1), &header, &[0; 4], false, &mut ());
    let Verdict::Store(delivery) = verdict else { panic!("{verdict:?}") };
    worker.handle_delivered(Time(1), &delivery, &mut ());
}

fn credit(worker: &mut Worker, to: OpId) {
    let ack = WindowId::new(to, 0);
    let header = Header { kind: Kind::Credit, ack, ..Header::ping(JobId(1), Generation(0), 0) };
    worker.handle_decoded(Time(3), &header, &[], false, &mut ());
}

#[test]
fn a_rank_is_ready_to_move_once_all_have_the_sums_that_it_has_not_kept() {
    // wire: W-78
    let mut worker = worker();
    let small = Descriptor::sum(1, DType::F32);
    let submit = |worker: &mut Worker| {
        worker.submit_scanned(Time(0), small, vec![1], Span::from_secs(1)).unwrap()
    };
    // This op has ended here and is forgotten, but another rank may lack its sum.
    let ended = submit(&mut worker);
    opened(&mut worker);
    finish_small(&mut worker, ended, ended);
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    assert!(worker.is_idle() && !worker.is_ready_to_move());
    let in_flight = submit(&mut worker);
    opened(&mut worker);
    worker.prepare_to_move();
    let later = submit(&mut worker);
    opened(&mut worker);
    let kept = [ended, in_flight, later].map(|op| worker.keeps_sums_of(op));
    assert_eq!(kept, [false, false, true]);
    assert!(!worker.is_ready_to_move());
    credit(&mut worker, in_flight);
    assert!(!worker.is_ready_to_move());
    finish_small(&mut worker, in_flight, in_flight);
    assert!(!worker.is_ready_to_move(), "another rank may lack the sum of the second op");
    credit(&mut worker, later);
    assert!(worker.is_ready_to_move());
    // The op that is in flight resumes elsewhere.
    assert_eq!(worker.first_kept(), later);
    worker.resume(Config { may_move: true, ..config() }, Time(4), &mut ());
    assert_eq!(opened(&mut worker), [later]);
    assert!(worker.is_ready_to_move());
}

#[test]
fn a_prepared_rank_at_rest_acknowledges_and_asks_until_it_is_ready() {
    let mut worker = worker();
    let op = submit(&mut worker, &[1]);
    opened(&mut worker);
    arrive(&mut worker, WindowId::new(op, 0), Header::NO_PREVIOUS);
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    assert_eq!(worker.poll_timeout(), Time::NEVER, "a rank that keeps nothing rests");
    worker.prepare_to_move();
    let due = worker.poll_timeout();
    assert!(due < Time::NEVER && !worker.is_ready_to_move());
    assert!(!worker.is_at_rest(), "its driver must go on");
    worker.handle_timeout(due, &mut ());
    let mut out = [0xa5; Header::LEN + 1408];
    let sent = worker.poll_transmit(due, &mut out, &mut ());
    let Some(Transmit::Datagram { len, .. }) = sent else { panic!("{sent:?}") };
    // Every message acknowledges, and a probe asks for the credit too.
    let (header, _) = Header::decode(&out[..len]).unwrap();
    assert!(matches!(header.kind, Kind::Ack | Kind::Nack), "{header:?}");
    assert_eq!(header.ack, WindowId::new(OpId(op.0 + 1), 0));
    credit(&mut worker, OpId(op.0 + 1));
    assert!(worker.is_ready_to_move());
    assert_eq!(worker.poll_timeout(), Time::NEVER);
    assert!(worker.is_at_rest());
}

#[test]
fn a_rank_whose_move_is_cancelled_keeps_nothing_and_prepares_again_from_the_start() {
    let mut worker = worker();
    let small = Descriptor::sum(1, DType::F32);
    let submit = |worker: &mut Worker| {
        let op = worker.submit_scanned(Time(0), small, vec![1], Span::from_secs(1)).unwrap();
        opened(worker);
        op
    };
    worker.prepare_to_move();
    let (ended, in_flight) = (submit(&mut worker), submit(&mut worker));
    finish_small(&mut worker, ended, ended);
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    assert_eq!(worker.first_kept(), ended);
    worker.stop_keeping();
    assert!(worker.first_kept() == in_flight && !worker.is_ready_to_move());
    let later = submit(&mut worker);
    assert!(!worker.keeps_sums_of(later));
    // The ops in flight end as usual, and the rank rests.
    finish_small(&mut worker, in_flight, ended);
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    worker.prepare_to_move();
    credit(&mut worker, later);
    assert!(!worker.is_ready_to_move(), "the op between the two preparations is not kept");
    worker.stop_keeping();
    finish_small(&mut worker, later, later);
    assert_eq!(worker.poll_outcome().unwrap().result, Ok(()));
    assert!(worker.is_idle() && worker.is_at_rest());
    assert_eq!(worker.poll_timeout(), Time::NEVER);
}

#[test]
#[should_panic(expected = "some sums were not kept")]
fn a_rank_that_is_not_ready_cannot_resume_elsewhere() {
    let mut worker = worker();
    submit(&mut worker, &[1]);
    worker.prepare_to_move();
    worker.resume(Config { may_move: true, ..config() }, Time(4), &mut ());
}
