use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::endpoint::client_config;
use super::frames::{FrameError, LONGEST, MAX_FRAME, recv, send};
use super::*;
use crate::NetError;

mod texts;

const PATIENCE: Span = Span::from_secs(100);
/// Timeout of tests that expect no answer, where a real answer would arrive much sooner.
const IMPATIENCE: Span = Span::from_millis(300);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    job: String,
    rank: u16,
}

fn hello() -> Hello {
    Hello { job: "resnet".to_owned(), rank: 3 }
}

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Returns credentials that accept everyone on loopback.
fn strangers() -> Credentials {
    Credentials::new(None, false).unwrap()
}

async fn call(to: SocketAddr, patience: Span) -> Result<Connection, NetError> {
    connect(to, &strangers(), patience).await
}

/// Returns the two ends of a connection.
async fn pair() -> (Connection, quinn::Connection) {
    let server = server(any_port(), &strangers()).unwrap();
    let to = server.local_addr().unwrap();
    let accept = tokio::spawn(async move { server.accept().await.unwrap().await.unwrap() });
    let client = call(to, PATIENCE).await.unwrap();
    (client, accept.await.unwrap())
}

/// Returns the two ends of a stream after the client has written `bytes` and finished the stream.
async fn stream_of(bytes: &[u8]) -> (Connection, quinn::Connection, quinn::RecvStream) {
    let (client, served) = pair().await;
    let (mut out, _) = client.quic().open_bi().await.unwrap();
    out.write_all(bytes).await.unwrap();
    out.finish().unwrap();
    let (_, stream) = served.accept_bi().await.unwrap();
    (client, served, stream)
}

#[tokio::test]
async fn the_connections_of_a_caller_share_a_socket() {
    let caller = Caller::new(PROTOCOL, &strangers()).unwrap();
    let mut callers = vec![];
    for _ in 0..3 {
        let server = server(any_port(), &strangers()).unwrap();
        let to = server.local_addr().unwrap();
        let accept = tokio::spawn(async move { server.accept().await.unwrap().await.unwrap() });
        let client = caller.connect(to, PATIENCE).await.unwrap();
        callers.push(accept.await.unwrap().remote_address());
        client.close("tested").await;
    }
    assert!(callers.iter().all(|from| *from == callers[0]), "{callers:?}");
}

#[tokio::test]
async fn a_message_is_echoed_over_a_connection_of_strangers() {
    let server = server(any_port(), &strangers()).unwrap();
    let to = server.local_addr().unwrap();
    let echo = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().await.unwrap();
        assert!(connection.peer_identity().is_some(), "clients show a certificate too");
        let (mut out, mut back) = connection.accept_bi().await.unwrap();
        while let Some(message) = recv::<Hello>(&mut back).await.unwrap() {
            send(&mut out, &message).await.unwrap();
        }
        out.finish().unwrap();
        connection.closed().await
    });
    let client = call(to, PATIENCE).await.unwrap();
    let (mut out, mut back) = client.quic().open_bi().await.unwrap();
    for rank in 0..3 {
        send(&mut out, &Hello { rank, ..hello() }).await.unwrap();
    }
    out.finish().unwrap();
    for rank in 0..3 {
        assert_eq!(recv(&mut back).await.unwrap(), Some(Hello { rank, ..hello() }));
    }
    assert_eq!(recv::<Hello>(&mut back).await.unwrap(), None, "the stream ends between messages");
    client.close("done").await;
    let end = echo.await.unwrap();
    assert!(
        matches!(end, quinn::ConnectionError::ApplicationClosed(close) if close.reason == "done")
    );
}

#[tokio::test]
async fn garbage_on_a_stream_is_a_typed_error() {
    let json = br#"{"job":"x","rank":3}"#;
    let frame = |len: u32, body: &[u8]| [&len.to_be_bytes()[..], body].concat();
    let too_long = frame(u32::try_from(MAX_FRAME + 1).unwrap(), b"");
    let (_client, _served, mut stream) = stream_of(&too_long).await;
    let error = recv::<Hello>(&mut stream).await.unwrap_err();
    assert!(matches!(error, FrameError::TooLong { len } if len == MAX_FRAME + 1), "{error}");

    for truncated in [vec![0], vec![0, 0, 0], frame(20, b""), frame(20, &json[..19])] {
        let (_client, _served, mut stream) = stream_of(&truncated).await;
        let error = recv::<Hello>(&mut stream).await.unwrap_err();
        assert!(matches!(error, FrameError::Truncated), "{truncated:?}: {error}");
    }

    for body in [&b""[..], b"\xff\xff\xff", b"{}", b"{\"job\":\"x\",\"rank\":-1}", b"[[[[[["] {
        let length = u32::try_from(body.len()).unwrap();
        let (_client, _served, mut stream) = stream_of(&frame(length, body)).await;
        let error = recv::<Hello>(&mut stream).await.unwrap_err();
        assert!(matches!(error, FrameError::Decode(_)), "{body:?}: {error}");
    }

    let (_client, _served, mut stream) = stream_of(&frame(20, json)).await;
    assert!(recv::<Hello>(&mut stream).await.unwrap().is_some());
    assert_eq!(recv::<Hello>(&mut stream).await.unwrap(), None);
}

#[tokio::test]
async fn messages_up_to_the_limit_pass_and_none_above() {
    let (client, served) = pair().await;
    let (mut out, _) = client.quic().open_bi().await.unwrap();
    // JSON adds two quotes.
    let longest = "x".repeat(MAX_FRAME - 2);
    send(&mut out, &longest).await.unwrap();
    let error = send(&mut out, &format!("{longest}x")).await.unwrap_err();
    assert!(matches!(error, FrameError::TooLong { .. }), "{error}");
    let (_, mut back) = served.accept_bi().await.unwrap();
    assert_eq!(recv::<String>(&mut back).await.unwrap(), Some(longest));
}

#[tokio::test]
async fn a_connection_that_is_gone_ends_a_receive() {
    let (client, served) = pair().await;
    let (mut out, _) = client.quic().open_bi().await.unwrap();
    send(&mut out, &hello()).await.unwrap();
    let (_, mut back) = served.accept_bi().await.unwrap();
    assert_eq!(recv::<Hello>(&mut back).await.unwrap(), Some(hello()));
    client.close("gone").await;
    let error = recv::<Hello>(&mut back).await.unwrap_err();
    assert!(matches!(error, FrameError::Read(_)), "{error}");
}

/// Returns the output of a future that is ready immediately, or `None` if it has to wait.
async fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = future => Some(done),
        () = std::future::ready(()) => None,
    }
}

#[tokio::test]
async fn a_peer_has_one_stream_and_no_more_room_than_a_message_takes() {
    let (client, served) = pair().await;
    // The server may open no streams, and the client only one bidirectional stream.
    assert!(at_once(served.open_bi()).await.is_none());
    assert!(at_once(served.open_uni()).await.is_none());
    assert!(at_once(client.quic().open_uni()).await.is_none());
    client.close("done").await;

    // This caller sends as much as the server allows, regardless of our own client settings.
    let server = server(any_port(), &strangers()).unwrap();
    let to = server.local_addr().unwrap();
    let accept = tokio::spawn(async move { server.accept().await.unwrap().await.unwrap() });
    let mut config = client_config(&strangers(), PROTOCOL).unwrap();
    config.transport_config(quinn::TransportConfig::default().into());
    let caller = quinn::Endpoint::client(any_port()).unwrap();
    let connection = caller.connect_with(config, to, "racksum").unwrap().await.unwrap();
    let _served = accept.await.unwrap();
    let (mut out, _back) = connection.open_bi().await.unwrap();
    assert!(at_once(connection.open_bi()).await.is_none());
    let unread = vec![0; 4 * LONGEST];
    assert_eq!(out.write(&unread).await.unwrap(), LONGEST);
    assert!(at_once(out.write(&unread)).await.is_none());
}

/// Calls, through a relay, a server that validates the caller's address first. The relay passes
/// `see` each datagram, and a flag that is true if the server sent it; `see` may change the
/// datagram.
async fn call_through(mut see: impl FnMut(&mut [u8], bool) + Send + 'static) {
    let server = server(any_port(), &strangers()).unwrap();
    let to = server.local_addr().unwrap();
    let accept = tokio::spawn(async move {
        loop {
            let incoming = server.accept().await.unwrap();
            if incoming.remote_address_validated() {
                return incoming.await.unwrap();
            }
            incoming.retry().unwrap();
        }
    });
    let between = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
    let at = between.local_addr().unwrap();
    let relay = tokio::spawn(async move {
        let (mut caller, mut datagram) = (None, [0; 2048]);
        loop {
            let (len, from) = between.recv_from(&mut datagram).await.unwrap();
            see(&mut datagram[..len], from == to);
            let to = if from == to { caller.unwrap() } else { to };
            caller = caller.or(Some(from));
            between.send_to(&datagram[..len], to).await.unwrap();
        }
    });
    drop((call(at, PATIENCE).await.unwrap(), accept.await.unwrap()));
    relay.abort();
}

#[tokio::test]
async fn both_ends_give_themselves_identifiers_of_ours_also_in_a_retry() {
    let (sender, lengths) = std::sync::mpsc::channel();
    call_through(move |datagram, is_servers| {
        // Only long headers (RFC 8999, section 5.1) carry the length of the identifier.
        if datagram[0] & 0x80 != 0 {
            let theirs = usize::from(datagram[5]);
            sender.send((is_servers, usize::from(datagram[6 + theirs]))).unwrap();
        }
    })
    .await;
    let lengths: Vec<_> = lengths.try_iter().collect();
    assert!(lengths.iter().filter(|(is_servers, _)| *is_servers).count() > 1, "{lengths:?}");
    assert!(lengths.iter().all(|(_, len)| *len == connection_id::LEN), "{lengths:?}");
}

#[tokio::test]
async fn a_call_whose_first_retry_is_corrupted_is_answered_all_the_same() {
    let (sender, corrupted) = std::sync::mpsc::sync_channel(1);
    call_through(move |datagram, is_servers| {
        let is_retry = is_servers && datagram[0] & 0xf0 == 0xf0;
        if is_retry && sender.try_send(()).is_ok() {
            *datagram.last_mut().unwrap() ^= 1;
        }
    })
    .await;
    corrupted.try_recv().unwrap();
}

#[tokio::test]
async fn a_connection_stays_at_the_address_of_its_handshake() {
    let server = server(any_port(), &strangers()).unwrap();
    let to = server.local_addr().unwrap();
    let served = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().await.unwrap();
        let at_first = connection.remote_address();
        let (mut out, mut back) = connection.accept_bi().await.unwrap();
        let mut addresses = Vec::new();
        while let Some(message) = recv::<Hello>(&mut back).await.unwrap() {
            addresses.push(connection.remote_address());
            send(&mut out, &message).await.unwrap();
        }
        (at_first, addresses)
    });
    // A relay between the two sends some of the caller's datagrams from another address.
    let between = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
    let elsewhere = tokio::net::UdpSocket::bind("127.0.0.9:0").await.unwrap();
    let (at, moves) = (between.local_addr().unwrap(), tokio::sync::Notify::new());
    let moves = std::sync::Arc::new(moves);
    let moved = std::sync::Arc::clone(&moves);
    let relay = tokio::spawn(async move {
        let (mut caller, mut left) = (None, 0);
        let (mut datagram, mut answer) = ([0; 2048], [0; 2048]);
        loop {
            let (len, from) = tokio::select! {
                () = moved.notified() => {
                    left = 4;
                    continue;
                }
                received = between.recv_from(&mut datagram) => received.unwrap(),
                received = elsewhere.recv_from(&mut answer) => {
                    let (len, _) = received.unwrap();
                    between.send_to(&answer[..len], caller.unwrap()).await.unwrap();
                    continue;
                }
            };
            if from == to {
                between.send_to(&datagram[..len], caller.unwrap()).await.unwrap();
                continue;
            }
            caller = caller.or(Some(from));
            let socket = if left > 0 { &elsewhere } else { &between };
            left = std::cmp::max(left, 1) - 1;
            socket.send_to(&datagram[..len], to).await.unwrap();
        }
    });
    let client = call(at, PATIENCE).await.unwrap();
    let (mut out, mut back) = client.quic().open_bi().await.unwrap();
    for rank in 0..2 {
        send(&mut out, &Hello { rank, ..hello() }).await.unwrap();
        assert_eq!(recv(&mut back).await.unwrap(), Some(Hello { rank, ..hello() }));
        moves.notify_one();
        tokio::task::yield_now().await;
    }
    out.finish().unwrap();
    let (at_first, addresses) = served.await.unwrap();
    assert_eq!(addresses, [at_first; 2]);
    relay.abort();
}

#[tokio::test]
async fn what_no_connection_has_sent_is_not_answered() {
    let server = server(any_port(), &strangers()).unwrap();
    let stranger = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
    // These look like datagrams of a connection, which have short headers.
    for len in [21, 64, 1200] {
        stranger.send_to(&vec![0x52; len], server.local_addr().unwrap()).await.unwrap();
    }
    let answered = tokio::time::timeout(duration(IMPATIENCE), stranger.recv(&mut [0; 2048])).await;
    assert!(answered.is_err(), "{answered:?}");
}

#[tokio::test]
async fn calling_nobody_gives_up_in_time_and_says_so() {
    // The socket is bound but silent, so that no other process takes the port.
    let silent = std::net::UdpSocket::bind(any_port()).unwrap();
    let to = silent.local_addr().unwrap();
    let error = call(to, IMPATIENCE).await.unwrap_err();
    assert!(matches!(error, NetError::NobodyThere { addr, .. } if addr == to), "{error}");
    assert!(error.to_string().contains(" within 0.3 s; "), "{error}");
    drop(silent);
    let error = call(to, IMPATIENCE).await.unwrap_err();
    assert!(matches!(error, NetError::NobodyThere { .. }), "{error}");
}

#[tokio::test]
async fn calls_that_are_given_up_leave_no_task_and_no_socket() {
    let silent = std::net::UdpSocket::bind(any_port()).unwrap();
    let to = silent.local_addr().unwrap();
    let credentials = strangers();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for _ in 0..50 {
        let called =
            tokio::time::timeout(Duration::from_millis(2), connect(to, &credentials, PATIENCE));
        assert!(called.await.is_err(), "nobody answers");
    }
    // The runtime has one thread, which drops the aborted tasks while this task yields.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(tasks(), before);
}

#[tokio::test]
async fn a_server_of_another_protocol_is_told_from_silence() {
    let other = serve(any_port(), &strangers(), "racksum/0").unwrap();
    let to = other.local_addr().unwrap();
    tokio::spawn(async move {
        let refused = other.accept().await.unwrap().await;
        assert!(refused.is_err());
    });
    let error = call(to, PATIENCE).await.unwrap_err();
    assert!(matches!(error, NetError::WrongProtocol { .. }), "{error}");
    assert!(error.to_string().contains("does not speak racksum/1"), "{error}");
}

#[tokio::test]
async fn a_taken_port_is_an_error_that_names_it() {
    let holder = server(any_port(), &strangers()).unwrap();
    let addr = holder.local_addr().unwrap();
    let error = server(addr, &strangers()).unwrap_err();
    assert!(matches!(error, NetError::PortTaken { addr: taken } if taken == addr), "{error}");
}

#[tokio::test]
async fn without_certificates_only_loopback_is_served_or_called() {
    let everywhere: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let error = server(everywhere, &strangers()).unwrap_err();
    assert!(matches!(error, NetError::Unprotected { .. }), "{error}");
    assert!(error.to_string().contains("set `identity` to"), "{error}");
    let error = call("203.0.113.77:7000".parse().unwrap(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, NetError::Unprotected { .. }), "{error}");
    let open = server(everywhere, &Credentials::new(None, true).unwrap()).unwrap();
    assert_ne!(open.local_addr().unwrap().port(), 0);
}

#[tokio::test]
async fn what_cannot_be_called_is_said_at_once() {
    let error = call(any_port(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, NetError::NotCallable { .. }), "{error}");
}

#[test]
fn an_identity_keeps_its_key_to_itself() {
    let shown = format!("{:?}", Identity::ephemeral().unwrap());
    assert_eq!(shown, "Identity { authorities: 0, .. }");
}
