//! Access to memory that Python passes by address. The package passes the addresses of contiguous
//! tensors, and keeps the tensors alive while this module uses them.

#![expect(unsafe_code, reason = "Python passes tensors as addresses, without borrows")]

use std::ptr::NonNull;

use pyo3::types::PyBytes;
use pyo3::{Bound, Py, PyAny, PyResult, Python, pyfunction};
use racksum_proto::descriptor::Descriptor;
use racksum_worker::Region;

use crate::errors::{raise, read};

/// Returns a mask of the non-zero blocks of the tensor at `address`: one bit for each block, lowest
/// bit first, padded to whole 64-bit words. Turns -0.0 into +0.0 in blocks of zeros.
#[pyfunction]
pub(crate) fn scan<'py>(
    py: Python<'py>,
    address: usize,
    nbytes: usize,
    dtype: &str,
    block: usize,
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let descriptor = Descriptor::sum(0, read(py, "dtype", dtype)?).with_block(block);
    let descriptor = descriptor.map_err(|error| raise(py, "BadArgument", error.to_string()))?;
    let mut region = region_of(address, nbytes, owner);
    let words = py.detach(|| racksum_worker::scan(&mut region, &descriptor));
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Creates the region of a tensor that an op reduces in place. As with every collective, nothing
/// else may access the tensor while the op runs.
pub(crate) fn region_of(address: usize, len: usize, owner: Py<PyAny>) -> Region {
    assert_is_somewhere(address, len);
    let start = NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: the package guarantees that the bytes are those of a contiguous tensor, which `owner`
    // keeps in place, and that only ops of this client access them until the op has ended.
    unsafe { Region::new(start, len, owner) }
}

/// Returns a copy of the bytes at an address.
pub(crate) fn read_from(address: usize, len: usize) -> Vec<u8> {
    assert_is_somewhere(address, len);
    let mut bytes = Vec::with_capacity(len);
    if len > 0 {
        // SAFETY: the package guarantees that the `len` bytes are those of a contiguous tensor, and
        // keeps the tensor alive during the call. The vector has room for `len` bytes, and the copy
        // initialises them.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
    }
    bytes
}

/// Writes bytes to an address.
pub(crate) fn write_to(address: usize, bytes: &[u8]) {
    assert_is_somewhere(address, bytes.len());
    if !bytes.is_empty() {
        // SAFETY: the package guarantees that the target is a contiguous tensor with room for these
        // bytes. It created the tensor, and keeps it alive during the call.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
        }
    }
}

/// Asserts that the address is not 0, unless there are no bytes. The package has already rejected
/// tensors without memory.
fn assert_is_somewhere(address: usize, len: usize) {
    assert!(address != 0 || len == 0, "a tensor of {len} bytes has no address");
}
