//! Which vector instructions this machine has, and how a kernel gets compiled for them.
//!
//! A kernel is plain code in a [`Task`], always inlined. [`Level::run`] inlines it into a
//! function that may use the instructions of a level, so that its loops become vectors of that
//! width.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calls functions compiled for instructions found at run time")
)]

use std::sync::OnceLock;

/// A set of vector instructions that this machine is known to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(Isa);

/// The sets a kernel is compiled for. Private: only detection makes a [`Level`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    /// What every machine of the target has.
    Baseline,
    /// 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors, with the extensions of a server.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// A kernel with its arguments. `run` must be `#[inline(always)]`, and so must all it calls.
pub(super) trait Task {
    /// What it returns.
    type Output;

    /// Does the work.
    fn run(self) -> Self::Output;
}

impl Level {
    /// The widest level of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().unwrap_or(Self(Isa::Baseline)))
    }

    /// The levels of this machine, narrowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        let found = [
            Some(Isa::Baseline),
            #[cfg(target_arch = "x86_64")]
            is_x86_feature_detected!("avx2").then_some(Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl"))
            .then_some(Isa::Avx512),
        ];
        found.into_iter().flatten().map(Self)
    }

    /// The name of the instruction set.
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

    /// Runs `task`, compiled for this level.
    pub(super) fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            Isa::Baseline => task.run(),
            // SAFETY: a level is only made of an instruction set that was detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(task) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(task) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<T: Task>(task: T) -> T::Output {
    task.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512dq,avx512vl")]
fn run_avx512<T: Task>(task: T) -> T::Output {
    task.run()
}
