//! Authenticated datagrams: forged and replayed datagrams change nothing but a counter (I6).

use std::net::SocketAddr;
use std::time::Duration;

use racksum_net::auth::Sealer;
use racksum_net::udp::Transmit;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::control::Welcome;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Generation, OpId, Rank, WindowId};
use racksum_proto::reject::Reject;
use racksum_proto::wire::{Header, Kind, NackEntries, NackEntry};
use racksum_worker::{Client, ConnectError, ConnectOptions};

use crate::impostor::Impostor;
use crate::inputs::floats;
use crate::rig::{Rig, bounded};
use crate::strangers::{datagram, disturbed, header};
use crate::waits::await_that;

/// The methods that authenticate datagrams.
const WAYS: [DataAuth; 2] = [DataAuth::Mac, DataAuth::Aead];

fn sealed(sealer: &mut Sealer, contents: &[u8]) -> Vec<u8> {
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let mut out = Vec::new();
    sealer.seal(&Transmit::new(nowhere, contents, contents.len()), &mut out);
    out
}

/// Returns the sealer of rank 0.
fn sealer(welcome: &Welcome) -> Sealer {
    Sealer::of_rank(welcome.data_auth, &welcome.keys.unwrap(), Rank(0), 0).unwrap()
}

/// Returns the header of an unsealed acknowledgement from rank 0.
fn ack(welcome: &Welcome) -> Header {
    header(welcome.job, Generation(0), Rank(0))
}

#[test]
fn what_is_forged_replayed_or_spoofed_is_counted_and_changes_nothing() {
    for auth in WAYS {
        bounded(60, move || {
            let rig = Rig::start(|config| config.data_auth = Some(auth));
            let mut impostor = Impostor::connect(&rig);
            let welcome = impostor.join(impostor.wish("own", 0, 1));
            let mut own = sealer(&welcome);
            let plain = datagram(&ack(&welcome), &[]);
            let genuine = sealed(&mut own, &plain);
            let mut changed = sealed(&mut own, &plain);
            changed[20] ^= 1;
            let cut_short = sealed(&mut own, &plain);
            let keys = welcome.keys.unwrap();
            let guessed = Keys { up: Key([7; Key::LEN]), ..keys };
            let mut wrong_key = Sealer::of_rank(auth, &guessed, Rank(0), 0).unwrap();
            // The shard's own sealer, as if an attacker sent the shard's datagrams back to it.
            let mut reflected = Sealer::of_shard(auth, &keys.down, 0).unwrap();
            let mut other_shard = Sealer::of_rank(auth, &keys, Rank(0), 1).unwrap();
            // Use up sequence numbers: the aggregator checks the tag only if the number is new.
            for sealer in [&mut wrong_key, &mut reflected, &mut other_shard] {
                (0..99).for_each(|_| drop(sealed(sealer, &plain)));
            }
            let spoofed = Header { sender: Rank(1), ..ack(&welcome) };
            // An unsealed datagram's generation would pass as a new sequence number.
            let bare = datagram(&Header { generation: Generation(999), ..ack(&welcome) }, &[]);
            let datagrams = [
                (Reject::Forged, bare),
                (Reject::Forged, plain[..47].to_vec()),
                (Reject::Forged, changed),
                (Reject::Forged, sealed(&mut wrong_key, &plain)),
                (Reject::Forged, sealed(&mut reflected, &plain)),
                (Reject::Forged, sealed(&mut other_shard, &plain)),
                (Reject::Forged, cut_short[..cut_short.len() - 1].to_vec()),
                (Reject::Replayed, genuine.clone()),
                (Reject::Sender, sealed(&mut own, &datagram(&spoofed, &[]))),
            ];
            impostor.send(0, &genuine);
            disturbed(&rig, || {
                for _ in 0..10 {
                    datagrams.iter().for_each(|(_, datagram)| impostor.send(0, datagram));
                    // wire: W-60
                    let both = [&plain[..], &datagram(&spoofed, &[])].concat();
                    impostor.send(0, &sealed(&mut own, &both));
                }
                for (reason, more) in
                    [(Reject::Forged, 0), (Reject::Replayed, 0), (Reject::Sender, 10)]
                {
                    // Exclude a datagram shorter than a header: it belongs to no job, so it does
                    // not count as forged.
                    let of = |it: &&(Reject, Vec<u8>)| it.0 == reason && it.1.len() >= Header::LEN;
                    let due = more + 10 * datagrams.iter().filter(of).count() as u64;
                    let what = format!("{due} datagrams are rejected for {reason:?}, {auth}");
                    rig.await_stats(&what, |_| rig.rejects().of(reason) >= due);
                }
                impostor.vanish();
            });
        });
    }
}

/// Returns how many datagrams arrive before 300 ms of silence.
fn count_received(impostor: &Impostor) -> usize {
    impostor.socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut datagram = [0; 2048];
    std::iter::from_fn(|| impostor.socket.recv(&mut datagram).ok()).count()
}

#[test]
fn a_question_that_a_stranger_repeats_is_answered_once() {
    bounded(60, || {
        let rig = Rig::start(|config| config.data_auth = Some(DataAuth::Mac));
        let mut impostor = Impostor::connect(&rig);
        let welcome = impostor.join(impostor.wish("own", 0, 1));
        let mut own = sealer(&welcome);
        let mut send = |header: Header, body: &[u8]| {
            let bytes = sealed(&mut own, &datagram(&header, body));
            impostor.send(0, &bytes);
            bytes
        };
        let mut descriptor = [0; Descriptor::LEN];
        Descriptor::sum(4, DType::F32).encode(&mut descriptor);
        // The op's first and only window, which the rank will send.
        let rest = [u32::MAX.to_be_bytes(), 1_u32.to_be_bytes(), [0; 4], 1_u32.to_be_bytes()];
        let open = [&descriptor[..], &rest.concat()].concat();
        send(Header { kind: Kind::Open, ..ack(&welcome) }, &open);
        send(Header { kind: Kind::Data, mask: 1, ..ack(&welcome) }, &[0x3f; 16]);
        assert!(count_received(&impostor) > 0, "the sum must arrive");
        let mut entry = [0; 64];
        let lacks = NackEntry { window: WindowId::new(OpId(0), 0), fragments: u64::MAX };
        let len = NackEntries::encode(std::iter::once(lacks), &mut entry);
        let question = send(Header { kind: Kind::Nack, ..ack(&welcome) }, &entry[..len]);
        assert!(count_received(&impostor) > 0, "the sum must arrive again");
        (0..20).for_each(|_| impostor.send(0, &question));
        assert_eq!(count_received(&impostor), 0, "copies must get no answer");
        rig.await_stats("the copies are counted", |_| rig.rejects().of(Reject::Replayed) == 20);
        impostor.vanish();
    });
}

#[test]
fn a_rank_that_wants_its_data_authenticated_otherwise_is_told_and_the_others_wait_on() {
    bounded(60, || {
        let rig = Rig::start(|config| config.data_auth = Some(DataAuth::Mac));
        let run = |options: &ConnectOptions| {
            let client = Client::connect(options)?;
            let mut tensor = floats([1.0, 2.0]);
            client.reduce(&mut tensor, Descriptor::sum(2, DType::F32)).unwrap();
            Ok::<_, ConnectError>(tensor)
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| run(&rig.options("job", 0, 2)));
            await_that("the first rank waits", || rig.aggregator.jobs() == 1);
            let second = rig.options("job", 1, 2);
            let wrong = ConnectOptions { data_auth: Some(DataAuth::Aead), ..second.clone() };
            let error = run(&wrong).unwrap_err();
            assert!(matches!(error, ConnectError::Refused(_)), "{error:?}");
            let why = "the aggregator refused: this aggregator authenticates data with \"mac\", \
                       but rank 1 asks for \"aead\"; set `data_auth` to the aggregator's";
            assert_eq!(error.to_string(), why);
            let right = ConnectOptions { data_auth: Some(DataAuth::Mac), ..second };
            assert_eq!(run(&right).unwrap(), floats([2.0, 4.0]));
            assert_eq!(first.join().unwrap().unwrap(), floats([2.0, 4.0]));
        });
    });
}
