//! Measures the kernels in bytes per second. The machine's own memory copy is the reference.
//!
//! The counted bytes are those of all inputs for a fold, of the tensor for a scan, of the f32
//! tensor for a conversion, of the source for a copy, and of the header itself for a header. To run
//! some of the benches, use `cargo bench -p racksum-benches --bench kernels -- fold/f32`.

mod setting;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use racksum_benches::{WORLD, contribution, gradient, sparse};
use racksum_kernels::{codec, fold};
use racksum_proto::arith::FoldTerms;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::wire::{Header, Kind};

fn main() {
    let mut criterion = setting::criterion();
    copies(&mut criterion);
    scans(&mut criterion);
    folds(&mut criterion);
    short_folds(&mut criterion);
    elementwise_conversions(&mut criterion);
    scaled_conversions(&mut criterion);
    headers(&mut criterion);
    criterion.final_summary();
}

/// Measures a memory copy, the reference for the other figures.
fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memcpy");
    for (name, len) in SIZES {
        let src = gradient(len, 1);
        let mut dst = vec![0; len];
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                dst.copy_from_slice(black_box(&src));
                black_box(&mut dst);
            });
        });
    }
    group.finish();
}

fn scans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scan");
    let block_len = BLOCK_ELEMENTS * DType::F32.size();
    for (name, len) in SIZES {
        for (density, every) in [("dense", 1), ("1 %", 100), ("zero", 0)] {
            let mut tensor = sparse(len, block_len, every);
            group.throughput(Throughput::Bytes(len as u64));
            group.bench_function(BenchmarkId::new(density, name), |bencher| {
                bencher.iter(|| {
                    for window in tensor.chunks_mut(WINDOW_LEN) {
                        let window = black_box(window);
                        let occupancy = codec::scan_window(DType::F32, BLOCK_ELEMENTS, window);
                        black_box(occupancy);
                    }
                });
            });
        }
    }
    group.finish();
}

fn folds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fold");
    for (wire, reduction) in [
        (WireType::F32, Reduction::Sum),
        (WireType::F32, Reduction::Avg),
        (WireType::F32, Reduction::Max),
        (WireType::Bf16, Reduction::Sum),
        (WireType::Bf16, Reduction::Avg),
        (WireType::F16, Reduction::Sum),
        (WireType::F64, Reduction::Sum),
        (WireType::I32, Reduction::Sum),
        (WireType::Int8, Reduction::Sum),
        (WireType::Fixed32, Reduction::Sum),
    ] {
        for ranks in [2, 4, 8] {
            let name = format!("{} {}", wire.name(), reduction.name());
            bench_fold(&mut group, &name, (wire, reduction), ranks, CACHED_LEN);
        }
    }
    group.finish();
}

/// Measures folds of short runs, as in fragments: a few elements, a small block, a datagram.
fn short_folds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("short fold");
    for wire in [WireType::F32, WireType::Bf16] {
        for len in [32, 128, 1424] {
            let name = format!("{} of {len} B", wire.name());
            bench_fold(&mut group, &name, (wire, Reduction::Sum), 8, len);
        }
    }
    group.finish();
}

/// Measures a fold of `ranks` contributions of about `len` bytes; scaled types fold block by block.
fn bench_fold(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    name: &str,
    (wire, reduction): (WireType, Reduction),
    ranks: u64,
    len: usize,
) {
    let fold = FoldTerms { world: WORLD, absent: false };
    let buffers: Vec<Vec<u8>> =
        (0..ranks).map(|rank| contribution(wire, BLOCK_ELEMENTS, len, rank)).collect();
    let len = buffers[0].len();
    let step = if wire.is_scaled() { wire.block_len(BLOCK_ELEMENTS) } else { len };
    let runs: Vec<Vec<&[u8]>> = (0..len / step)
        .map(|run| buffers.iter().map(|buffer| &buffer[run * step..][..step]).collect())
        .collect();
    let mut out = vec![0; len];
    group.throughput(Throughput::Bytes(ranks * len as u64));
    group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
        bencher.iter(|| {
            for (inputs, out) in runs.iter().zip(out.chunks_mut(step)) {
                let inputs = black_box(inputs.as_slice());
                fold::fold_run(wire, reduction, fold, inputs, out).expect("the lengths are equal");
            }
            black_box(&mut out);
        });
    });
}

fn elementwise_conversions(criterion: &mut Criterion) {
    let src = gradient(CACHED_LEN, 1);
    for wire in [WireType::Bf16, WireType::F16] {
        let mut encoded = vec![0; wire.block_len(CACHED_LEN / 4)];
        let mut group = criterion.benchmark_group("convert");
        group.throughput(Throughput::Bytes(CACHED_LEN as u64));
        group.bench_function(BenchmarkId::new("encode", wire.name()), |bencher| {
            bencher.iter(|| {
                codec::encode_run(DType::F32, wire, black_box(&src), &mut encoded)
                    .expect("f32 converts to and from the wire type");
                black_box(&mut encoded);
            });
        });
        let mut decoded = vec![0; CACHED_LEN];
        group.bench_function(BenchmarkId::new("decode", wire.name()), |bencher| {
            bencher.iter(|| {
                codec::decode_run(wire, DType::F32, black_box(&encoded), &mut decoded)
                    .expect("f32 converts to and from the wire type");
                black_box(&mut decoded);
            });
        });
        group.finish();
    }
}

fn scaled_conversions(criterion: &mut Criterion) {
    let src = gradient(CACHED_LEN, 1);
    let tensor_block = BLOCK_ELEMENTS * DType::F32.size();
    for wire in [WireType::Int8, WireType::Fixed32] {
        let wire_block = wire.block_len(BLOCK_ELEMENTS);
        let mut encoded = vec![0; CACHED_LEN / tensor_block * wire_block];
        let mut group = criterion.benchmark_group("convert");
        group.throughput(Throughput::Bytes(CACHED_LEN as u64));
        group.bench_function(BenchmarkId::new("encode", wire.name()), |bencher| {
            bencher.iter(|| {
                let blocks = black_box(&src).chunks(tensor_block);
                for (x, block) in blocks.zip(encoded.chunks_mut(wire_block)) {
                    codec::encode_block(DType::F32, wire, WORLD, x, block)
                        .expect("f32 converts to and from the wire type");
                }
                black_box(&mut encoded);
            });
        });
        let mut decoded = vec![0; CACHED_LEN];
        group.bench_function(BenchmarkId::new("decode", wire.name()), |bencher| {
            bencher.iter(|| {
                let blocks = black_box(&encoded).chunks(wire_block);
                for (block, y) in blocks.zip(decoded.chunks_mut(tensor_block)) {
                    codec::decode_block(wire, DType::F32, block, y)
                        .expect("f32 converts to and from the wire type");
                }
                black_box(&mut decoded);
            });
        });
        group.finish();
    }
}

/// Measures the encoding and decoding of a fragment's header, in header bytes per second.
fn headers(criterion: &mut Criterion) {
    let header = Header {
        kind: Kind::Data,
        sender: Rank(3),
        window: WindowId::new(OpId(5), 1000),
        mask: (1 << 60) - 1,
        length: 1408,
        ..Header::ping(JobId(7), Generation(1), 2)
    };
    let mut datagram = vec![0; Header::LEN + 1408];
    let mut group = criterion.benchmark_group("header");
    group.throughput(Throughput::Bytes(Header::LEN as u64));
    group.bench_function("encode", |bencher| {
        let out = datagram.first_chunk_mut().expect("a header fits");
        bencher.iter(|| {
            black_box(&header).encode(black_box(out));
        });
    });
    group.bench_function("decode", |bencher| {
        bencher.iter(|| black_box(Header::decode(black_box(&datagram))));
    });
    group.finish();
}

/// Default number of elements in a block.
const BLOCK_ELEMENTS: usize = 256;

/// Number of bytes in 64 blocks of f32, the most blocks that one scan covers.
const WINDOW_LEN: usize = 64 * BLOCK_ELEMENTS * 4;

/// Number of bytes that fit in a core's cache.
const CACHED_LEN: usize = 32 * 1024;

/// A buffer size that fits in the cache, and one that does not.
const SIZES: [(&str, usize); 2] = [("32 KiB", CACHED_LEN), ("64 MiB", 64 * 1024 * 1024)];
