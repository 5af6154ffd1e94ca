use std::net::SocketAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use racksum_proto::ids::{JobId, OpId, WindowId};
use racksum_proto::wire::{self, Kind};

use super::*;

const LIFE: Generation = Generation(3);
const WAYS: [DataAuth; 2] = [DataAuth::Mac, DataAuth::Aead];

fn keys() -> Keys {
    Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) }
}

/// Returns a sealer and an opener for datagrams from rank 1 to shard 2.
fn ends(auth: DataAuth) -> (Sealer, Opener) {
    let sealer = Sealer::of_rank(auth, &keys(), Rank(1), 2).unwrap();
    (sealer, Opener::of_rank(auth, &keys().up, LIFE, Rank(1), 2).unwrap())
}

fn message(body: &[u8]) -> Vec<u8> {
    let header = Header {
        kind: Kind::Data,
        sender: Rank(1),
        window: WindowId::new(OpId(5), 6),
        mask: 1,
        length: u16::try_from(body.len()).unwrap(),
        ..Header::ping(JobId(7), LIFE, 2)
    };
    let mut head = [0; Header::LEN];
    header.encode(&mut head);
    [&head[..], body].concat()
}

fn sealed(sealer: &mut Sealer, datagram: &[u8]) -> Vec<u8> {
    let to = SocketAddr::from(([127, 0, 0, 1], 9));
    let mut out = Vec::new();
    sealer.seal(&Transmit::new(to, datagram, datagram.len()), &mut out);
    out
}

#[test]
fn what_is_sealed_is_opened_as_it_was() {
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let datagram = [message(b"some gradients"), message(b"and more")].concat();
        for number in 0..3 {
            let mut sealed = sealed(&mut sealer, &datagram);
            assert_eq!(sealed.len(), datagram.len() + auth.trailer());
            assert_eq!(Header::number(&sealed), Some(number));
            let hidden = !sealed.windows(14).any(|part| part == b"some gradients");
            assert_eq!(hidden, auth == DataAuth::Aead);
            assert_eq!(opener.open(&mut sealed).unwrap(), datagram, "{auth}");
        }
    }
    assert!(Sealer::of_rank(DataAuth::None, &keys(), Rank(1), 2).is_none());
}

#[test]
fn a_tag_is_what_the_wire_says_that_it_is() {
    // The nonce of docs/wire.md, Authentication: sender 1, shard 2, and an eight-byte number.
    let nonce = [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0];
    // Tags from another implementation, which also reproduces the test vectors of RFC 10032.
    let tags =
        [0xe0e2_07b2_9472_e256_18cd_7f9d_fc2f_8698, 0xb119_5a3a_33c1_f642_924b_0b81_855a_047c];
    for (auth, known) in WAYS.into_iter().zip(tags) {
        let (mut sealer, _) = ends(auth);
        sealer.next = 3;
        let sealed = sealed(&mut sealer, &message(b"some gradients"));
        let mut messages = message(b"some gradients");
        Header::put_number(&mut messages, 3);
        let plain = if auth == DataAuth::Mac { messages.len() } else { Header::LEN };
        let (plain, hidden) = messages.split_at(plain);
        let (hidden, tag) = Aegis128X2::<16>::new(&[1; 16], &nonce).encrypt(hidden, plain);
        assert_eq!(u128::from_be_bytes(tag), known);
        assert_eq!(sealed, [plain, &hidden, &tag[..auth.trailer()]].concat(), "{auth}");
    }
}

#[test]
fn one_that_begins_late_takes_what_comes_then_and_nothing_from_before() {
    let keys = keys();
    for sent in [0, 1 << 31, (1 << 32) - 2, 1 << 32, 3 << 40] {
        let mut sealer = Sealer::of_shard(DataAuth::Mac, &keys.down, 2).unwrap();
        sealer.next = sent;
        let datagram = message(b"sums");
        let before: Vec<_> = (0..3).map(|_| sealed(&mut sealer, &datagram)).collect();
        let opener = Opener::of_shard(DataAuth::Mac, &keys, LIFE, 2).unwrap();
        let mut opener = opener.after(sealer.sealed());
        for mut old in before {
            assert_eq!(opener.open(&mut old), Err(Reject::Replayed), "{sent}");
        }
        for _ in 0..3 {
            assert_eq!(opener.open(&mut sealed(&mut sealer, &datagram)).unwrap(), datagram);
        }
    }
}

#[test]
fn trains_are_sealed_datagram_by_datagram_and_so_is_a_last_datagram() {
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        let (one, last) = (message(&[7; 100]), message(&[8; 30]));
        let gso_batch = [&one[..], &one, &last].concat();
        let mut out = Vec::new();
        let stride = sealer.seal(&Transmit::new(to, &gso_batch, one.len()), &mut out);
        assert_eq!(stride, one.len() + auth.trailer());
        let opened = out.chunks_mut(stride).map(|part| opener.open(part).unwrap().to_vec());
        assert_eq!(opened.collect::<Vec<_>>(), [one.clone(), one.clone(), last]);

        let mut out = [vec![1, 2, 3], one.clone()].concat();
        sealer.seal_last(&mut out, 3);
        assert_eq!(opener.open(&mut out[3..]).unwrap(), one);

        let (mut there, mut tag) = (one.clone(), Vec::new());
        sealer.seal_in_place(&mut there, &mut tag);
        assert_eq!(opener.open(&mut [there, tag].concat()).unwrap(), one);
    }
}

#[test]
fn datagrams_with_room_for_their_tags_are_sealed_and_can_be_sealed_again() {
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let (one, last) = (message(&[7; 100]), message(&[8; 30]));
        let room = vec![0xa5; auth.trailer()];
        let mut contents = [&one[..], &room, &one, &room, &last, &room].concat();
        let stride = one.len() + room.len();
        let mut spare = Vec::new();
        for _ in 0..2 {
            let sealed = sealer.seal_with_room(&mut contents, stride, &mut spare);
            let opened = sealed.chunks_mut(stride).map(|part| opener.open(part).unwrap().to_vec());
            assert_eq!(opened.collect::<Vec<_>>(), [one.clone(), one.clone(), last.clone()]);
        }
    }
}

#[test]
fn a_datagram_counts_once() {
    // wire: W-59
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let first = sealed(&mut sealer, &message(b"first"));
        let second = sealed(&mut sealer, &message(b"second"));
        assert!(opener.open(&mut second.clone()).is_ok());
        assert!(opener.open(&mut first.clone()).is_ok(), "the first datagram arrives late");
        for again in [first, second] {
            assert_eq!(opener.open(&mut again.clone()), Err(Reject::Replayed));
        }
    }
}

#[test]
fn what_was_forged_does_not_make_the_genuine_a_replay() {
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let genuine = sealed(&mut sealer, &message(b"genuine"));
        let mut forged = genuine.clone();
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(opener.open(&mut forged), Err(Reject::Forged));
        assert!(opener.open(&mut genuine.clone()).is_ok());
    }
}

#[test]
fn every_changed_bit_and_every_truncation_is_seen() {
    // wire: W-58
    for auth in WAYS {
        let (mut sealer, mut opener) = ends(auth);
        let genuine = sealed(&mut sealer, &message(b"genuine"));
        for bit in 0..genuine.len() * 8 {
            let mut changed = genuine.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opener.open(&mut changed), Err(Reject::Forged), "{auth} bit {bit}");
        }
        for len in 0..genuine.len() {
            assert_eq!(opener.open(&mut genuine[..len].to_vec()), Err(Reject::Forged), "{len}");
        }
        let longer = [&genuine[..], &[0]].concat();
        assert_eq!(opener.open(&mut longer.clone()), Err(Reject::Forged));
        assert!(opener.open(&mut genuine.clone()).is_ok());
    }
}

#[test]
fn the_ways_of_ranks_shards_directions_and_keys_are_apart() {
    for auth in WAYS {
        let (mut sealer, _) = ends(auth);
        let genuine = sealed(&mut sealer, &message(b"genuine"));
        let other = Key([9; Key::LEN]);
        let apart = [
            Opener::of_rank(auth, &keys().up, LIFE, Rank(2), 2),
            Opener::of_rank(auth, &keys().up, LIFE, Rank(1), 3),
            Opener::of_rank(auth, &other, LIFE, Rank(1), 2),
            Opener::of_shard(auth, &keys(), LIFE, 2),
            Opener::of_shard(auth, &Keys { down: keys().up, ..keys() }, LIFE, 2),
        ];
        for (i, opener) in apart.into_iter().enumerate() {
            let opened = opener.unwrap().open(&mut genuine.clone()).map(|it| it.to_vec());
            assert_eq!(opened, Err(Reject::Forged), "{auth} {i}");
        }
    }
}

#[test]
fn both_directions_have_one_key_each() {
    for auth in WAYS {
        let mut sealer = Sealer::of_shard(auth, &keys().down, 2).unwrap();
        let mut opener = Opener::of_shard(auth, &keys(), LIFE, 2).unwrap();
        let datagram = message(b"sums");
        assert_eq!(opener.open(&mut sealed(&mut sealer, &datagram)).unwrap(), datagram);
    }
    assert_ne!(new_key().unwrap(), new_key().unwrap());
}

proptest! {
    #[test]
    fn noise_is_never_taken_and_never_panics(mut noise in vec(any::<u8>(), 0..200)) {
        for auth in WAYS {
            let (_, mut opener) = ends(auth);
            let rejected = opener.open(&mut noise);
            prop_assert!(matches!(rejected, Err(Reject::Forged | Reject::Replayed)));
        }
        // A holder of the key may seal anything, so decoding its messages must not panic.
        let (mut sealer, mut opener) = ends(DataAuth::Mac);
        let mut sealed = sealed(&mut sealer, &noise);
        if let Ok(opened) = opener.open(&mut sealed) {
            wire::messages(opened).for_each(drop);
        }
    }
}
