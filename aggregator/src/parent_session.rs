//! The calls from an aggregator to its parent: one connection per job, over which the aggregator
//! joins that job.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use racksum_net::interface::{interface_of, local_addr_towards, max_datagram};
use racksum_net::quic::{self, CallOptions, ControlConnection, Credentials, run_session_on};
use racksum_net::resolve::resolve;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use racksum_proto::time::Span;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::multicast_ping::ping;
use crate::paths::prove;
use crate::registry::{Joined, MEMBER_QUEUE, ParentCall, Seat, SharedRegistry, lock, settle};

/// The time limit for the parent to answer a call.
const PATIENCE: Span = Span::from_secs(5);
/// The MTU to assume if the interface is unknown.
const USUAL_MTU: usize = 1500;

/// Keeps the job of a seat connected to the parent until the job ends.
pub(crate) async fn call(registry: SharedRegistry, seat: Seat) {
    let Some(parent) = lock(&registry).config().parent.clone() else { return };
    loop {
        let called = lock(&registry).call(&seat);
        let Some(ParentCall { join, messages, over }) = called else { return };
        // This call can be dropped at any point: an unfinished proof of a data path leaves no state
        // at the parent.
        let answered = tokio::select! {
            answered = reach(&registry, &parent, join) => answered,
            _ = over => return,
        };
        let why = match answered {
            Ok(Answered { line, to, join }) => {
                let (sender, receiver) = channel(MEMBER_QUEUE);
                let floods = Arc::new(AtomicBool::new(false));
                let on_message = on_message(sender, Arc::clone(&floods));
                let handling = handle_messages(&registry, &seat, to, receiver);
                let session = run_session_on(line, FromWorker::Join(join), messages, on_message);
                let (ended, ()) = tokio::join!(session, handling);
                if floods.load(Relaxed) { FLOODS.to_owned() } else { ended.to_string() }
            }
            Err(why) => why,
        };
        if !lock(&registry).handle_parent_disconnect(&seat, &parent, &why) {
            return;
        }
    }
}

/// Returns a handler that queues the parent's messages. If the queue is full, the parent is
/// flooding this aggregator, so the handler sets `floods` and stops receiving.
fn on_message(
    sender: Sender<FromAggregator>,
    floods: Arc<AtomicBool>,
) -> impl Fn(FromAggregator) -> bool + Send + 'static {
    move |message| {
        let queued = sender.try_send(message);
        if matches!(queued, Err(TrySendError::Full(_))) {
            floods.store(true, Relaxed);
        }
        queued.is_ok()
    }
}

/// The error for a parent that floods this aggregator.
const FLOODS: &str = "the parent sent more messages than the protocol allows; check that --parent \
                      names a racksum aggregator, and install the same release on both";

/// The reason why a parent cannot be called.
#[derive(Debug)]
pub(crate) enum NotFound {
    /// The parent's name does not resolve now, but may resolve later.
    Temporary(String),
    /// This aggregator can never call the parent's address.
    Permanent(String),
}

impl NotFound {
    pub(crate) fn why(self) -> String {
        match self {
            Self::Temporary(why) | Self::Permanent(why) => why,
        }
    }
}

/// Returns the parent's addresses that the shards of an aggregator at `own` can send to. The list
/// has at least one address, and does not contain the aggregator's own.
pub(crate) async fn find(own: SocketAddr, parent: &str) -> Result<Vec<SocketAddr>, NotFound> {
    let bind = own.ip();
    let found = resolve(parent).await;
    let found = found.map_err(|why| match why.kind() {
        io::ErrorKind::Unsupported => NotFound::Permanent(format!("cannot use {parent:?}: {why}")),
        _ => NotFound::Temporary(format!("cannot resolve {parent:?}: {why}")),
    })?;
    let mut fitting = found.clone();
    fitting.retain(|addr| addr.is_ipv6() == bind.is_ipv6());
    let Some(to) = fitting.first().copied() else {
        return Err(NotFound::Permanent(format!(
            "this aggregator serves on {bind}, which cannot reach any of {found:?}, the addresses \
             of {parent:?}; start it with --bind and an address that can"
        )));
    };
    fitting.retain(|addr| !bind.is_loopback() || addr.ip().is_loopback());
    if fitting.is_empty() {
        return Err(NotFound::Permanent(format!(
            "this aggregator serves on {bind}, which cannot reach {to}; start it with --bind and \
             an address that can"
        )));
    }
    if let Some(addr) = fitting.iter().find(|addr| is_at(own, **addr)) {
        return Err(NotFound::Permanent(format!(
            "{parent:?} is {addr}, which is this aggregator itself; give the HOST:PORT of another \
             aggregator"
        )));
    }
    fitting.dedup();
    Ok(fitting)
}

/// Returns whether a call to `to` arrives at a socket of this host that is bound to `own`.
fn is_at(own: SocketAddr, to: SocketAddr) -> bool {
    let (bind, ip) = (own.ip(), to.ip());
    // The kernel treats a call to the unspecified address as a call to this host.
    let is_here = || ip.is_loopback() || ip.is_unspecified() || interface_of(ip).is_some();
    own.port() == to.port() && (ip == bind || bind.is_unspecified() && is_here())
}

/// A parent with a proven data path, and the join to send to the parent.
struct Answered {
    line: ControlConnection,
    to: SocketAddr,
    join: Join,
}

/// Calls the parent and proves the data path to it. An error says why that failed.
async fn reach(
    registry: &SharedRegistry,
    parent: &str,
    mut join: Join,
) -> Result<Answered, String> {
    let (own, identity, insecure) = {
        let registry = lock(registry);
        let config = registry.config();
        let own = SocketAddr::new(config.bind, config.port);
        (own, config.identity.clone(), config.insecure)
    };
    let bind = own.ip();
    let addrs = find(own, parent).await.map_err(NotFound::why)?;
    // The identity is read for each call, since it may have been renewed.
    let credentials = Credentials::read(identity, insecure).await.map_err(|why| why.to_string())?;
    // The parent accepts data only from the address that called it.
    let from = Some(bind).filter(|bind: &IpAddr| !bind.is_unspecified());
    let patience = Span(PATIENCE.0 / addrs.len() as u64);
    let caller = CallOptions { from, credentials, patience };
    let (mut line, to) = call_one(&addrs, &caller).await?;
    join.max_datagram = join.max_datagram.min(largest_datagram(from, to)?);
    join.max_datagram = prove(registry, &mut line, to, join.max_datagram).await?;
    Ok(Answered { line, to, join })
}

/// Calls the addresses in order until one answers. The error lists the reason why each call failed.
async fn call_one(
    addrs: &[SocketAddr],
    caller: &CallOptions,
) -> Result<(ControlConnection, SocketAddr), String> {
    let mut tried = Vec::new();
    for to in addrs {
        match quic::call(*to, caller).await {
            Ok(line) => return Ok((line, *to)),
            Err(why) => tried.push(why.to_string()),
        }
    }
    Err(tried.join("; "))
}

/// Handles the parent's messages until the connection ends.
async fn handle_messages(
    registry: &SharedRegistry,
    seat: &Seat,
    parent: SocketAddr,
    mut messages: Receiver<FromAggregator>,
) {
    while let Some(message) = messages.recv().await {
        let ending = lock(registry).ending_by_message(seat, &message);
        let _fence = settle(registry, ending).await;
        let joined = lock(registry).handle_parent_message(seat, parent, message);
        if joined == Joined::Ping {
            tokio::spawn(ping(Arc::clone(registry), seat.clone()));
        }
    }
}

/// Returns the size in bytes of the largest datagram that fits the MTU towards the parent.
fn largest_datagram(from: Option<IpAddr>, to: SocketAddr) -> Result<u16, String> {
    let local = from.map_or_else(|| local_addr_towards(to), Ok);
    let local = local.map_err(|error| error.to_string())?;
    let mtu = interface_of(local).map_or(USUAL_MTU, |interface| interface.mtu);
    let largest = max_datagram(mtu, to.is_ipv6()).map_err(|error| error.to_string())?;
    Ok(u16::try_from(largest).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use racksum_net::interface::interfaces;

    use super::*;

    #[test]
    fn a_parent_that_says_more_than_is_heeded_is_known_from_one_that_nobody_hears() {
        let floods = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = channel(2);
        let on_message = on_message(sender, Arc::clone(&floods));
        assert!(on_message(FromAggregator::Drain) && on_message(FromAggregator::Drain));
        assert!(!floods.load(Relaxed));
        assert!(!on_message(FromAggregator::Drain) && floods.swap(false, Relaxed));
        drop(receiver);
        assert!(!on_message(FromAggregator::Drain) && !floods.load(Relaxed));
    }

    #[test]
    fn an_aggregator_is_no_parent_of_its_own_by_any_of_its_addresses() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let refused = |own: &str, parent: &str| {
            let found = runtime.block_on(find(own.parse().unwrap(), parent));
            let itself = "which is this aggregator itself";
            matches!(found, Err(NotFound::Permanent(why)) if why.contains(itself))
        };
        for (own, parent) in [
            ("127.0.0.1:7310", "localhost:7310"),
            ("127.0.0.1:7310", "127.0.0.1:7310"),
            ("0.0.0.0:7310", "0.0.0.0:7310"),
            ("0.0.0.0:7310", "localhost:7310"),
            ("0.0.0.0:7310", "127.0.0.2:7310"),
            ("[::]:7310", "[::1]:7310"),
        ] {
            assert!(refused(own, parent), "{own} {parent}");
        }
        let all = interfaces().unwrap();
        for ip in all.iter().flat_map(|it| &it.addrs).filter(|ip| ip.is_ipv4()) {
            assert!(refused("0.0.0.0:7310", &format!("{ip}:7310")), "{ip}");
        }
        for (own, parent) in [
            ("127.0.0.1:7310", "localhost:7311"),
            ("127.0.0.1:7310", "127.0.0.2:7310"),
            ("0.0.0.0:7310", "203.0.113.7:7310"),
            ("0.0.0.0:0", "localhost:7310"),
        ] {
            assert!(!refused(own, parent), "{own} {parent}");
        }
    }
}
