//! Bytes of a tensor: private, or shared with other processes, which may write to them.
//!
//! A conversion of shared bytes goes through a private copy of a few blocks, which stays in the L1
//! cache. Bytes that need no conversion are copied once.

#![expect(unsafe_code, reason = "the kernel sends and receives bytes by address")]

use std::io;

use racksum_kernels::codec;
use racksum_kernels::shared::SharedBytes;
use racksum_net::auth::append;
use racksum_net::udp::{Tail, UdpSocket};
use racksum_proto::arith::{self, ArithError, MAX_BLOCK_ELEMENTS};
use racksum_proto::dtype::{DType, WireType};

/// Bytes of a tensor to read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TensorBytes<'a> {
    /// Bytes that only this process writes.
    Own(&'a [u8]),
    /// Bytes that other processes may write.
    Shared(SharedBytes<'a>),
}

/// Bytes of a tensor to write.
#[derive(Debug)]
pub(crate) enum TensorBytesMut<'a> {
    /// Bytes that only this process accesses.
    Own(&'a mut [u8]),
    /// Bytes that other processes may write.
    Shared(SharedBytes<'a>),
}

impl<'a> TensorBytes<'a> {
    /// Returns the number of bytes.
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(shared) => shared.len(),
        }
    }

    /// Appends a copy of the bytes to `out`.
    pub(crate) fn append_to(self, out: &mut Vec<u8>) {
        match self {
            Self::Own(bytes) => append(out, bytes),
            Self::Shared(shared) => shared.append_to(out),
        }
    }

    /// Returns a copy of the bytes.
    #[cfg(test)]
    pub(crate) fn to_vec(self) -> Vec<u8> {
        let mut copy = Vec::new();
        self.append_to(&mut copy);
        copy
    }

    /// Returns the bytes as the tail of a datagram.
    pub(crate) fn tail(self) -> Tail<'a> {
        match self {
            Self::Own(bytes) => bytes.into(),
            // SAFETY: shared bytes stay readable for their lifetime.
            Self::Shared(shared) => unsafe { Tail::at(shared.start(), shared.len()) },
        }
    }

    /// Writes the elements in wire form, like [`codec::encode_run`].
    pub(crate) fn encode_run(
        self,
        dtype: DType,
        wire: WireType,
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        match self {
            Self::Own(src) => codec::encode_run(dtype, wire, src, out),
            Self::Shared(src) => {
                arith::check_encode_run(dtype, wire, src.len(), out.len())?;
                if wire == dtype.native_wire() {
                    src.read(out);
                    return Ok(());
                }
                let pieces = out.chunks_mut(PIECE / dtype.size() * wire.element_size());
                for (src, out) in src.chunks(PIECE).zip(pieces) {
                    let copy = &mut [0; PIECE][..src.len()];
                    src.read(copy);
                    codec::encode_run(dtype, wire, copy, out)?;
                }
                Ok(())
            }
        }
    }

    /// Writes the elements as one block of a scaled wire type, like [`codec::encode_block`].
    pub(crate) fn encode_block(
        self,
        dtype: DType,
        wire: WireType,
        world: u32,
        out: &mut [u8],
    ) -> Result<(), ArithError> {
        match self {
            Self::Own(src) => codec::encode_block(dtype, wire, world, src, out),
            Self::Shared(src) => {
                arith::check_encode_block(dtype, wire, world, src.len(), out.len())?;
                let copy = &mut [0; MAX_BLOCK][..src.len()];
                src.read(copy);
                codec::encode_block(dtype, wire, world, copy, out)
            }
        }
    }
}

impl TensorBytesMut<'_> {
    /// Returns the number of bytes.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(shared) => shared.len(),
        }
    }

    /// Returns the mask of a window's non-zero blocks, like [`codec::scan_window`].
    pub(crate) fn scan_window(self, dtype: DType, block_elements: usize) -> u64 {
        match self {
            Self::Own(window) => codec::scan_window(dtype, block_elements, window),
            Self::Shared(window) => codec::scan_shared(dtype, block_elements, window),
        }
    }

    /// Prefetches the memory, like [`codec::prefetch_to_write`].
    pub(crate) fn prefetch(&self) {
        match self {
            Self::Own(run) => codec::prefetch_to_write(run),
            Self::Shared(run) => codec::prefetch_shared(*run),
        }
    }

    /// Writes wire elements as elements of the tensor, like [`codec::decode_run`].
    pub(crate) fn decode_run(
        self,
        wire: WireType,
        dtype: DType,
        src: &[u8],
    ) -> Result<(), ArithError> {
        match self {
            Self::Own(dst) => codec::decode_run(wire, dtype, src, dst),
            Self::Shared(dst) => {
                arith::check_decode_run(wire, dtype, src.len(), dst.len())?;
                if wire == dtype.native_wire() {
                    dst.write(src);
                    return Ok(());
                }
                let pieces = src.chunks(PIECE / dtype.size() * wire.element_size());
                for (src, dst) in pieces.zip(dst.chunks(PIECE)) {
                    let copy = &mut [0; PIECE][..dst.len()];
                    codec::decode_run(wire, dtype, src, copy)?;
                    dst.write(copy);
                }
                Ok(())
            }
        }
    }

    /// Writes one block of a scaled wire type as elements of the tensor, like
    /// [`codec::decode_block`].
    pub(crate) fn decode_block(
        self,
        wire: WireType,
        dtype: DType,
        src: &[u8],
    ) -> Result<(), ArithError> {
        match self {
            Self::Own(dst) => codec::decode_block(wire, dtype, src, dst),
            Self::Shared(dst) => {
                arith::check_decode_block(wire, dtype, src.len(), dst.len())?;
                let copy = &mut [0; MAX_BLOCK][..dst.len()];
                codec::decode_block(wire, dtype, src, copy)?;
                dst.write(copy);
                Ok(())
            }
        }
    }

    /// Takes the datagram that a peek at the socket has shown. Its first bytes go to `head`, the
    /// next ones to the tensor. Returns how many bytes were written.
    pub(crate) fn receive(self, socket: &UdpSocket, head: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Own(tail) => socket.take_peeked(head, tail),
            // SAFETY: shared bytes can be written, and no reference to them exists.
            Self::Shared(tail) => unsafe { socket.take_peeked_at(head, tail.start(), tail.len()) },
        }
    }
}

/// The number of bytes of a tensor that are converted at a time, a multiple of every element size.
const PIECE: usize = 2 << 10;

/// The size of the largest block of a tensor in bytes.
const MAX_BLOCK: usize = MAX_BLOCK_ELEMENTS * DType::F64.size();
