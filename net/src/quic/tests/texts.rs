//! Tests that hostile text in the fields of a peer's control messages is displayed safely.

use racksum_proto::auth::{DataAuth, Key};
use racksum_proto::control::{
    CallerId, FromAggregator, FromWorker, Join, LostRank, OnRankLoss, Resume, Welcome,
};
use racksum_proto::ids::{Generation, JobId, OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::peer_text::{PeerText, Unshown};
use racksum_proto::status::OwnCounters;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::frames::{FrameError, MAX_FRAME};

/// Returns a copy of the value for each of its strings, with that string replaced by `text`.
fn with_text(value: &Value, text: &str) -> Vec<Value> {
    match value {
        Value::String(_) => vec![text.into()],
        Value::Array(all) => (0..all.len())
            .flat_map(|at| with_text(&all[at], text).into_iter().map(move |it| (at, it)))
            .map(|(at, it)| {
                let mut all = all.clone();
                all[at] = it;
                all.into()
            })
            .collect(),
        Value::Object(all) => all
            .iter()
            .flat_map(|(key, it)| with_text(it, text).into_iter().map(move |it| (key, it)))
            .map(|(key, it)| {
                let mut all = all.clone();
                all[key] = it;
                all.into()
            })
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) => Vec::new(),
    }
}

/// Puts hostile text into each string field in turn, and checks how the message or its decode error
/// is displayed. Returns how many fields accepted the text.
fn feed<T: Serialize + DeserializeOwned + std::fmt::Debug>(message: &T) -> usize {
    let evil = "\n\x1b[31m\x07\u{202e}".to_owned() + &"x".repeat(1 << 20);
    let texts = with_text(&serde_json::to_value(message).unwrap(), &evil);
    let shown = texts.iter().map(|json| match serde_json::from_str::<T>(&json.to_string()) {
        Ok(message) => (1, format!("{message:?}")),
        Err(error) => (0, FrameError::Decode(error).to_string()),
    });
    let mut taken = 0;
    for (count, shown) in shown {
        let is_plain = |c: char| PeerText::is_plain(c.encode_utf8(&mut [0; 4]));
        assert!(shown.chars().all(is_plain), "{shown:?}");
        assert!(shown.len() < 2 * PeerText::MAX, "{} bytes are shown", shown.len());
        taken += count;
    }
    taken
}

fn join() -> Join {
    Join {
        version: 1,
        job: "train".into(),
        generation: Generation(0),
        rank: 0,
        world: 1,
        lanes: 1,
        data_ports: vec![1],
        receive_buffer: 0,
        max_datagram: 1472,
        multicast: false,
        stripe: (0, 1),
        pool_slots: 0,
        data_auth: None,
        secret: None,
        begun_by: Some(CallerId::Identity("node-1".into())),
        wait: false,
        on_rank_loss: OnRankLoss::Abort,
        may_move: false,
        aggregates: false,
        rejoin: false,
        resume: Some(Resume { first_op: OpId(0), absent: vec![ABSENT] }),
    }
}

fn target() -> MoveTarget {
    MoveTarget { hosts: vec!["agg-2:7177".into()] }
}

const ABSENT: LostRank = LostRank { rank: 1, why: Loss::Died };

fn welcome() -> Welcome {
    Welcome {
        job: JobId(1),
        rank: Rank(0),
        rack: Vec::new(),
        data_ports: vec![1],
        pool_slots: 2,
        max_ops: 1,
        fragment_payload: 1024,
        in_flight: 1,
        first_op: OpId(0),
        group: Some("239.0.0.1:1".parse().unwrap()),
        data_auth: DataAuth::None,
        keys: None,
        sealed: Vec::new(),
        may_move: false,
        in_tree: false,
    }
}

#[test]
fn no_field_of_what_a_worker_says_is_shown_as_it_came() {
    use FromWorker as Message;
    // Number of free-text fields in each message. A join has the names of a job, a group and an
    // identity. The match makes the compiler reject a message that is not listed.
    let texts = |message: &Message| match message {
        Message::Join(_)
        | Message::AddRank(_)
        | Message::AskPresent(_)
        | Message::AskRoom(_)
        | Message::MoveJob { .. } => 3,
        Message::DrainTo { .. } | Message::CannotMove { .. } => 1,
        Message::RankLost(_)
        | Message::PingArrived
        | Message::Counters(_)
        | Message::Leave { .. }
        | Message::CancelRejoin
        | Message::Withdraw
        | Message::Stay
        | Message::Move
        | Message::AskStatus { .. }
        | Message::Prove { .. }
        | Message::AskPingSizes
        | Message::MovePrepared { .. }
        | Message::MayMove { .. }
        | Message::Stop => 0,
    };
    let all = [
        Message::Join(join()),
        Message::AddRank(join()),
        Message::AskPresent(join()),
        Message::AskRoom(join()),
        Message::MoveJob { version: 1, job: "train".into(), to: target() },
        Message::DrainTo { version: 1, to: target() },
        Message::CannotMove { number: 1, reason: String::new() },
        Message::MovePrepared { number: 1 },
        Message::MayMove { may_move: true },
        Message::RankLost(ABSENT),
        Message::PingArrived,
        Message::Counters(OwnCounters::default()),
        Message::Prove { version: 1 },
        Message::AskPingSizes,
        Message::Leave { next_op: Some(OpId(1)) },
    ];
    all.iter().for_each(|message| assert_eq!(feed(message), texts(message), "{message:?}"));
}

#[test]
fn no_field_of_what_an_aggregator_says_is_shown_as_it_came() {
    use FromAggregator as Message;
    let texts = |message: &Message| match message {
        Message::Refused { .. }
        | Message::RefusedRank { .. }
        | Message::Queued { .. }
        | Message::ParentLost { .. }
        | Message::Status { .. }
        | Message::PrepareMove { .. }
        | Message::Superseded { .. } => 1,
        Message::WrongVersion { .. }
        | Message::Lifeline { .. }
        | Message::Prove { .. }
        | Message::PingSizes { .. }
        | Message::Waiting { .. }
        | Message::Present { .. }
        | Message::MayLeave
        | Message::Room
        | Message::MoveNow { .. }
        | Message::CancelMove { .. }
        | Message::Moved { .. }
        | Message::Welcome(_)
        | Message::Ready { .. }
        | Message::ContinueWithout(_)
        | Message::Drain
        | Message::PeerLost { .. } => 0,
    };
    let text = String::new;
    let all = [
        Message::Refused { reason: text() },
        Message::RefusedRank { rank: 0, reason: text() },
        Message::Queued { before: 0, why: text() },
        Message::ParentLost { reason: text() },
        Message::Status { part: Unshown(text()), more: false },
        Message::Superseded { by: Generation(1), why: text() },
        Message::Lifeline { port: 1, token: Key([0; Key::LEN]) },
        Message::Prove {
            data_ports: vec![1],
            token: Key([0; Key::LEN]),
            ip: "192.0.2.1".parse().unwrap(),
        },
        Message::PingSizes { sizes: vec![1] },
        Message::Welcome(welcome()),
        Message::ContinueWithout(ABSENT),
        Message::PeerLost { ranks: Vec::new(), why: Loss::Died },
        Message::MayLeave,
        Message::Room,
        Message::PrepareMove { number: 1, to: target() },
        Message::MoveNow { number: 1 },
        Message::CancelMove { number: 1 },
        Message::Moved { jobs: 1 },
    ];
    all.iter().for_each(|message| assert_eq!(feed(message), texts(message), "{message:?}"));
}

#[test]
fn a_sentence_that_quotes_others_at_any_length_makes_no_message_that_is_too_long() {
    use FromAggregator as Message;
    // JSON escapes every character of this text.
    let text = || "\"".repeat(1 << 20);
    let all = [
        Message::Refused { reason: text() },
        Message::RefusedRank { rank: 0, reason: text() },
        Message::Queued { before: 0, why: text() },
        Message::ParentLost { reason: text() },
        Message::Superseded { by: Generation(1), why: text() },
    ];
    for message in all {
        let json = serde_json::to_string(&message).unwrap();
        assert!(json.len() < MAX_FRAME / 2, "{} bytes of {json:.40}", json.len());
    }
}
