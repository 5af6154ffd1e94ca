//! Measures the authentication and encryption of datagrams in bytes per second, at the sender and
//! at the receiver. The machine's own memory copy is the reference. Run `cargo bench -p
//! racksum-benches --bench sealing`.

mod setting;

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use racksum_net::auth::{Opener, Sealer};
use racksum_net::udp::Transmit;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::ids::{Generation, JobId, Rank};
use racksum_proto::wire::Header;

fn main() {
    let mut criterion = setting::criterion();
    copies(&mut criterion);
    for auth in [DataAuth::Mac, DataAuth::Aead] {
        seals(&mut criterion, auth);
        opens(&mut criterion, auth);
    }
    criterion.final_summary();
}

/// Measures a memory copy, the reference for the other figures.
fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memcpy");
    for len in SIZES {
        let (src, mut dst) = (datagram(len), vec![0; len]);
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(len.to_string(), |bencher| {
            bencher.iter(|| {
                dst.copy_from_slice(black_box(&src));
                black_box(&mut dst);
            });
        });
    }
    group.finish();
}

/// Measures sealing as a shard seals results: `mac` in place, and `aead` in a copy, because the
/// original may be sent again.
fn seals(criterion: &mut Criterion, auth: DataAuth) {
    let mut group = criterion.benchmark_group(format!("seal {}", auth.name()));
    for len in SIZES {
        let (mut sealer, _) = both(auth);
        let (mut bytes, mut out) = (datagram(len), Vec::with_capacity(len));
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(BenchmarkId::from_parameter(len), |bencher| {
            bencher.iter(|| {
                out.clear();
                black_box(sealer.seal_with_room(black_box(&mut bytes), len, &mut out));
            });
        });
    }
    group.finish();
}

fn opens(criterion: &mut Criterion, auth: DataAuth) {
    let mut group = criterion.benchmark_group(format!("open {}", auth.name()));
    for len in SIZES {
        let (mut sealer, mut opener) = both(auth);
        let bytes = datagram(len - auth.trailer());
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut sealed = || {
            let mut out = Vec::with_capacity(len);
            sealer.seal(&Transmit::new(to, &bytes, bytes.len()), &mut out);
            out
        };
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(BenchmarkId::from_parameter(len), |bencher| {
            bencher.iter_batched_ref(
                &mut sealed,
                |datagram| opener.open(black_box(datagram)).expect("the keys match").len(),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

/// Returns the sealer of one rank and the matching opener.
fn both(auth: DataAuth) -> (Sealer, Opener) {
    let keys = Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) };
    let sealer = Sealer::of_rank(auth, &keys, Rank(0), 0);
    let opener = Opener::of_rank(auth, &keys.up, Generation(0), Rank(0), 0);
    sealer.zip(opener).expect("the mode is not `none`")
}

fn datagram(len: usize) -> Vec<u8> {
    let mut bytes = vec![0xa5; len];
    if let Some(head) = bytes.first_chunk_mut() {
        Header::ping(JobId(1), Generation(0), 0).encode(head);
    }
    bytes
}

/// Sizes of an Ethernet datagram, and of a loopback datagram that holds a window.
const SIZES: [usize; 2] = [1440, 61_500];
