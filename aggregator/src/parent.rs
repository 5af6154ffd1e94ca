//! Calls from an aggregator to its parent: one connection per job, joined as a rank of that job.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use racksum_net::interface::{interface_of, local_addr_towards, max_datagram};
use racksum_net::quic::{self, Caller, Credentials, Line, talk};
use racksum_net::resolve::resolve;
use racksum_proto::control::{FromAggregator, FromWorker, Join};
use racksum_proto::time::Span;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::multicast_ping::ping;
use crate::paths::prove;
use crate::registry::{Call, Joined, MEMBER_QUEUE, Seat, Shared, lock, settle};

/// The time limit for the parent to answer a connection.
const PATIENCE: Span = Span::from_secs(5);
/// The MTU to assume if the interface is unknown.
const USUAL_MTU: usize = 1500;

/// Talks to the parent for as long as the job of a seat exists.
pub(crate) async fn call(registry: Shared, seat: Seat) {
    let Some(parent) = lock(&registry).config().parent.clone() else { return };
    loop {
        let called = lock(&registry).call(&seat);
        let Some(Call { join, messages, over }) = called else { return };
        // Nothing has been sent that would have to be taken back: an unfinished proof of a data
        // path leaves no state.
        let answered = tokio::select! {
            answered = reach(&registry, &parent, join) => answered,
            _ = over => return,
        };
        let why = match answered {
            Ok(Answered { line, to, join }) => {
                let (tell, heard) = channel(MEMBER_QUEUE);
                let floods = Arc::new(AtomicBool::new(false));
                let hear = hear(tell, Arc::clone(&floods));
                let heeded = handle_messages(&registry, &seat, to, heard);
                let spoken = talk(line, FromWorker::Join(join), messages, hear);
                let (ended, ()) = tokio::join!(spoken, heeded);
                if floods.load(Relaxed) { FLOODS.to_owned() } else { ended.to_string() }
            }
            Err(why) => why,
        };
        if !lock(&registry).hung_up(&seat, &parent, &why) {
            return;
        }
    }
}

/// Returns a handler that queues the parent's messages. If the queue is full, the parent floods
/// this aggregator: the handler sets `floods` and stops receiving.
fn hear(
    tell: Sender<FromAggregator>,
    floods: Arc<AtomicBool>,
) -> impl Fn(FromAggregator) -> bool + Send + 'static {
    move |message| {
        let told = tell.try_send(message);
        if matches!(told, Err(TrySendError::Full(_))) {
            floods.store(true, Relaxed);
        }
        told.is_ok()
    }
}

/// The error for a parent that floods this aggregator.
const FLOODS: &str = "the parent sent more messages than the protocol allows; it is of another \
                      release, or not a racksum aggregator";

/// The reason why a parent cannot be called.
#[derive(Debug)]
pub(crate) enum Unfound {
    /// The address is not known now, but may be later.
    Yet(String),
    /// The parent can never be called.
    Ever(String),
}

impl Unfound {
    fn why(self) -> String {
        match self {
            Self::Yet(why) | Self::Ever(why) => why,
        }
    }
}

/// Returns the parent's addresses that the shards of an aggregator at `own` can send to. There is
/// at least one, and none is the aggregator's own.
pub(crate) async fn find(own: SocketAddr, parent: &str) -> Result<Vec<SocketAddr>, Unfound> {
    let bind = own.ip();
    let unknown =
        |why: String| format!("{parent:?} is not an aggregator address (HOST:PORT): {why}");
    let found = resolve(parent).await;
    let found = found.map_err(|why| {
        let told = unknown(why.to_string());
        match why.kind() {
            io::ErrorKind::Unsupported => Unfound::Ever(told),
            _ => Unfound::Yet(told),
        }
    })?;
    let mut fitting = found.clone();
    fitting.retain(|addr| addr.is_ipv6() == bind.is_ipv6());
    let Some(to) = fitting.first().copied() else {
        return Err(Unfound::Ever(unknown(format!("{bind} cannot reach any of {found:?}"))));
    };
    fitting.retain(|addr| !bind.is_loopback() || addr.ip().is_loopback());
    if fitting.is_empty() {
        return Err(Unfound::Ever(format!(
            "this aggregator serves on {bind}, which cannot reach {to}; start it with --bind and \
             an address that can"
        )));
    }
    if let Some(addr) = fitting.iter().find(|addr| is_at(own, **addr)) {
        return Err(Unfound::Ever(format!(
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

/// A parent with a proven data path, and the join to send to it.
struct Answered {
    line: Line,
    to: SocketAddr,
    join: Join,
}

/// Calls the parent and proves the data path to it. An error says why that failed.
async fn reach(registry: &Shared, parent: &str, mut join: Join) -> Result<Answered, String> {
    let (own, identity, insecure) = {
        let registry = lock(registry);
        let config = registry.config();
        let own = SocketAddr::new(config.bind, config.port);
        (own, config.identity.clone(), config.insecure)
    };
    let bind = own.ip();
    let addrs = find(own, parent).await.map_err(Unfound::why)?;
    // The identity is read for each call, since it may have been renewed.
    let credentials = Credentials::read(identity, insecure).await.map_err(|why| why.to_string())?;
    // The parent takes data only from the address that called it.
    let from = Some(bind).filter(|bind: &IpAddr| !bind.is_unspecified());
    let patience = Span(PATIENCE.0 / addrs.len() as u64);
    let caller = Caller { from, credentials, patience };
    let (mut line, to) = call_one(&addrs, &caller).await?;
    join.max_datagram = join.max_datagram.min(largest_datagram(from, to)?);
    join.max_datagram = prove(registry, &mut line, to, join.max_datagram).await?;
    Ok(Answered { line, to, join })
}

/// Calls the first address that answers. An error gives the reason for each address.
async fn call_one(addrs: &[SocketAddr], caller: &Caller) -> Result<(Line, SocketAddr), String> {
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
    registry: &Shared,
    seat: &Seat,
    parent: SocketAddr,
    mut heard: Receiver<FromAggregator>,
) {
    while let Some(message) = heard.recv().await {
        let ending = lock(registry).ending_by_message(seat, &message);
        let _fence = settle(registry, ending).await;
        let joined = lock(registry).hear_from_parent(seat, parent, message);
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
        let (tell, heard) = channel(2);
        let hear = hear(tell, Arc::clone(&floods));
        assert!(hear(FromAggregator::Drain) && hear(FromAggregator::Drain));
        assert!(!floods.load(Relaxed));
        assert!(!hear(FromAggregator::Drain) && floods.swap(false, Relaxed));
        drop(heard);
        assert!(!hear(FromAggregator::Drain) && !floods.load(Relaxed));
    }

    #[test]
    fn an_aggregator_is_no_parent_of_its_own_by_any_of_its_addresses() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let refused = |own: &str, parent: &str| {
            let found = runtime.block_on(find(own.parse().unwrap(), parent));
            let itself = "which is this aggregator itself";
            matches!(found, Err(Unfound::Ever(why)) if why.contains(itself))
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
