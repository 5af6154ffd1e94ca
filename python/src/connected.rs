//! A client and the process that connected it.

use std::sync::Arc;

use pyo3::prelude::*;
use racksum_worker::{Blocks, Client};

use crate::errors::raise;

/// A client, bound to the process that connected it. A forked child has none of the client's
/// threads, and these may hold the client's locks forever.
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

    /// Returns the client, or an error in a process that was forked since.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&Client> {
        match &self.client {
            Some(client) if !self.is_forked() => Ok(client),
            _ => Err(raise(
                py,
                "SessionClosed",
                format!(
                    "the session was connected by process {}, from which this one, {}, was \
                     forked; connect after the fork",
                    self.pid,
                    std::process::id()
                ),
            )),
        }
    }

    /// Gives the client the memory of sums that are no longer needed.
    pub(crate) fn recycle(&self, blocks: Blocks) {
        if let Some(client) = self.client.as_ref().filter(|_| !self.is_forked()) {
            client.recycle(blocks);
        }
    }
}

impl Drop for Connected {
    #[expect(clippy::mem_forget, reason = "what a fork has copied cannot be closed")]
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
