#![allow(warnings)]
use racksum_aggregator::kernel::*;
use racksum_proto::arith::Fold;
use racksum_proto::dtype::*;
use std::hint::black_box;
use std::time::Instant;
fn time(mut f: impl FnMut()) -> f64 {
    for _ in 0..100 { f() }
    let mut best = f64::MAX;
    for _ in 0..15 {
        let t = Instant::now();
        let mut n = 0;
        while t.elapsed().as_micros() < 3000 { for _ in 0..20 { f(); } n += 20; }
        best = best.min(t.elapsed().as_secs_f64() / n as f64);
    }
    best
}
fn main() {
    let a = vec![1u8; 32768]; let mut b = vec![0u8; 32768];
    let t = time(|| { b.copy_from_slice(black_box(&a)); black_box(&mut b); });
    println!("memcpy 32K {:.1} GB/s", 32768.0/t/1e9);
    let a = vec![1u8; 262144]; let mut c = vec![0u8; 262144];
    let t = time(|| { c.copy_from_slice(black_box(&a)); black_box(&mut c); });
    println!("memcpy 256K {:.1} GB/s", 262144.0/t/1e9);
    for len in [32768usize, 1424, 256, 128, 60, 32] {
    for level in Level::available().skip(1) {
        for wire in [WireType::F32, WireType::F64, WireType::Bf16, WireType::F16, WireType::I32, WireType::I64] {
            print!("{len:6} {:9} {:5}", level.name(), wire.name());
            for red in [Reduction::Sum, Reduction::Max] {
                if red == Reduction::Avg && matches!(wire, WireType::I32 | WireType::I64) { continue; }
                print!(" | {}", red.name());
                for n in [1, 2, 8] {
                    let bufs: Vec<Vec<u8>> = (0..n).map(|j| (0..len).map(|i| [0x00u8,0x3f,0x80,0x3f][(i)%4] ).collect()).collect();
                    let ins: Vec<&[u8]> = bufs.iter().map(|x| &x[..]).collect();
                    let mut out = vec![0u8; len];
                    let t = time(|| { fold_run_at(level, wire, red, Fold { world: 8, absent: false }, black_box(&ins), &mut out); black_box(&mut out); });
                    print!(" {:6.1}", (n * len) as f64 / t / 1e9);
                    if len < 2000 { print!("({:4.0}ns)", t*1e9); }
                }
            }
            println!();
        }
    }}
}
