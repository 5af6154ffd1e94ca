//! Authentication of outgoing datagrams. Each is a sealed copy, or a header and a tag around bytes
//! in a tensor.

use std::collections::BTreeMap;

use racksum_net::auth::Sealer;
use racksum_net::udp::Transmit as Message;
use racksum_proto::auth::DataAuth;
use racksum_proto::ids::OpId;
use racksum_proto::wire::Header;

use super::staged::{NOWHERE, Staged};
use super::{Link, Links};
use crate::payload::Payload;

/// The number of messages sealed at a time: a few windows, so that they stay in the processor's
/// cache.
pub(super) const SEALED: usize = 4;

/// The location of a sealed message in its buffer.
#[derive(Debug, Clone, Copy, Default)]
struct SealedRange {
    start: usize,
    end: usize,
    stride: usize,
    /// Whether the payload stays in the tensor. The buffer then holds only a header and a tag.
    in_tensor: bool,
}

impl Links {
    /// Returns whether datagrams are authenticated.
    pub(super) fn are_sealed(&self) -> bool {
        // Either all aggregators of a job authenticate datagrams or none does, so check one link.
        self.shards.first().is_some_and(|link| link.auth.is_some())
    }

    /// Seals up to [`SEALED`] messages into `sealed`, and fills `batch` with the messages to send.
    pub(super) fn seal<'a>(
        &mut self,
        run: &[Staged],
        bytes: &[u8],
        payloads: &'a mut BTreeMap<OpId, Payload>,
        sealed: &'a mut Vec<u8>,
        batch: &mut [Message<'a>],
    ) {
        sealed.clear();
        let mut places = [SealedRange::default(); SEALED];
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
                staged.seal_copy(sealer, bytes, payloads, sealed)
            };
            *place = SealedRange { start, end: sealed.len(), stride, in_tensor };
        }
        for ((message, staged), place) in batch.iter_mut().zip(run).zip(places) {
            let Link { addr, .. } = self.shards[usize::from(staged.stream.shard)];
            let contents = &sealed[place.start..place.end];
            *message = if place.in_tensor {
                let (head, tag) = contents.split_at(Header::LEN);
                Message::in_parts(addr, head, staged.tail(payloads).tail(), tag)
            } else {
                Message::new(addr, contents, place.stride)
            };
        }
    }
}

impl Staged {
    /// Appends a sealed copy of a message to `sealed`. Returns the stride of the sealed datagrams.
    fn seal_copy(
        &self,
        sealer: &mut Sealer,
        bytes: &[u8],
        payloads: &BTreeMap<OpId, Payload>,
        sealed: &mut Vec<u8>,
    ) -> usize {
        let contents = self.contents(bytes);
        if self.in_tensor.is_none() {
            return sealer.seal(&Message::new(NOWHERE, contents, self.gso_batch.stride()), sealed);
        }
        let start = sealed.len();
        sealed.extend_from_slice(contents);
        self.tail(payloads).append_to(sealed);
        sealer.seal_last(sealed, start);
        sealed.len() - start
    }

    /// Seals a message around its tensor data without a copy, and appends the header and the tag to
    /// `sealed`. The tag covers the header and the data as one slice, so the header temporarily
    /// replaces the tensor bytes before the data. Returns false if the message has no tensor data,
    /// if there are too few bytes before the data, or if a copy is needed: to encrypt, or because
    /// other processes may write to the tensor.
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
        // The sealer has written the datagram's number into the header.
        sealed[start..start + Header::LEN].copy_from_slice(&header);
        true
    }
}
