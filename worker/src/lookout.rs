//! A look at the aggregators that come before the one where a rank waits for others.
//!
//! Ranks try their aggregators in one order, but not at one time: those that come while one is gone
//! wait at the next, and those that come once it is back wait there. So who waits looks whether one
//! that comes before can be had, and goes there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::sleep;
use std::time::Duration;

use racksum_net::quic::{Credentials, connect};
use racksum_proto::time::Span;
use tokio::runtime::{Builder, Runtime};

use crate::error::ConnectError;
use crate::join::resolve;
use crate::options::ConnectOptions;

/// Looks from a thread of its own until it is dropped, or has seen one.
#[derive(Debug)]
pub(crate) struct Lookout(Arc<State>);

#[derive(Debug, Default)]
struct State {
    seen: AtomicBool,
    over: AtomicBool,
}

impl Lookout {
    /// Looks for any of some sets of aggregators, all of which must answer; not before `pause`.
    pub(crate) fn start(
        options: &ConnectOptions,
        sets: Vec<Vec<String>>,
        mut pause: Duration,
    ) -> Result<Self, ConnectError> {
        let credentials = Credentials::new(options.identity.as_deref(), options.insecure)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let state = Arc::new(State::default());
        let seen = Arc::clone(&state);
        // Nobody waits for its end: it may be in the middle of a call.
        std::thread::Builder::new().name("lookout".into()).spawn(move || {
            let answers = |host: &String| answers(&runtime, host, &credentials);
            loop {
                sleep(pause);
                pause = PAUSE;
                if seen.over.load(Relaxed) {
                    return;
                }
                if sets.iter().any(|set| set.iter().all(answers)) {
                    return seen.seen.store(true, Relaxed);
                }
            }
        })?;
        Ok(Self(state))
    }

    /// Whether one of the sets can be had.
    pub(crate) fn has_seen(&self) -> bool {
        self.0.seen.load(Relaxed)
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.0.over.store(true, Relaxed);
    }
}

/// Whether an aggregator takes a connection.
fn answers(runtime: &Runtime, host: &str, credentials: &Credentials) -> bool {
    let Ok(to) = resolve(host) else { return false };
    runtime.block_on(async {
        match connect(to, credentials, PATIENCE).await {
            Ok(connection) => {
                connection.close("looked").await;
                true
            }
            Err(_) => false,
        }
    })
}

/// How long until it looks again.
const PAUSE: Duration = Duration::from_millis(500);
/// How long an aggregator may take to answer.
const PATIENCE: Span = Span::from_secs(2);
