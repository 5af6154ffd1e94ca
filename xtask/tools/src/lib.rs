//! Tools that the chores (`xtask`) and the harness of the benches (`benches/harness`) share:
//! commands, requirements of the machine, the Python environment, timeouts and Ctrl-C.
//!
//! Only these two programs use this crate, so its errors are for people to read (`anyhow`).

pub mod deadline;
pub mod interrupt;
pub mod machine;
pub mod python;
pub mod shell;

use std::path::Path;

/// Returns the workspace root.
///
/// # Panics
/// Panics if this crate has moved to another folder of the workspace.
#[must_use]
pub fn root() -> &'static Path {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    root.expect("this crate is two folders below the root")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_root_has_the_lock_file_of_the_workspace() {
        assert!(super::root().join("Cargo.lock").is_file());
    }
}
