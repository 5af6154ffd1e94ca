//! The page that the kubelet's probes read.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

/// Answers `GET /healthz` for as long as this future is polled. The page does not depend on the API
/// server: a restart would not bring it back.
///
/// # Errors
/// If the address cannot be bound.
pub async fn serve(address: SocketAddr) -> io::Result<Infallible> {
    let listener = TcpListener::bind(address).await?;
    loop {
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("accepting a probe: {error}");
                tokio::time::sleep(PATIENCE).await;
                continue;
            }
        };
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service_fn(answer));
        tokio::spawn(async move {
            if let Ok(Err(error)) = tokio::time::timeout(PATIENCE, connection).await {
                tracing::debug!("a probe: {error}");
            }
        });
    }
}

async fn answer<T>(request: Request<T>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) = match request.uri().path() {
        "/healthz" => (StatusCode::OK, "ok\n"),
        _ => (StatusCode::NOT_FOUND, "the only page is /healthz\n"),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    Ok(response)
}

/// The longest time of a probe.
const PATIENCE: Duration = Duration::from_secs(5);
