//! A stand-in for the API server, in this process, over real HTTP.
//!
//! It enforces the rules that the operator depends on: resource versions and conflicts, UIDs,
//! what may change in a pod, ownership of fields by server-side apply, finalizers, and watches with
//! bookmarks that end, break, and expire. Tests can make it refuse requests or vanish.

mod apply;
mod http;
mod pods;
mod rights;
mod store;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::{Client, Config};
use serde_json::Value;
use tokio::sync::watch;

pub(crate) use http::typed;
pub(crate) use rights::granted;
pub(crate) use store::{Kind, Store};

/// A running stand-in.
#[derive(Debug)]
pub(crate) struct Server {
    shared: Arc<Shared>,
    address: std::net::SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    store: Mutex<Store>,
    /// Changes when the store does, or when watches should look at their state.
    changed: watch::Sender<u64>,
    faults: Mutex<Faults>,
    granted: rights::Granted,
    /// The rights that the operator has used.
    used: Mutex<BTreeSet<rights::Right>>,
}

/// The faults that tests inject.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Requests that get this answer: a method, a part of the path, and how often.
    pub(crate) refusals: Vec<Refusal>,
    /// Whether connections are closed without an answer.
    pub(crate) is_gone: bool,
    /// The number of requests that were not answered.
    pub(crate) unanswered: u64,
    /// Counts up to break all watches that run.
    pub(crate) breaks: u64,
    /// Whether watches get no events, as if the network held them back.
    pub(crate) holds_events: bool,
}

/// A request that is refused.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    pub(crate) method: &'static str,
    pub(crate) part: String,
    pub(crate) times: u32,
    pub(crate) code: u16,
    pub(crate) message: String,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(Shared {
            store: Mutex::new(Store::default()),
            changed: watch::Sender::new(0),
            faults: Mutex::default(),
            granted: granted(),
            used: Mutex::default(),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(http::serve(listener, shared.clone()));
        Self { shared, address, task }
    }

    /// Returns a client that talks to this server as the operator.
    pub(crate) fn client(&self) -> Client {
        self.client_of(Some(OPERATOR))
    }

    /// Returns a client that may do everything.
    pub(crate) fn admin(&self) -> Client {
        self.client_of(None)
    }

    fn client_of(&self, token: Option<&str>) -> Client {
        let mut config = Config::new(self.url().parse().unwrap());
        config.default_namespace = "ml".into();
        config.connect_timeout = Some(std::time::Duration::from_secs(10));
        if let Some(token) = token {
            let header =
                ("authorization".parse().unwrap(), format!("Bearer {token}").parse().unwrap());
            config.headers.push(header);
        }
        racksum_operator::api::client(config).unwrap()
    }

    /// Returns the rights that the operator has used.
    pub(crate) fn rights(&self) -> BTreeSet<rights::Right> {
        lock(&self.shared.used).clone()
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn store(&self) -> StoreGuard<'_> {
        StoreGuard { guard: lock(&self.shared.store), shared: &self.shared }
    }

    /// Returns the locked store, without waking watches afterwards.
    pub(crate) fn store_quietly(&self) -> MutexGuard<'_, Store> {
        lock(&self.shared.store)
    }

    pub(crate) fn faults<T>(&self, change: impl FnOnce(&mut Faults) -> T) -> T {
        let changed = change(&mut lock(&self.shared.faults));
        self.shared.wake();
        changed
    }

    /// Refuses the next requests that match.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        self.faults(|faults| faults.refusals.push(refusal));
    }

    /// Waits until the store has changed since the receiver looked.
    pub(crate) async fn changed(&self, receiver: &mut watch::Receiver<u64>) {
        receiver.changed().await.unwrap();
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
        record(&lock(&self.shared.store).writes);
    }
}

/// The token of the operator, whose rights are limited.
pub(crate) const OPERATOR: &str = "operator";

/// Appends what clients wrote to the file that `cargo xtask test` validates.
fn record(writes: &[Value]) {
    use std::io::Write as _;
    let Some(path) = std::env::var_os("RACKSUM_OPERATOR_WRITES") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let text: String = writes.iter().map(|write| format!("{write}\n")).collect();
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

impl Shared {
    fn wake(&self) {
        self.changed.send_modify(|count| *count += 1);
    }
}

/// The locked store. Wakes watches when it is dropped.
pub(crate) struct StoreGuard<'a> {
    guard: MutexGuard<'a, Store>,
    shared: &'a Shared,
}

impl std::ops::Deref for StoreGuard<'_> {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.guard
    }
}

impl std::ops::DerefMut for StoreGuard<'_> {
    fn deref_mut(&mut self) -> &mut Store {
        &mut self.guard
    }
}

impl Drop for StoreGuard<'_> {
    fn drop(&mut self) {
        self.shared.wake();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
