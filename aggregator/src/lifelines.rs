//! Lifelines: TCP connections whose end shows immediately that a rank's process has died. Each
//! lifeline is offered to a rank with a token; the rank claims the lifeline by sending the token.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use racksum_net::auth::new_key;
use racksum_net::quic::{lifeline, quinn};
use racksum_net::with_limit;
use racksum_proto::auth::Key;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::caller_limits::{CallerKey, CallerLimit, HANDSHAKES_OF_ONE};

/// The offered lifelines, by the token that claims each.
type Offers = Arc<Mutex<BTreeMap<[u8; Key::LEN], oneshot::Sender<TcpStream>>>>;

/// The listener for the ranks' lifelines.
#[derive(Debug, Clone)]
pub(crate) struct Lifelines {
    /// The port, or `None` if the aggregator cannot listen.
    port: Option<u16>,
    offers: Offers,
}

impl Lifelines {
    /// Accepts lifelines until the runtime ends, at the endpoint's port if that port is free for
    /// TCP. At most `unjoined` connections at a time may be open without having sent a token.
    pub(crate) async fn serve(endpoint: &quinn::Endpoint, unjoined: usize) -> Self {
        let offers = Offers::default();
        let listener = match endpoint.local_addr() {
            Ok(addr) => lifeline::listen(addr).await,
            Err(error) => Err(error),
        };
        let port = match listener.and_then(|listener| Ok((listener.local_addr()?, listener))) {
            Ok((addr, listener)) => {
                tokio::spawn(take(listener, Arc::clone(&offers), unjoined));
                Some(addr.port())
            }
            Err(error) => {
                let error = with_limit(&error);
                tracing::warn!(
                    error,
                    "cannot listen for lifelines; a dead rank is noticed only after 20 s of silence"
                );
                None
            }
        };
        Self { port, offers }
    }

    /// Offers a lifeline. Returns its token, the port, and a receiver for the connection, or `None`
    /// if the aggregator cannot listen or the system provides no randomness. An offer is forgotten
    /// once its receiver is dropped.
    pub(crate) fn offer(&self) -> Option<(Key, u16, oneshot::Receiver<TcpStream>)> {
        let (port, token) = (self.port?, new_key().ok()?);
        let (come, lifeline) = oneshot::channel();
        let mut offers = self.offers.lock().unwrap_or_else(PoisonError::into_inner);
        offers.retain(|_, offered| !offered.is_closed());
        offers.insert(token.0, come);
        Some((token, port, lifeline))
    }
}

/// Passes each accepted lifeline to the session that offered it.
async fn take(listener: TcpListener, offers: Offers, unjoined: usize) {
    let limit = CallerLimit::new(unjoined, HANDSHAKES_OF_ONE);
    let mut warned = false;
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(
                        %error,
                        "cannot accept a lifeline; a dead rank that has no lifeline is noticed \
                         only after 20 s of silence; if too many files are open, raise the limit \
                         (ulimit -n)"
                    );
                }
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        // A connection that sends no token must not keep others out.
        let entered = limit.acquire(CallerKey::new(None, from.ip()));
        let Some((permit, mut revoked)) = entered else { continue };
        let offers = Arc::clone(&offers);
        tokio::spawn(async move {
            let received = tokio::select! {
                received = lifeline::token_of(stream) => received,
                () = revoked.wait() => return,
            };
            drop(permit);
            let Some((token, stream)) = received else { return };
            let mut offers = offers.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(offered) = offers.remove(&token.0) {
                // Ignore a failed send: the session that made the offer may have ended.
                drop(offered.send(stream));
            }
        });
    }
}

/// The delay after a failed accept.
const RETRY: std::time::Duration = std::time::Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use racksum_net::quic::{Credentials, server};
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpSocket;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_lifeline_goes_to_whom_it_was_offered_and_no_other_is_kept() {
        let credentials = Credentials::new(None, false).unwrap();
        // The port is already taken for TCP, so the lifelines must use another port.
        let (endpoint, to, _taken) = loop {
            let endpoint = server("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
            let to = endpoint.local_addr().unwrap();
            // Retry, because another process may hold the port for a while.
            if let Ok(taken) = TcpListener::bind(to).await {
                break (endpoint, to, taken);
            }
        };
        let lifelines = Lifelines::serve(&endpoint, 8).await;
        let (token, port, come) = lifelines.offer().unwrap();
        assert_ne!(port, to.port());
        let laid = |lifeline| match lifeline {
            lifeline::Lifeline::Laid(stream) => stream,
            none => panic!("{none:?}"),
        };
        let mut stranger = laid(lifeline::lay(to, port, Key([9; Key::LEN])).await);
        let end = timeout(Duration::from_secs(5), stranger.read(&mut [0; 8])).await;
        assert!(
            matches!(end, Ok(Ok(0) | Err(_))),
            "a connection with an unknown token is closed: {end:?}"
        );
        let own = laid(lifeline::lay(to, port, token).await);
        let came = timeout(Duration::from_secs(5), come).await.unwrap().unwrap();
        assert_eq!(came.peer_addr().unwrap(), own.local_addr().unwrap());
        // Offers whose receivers were dropped are forgotten.
        drop(lifelines.offer());
        drop(lifelines.offer());
        assert_eq!(lifelines.offers.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn connections_that_say_nothing_keep_out_no_lifeline_from_another_address() {
        let credentials = Credentials::new(None, false).unwrap();
        let endpoint = server("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
        let lifelines = Lifelines::serve(&endpoint, 2).await;
        let (token, port, come) = lifelines.offer().unwrap();
        let to = SocketAddr::new(endpoint.local_addr().unwrap().ip(), port);
        let mut silent = Vec::new();
        for _ in 0..200 {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
            silent.push(socket.connect(to).await.unwrap());
        }
        let own = lifeline::lay(endpoint.local_addr().unwrap(), port, token).await;
        assert!(matches!(own, lifeline::Lifeline::Laid(_)), "{own:?}");
        // Each of the silent connections may stay open for seconds.
        timeout(Duration::from_secs(60), come).await.unwrap().unwrap();
    }
}
