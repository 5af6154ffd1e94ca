//! A client and the process that connected it.

use std::sync::Arc;

use pyo3::prelude::*;
use racksum_worker::{Blocks, Client};

use crate::errors::raise;

/// A client, bound to the process that connected it. A forked child must not use the client: the
/// child has none of the client's threads, and a lock that one of them held at the fork stays
/// locked in the child forever.
#[derive(Debug, Clone)]
pub(crate) struct Connected {
    client: Option<Arc<Client>>,
    pid: u32,
}

impl Connected {
    pub(crate) fn new(client: Client) -> Self {
        Self { client: Some(Arc::new(client)), pid: std::process::id() }
    }

    /// Returns whether this process is not the one that connected the client.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// Returns the client, or an error in a forked child of the process that connected it.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&Client> {
        match &self.client {
            Some(client) if !self.is_forked() => Ok(client),
            _ => Err(raise(
                py,
                "SessionClosed",
                format!(
                    "process {} connected the session, and this process, {}, was forked from it; \
                     connect after the fork",
                    self.pid,
                    std::process::id()
                ),
            )),
        }
    }

    /// Lets the client reuse the memory of sums that are no longer needed.
    pub(crate) fn recycle(&self, blocks: Blocks) {
        if let Some(client) = self.client.as_ref().filter(|_| !self.is_forked()) {
            client.recycle(blocks);
        }
    }
}

impl Drop for Connected {
    #[expect(clippy::mem_forget, reason = "a forked child cannot close the parent's client")]
    fn drop(&mut self) {
        let client = self.client.take();
        if self.is_forked() {
            std::mem::forget(client);
        } else {
            // Closing a client joins its threads, which may take seconds, so release the GIL.
            Python::attach(|py| py.detach(|| drop(client)));
        }
    }
}
