//! The protobuf messages of a Chakra trace, as far as the reader uses them.
//!
//! Source: `et_def.proto` of mlcommons/chakra. The decoder skips other fields. In a trace, each
//! message follows its length, a varint; the first is the [`GlobalMetadata`].

use prost::{Message, Oneof};

/// The head of a trace.
#[derive(Clone, PartialEq, Message)]
pub(super) struct GlobalMetadata {
    /// The version of the schema.
    #[prost(string, tag = "1")]
    pub(super) version: String,
}

/// A node.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    /// A [`NodeType`], or a number of a later schema.
    #[prost(int32, tag = "3")]
    pub(super) kind: i32,
    #[prost(uint64, repeated, tag = "4")]
    pub(super) ctrl_deps: Vec<u64>,
    #[prost(uint64, repeated, tag = "5")]
    pub(super) data_deps: Vec<u64>,
    #[prost(uint64, tag = "7")]
    pub(super) duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    pub(super) attributes: Vec<Attribute>,
}

/// A named value.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Attribute {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(oneof = "Value", tags = "7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29")]
    pub(super) value: Option<Value>,
}

/// A value that is a number, a flag or a text. Writers disagree on the width and sign of numbers.
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Value {
    #[prost(int32, tag = "7")]
    Int32(i32),
    #[prost(int64, tag = "9")]
    Int64(i64),
    #[prost(uint32, tag = "11")]
    Uint32(u32),
    #[prost(uint64, tag = "13")]
    Uint64(u64),
    #[prost(sint32, tag = "15")]
    Sint32(i32),
    #[prost(sint64, tag = "17")]
    Sint64(i64),
    #[prost(fixed32, tag = "19")]
    Fixed32(u32),
    #[prost(fixed64, tag = "21")]
    Fixed64(u64),
    #[prost(sfixed32, tag = "23")]
    Sfixed32(i32),
    #[prost(sfixed64, tag = "25")]
    Sfixed64(i64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

impl Value {
    /// Returns the value of a whole number of any width.
    pub(super) fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::Int32(it) | Self::Sint32(it) | Self::Sfixed32(it) => it.into(),
            Self::Int64(it) | Self::Sint64(it) | Self::Sfixed64(it) => it.into(),
            Self::Uint32(it) | Self::Fixed32(it) => it.into(),
            Self::Uint64(it) | Self::Fixed64(it) => it.into(),
            Self::Bool(_) | Self::Text(_) => return None,
        })
    }
}

/// The kinds of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeType {
    Metadata,
    Memory,
    Compute,
    Send,
    Recv,
    Collective,
}

impl NodeType {
    /// Returns the kind with this number, or the name of a kind that the reader does not support.
    pub(super) fn from_number(number: i32) -> Result<Self, String> {
        Ok(match number {
            1 => Self::Metadata,
            2 | 3 => Self::Memory,
            4 => Self::Compute,
            5 => Self::Send,
            6 => Self::Recv,
            7 => Self::Collective,
            0 => return Err("INVALID_NODE".to_owned()),
            8 => return Err("STORAGE_NODE".to_owned()),
            9 => return Err("BATCH_NODE".to_owned()),
            10 => return Err("CHECKPOINT_NODE".to_owned()),
            _ => return Err(format!("number {number}")),
        })
    }
}

/// One message of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame<'a> {
    /// The offset of the message's first byte.
    pub(super) offset: usize,
    pub(super) bytes: &'a [u8],
}

/// Takes the message at `offset`, or none at the end of the trace.
pub(super) fn frame(trace: &[u8], offset: usize) -> Result<Option<Frame<'_>>, FrameError> {
    let mut rest = trace.get(offset..).unwrap_or_default();
    if rest.is_empty() {
        return Ok(None);
    }
    let length = prost::decode_length_delimiter(&mut rest).map_err(|_| FrameError::Length)?;
    let Some(bytes) = rest.get(..length) else {
        return Err(FrameError::Truncated { length, left: rest.len() });
    };
    Ok(Some(Frame { offset: trace.len() - rest.len(), bytes }))
}

/// An error in the framing of a trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length of a message is not a varint.
    #[error("its length is malformed")]
    Length,
    /// A message is longer than the rest of the trace.
    #[error("it has {length} bytes, but the trace has only {left} more")]
    Truncated {
        /// The length of the message.
        length: usize,
        /// Bytes left.
        left: usize,
    },
    /// A message is not protobuf of this schema.
    #[error("{0}")]
    Message(String),
    /// The trace does not begin with its metadata.
    #[error("the trace is empty; it must begin with a GlobalMetadata message")]
    Empty,
}
