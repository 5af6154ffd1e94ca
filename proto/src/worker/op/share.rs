//! This rank's share of an op: the non-zero blocks of each window, and the windows whose sums have
//! arrived.

use alloc::vec;
use alloc::vec::Vec;

/// The windows of an op at a worker.
#[derive(Debug)]
pub(in crate::worker) struct Share {
    /// The mask of the non-zero blocks of each scanned window.
    masks: Vec<u64>,
    /// How many windows are scanned, in tensor order.
    scanned: u32,
    /// The window after the last one that was either sent or skipped because it is empty.
    passed: u32,
    /// Whether the sum of each window has arrived; empty if the job cannot move. Once a sum has
    /// arrived, the window's mask is that of the sum.
    held: Vec<bool>,
}

impl Share {
    /// Creates a share in which no window has been scanned.
    pub(in crate::worker) fn unscanned(windows: u32) -> Self {
        Self { masks: vec![0; windows as usize], scanned: 0, passed: 0, held: Vec::new() }
    }

    /// Creates a share whose non-zero blocks are known: `masks` has one mask for each window.
    pub(in crate::worker) fn scanned(masks: Vec<u64>) -> Self {
        let scanned = u32::try_from(masks.len()).unwrap_or(u32::MAX);
        Self { masks, scanned, passed: 0, held: Vec::new() }
    }

    /// Prepares to record which sums have arrived; needed only if the job may move.
    pub(in crate::worker) fn keep_sums(&mut self) {
        self.held = vec![false; self.masks.len()];
    }

    /// Returns whether the share records which sums have arrived.
    pub(in crate::worker) const fn keeps_sums(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the mask of a window's blocks; 0 for an unknown window.
    #[inline]
    pub(in crate::worker) fn mask(&self, index: u32) -> u64 {
        self.masks.get(index as usize).copied().unwrap_or(0)
    }

    /// Returns how many windows are scanned.
    #[inline]
    pub(in crate::worker) const fn scanned_windows(&self) -> u32 {
        self.scanned
    }

    /// Returns whether every window is scanned.
    #[inline]
    pub(in crate::worker) fn is_scanned(&self) -> bool {
        self.scanned as usize >= self.masks.len()
    }

    /// Returns the next window to scan, if fewer than `ahead` windows are scanned ahead of sending.
    pub(in crate::worker) fn next_scan(&self, ahead: u32) -> Option<u32> {
        (self.scanned < self.passed.saturating_add(ahead)).then_some(self.scanned)
    }

    /// Notes the non-zero blocks of the next window to scan.
    pub(in crate::worker) fn note_scanned(&mut self, index: u32, mask: u64) {
        debug_assert_eq!(index, self.scanned, "windows are scanned in order");
        self.masks[index as usize] = mask;
        self.scanned += 1;
    }

    /// Notes that a window was sent, or skipped because it is empty.
    #[inline]
    pub(in crate::worker) fn pass(&mut self, index: u32) {
        self.passed = self.passed.max(index + 1);
    }

    /// Notes that all windows must be sent again, to other shards.
    pub(in crate::worker) const fn restart(&mut self) {
        self.passed = 0;
    }

    /// Returns whether the sum of a window has arrived.
    #[inline]
    pub(in crate::worker) fn holds(&self, index: u32) -> bool {
        self.held.get(index as usize).copied().unwrap_or(false)
    }

    /// Notes that the sum of a window has arrived, with the blocks `mask`.
    pub(in crate::worker) fn note_held(&mut self, index: u32, mask: u64) {
        if let Some(held) = self.held.get_mut(index as usize) {
            *held = true;
            self.masks[index as usize] = mask;
        }
    }
}
