//! How an aggregator calls its parent: one conversation for each job, as a rank of which it is.

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

use crate::multicast_probe::probe;
use crate::paths::prove;
use crate::registry::{Call, Joined, MEMBER_QUEUE, Seat, Shared, lock, settle};

/// How long the parent may take to answer a connection.
const PATIENCE: Span = Span::from_secs(5);
/// What a way has whose interface is not known.
const USUAL_MTU: usize = 1500;

/// Is in conversation with the parent for as long as the job of a seat is there.
pub(crate) async fn call(registry: Shared, seat: Seat) {
    let Some(parent) = lock(&registry).config().parent.clone() else { return };
    loop {
        let called = lock(&registry).call(&seat);
        let Some(Call { join, messages, over }) = called else { return };
        // Nothing has been said yet that would have to be taken back: of a data path that is not
        // proven to its end nothing is left.
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

/// Takes what the parent says, up to as many words as may wait to be heeded: one that says more
/// floods this aggregator, and is listened to no longer.
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

/// Why a parent is not listened to any longer.
const FLOODS: &str = "it says more than the protocol has it say; it is of another release, or no \
                      aggregator of racksum";

/// Why a parent cannot be called.
#[derive(Debug)]
pub(crate) enum Unfound {
    /// It is not known now, and may be later.
    Yet(String),
    /// It never can be.
    Ever(String),
}

impl Unfound {
    fn why(self) -> String {
        match self {
            Self::Yet(why) | Self::Ever(why) => why,
        }
    }
}

/// The addresses of the parent of an aggregator that serves at `own`: those that its shards can
/// send to, of which there is one at least, and none of which is its own.
pub(crate) async fn find(own: SocketAddr, parent: &str) -> Result<Vec<SocketAddr>, Unfound> {
    let bind = own.ip();
    let unknown =
        |why: String| format!("{parent:?} is no address of an aggregator (HOST:PORT): {why}");
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
        return Err(Unfound::Ever(unknown(format!("{bind} reaches none of {found:?}"))));
    };
    fitting.retain(|addr| !bind.is_loopback() || addr.ip().is_loopback());
    if fitting.is_empty() {
        return Err(Unfound::Ever(format!(
            "this aggregator serves on {bind}, from where nothing reaches {to}; start it with \
             --bind and an address that does"
        )));
    }
    if let Some(addr) = fitting.iter().find(|addr| is_at(own, **addr)) {
        return Err(Unfound::Ever(format!(
            "{parent:?} is at {addr}, which is this aggregator itself; give the HOST:PORT of \
             another"
        )));
    }
    fitting.dedup();
    Ok(fitting)
}

/// Whether a call to an address arrives at a socket of this host that is bound to `own`.
fn is_at(own: SocketAddr, to: SocketAddr) -> bool {
    let (bind, ip) = (own.ip(), to.ip());
    // The kernel takes a call to no address in particular for one to this host.
    let is_here = || ip.is_loopback() || ip.is_unspecified() || interface_of(ip).is_some();
    own.port() == to.port() && (ip == bind || bind.is_unspecified() && is_here())
}

/// A parent to which the data path is proven, and what it is told then.
struct Answered {
    line: Line,
    to: SocketAddr,
    join: Join,
}

/// Calls the parent, and proves the data path to it; the error says why it cannot be had.
async fn reach(registry: &Shared, parent: &str, mut join: Join) -> Result<Answered, String> {
    let (own, identity, insecure) = {
        let registry = lock(registry);
        let config = registry.config();
        let own = SocketAddr::new(config.bind, config.port);
        (own, config.identity.clone(), config.insecure)
    };
    let bind = own.ip();
    let addrs = find(own, parent).await.map_err(Unfound::why)?;
    // Read again for each call: it may have been renewed.
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

/// Calls the first address that answers; the error says of each why it does not.
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

/// Does what the parent says, until it says no more.
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
        if joined == Joined::Probe {
            tokio::spawn(probe(Arc::clone(registry), seat.clone()));
        }
    }
}

/// Bytes of the largest datagram that the way to the parent takes.
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
