//! Vector instruction sets of this machine, and the compilation of kernels for each set.
//!
//! A kernel is a [`Task`], which is generic over the instruction set and always inlined.
//! [`Level::run`] inlines it into a function that may use the instructions of a level, so the
//! compiler also vectorizes the kernel's plain loops with those instructions.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calls functions compiled for instructions found at run time")
)]

use std::sync::OnceLock;

use crate::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use crate::x86::{Avx2, Avx512};

/// Set of vector instructions that this machine is known to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(Isa);

/// Instruction sets that kernels are compiled for. The type is private, so that only detection
/// creates a [`Level`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    /// The instructions that every machine of the target has.
    Baseline,
    /// 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors, with the AVX-512 extensions of server processors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Kernel with its arguments. `run` and every function that it calls must be `#[inline(always)]`.
pub(crate) trait Task {
    /// The result of the kernel.
    type Output;

    /// Runs the kernel with the instructions of `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

impl Level {
    /// Returns the widest level of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().unwrap_or(Self(Isa::Baseline)))
    }

    /// Returns the levels of this machine, narrowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        let found = [
            Some(Isa::Baseline),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"))
                .then_some(Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl"))
            .then_some(Isa::Avx512),
        ];
        found.into_iter().flatten().map(Self)
    }

    /// Returns the name of the instruction set.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Isa::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
        }
    }

    /// Returns the widest level, up to this one, whose vectors fit into `len` bytes. `len` is at
    /// least [`MIN_LEN`].
    pub(crate) fn within(self, len: usize) -> Self {
        if len >= self.vector_len() {
            return self;
        }
        match self.0 {
            Isa::Baseline => self,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Self(Isa::Baseline),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Self(Isa::Avx2).within(len),
        }
    }

    fn vector_len(self) -> usize {
        match self.0 {
            Isa::Baseline => Portable::BYTES,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::BYTES,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::BYTES,
        }
    }

    /// Runs `task` with the instructions of this level.
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            Isa::Baseline => task.run(Portable),
            // SAFETY: a level exists only if its instruction set was detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(task) },
            // SAFETY: a level exists only if its instruction set was detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(task) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn run_avx2<T: Task>(task: T) -> T::Output {
    // SAFETY: `Level::run` calls this function only if the machine has its instructions.
    task.run(unsafe { Avx2::assume() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<T: Task>(task: T) -> T::Output {
    // SAFETY: `Level::run` calls this function only if the machine has its instructions.
    task.run(unsafe { Avx512::assume() })
}

/// Length in bytes of the shortest vectors.
pub(crate) const MIN_LEN: usize = Portable::BYTES;
