//! A job's link to the parent aggregator.

use std::net::SocketAddr;

use racksum_proto::control::{FromWorker, Welcome};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// A job's link to the parent.
#[derive(Debug, Default)]
pub(super) struct ParentLink {
    /// Whether a task calls the parent, or is about to.
    pub(super) called: bool,
    /// The queue for messages to the parent, while it is connected.
    pub(super) messages: Option<UnboundedSender<FromWorker>>,
    /// The queues of the job's earlier generations, kept open until the parent ends those
    /// connections. If this side closed one, the parent would tell the other racks that a rank of
    /// this rack has left.
    pub(super) before: Vec<UnboundedSender<FromWorker>>,
    /// Dropping this sender ends a call that the parent has not answered yet. After the answer,
    /// dropping `messages` ends the call.
    pub(super) _over: Option<oneshot::Sender<()>>,
    /// The ranks that, according to the parent, have not joined anywhere in the tree.
    pub(super) missing: Option<Vec<u16>>,
    /// The reason why there is no room at the parent, in the parent's words.
    pub(super) queued: Option<String>,
    /// The parent's address, and its grant.
    pub(super) granted: Option<(SocketAddr, Welcome)>,
}

impl ParentLink {
    /// Creates the link of a job whose previous generation had the link `before`.
    pub(super) fn after(before: Option<Self>) -> Self {
        let Self { mut before, messages, .. } = before.unwrap_or_default();
        before.extend(messages);
        // Keep the number of these connections bounded, even if the parent ends none of them.
        before.drain(..before.len().saturating_sub(MOST_BEFORE));
        Self { before, ..Self::default() }
    }
}

/// The maximum number of earlier generations of a job whose connections to the parent stay open.
pub(super) const MOST_BEFORE: usize = 4;
