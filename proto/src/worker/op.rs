//! An op in flight at a worker.

use alloc::vec::Vec;

use crate::descriptor::Descriptor;
use crate::error::OpError;
use crate::geometry::Geometry;
use crate::ids::{OpId, Rank};
use crate::time::{Span, Time};

/// An op in flight.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) id: OpId,
    pub(super) descriptor: Descriptor,
    pub(super) geometry: Geometry,
    /// The non-zero blocks of each window that has been scanned.
    pub(super) masks: Vec<u64>,
    /// Windows scanned, in the order of the tensor.
    pub(super) scanned: u32,
    /// The window after the last that was sent, or passed over because it is empty.
    pub(super) passed: u32,
    pub(super) started: Time,
    pub(super) deadline: Time,
    /// Streams that lack results.
    pub(super) streams_left: u32,
    /// What the op will fail with once all its results are in.
    pub(super) error: Option<OpError>,
    /// How many ranks results lack, by shard; those that lack none are not here.
    pub(super) absent: Vec<(u8, usize)>,
    pub(super) ended: bool,
    /// It ended without having all its results.
    pub(super) failed: bool,
    /// Of which windows the sum is here, where the job may move: their masks are the sums'.
    pub(super) held: Vec<bool>,
    /// It was in flight when the job moved: what is held was said when it was opened.
    pub(super) resumed: bool,
    /// The ranks that its results lacked when the job moved.
    pub(super) lacked: Lacked,
}

/// Ranks that results lack.
#[derive(Debug, Clone, Default)]
pub(super) struct Lacked {
    /// Those that are known by name.
    pub(super) ranks: Vec<Rank>,
    /// How many more there are.
    pub(super) unnamed: usize,
}

impl Op {
    /// Whether the sum of a window is here.
    pub(super) fn holds(&self, index: u32) -> bool {
        self.held.get(index as usize).copied().unwrap_or(false)
    }

    /// Notes that the sum of a window is here, of these blocks.
    pub(super) fn note_held(&mut self, index: u32, mask: u64) {
        if let Some(held) = self.held.get_mut(index as usize) {
            *held = true;
            self.masks[index as usize] = mask;
        }
    }

    /// Notes that a result of a shard lacks ranks: the first so many that were lost.
    pub(super) fn note_absent(&mut self, shard: u8, ranks: usize) {
        if ranks == 0 {
            return;
        }
        match self.absent.iter_mut().find(|(of, _)| *of == shard) {
            Some((_, most)) => *most = ranks.max(*most),
            None => self.absent.push((shard, ranks)),
        }
    }

    pub(super) fn new(
        descriptor: Descriptor,
        masks: Vec<u64>,
        scanned: u32,
        now: Time,
        timeout: Span,
    ) -> Self {
        Self {
            id: OpId(0),
            geometry: Geometry::new(&descriptor),
            descriptor,
            masks,
            scanned,
            passed: 0,
            started: now,
            deadline: now + timeout,
            streams_left: 0,
            error: None,
            absent: Vec::new(),
            ended: false,
            failed: false,
            held: Vec::new(),
            resumed: false,
            lacked: Lacked::default(),
        }
    }
}
