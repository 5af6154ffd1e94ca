//! Tests of copies, and of kernels whose input changes while they run.

use std::ptr::NonNull;

use racksum_proto::arith::{self, FoldTerms};
use racksum_proto::dtype::{DType, Reduction};

use super::SharedBytes;
use crate::Level;
use crate::copy::{LINE, volatile};

/// Returns the buffer of a test as shared bytes.
pub(crate) fn shared_of(bytes: &mut [u8]) -> SharedBytes<'_> {
    let len = bytes.len();
    // SAFETY: the buffer stays borrowed, and only one thread of the test accesses it.
    unsafe { SharedBytes::new(NonNull::from(bytes).cast(), len) }
}

/// Lengths and offsets around those of words, vectors, lines and string instructions.
const LENGTHS: &[usize] = if cfg!(miri) {
    &[0, 1, 7, 8, 15, 16, 70]
} else {
    &[0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4200]
};
const OFFSETS: &[usize] = if cfg!(miri) { &[0, 1, 8] } else { &[0, 1, 8, 15, 63] };

fn pairs(ones: &[usize], others: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    ones.iter().flat_map(|one| others.iter().map(|other| (*one, *other)))
}

/// Returns bytes in which adjacent bytes differ.
fn pattern(len: usize) -> Vec<u8> {
    (1..=251).cycle().take(len).collect()
}

/// Checks that `copy` fills a range with [`pattern`] and writes nothing outside of the range.
fn check(copy: impl Fn(&mut [u8], &mut [u8])) {
    for len in LENGTHS.iter().copied() {
        for (one, other) in pairs(OFFSETS, OFFSETS) {
            let mut from = pattern(one + len);
            let mut to = vec![0xa5; other + len + 64];
            let mut expected = to.clone();
            expected[other..other + len].copy_from_slice(&from[one..]);
            copy(&mut from[one..], &mut to[other..other + len]);
            assert!(to == expected, "{len} bytes from {one} to {other}");
        }
    }
}

#[test]
fn copies_have_every_byte_and_no_other() {
    check(|from, to| shared_of(from).read(to));
    check(|from, to| shared_of(to).write(from));
    check(|from, to| shared_of(to).copy_from(shared_of(from)));
}

#[test]
fn volatile_copies_have_every_byte_and_no_other() {
    type Copy = unsafe fn(*const u8, *mut u8, usize);
    for copy in [volatile::read as Copy, volatile::write, volatile::between] {
        // SAFETY: both buffers have this length, and no other thread accesses them.
        check(|from, to| unsafe { copy(from.as_ptr(), to.as_mut_ptr(), from.len()) });
    }
    let bytes = pattern(100);
    // SAFETY: the line lies within the buffer.
    let line = unsafe { volatile::line(bytes.as_ptr(), 30) };
    assert_eq!(line, bytes[30..30 + LINE]);
}

#[test]
fn clearing_and_comparing_stay_within_the_range() {
    for (len, offset) in pairs(LENGTHS, OFFSETS) {
        let mut bytes = pattern(offset + len + 64);
        let (mut same, range) = (bytes[offset..offset + len].to_vec(), offset..offset + len);
        assert!(shared_of(&mut bytes[range.clone()]).equals(&same));
        for at in [0, len / 2, len.wrapping_sub(1)].into_iter().filter(|at| *at < len) {
            same[at] ^= 1;
            assert!(!shared_of(&mut bytes[range.clone()]).equals(&same), "{at} of {len}");
            same[at] ^= 1;
        }
        let mut expected = bytes.clone();
        expected[range.clone()].fill(0);
        shared_of(&mut bytes[range]).clear();
        assert!(bytes == expected, "{len} bytes at {offset}");
    }
}

#[test]
fn parts_and_chunks_lie_within_the_range() {
    let mut bytes = pattern(100);
    let all = shared_of(&mut bytes);
    let lens: Vec<usize> = all.part(10..95).chunks(40).map(SharedBytes::len).collect();
    assert_eq!(lens, [40, 40, 5]);
    let mut last = [0; 5];
    all.part(10..95).chunks(40).last().unwrap().read(&mut last);
    assert_eq!(last, bytes[90..95]);
}

#[test]
#[should_panic(expected = "beyond the shared bytes")]
fn a_part_beyond_the_range_is_refused() {
    assert!(shared_of(&mut [0; 4]).part(2..5).is_empty());
}

#[test]
fn shared_tensors_are_folded_and_scanned_as_defined() {
    for elements in [0, 1, 3, 16, 63, 64, 65, 200] {
        let inputs: Vec<Vec<u8>> = (0..3)
            .map(|rank| (0..elements).flat_map(|i| ((i * rank) as f32).to_le_bytes()).collect())
            .collect();
        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let (terms, mut expected) = (FoldTerms { world: 3, absent: false }, vec![0; 4 * elements]);
        let wire = DType::F32.native_wire();
        arith::fold_run(wire, Reduction::Avg, terms, &slices, &mut expected).unwrap();
        let mut copies = inputs.clone();
        let shared: Vec<_> = copies.iter_mut().map(|bytes| shared_of(bytes)).collect();
        for level in Level::available() {
            let mut out = vec![0xa5; 4 * elements];
            level.fold_shared(DType::F32, Reduction::Avg, terms, &shared, &mut out).unwrap();
            assert_eq!(out, expected, "{}", level.name());
            let found = level.scan_shared(DType::F32, 32, shared[1]);
            let blocks = elements.div_ceil(32);
            // The tensor's first element is zero, and all other elements are nonzero.
            let occupied = if elements > 1 { (1 << blocks) - 1 } else { 0 };
            assert_eq!(found, occupied, "{}", level.name());
        }
    }
}

// This test needs copies in assembly: the volatile accesses used on other processors would race
// with the stores of the other thread.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod changing {
    use std::sync::atomic::Ordering::{Relaxed, Release};
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;
    use crate::{codec, fold};

    #[test]
    fn kernels_of_bytes_that_change_stay_within_them() {
        const WORDS: usize = 4096;
        const MARGIN: usize = 64;
        let memory: Vec<AtomicU64> =
            std::iter::repeat_with(AtomicU64::default).take(WORDS).collect();
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        let inner = |words: &[AtomicU64]| {
            let words = &words[MARGIN..WORDS - MARGIN];
            // SAFETY: the memory outlives its use below. All other accesses are atomic, and
            // assembly may race with atomic accesses.
            unsafe { SharedBytes::new(NonNull::from(words).cast(), size_of_val(words)) }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0_u64.. {
                    for word in &memory[MARGIN..WORDS - MARGIN] {
                        // Each round fills all words with one byte, which is zero in every fourth
                        // round.
                        let byte = [0, 0x80, round & 0xff, round >> 3 & 0xff][(round & 3) as usize];
                        word.store(byte * 0x0101_0101_0101_0101, Relaxed);
                    }
                    // The release ordering lets ThreadSanitizer note the stores of each round.
                    rounds.store(round, Release);
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            });
            while rounds.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            let shared = inner(&memory);
            let other = pattern(shared.len());
            let mut out = vec![0; shared.len()];
            for round in 0..200 {
                let dtype = DType::ALL[round % DType::ALL.len()];
                let reduction = Reduction::ALL[round % Reduction::ALL.len()];
                let terms = FoldTerms { world: 2, absent: true };
                fold::fold_shared(dtype, reduction, terms, &[shared, shared], &mut out).unwrap();
                for window in shared.chunks(64 * 32 * dtype.size()) {
                    codec::scan_shared(dtype, 32, window);
                }
                shared.read(&mut out);
                let _changes = shared.equals(&out);
                shared.write(&other);
                let (first, second) = (shared.part(0..4096), shared.part(8192..12_288));
                first.copy_from(second);
            }
            stop.store(true, Relaxed);
        });
        let mut margins = memory[..MARGIN].iter().chain(&memory[WORDS - MARGIN..]);
        assert!(margins.all(|word| word.load(Relaxed) == 0), "a kernel wrote outside of its bytes");
    }
}
