//! What goes out where datagrams are authenticated: copies that are sealed, or what lies in a
//! tensor between a header and a tag.

use std::collections::BTreeMap;

use racksum_net::auth::Sealer;
use racksum_net::udp::Transmit as Message;
use racksum_proto::auth::DataAuth;
use racksum_proto::ids::OpId;
use racksum_proto::wire::Header;

use super::staged::{NOWHERE, Staged};
use super::{Link, Links};
use crate::payload::Payload;

/// Messages sealed at a time: a few windows, so that they stay in the processor's cache.
pub(super) const SEALED: usize = 4;

/// Where a sealed message is.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    start: usize,
    end: usize,
    stride: usize,
    /// Most of it is where it was: there are only a header and a tag.
    in_tensor: bool,
}

impl Links {
    /// Whether datagrams are authenticated.
    pub(super) fn are_sealed(&self) -> bool {
        // All are or none is: the aggregators of a job authenticate alike.
        self.shards.first().is_some_and(|link| link.auth.is_some())
    }

    /// Seals a few messages into `sealed`, and puts what goes out in their place into `batch`.
    pub(super) fn seal<'a>(
        &mut self,
        run: &[Staged],
        bytes: &[u8],
        payloads: &'a mut BTreeMap<OpId, Payload>,
        sealed: &'a mut Vec<u8>,
        batch: &mut [Message<'a>],
    ) {
        sealed.clear();
        let mut places = [Place::default(); SEALED];
        for (staged, place) in run.iter().zip(&mut places) {
            let link = &mut self.shards[usize::from(staged.stream.shard)];
            let Some((sealer, _)) = &mut link.auth else {
                debug_assert!(false, "all links are sealed, or none is");
                continue;
            };
            // wire: W-57
            let start = sealed.len();
            let in_tensor = staged.seal_in_tensor(sealer, bytes, payloads, sealed);
            let stride = if in_tensor {
                Header::LEN
            } else {
                sealer.seal(&staged.message(NOWHERE, bytes, payloads), sealed)
            };
            *place = Place { start, end: sealed.len(), stride, in_tensor };
        }
        for ((message, staged), place) in batch.iter_mut().zip(run).zip(places) {
            let Link { addr, .. } = self.shards[usize::from(staged.stream.shard)];
            let contents = &sealed[place.start..place.end];
            *message = if place.in_tensor {
                let (head, tag) = contents.split_at(Header::LEN);
                Message::in_parts(addr, [head, staged.tail(payloads), tag])
            } else {
                Message::new(addr, contents, place.stride)
            };
        }
    }
}

impl Staged {
    /// Makes the tag of a message that goes on in a tensor without a copy of it, if that can be:
    /// what is encrypted is another message, and a tag is of bytes that lie in one place. Appends
    /// the header and the tag to `sealed`.
    fn seal_in_tensor(
        &self,
        sealer: &mut Sealer,
        bytes: &[u8],
        payloads: &mut BTreeMap<OpId, Payload>,
        sealed: &mut Vec<u8>,
    ) -> bool {
        let (DataAuth::Mac, Some((op, range))) = (sealer.auth(), &self.in_tensor) else {
            return false;
        };
        let Some(payload) = payloads.get_mut(op) else { return false };
        let mut header = [0; Header::LEN];
        header.copy_from_slice(self.contents(bytes));
        let start = sealed.len();
        sealed.extend_from_slice(&header);
        let seal = |datagram: &mut [u8]| sealer.seal_in_place(datagram, sealed);
        if !payload.data.show_behind(&mut header, range.clone(), seal) {
            sealed.truncate(start);
            return false;
        }
        // It has its number now.
        sealed[start..start + Header::LEN].copy_from_slice(&header);
        true
    }
}
