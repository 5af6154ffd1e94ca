//! The check of the manifests in `deploy/`, and of the objects that the operator writes.

use std::path::Path;

use anyhow::{Context, Result};
use racksum_tools::python::environment;
use racksum_tools::shell::{Cmd, path, target};

/// Builds the manifests with kubectl and checks them, and all writes of the operator's tests,
/// against the strict schemas of Kubernetes. Returns the reason if the tools cannot be installed.
pub(crate) fn check(root: &Path) -> Result<Option<String>> {
    let python = match environment(root, "kubernetes", "deploy/kubernetes/requirements.txt") {
        Ok(python) => python,
        Err(error) => return Ok(Some(format!("{error:#}"))),
    };
    let writes = target(root).join("operator-writes.jsonl");
    if writes.exists() {
        std::fs::remove_file(&writes).context("cannot remove the writes of an earlier run")?;
    }
    Cmd::cargo(&["test", "--locked", "-p", "racksum-operator", "--test", "operator"])
        .env(WRITES, path(&writes)?)
        .run(root)?;
    Cmd::new(path(&python)?, &["deploy/kubernetes/validate.py", path(&writes)?]).run(root)?;
    Ok(None)
}

/// The variable that names the file to which the operator's tests append all writes.
const WRITES: &str = "RACKSUM_OPERATOR_WRITES";
