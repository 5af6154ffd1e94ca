//! Files of gradients, and the expected results of their reduction.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// A test's own folder, removed when this value is dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("racksum-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// Returns the sorted names of the folder's entries.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Writes a file of tensors and returns its path.
    pub(crate) fn write(&self, name: &str, tensors: &[(&str, Tensor)]) -> String {
        let views = tensors.iter().map(|(name, tensor)| (*name, tensor.view()));
        let about = HashMap::from([("about".to_owned(), "a test".to_owned())]);
        let path = self.path(name);
        std::fs::write(&path, safetensors::serialize(views, Some(about)).unwrap()).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap_or(());
    }
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Creates a tensor from numbers.
    pub(crate) fn of(dtype: Dtype, shape: &[usize], numbers: &[f64]) -> Self {
        assert_eq!(numbers.len(), shape.iter().product::<usize>());
        let bytes = numbers.iter().flat_map(|number| element(dtype, *number)).collect();
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// Returns the elements as numbers. Only large i64s are rounded.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        let size = self.dtype.bitsize() / 8;
        self.bytes.chunks(size).map(|element| number(self.dtype, element)).collect()
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::new(self.dtype, self.shape.clone(), &self.bytes).unwrap()
    }
}

/// Reads all tensors of a file.
pub(crate) fn read(path: impl AsRef<Path>) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        (name, Tensor { dtype, shape, bytes: view.data().to_vec() })
    });
    tensors.collect()
}

/// Returns the four ranks' files of gradients captured in real training: `digits` or `words`.
pub(crate) fn captured(what: &str) -> Vec<String> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(what);
    (0..4)
        .map(|rank| data.join(format!("rank{rank}.safetensors")).to_str().unwrap().to_owned())
        .collect()
}

/// Checks a result against a reduction of the files in f64. The error of an element may be at most
/// `epsilon` times the sum of its inputs' magnitudes.
pub(crate) fn check(files: &[String], result: &str, op: &str, epsilon: f64) {
    let ranks: Vec<_> = files.iter().map(read).collect();
    let result = read(result);
    assert!(result.keys().eq(ranks[0].keys()), "{:?}", result.keys());
    for (name, tensor) in &result {
        let first = &ranks[0][name];
        assert_eq!((tensor.dtype, &tensor.shape), (first.dtype, &first.shape), "{name}");
        let inputs: Vec<_> = ranks.iter().map(|rank| rank[name].numbers()).collect();
        for (i, got) in tensor.numbers().into_iter().enumerate() {
            let column = || inputs.iter().map(|input| input[i]);
            let due = match op {
                "sum" => column().sum(),
                "avg" => column().sum::<f64>() / inputs.len() as f64,
                "min" => column().fold(f64::INFINITY, f64::min),
                "max" => column().fold(f64::NEG_INFINITY, f64::max),
                _ => unreachable!("{op}"),
            };
            let allowed = epsilon * column().map(f64::abs).sum::<f64>();
            assert!((got - due).abs() <= allowed, "{name} at {i}: {got}, not {due}");
        }
    }
}

/// Returns the number of blocks that are not zero in at least one of the tensors.
pub(crate) fn union(tensors: &[&Tensor], block: usize) -> u64 {
    let size = tensors[0].dtype.bitsize() / 8 * block;
    let count = tensors[0].bytes.len().div_ceil(size);
    let held = |at: &usize| {
        let zero =
            |tensor: &&&Tensor| tensor.bytes.chunks(size).nth(*at).unwrap().iter().all(|b| *b == 0);
        !tensors.iter().all(|tensor| zero(&tensor))
    };
    (0..count).filter(held).count() as u64
}

#[expect(clippy::cast_possible_truncation, reason = "the function rounds numbers to the dtype")]
fn element(dtype: Dtype, number: f64) -> Vec<u8> {
    match dtype {
        Dtype::F32 => (number as f32).to_le_bytes().to_vec(),
        Dtype::F64 => number.to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f64(number).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f64(number).to_le_bytes().to_vec(),
        Dtype::I32 => (number as i32).to_le_bytes().to_vec(),
        Dtype::I64 => (number as i64).to_le_bytes().to_vec(),
        Dtype::U8 => (number as i64).to_le_bytes()[..1].to_vec(),
        other => unreachable!("{other}"),
    }
}

fn number(dtype: Dtype, element: &[u8]) -> f64 {
    match dtype {
        Dtype::F32 => f32::from_le_bytes(element.try_into().unwrap()).into(),
        Dtype::F64 => f64::from_le_bytes(element.try_into().unwrap()),
        Dtype::F16 => f16::from_le_bytes(element.try_into().unwrap()).to_f64(),
        Dtype::BF16 => bf16::from_le_bytes(element.try_into().unwrap()).to_f64(),
        Dtype::I32 => i32::from_le_bytes(element.try_into().unwrap()).into(),
        Dtype::I64 => i64::from_le_bytes(element.try_into().unwrap()) as f64,
        other => unreachable!("{other}"),
    }
}
