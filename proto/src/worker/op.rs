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
    /// The mask of the non-zero blocks of each scanned window.
    pub(super) masks: Vec<u64>,
    /// How many windows are scanned, in tensor order.
    pub(super) scanned: u32,
    /// The window after the last one that was sent, or skipped because it is empty.
    pub(super) passed: u32,
    pub(super) started: Time,
    pub(super) deadline: Time,
    /// How many streams lack results.
    pub(super) streams_left: u32,
    /// The error that the op fails with once all its results have arrived.
    pub(super) error: Option<OpError>,
    /// How many ranks the results of each shard lack; shards whose results lack none have no entry.
    pub(super) absent: Vec<(u8, usize)>,
    pub(super) ended: bool,
    /// Whether the op ended without all its results.
    pub(super) failed: bool,
    /// Whether the sum of each window is here, if the job may move. The mask of such a window is
    /// the sum's.
    pub(super) held: Vec<bool>,
    /// Whether the op was in flight when the job moved; its opens then name the held sums.
    pub(super) resumed: bool,
    /// The ranks that the op's results lacked when the job moved.
    pub(super) lacked: Lacked,
}

/// The ranks that results lack.
#[derive(Debug, Clone, Default)]
pub(super) struct Lacked {
    /// The ranks whose names are known.
    pub(super) ranks: Vec<Rank>,
    /// How many more ranks there are.
    pub(super) unnamed: usize,
}

impl Op {
    /// Returns whether the sum of a window is here.
    pub(super) fn holds(&self, index: u32) -> bool {
        self.held.get(index as usize).copied().unwrap_or(false)
    }

    /// Notes that the sum of a window is here, with the blocks `mask`.
    pub(super) fn note_held(&mut self, index: u32, mask: u64) {
        if let Some(held) = self.held.get_mut(index as usize) {
            *held = true;
            self.masks[index as usize] = mask;
        }
    }

    /// Notes that a result of a shard lacks the first `ranks` ranks that its aggregator lost.
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
