//! The control server: accepts callers, and serves each in its own task.

use std::time::Duration;

use racksum_net::quic::{not_connected, quinn};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::caller_session::{Server, serve_caller};
use crate::door::Doors;
use crate::handshake::{STRANGERS, answer, shake_hands};
use crate::lifelines::Lifelines;
use crate::registry::{Shared, lock};

/// The maximum number of callers that have not joined yet, whatever they do. It is twice the ranks
/// of a large job.
pub(crate) const MAX_STRANGERS: usize = 512;
/// The time limit for telling the ranks that the server stops.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Serves until the endpoint is closed or the aggregator has failed. At most `strangers` callers at
/// a time may be connected without having joined.
pub(crate) async fn serve(
    endpoint: quinn::Endpoint,
    registry: Shared,
    strangers: usize,
    mut failure: watch::Receiver<Option<String>>,
    disbelieved: watch::Receiver<()>,
) {
    let lifelines = Lifelines::serve(&endpoint, strangers).await;
    let (doors, addr) = (Doors::new(strangers), endpoint.local_addr().ok());
    let server = Server { registry, lifelines, doors, addr, disbelieved };
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
        server.disbelieved.mark_unchanged();
        let knows = lock(&server.registry).knows_identities();
        let Some((connecting, place)) = answer(incoming, &server.doors, knows) else { continue };
        tokio::spawn(async move {
            match shake_hands(connecting, place).await {
                Some(Ok((connection, place))) => serve_caller(connection, place, server).await,
                Some(Err(cause)) => STRANGERS.note(|left_out| {
                    tracing::warn!(left_out, "connection refused: {}", not_connected(from, cause));
                }),
                None => {}
            }
        });
    }
    // The close message must still be sent; otherwise the ranks would learn of the end only by
    // silence.
    drop(timeout(CLOSE_TIMEOUT, endpoint.wait_idle()).await);
}

#[cfg(test)]
mod tests;
