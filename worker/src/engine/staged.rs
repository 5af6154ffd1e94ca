//! Staged datagrams: the location of their bytes until they are sent.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;

use racksum_net::udp::{GsoBatch, Transmit as Message};
use racksum_proto::ids::OpId;

use crate::payload::Payload;
use crate::tensor::TensorBytes;

/// A batch of datagrams to send together: the location of its bytes, and its stream.
#[derive(Debug, Clone)]
pub(super) struct Staged {
    pub(super) start: usize,
    pub(super) gso_batch: GsoBatch,
    pub(super) stream: Stream,
    /// Where the rest of the datagram lies, if the batch does not hold all of it: an op, and a
    /// range of its tensor.
    pub(super) in_tensor: Option<(OpId, Range<usize>)>,
}

/// The stream of a message. The shard determines the destination, and the lane the TOS value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) lane: u8,
    pub(super) shard: u8,
}

impl Staged {
    /// Returns the batch's part of the staging buffer `bytes`.
    pub(super) fn contents<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.start..self.start + self.gso_batch.len()]
    }

    /// Returns the rest of the datagram, which lies in a tensor; no bytes if the staging buffer
    /// holds the whole batch.
    pub(super) fn tail<'a>(&self, payloads: &'a BTreeMap<OpId, Payload>) -> TensorBytes<'a> {
        let payload = |op| payloads.get(op).map(|payload| &payload.data);
        let tail =
            self.in_tensor.as_ref().and_then(|(op, range)| Some((payload(op)?, range.clone())));
        tail.map_or(TensorBytes::Own(&[]), |(data, range)| data.bytes(range))
    }

    /// Returns the batch in the form that the socket sends, without authentication.
    pub(super) fn message<'a>(
        &self,
        to: SocketAddr,
        bytes: &'a [u8],
        payloads: &'a BTreeMap<OpId, Payload>,
    ) -> Message<'a> {
        let contents = self.contents(bytes);
        match self.in_tensor {
            None => Message::new(to, contents, self.gso_batch.stride()),
            Some(_) => Message::in_parts(to, contents, self.tail(payloads).tail(), &[]),
        }
    }
}

/// A placeholder address, to which nothing is sent.
pub(super) const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
