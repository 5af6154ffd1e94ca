//! Messages on a QUIC stream: a big-endian length of four bytes, then that many bytes of JSON.
//!
//! Control messages are few, and JSON lets people read them when debugging; the data path has its
//! own layout. No received message can cause a panic or allocate more than [`MAX_FRAME`].

use quinn::{ReadError, ReadExactError, RecvStream, SendStream, WriteError};
use racksum_proto::peer_text::PeerText;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Size of the largest message, in bytes of JSON.
pub const MAX_FRAME: usize = 64 << 10;

const LENGTH: usize = 4;

/// Size of the largest message on a stream, in bytes, including its length field.
pub(super) const LONGEST: usize = LENGTH + MAX_FRAME;

/// Reason why a message was not sent or not received. The stream is unusable after any of these
/// errors.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The message is longer than [`MAX_FRAME`].
    #[error("a control message of {len} bytes exceeds the limit of {MAX_FRAME}")]
    TooLong {
        /// Length of the message in bytes.
        len: usize,
    },
    /// The stream ended inside a message.
    #[error("the stream ended in the middle of a control message")]
    Truncated,
    /// The bytes are not a message of the expected type.
    #[error("cannot parse a control message: {}", PeerText::of(.0))]
    Decode(serde_json::Error),
    /// The message cannot be written as JSON.
    #[error("cannot encode a control message: {0}")]
    Encode(serde_json::Error),
    /// The stream or its connection ended while a message was being sent. quinn's own text omits
    /// why the connection was lost.
    #[error("cannot send a control message: {}", match .0 {
        WriteError::ConnectionLost(cause) => PeerText::of(cause),
        error => PeerText::of(error),
    })]
    Write(WriteError),
    /// The stream or its connection ended while a message was being received. quinn's own text
    /// omits why the connection was lost.
    #[error("cannot receive a control message: {}", match .0 {
        ReadError::ConnectionLost(cause) => PeerText::of(cause),
        error => PeerText::of(error),
    })]
    Read(ReadError),
}

/// Sends one message. Do not cancel the future: a partly sent message would corrupt the stream.
///
/// # Errors
///
/// Returns a [`FrameError`] if the message cannot be sent.
pub async fn send<T: Serialize>(stream: &mut SendStream, message: &T) -> Result<(), FrameError> {
    stream.write_all(&encode(message)?).await.map_err(FrameError::Write)
}

/// Receives one message; returns `None` if the stream ended between messages. Run this in a task of
/// its own: cancelling the future, as `select!` does, loses the bytes it has read.
///
/// # Errors
///
/// Returns a [`FrameError`] if the message cannot be received.
pub async fn recv<T: DeserializeOwned>(stream: &mut RecvStream) -> Result<Option<T>, FrameError> {
    let mut length = [0; LENGTH];
    match stream.read_exact(&mut length).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(error) => return Err(read_error(error)),
    }
    let mut json = vec![0; parse_length(length)?];
    stream.read_exact(&mut json).await.map_err(read_error)?;
    serde_json::from_slice(&json).map(Some).map_err(FrameError::Decode)
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; LENGTH];
    serde_json::to_writer(&mut frame, message).map_err(FrameError::Encode)?;
    let len = frame.len() - LENGTH;
    match u32::try_from(len) {
        Ok(length) if len <= MAX_FRAME => frame[..LENGTH].copy_from_slice(&length.to_be_bytes()),
        _ => return Err(FrameError::TooLong { len }),
    }
    Ok(frame)
}

fn parse_length(bytes: [u8; LENGTH]) -> Result<usize, FrameError> {
    let len = usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(usize::MAX);
    if len > MAX_FRAME { Err(FrameError::TooLong { len }) } else { Ok(len) }
}

fn read_error(error: ReadExactError) -> FrameError {
    match error {
        ReadExactError::FinishedEarly(_) => FrameError::Truncated,
        ReadExactError::ReadError(error) => FrameError::Read(error),
    }
}
