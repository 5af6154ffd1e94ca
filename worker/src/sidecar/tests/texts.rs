//! Tests that text from a message is sanitized before it is shown.

use racksum_proto::job_name::JobName;
use racksum_proto::peer_text::PeerText;
use racksum_proto::status::{Memory, SidecarJobStatus, SidecarStatus};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::sidecar::AskError;
use crate::sidecar::message::{FromSidecar, Join, NotJoined, VERSION};

/// Checks that the message's `Debug` output is plain and short when a hostile text replaces `TEXT`.
fn feed<T: Serialize + DeserializeOwned + std::fmt::Debug>(message: &T) {
    let evil = "\n\x1b[31m\x07\u{202e}".to_owned() + &"x".repeat(1 << 20);
    let json = serde_json::to_string(message).unwrap();
    assert!(json.contains(TEXT), "{json}");
    let json = json.replace(&format!("{TEXT:?}"), &serde_json::to_string(&evil).unwrap());
    let shown = format!("{:?}", serde_json::from_str::<T>(&json).unwrap());
    let is_plain = |c: char| PeerText::is_plain(c.encode_utf8(&mut [0; 4]));
    assert!(shown.chars().all(is_plain), "{shown:?}");
    assert!(shown.len() < 6 * PeerText::MAX, "{} bytes of {json:.100} are shown", shown.len());
}

const TEXT: &str = "a text";

#[test]
fn no_text_of_a_message_is_shown_as_it_came() {
    let text = || TEXT.to_owned();
    feed(&FromRank::Join(Join {
        version: VERSION,
        job: JobName::new(text(), text()),
        generation: Generation(0),
        rank: 0,
        world: 1,
        local_world: 1,
        lanes: 1,
        secret: None,
        join_timeout: 1,
        op_timeout: 1,
    }));
    for message in [
        FromSidecar::Refused { reason: text() },
        FromSidecar::NotJoined(NotJoined::Refused { reason: text() }),
        FromSidecar::NotJoined(NotJoined::NoRoom { why: text(), waited: 1, elsewhere: text() }),
        FromSidecar::NotJoined(NotJoined::Incomplete {
            missing: vec![1],
            waited: 1,
            elsewhere: text(),
        }),
        FromSidecar::NotJoined(NotJoined::NoAggregator { tried: text() }),
        FromSidecar::Lent { memory: 1, refused: Some(text()) },
        FromSidecar::CutOff { why: text() },
        FromSidecar::Superseded { why: text() },
    ] {
        feed(&message);
    }
}

#[test]
fn no_text_of_what_a_sidecar_does_is_shown_as_it_came() {
    let text = || TEXT.to_owned();
    let job = SidecarJobStatus {
        job: text(),
        group: text(),
        generation: 0,
        uid: 0,
        world: 1,
        local_world: 1,
        lanes: 1,
        state: text(),
        age_ms: 0,
        awaited: 0,
        awaited_ops: 0,
        summed_ops: 0,
        stalled_ms: None,
        ranks: Vec::new(),
    };
    feed(&SidecarStatus {
        version: text(),
        up_ms: 0,
        aggregators: vec![text()],
        insecure: false,
        draining: false,
        max_jobs: 1,
        max_ranks: 1,
        ranks: 0,
        memory: Memory::default(),
        jobs: vec![job],
    });
}

#[test]
fn a_sidecar_that_refuses_its_status_is_quoted() {
    let path = std::env::temp_dir().join(format!("racksum-refuses-{}", std::process::id()));
    let listener = Listener::bind(&path, 0o600).unwrap();
    for (answer, expected) in [
        (FromSidecar::Refused { reason: TEXT.into() }, TEXT),
        (FromSidecar::WrongVersion { speaks: 9 }, "it speaks protocol version 9"),
    ] {
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&path).unwrap_err());
            let line = listener.accept().unwrap().unwrap();
            line.recv::<FromRank>().unwrap();
            line.send(&answer, None).unwrap();
            let error = asks.join().unwrap();
            assert!(matches!(error, AskError::Refused(_)), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        });
    }
}
