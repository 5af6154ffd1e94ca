//! Gradients in safetensors files, read without loading a whole file.

use std::collections::BTreeMap;
use std::fs::{File, Metadata as FileMetadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use racksum_proto::dtype::DType;
use racksum_proto::peer_text::PeerText;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::keys::check_unique;
use super::quoted::Quoted;
use crate::exit::Failure;

/// A file with the gradients of one rank.
#[derive(Debug)]
pub(super) struct GradientFile {
    pub(super) path: PathBuf,
    /// The tensors, in the order in which the safetensors library writes them. They are reduced and
    /// written in this order.
    pub(super) tensors: Vec<Tensor>,
    file: File,
    /// The version of the file when it was opened.
    opened: Version,
    data_start: u64,
}

/// The length, times and link count of a file, which show whether its contents have changed.
///
/// These times advance in steps of a few milliseconds. A rewrite that keeps the length is missed if
/// all of it happens in the same step as the last change before the file was opened. A write
/// through a memory mapping updates the times only when the kernel notices that a page has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    len: u64,
    /// Time of the last write, in seconds and nanoseconds.
    written: (i64, i64),
    /// Time of the last change of contents or metadata. No program can set this time back.
    changed: (i64, i64),
    /// Number of hard links.
    names: u64,
}

impl Version {
    fn of(about: &FileMetadata) -> Self {
        Self {
            len: about.len(),
            written: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
            names: about.nlink(),
        }
    }

    /// Returns whether the contents may have changed since `opened`. A file keeps its contents when
    /// it gains or loses a name, for example when another file is moved to its path. In that case
    /// `changed` differs although nothing was written.
    fn differs(&self, opened: &Self) -> bool {
        let is_renamed = self.names != opened.names;
        self.len != opened.len
            || self.written != opened.written
            || self.changed != opened.changed && !is_renamed
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) elements: u64,
    /// Offset in bytes from the start of the file's data.
    offset: u64,
    /// Length of the data in bytes.
    pub(super) len: usize,
}

/// The part of a tensor's header entry that is checked before the header is parsed as a whole.
#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
}

impl GradientFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A message that names the file and the problem.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let unreadable =
            |error: io::Error| Failure::usage(format!("cannot read {}: {error}", path.display()));
        let about = std::fs::metadata(path).map_err(unreadable)?;
        if !about.is_file() {
            let kind = if about.is_dir() { "a directory" } else { "a pipe or a device" };
            return Err(Failure::usage(format!("{} is {kind}, not a file", path.display())));
        }
        let file = racksum_net::file::open(path).map_err(|error| {
            Failure::of_file(format!("cannot read {}: {error}", path.display()), &error)
        })?;
        let bad = |why: String| {
            Failure::usage(format!("{} is not a safetensors file: {why}", path.display()))
        };
        // Read the version from the open file, because the path may name another file by now.
        let opened = Version::of(&file.metadata().map_err(unreadable)?);
        let len = opened.len;
        if len < LENGTH {
            return Err(bad(format!("it has {len} B, but the header length alone takes 8 B")));
        }
        let mut length = [0; LENGTH_LEN];
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        let header_len = u64::from_le_bytes(length);
        if header_len > len - LENGTH {
            return Err(bad(format!(
                "its header length is {header_len} bytes, but the file has {len}"
            )));
        }
        if header_len > MAX_HEADER {
            return Err(bad(format!(
                "its header length is {header_len} bytes, more than the {MAX_HEADER} that the \
                 format allows"
            )));
        }
        let mut header = vec![0; usize::try_from(header_len).unwrap_or(0)];
        file.read_exact_at(&mut header, LENGTH).map_err(unreadable)?;
        check_unique(&header).map_err(bad)?;
        check_dtypes(path, &header)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| bad(PeerText::of(error).into()))?;
        let data_start = LENGTH + header_len;
        let whole = data_start + metadata.data_len() as u64;
        if len != whole {
            return Err(bad(format!("its header describes {whole} bytes, but the file has {len}")));
        }
        let mut tensors = Vec::new();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            tensors.push(Tensor::new(name, info));
        }
        tensors.sort_by(|one, other| {
            stored_as(other.dtype).cmp(&stored_as(one.dtype)).then(one.name.cmp(&other.name))
        });
        let opened = Self { path: path.to_owned(), tensors, file, opened, data_start };
        opened.check_unchanged()?;
        Ok(opened)
    }

    /// Reads bytes of a tensor, starting at byte `from`.
    ///
    /// # Errors
    /// A message that names the file. Reading also fails if the file has changed since it was
    /// opened, because its bytes may then come from two versions.
    pub(super) fn read(&self, tensor: &Tensor, from: usize, out: &mut [u8]) -> Result<(), Failure> {
        let at = self.data_start + tensor.offset + from as u64;
        self.file.read_exact_at(out, at).map_err(|error| {
            let path = self.path.display();
            Failure::failed(match error.kind() {
                ErrorKind::UnexpectedEof => {
                    format!("{path} was truncated while it was read; write it again")
                }
                _ => format!("cannot read {path}: {error}"),
            })
        })?;
        // Check after each read, so that the last read is covered and bytes of a changed file are
        // never sent.
        self.check_unchanged()
    }

    /// Checks that the file has not changed since it was opened.
    fn check_unchanged(&self) -> Result<(), Failure> {
        let path = self.path.display();
        let about = self
            .file
            .metadata()
            .map_err(|error| Failure::failed(format!("cannot read {path}: {error}")))?;
        if Version::of(&about).differs(&self.opened) {
            return Err(Failure::failed(format!(
                "{path} changed while it was read; start again once it is complete"
            )));
        }
        Ok(())
    }

    /// Checks that another file holds the same tensors.
    ///
    /// # Errors
    /// A message that names the file, the tensor and the difference.
    pub(super) fn check_same(&self, other: &Self) -> Result<(), Failure> {
        let (mine, theirs) = (self.path.display(), other.path.display());
        let by_name = |file: &Self| -> BTreeMap<String, Tensor> {
            file.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.clone())).collect()
        };
        let (ours, others) = (by_name(self), by_name(other));
        for (name, tensor) in &ours {
            let Some(there) = others.get(name) else {
                return Err(Failure::usage(format!(
                    "{theirs} lacks tensor {}, which {mine} has",
                    Quoted(name)
                )));
            };
            if there.dtype != tensor.dtype {
                return Err(Failure::usage(format!(
                    "tensor {} is {} in {theirs}, but {} in {mine}",
                    Quoted(name),
                    there.dtype.name(),
                    tensor.dtype.name()
                )));
            }
            if there.shape != tensor.shape {
                return Err(Failure::usage(format!(
                    "tensor {} has the shape {:?} in {theirs}, but {:?} in {mine}",
                    Quoted(name),
                    there.shape,
                    tensor.shape
                )));
            }
        }
        match others.keys().find(|name| !ours.contains_key(*name)) {
            None => Ok(()),
            Some(name) => Err(Failure::usage(format!(
                "{theirs} has tensor {}, which {mine} lacks",
                Quoted(name)
            ))),
        }
    }
}

impl Tensor {
    fn new(name: String, info: &TensorInfo) -> Self {
        let (start, end) = info.data_offsets;
        let dtype = reduced_as(info.dtype).unwrap_or(DType::F32);
        let elements = info.shape.iter().product::<usize>() as u64;
        let shape = info.shape.clone();
        Self { name, dtype, shape, elements, offset: start as u64, len: end - start }
    }

    /// Returns a hash of the name and shape, for the descriptor.
    pub(super) fn tag(&self) -> u64 {
        let mut digest = Digest::new();
        digest.add(self.name.as_bytes());
        // UTF-8 has no byte 0xff, so this byte marks the end of the name.
        digest.add(&[0xff]);
        for size in &self.shape {
            digest.add(&(*size as u64).to_le_bytes());
        }
        digest.value()
    }
}

/// A stable hash: 64-bit FNV-1a (Fowler, Noll, Vo).
#[derive(Debug, Clone, Copy)]
pub(super) struct Digest(u64);

impl Digest {
    pub(super) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(super) const fn value(self) -> u64 {
        self.0
    }
}

/// Returns the start of a file that holds `tensors` in order: the header's length and the header.
pub(super) fn header_of(tensors: &[Tensor]) -> Result<Vec<u8>, Failure> {
    let cannot =
        |error: String| Failure::failed(format!("cannot encode the header of the result: {error}"));
    let mut end = 0;
    let infos = tensors
        .iter()
        .map(|tensor| {
            let start = end;
            end += tensor.len;
            let (dtype, shape) = (stored_as(tensor.dtype), tensor.shape.clone());
            (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
        })
        .collect();
    let metadata = Metadata::new(None, infos).map_err(|error| cannot(error.to_string()))?;
    let mut header = vec![0; LENGTH_LEN];
    serde_json::to_writer(&mut header, &metadata).map_err(|error| cannot(error.to_string()))?;
    // The data must start at a multiple of eight bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let len = header.len() as u64 - LENGTH;
    header[..LENGTH_LEN].copy_from_slice(&len.to_le_bytes());
    Ok(header)
}

/// Refuses a header with a dtype that racksum cannot reduce, and names the tensor. Accepts a
/// malformed header, because the parser later reports the error.
fn check_dtypes(path: &Path, header: &[u8]) -> Result<(), Failure> {
    let Ok(entries) = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(header) else {
        return Ok(());
    };
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        let Ok(Entry { dtype }) = Entry::deserialize(entry) else { continue };
        let known = serde_json::from_value::<Dtype>(dtype.clone().into()).ok();
        if known.and_then(reduced_as).is_none() {
            let names = DType::ALL.map(|dtype| stored_as(dtype).to_string());
            return Err(Failure::usage(format!(
                "tensor {} of {} has dtype {}, which racksum cannot reduce; it reduces {}",
                Quoted(name),
                path.display(),
                known.map_or_else(|| Quoted(&dtype).to_string(), |known| known.to_string()),
                names.join(", ")
            )));
        }
    }
    Ok(())
}

/// Converts a safetensors dtype to racksum's, if racksum can reduce it.
const fn reduced_as(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

const fn stored_as(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
    }
}

/// Length in bytes of the first field of the file, which holds the length of the header.
const LENGTH: u64 = LENGTH_LEN as u64;
/// [`LENGTH`] as a `usize`.
const LENGTH_LEN: usize = 8;
/// Longest header that the format allows, in bytes.
const MAX_HEADER: u64 = 100_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, header: &str, data: usize) -> PathBuf {
        let path = std::env::temp_dir().join(format!("racksum-file-{}-{name}", std::process::id()));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn open(name: &str, header: &str, data: usize) -> Result<GradientFile, Failure> {
        let path = file(name, header, data);
        let opened = GradientFile::open(&path);
        std::fs::remove_file(path).unwrap();
        opened
    }

    fn why(name: &str, header: &str, data: usize) -> String {
        open(name, header, data).unwrap_err().to_string()
    }

    #[test]
    fn tensors_are_in_the_order_of_the_format_whatever_their_order_in_the_file() {
        let header = r#"{"__metadata__":{"a":"b"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "c":{"dtype":"F64","shape":[],"data_offsets":[8,16]},
            "a":{"dtype":"F32","shape":[1,0],"data_offsets":[16,16]}}"#;
        let file = open("order", header, 16).unwrap();
        let names: Vec<_> = file.tensors.iter().map(|tensor| &tensor.name[..]).collect();
        assert_eq!(names, ["c", "a", "b"]);
        let elements: Vec<_> = file.tensors.iter().map(|tensor| tensor.elements).collect();
        assert_eq!(elements, [1, 0, 2]);
        let mut bytes = [0; 4];
        file.read(&file.tensors[2], 4, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4]);
        let why = file.read(&file.tensors[2], 14, &mut bytes).unwrap_err().to_string();
        assert!(why.ends_with(" was truncated while it was read; write it again"), "{why}");
        let again = header_of(&file.tensors).unwrap();
        let metadata: Metadata = serde_json::from_slice(&again[8..]).unwrap();
        assert_eq!(metadata.offset_keys(), ["c", "a", "b"]);
        assert_eq!((again.len() % 8, metadata.data_len()), (0, 16));
    }

    const GOOD: &str = r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;

    #[test]
    fn a_file_that_is_rewritten_in_place_while_it_is_read_is_refused() {
        let path = file("rewritten", GOOD, 4);
        let opened = GradientFile::open(&path).unwrap();
        let mut bytes = [0; 4];
        opened.read(&opened.tensors[0], 0, &mut bytes).unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_all_at(&[8; 4], 8 + GOOD.len() as u64).unwrap();
        // Set the time, because the clock of the file system may not have advanced yet.
        writer.set_modified(std::time::UNIX_EPOCH).unwrap();
        let why = opened.read(&opened.tensors[0], 0, &mut bytes).unwrap_err().to_string();
        assert!(
            why.ends_with("-rewritten changed while it was read; start again once it is complete"),
            "{why}"
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_writer_that_sets_the_time_back_is_seen_and_a_file_that_loses_its_name_stays_whole() {
        let path = file("back", GOOD, 4);
        let opened = GradientFile::open(&path).unwrap();
        let mut bytes = [0; 4];
        std::fs::rename(file("new", GOOD, 4), &path).unwrap();
        opened.read(&opened.tensors[0], 0, &mut bytes).unwrap();
        let opened = GradientFile::open(&path).unwrap();
        let before = path.metadata().unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        while Version::of(&writer.metadata().unwrap()).changed == opened.opened.changed {
            writer.set_modified(before.modified().unwrap()).unwrap();
        }
        let why = opened.read(&opened.tensors[0], 0, &mut bytes).unwrap_err().to_string();
        assert!(why.contains(" changed while it was read; "), "{why}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_key_that_is_there_twice_is_named() {
        let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        for (header, key) in [
            (format!(r#"{{"w":{entry},"w":{entry}}}"#), "\"w\""),
            (format!(r#"{{"w":{entry},"\u0077":{entry}}}"#), "\"w\""),
            (GOOD.replace("{\"dtype\"", "{\"dtype\":\"F64\",\"dtype\""), "\"dtype\""),
            (format!(r#"{{"__metadata__":{{"a":"b","a":"c"}},"w":{entry}}}"#), "\"a\""),
            (format!(r#"{{"__metadata__":{{}},"w":{entry},"__metadata__":{{}}}}"#), "\"__meta"),
        ] {
            let why = why("twice", &header, 4);
            assert!(why.contains("is not a safetensors file: its header has the key "), "{why}");
            assert!(why.contains(key) && why.contains(" twice"), "{why}");
        }
    }

    #[test]
    fn a_dtype_that_cannot_be_reduced_is_named_with_its_tensor() {
        for dtype in ["U8", "F8_E4M3", "nonsense"] {
            let header =
                format!(r#"{{"w":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,4]}}}}"#);
            let why = why("dtype", &header, 4);
            assert!(why.starts_with("tensor \"w\" of ") && why.contains(dtype), "{why}");
            assert!(why.ends_with("it reduces F32, F64, F16, BF16, I32, I64"), "{why}");
        }
    }

    #[test]
    fn a_text_of_a_file_is_shown_without_control_characters_and_cut() {
        let long = "x".repeat(100_000);
        for (name, dtype) in [("\\u001b[31mred", "\\u001b[31m\u{202e}"), (&long, &long)] {
            let header =
                format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,4]}}}}"#);
            let why = why("text", &header, 4);
            assert!(PeerText::is_plain(&why) && why.len() < 1024, "{why:?}");
            assert!(why.ends_with("it reduces F32, F64, F16, BF16, I32, I64"), "{why}");
        }
        let flag = r#"{"a `wait` b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        assert!(why("flag", flag, 4).starts_with("tensor \"a `wait` b\" of "));
    }

    #[test]
    fn what_is_no_safetensors_file_is_refused_in_a_sentence() {
        let good = GOOD;
        assert!(open("good", good, 4).is_ok());
        for (name, header, data) in [
            ("short", good, 3),
            ("long", good, 5),
            ("json", "not json", 0),
            ("list", "[1]", 0),
            ("offsets", r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4),
            ("shape", r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4),
        ] {
            let why = why(name, header, data);
            assert!(why.contains("is not a safetensors file: "), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
        let path = std::env::temp_dir().join(format!("racksum-file-{}-raw", std::process::id()));
        for bytes in [&b""[..], b"1234567", &u64::MAX.to_le_bytes(), &9u64.to_le_bytes()] {
            std::fs::write(&path, bytes).unwrap();
            let why = GradientFile::open(&path).unwrap_err().to_string();
            assert!(why.contains("is not a safetensors file: "), "{why}");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_difference_between_files_is_named() {
        let of = |name: &str, dtype: &str, shape: &str| {
            let header = format!(
                r#"{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,8]}}}}"#
            );
            open(&format!("same-{name}-{dtype}-{}", shape.len()), &header, 8).unwrap()
        };
        let one = of("w", "F32", "[2]");
        assert!(one.check_same(&of("w", "F32", "[2]")).is_ok());
        for (other, what) in [
            (of("w", "I32", "[2]"), "is i32 in "),
            (of("w", "F32", "[2, 1]"), "has the shape [2, 1] in "),
            (of("v", "F32", "[2]"), "lacks tensor \"w\", which "),
        ] {
            let why = one.check_same(&other).unwrap_err().to_string();
            assert!(why.contains(what), "{why}");
        }
        let none = open("none", "{}", 0).unwrap();
        let why = none.check_same(&one).unwrap_err().to_string();
        assert!(why.contains("has tensor \"w\", which "), "{why}");
    }

    #[test]
    fn the_tag_tells_names_and_shapes_apart() {
        let tensor = |name: &str, shape: &[usize]| Tensor {
            name: name.to_owned(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            elements: 6,
            offset: 0,
            len: 24,
        };
        let tags = [
            tensor("a", &[6]).tag(),
            tensor("b", &[6]).tag(),
            tensor("a", &[2, 3]).tag(),
            tensor("a", &[3, 2]).tag(),
        ];
        assert!((1..4).all(|i| !tags[..i].contains(&tags[i])));
        // The tag must never change, because ranks of different builds must agree.
        assert_eq!(tensor("a", &[6]).tag(), 0xba50_5b4b_c624_cb4f);
    }
}
