//! The control server: accepts callers, and serves each in its own task.

use std::time::Duration;

use racksum_net::quic::{not_connected, quinn};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::caller_limits::CallerLimits;
use crate::caller_session::{Server, serve_caller};
use crate::handshake::{STRANGERS, answer, shake_hands};
use crate::lifelines::Lifelines;
use crate::registry::{SharedRegistry, lock};

/// The maximum number of callers that have not joined yet: twice the number of ranks of the largest
/// job.
pub(crate) const MAX_STRANGERS: usize = 512;
/// The time limit for sending the close message to the ranks.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Serves until the endpoint is closed or the aggregator has failed. At most `unjoined` callers at
/// a time may be connected without having joined.
pub(crate) async fn serve(
    endpoint: quinn::Endpoint,
    registry: SharedRegistry,
    unjoined: usize,
    mut failure: watch::Receiver<Option<String>>,
    authorities_changed: watch::Receiver<()>,
    drain_requested: watch::Sender<bool>,
) {
    let lifelines = Lifelines::serve(&endpoint, unjoined).await;
    let (limits, addr) = (CallerLimits::new(unjoined), endpoint.local_addr().ok());
    let server = Server { registry, lifelines, limits, addr, drain_requested, authorities_changed };
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            Ok(_) = failure.wait_for(Option::is_some) => {
                lock(&server.registry).stop();
                endpoint.close(1u32.into(), b"the aggregator failed");
                None
            }
        };
        let Some(incoming) = incoming else { break };
        let from = incoming.remote_address();
        let mut server = server.clone();
        server.authorities_changed.mark_unchanged();
        let knows = lock(&server.registry).knows_identities();
        let Some((connecting, permit)) = answer(incoming, &server.limits, knows) else {
            continue;
        };
        tokio::spawn(async move {
            match shake_hands(connecting, permit).await {
                Some(Ok((connection, permit))) => serve_caller(connection, permit, server).await,
                Some(Err(cause)) => STRANGERS.note(|left_out| {
                    tracing::warn!(left_out, "connection refused: {}", not_connected(from, cause));
                }),
                None => {}
            }
        });
    }
    // Wait until the close message is sent; otherwise the ranks would notice the end only after a
    // period of silence.
    drop(timeout(CLOSE_TIMEOUT, endpoint.wait_idle()).await);
}

#[cfg(test)]
mod tests;
