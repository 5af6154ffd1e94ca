//! A client, and the process that it is of.

use std::sync::Arc;

use pyo3::prelude::*;
use racksum_worker::Blocks;

use crate::client::Client;
use crate::errors::raise;

/// A client, of the process that it was connected in. A child that was forked from that has none of
/// its threads, and its locks may be held by them for ever.
#[derive(Debug, Clone)]
pub(crate) struct Connected {
    client: Option<Arc<Client>>,
    pid: u32,
}

impl Connected {
    pub(crate) fn new(client: Client) -> Self {
        Self { client: Some(Arc::new(client)), pid: std::process::id() }
    }

    /// Whether this is another process than the one that connected.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// The client, in the process that it is of.
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

    /// Hands back sums that are of no more use.
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
            // A client that closes waits for its threads, which may take seconds.
            Python::attach(|py| py.detach(|| drop(client)));
        }
    }
}
