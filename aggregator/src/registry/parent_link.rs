//! What a job holds of its call to the parent.

use std::net::SocketAddr;

use racksum_proto::control::{FromWorker, Welcome};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// A job's way to the parent.
#[derive(Debug, Default)]
pub(super) struct ParentLink {
    /// Somebody calls the parent, or is about to.
    pub(super) called: bool,
    /// What is said to the parent goes here, while it is called.
    pub(super) messages: Option<UnboundedSender<FromWorker>>,
    /// The same of the job's lives before, until the parent ends those by itself: a last word would
    /// say to the other racks that a rank of this one has left.
    pub(super) before: Vec<UnboundedSender<FromWorker>>,
    /// Ends the call when it is dropped, unless the parent has answered: then words end it.
    pub(super) _over: Option<oneshot::Sender<()>>,
    /// The ranks that have joined nowhere, as the parent says.
    pub(super) missing: Option<Vec<u16>>,
    /// What there is no room for at the parent, as it says.
    pub(super) queued: Option<String>,
    /// The parent's address, and what it granted.
    pub(super) granted: Option<(SocketAddr, Welcome)>,
}

impl ParentLink {
    /// The way of a job whose life before had this one.
    pub(super) fn after(before: Option<Self>) -> Self {
        let Self { mut before, messages, .. } = before.unwrap_or_default();
        before.extend(messages);
        // Those of a parent that ends none are not kept without end.
        before.drain(..before.len().saturating_sub(MOST_BEFORE));
        Self { before, ..Self::default() }
    }
}

/// Lives of a job before the present one whose conversations with the parent go on.
pub(super) const MOST_BEFORE: usize = 4;
