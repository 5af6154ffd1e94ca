//! The configuration of a job at a shard.

use crate::geometry::{Fragmentation, Geometry};
use crate::ids::{Generation, JobId, OpId};
use crate::reject::Reject;
use crate::wire::Header;

/// The configuration of a job at a shard, and the resources granted to the job.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// The job.
    pub job: JobId,
    /// The job's generation.
    pub generation: Generation,
    /// How many ranks the job has.
    pub world: u16,
    /// How many lanes the job has.
    pub lanes: u8,
    /// This shard's number.
    pub shard: u8,
    /// How many shards the job's windows are spread over.
    pub shards: u8,
    /// The number of slots of each of the job's streams.
    pub pool_slots: u32,
    /// How many ops each rank may have in flight.
    pub max_ops: u16,
    /// How windows are cut into datagrams.
    pub cut: Fragmentation,
    /// The most bytes of results in flight in one stream, limited so that the ranks can buffer the
    /// results of all streams.
    pub results_in_flight: usize,
    /// The job's first op at this aggregator, if the job has moved from another one.
    pub moved_at: Option<OpId>,
    /// How many workers the sum covers, if the ranks of this job are aggregators.
    pub weight: Option<u16>,
    /// Whether sums go to a parent, which returns the results.
    pub has_parent: bool,
}

impl Config {
    /// Returns whether the aggregator has a parent or is a parent itself.
    pub(super) const fn is_of_tree(&self) -> bool {
        self.has_parent || self.weight.is_some()
    }

    /// Returns how many workers the sum covers.
    pub(super) fn weight(&self) -> u16 {
        self.weight.unwrap_or(self.world)
    }

    /// Checks the window, mask, fragment number and length against the op's geometry. Returns the
    /// length of the payload that the mask describes, and how that payload is cut into fragments.
    pub(super) fn check_shape(
        &self,
        header: &Header,
        body: &[u8],
        geometry: &Geometry,
    ) -> Result<(usize, Fragmentation), Reject> {
        let index = header.window.index;
        // wire: W-11
        if index >= geometry.windows()
            || header.mask == 0
            || header.mask & !geometry.full_mask(index) != 0
        {
            return Err(Reject::Shape);
        }
        let len = geometry.payload_len(index, header.mask);
        let cut = geometry.cut(self.cut, len);
        let fragment = usize::from(header.fragment);
        // wire: W-21
        if fragment >= cut.count(len) || cut.range(len, fragment).len() != body.len() {
            return Err(Reject::Shape);
        }
        Ok((len, cut))
    }
}
