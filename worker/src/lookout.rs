//! A look at the aggregators that come before those where a rank waits for others.
//!
//! Ranks try their aggregators in one order, but not at one time: those that come while one is gone
//! wait at the next, and those that come once it is back wait there. So who waits asks at those
//! that come before whether others of the job wait there, and goes to them.
//!
//! All go towards the first, so they meet. Nobody leaves for an aggregator where nobody of the job
//! is, which may be full.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use racksum_net::quic::{Caller, Credentials, look};
use tokio::runtime::Builder;
use tokio::select;
use tokio::sync::oneshot;

use crate::control::patience;
use crate::error::ConnectError;
use crate::join::resolve;
use crate::options::ConnectOptions;

/// How long a rank waits before it looks for the first time, and twice as long before each next.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest that it waits: several looks before the others may be taken for lost.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A lookout from one set of aggregators.
#[derive(Debug)]
pub(crate) struct Lookout<'a> {
    options: &'a ConnectOptions,
    moves: bool,
    /// The sets that come before, and the place of each.
    sets: Vec<(usize, Vec<String>)>,
    looking: Option<Looking>,
}

/// A thread that looks. It ends soon after this is dropped, or has told what it has seen.
#[derive(Debug)]
struct Looking {
    seen: Receiver<usize>,
    _over: oneshot::Sender<()>,
}

impl<'a> Lookout<'a> {
    /// A lookout for sets of aggregators, each with its place, of a rank that joins a job or moves
    /// with it.
    pub(crate) const fn new(
        options: &'a ConnectOptions,
        moves: bool,
        sets: Vec<(usize, Vec<String>)>,
    ) -> Self {
        Self { options, moves, sets, looking: None }
    }

    /// The place of a set where others wait. Looks only as long as the rank waits, too.
    pub(crate) fn seen(&mut self, waits: bool) -> Option<usize> {
        if !waits || self.sets.is_empty() {
            self.looking = None;
            return None;
        }
        if self.looking.is_none() {
            match Looking::start(self.options, self.moves, self.sets.clone()) {
                Ok(looking) => self.looking = Some(looking),
                Err(error) => {
                    tracing::warn!(%error, "cannot look for ranks at other aggregators");
                    self.sets.clear();
                }
            }
        }
        self.looking.as_ref()?.seen.try_recv().ok()
    }
}

impl Looking {
    fn start(
        options: &ConnectOptions,
        moves: bool,
        sets: Vec<(usize, Vec<String>)>,
    ) -> Result<Self, ConnectError> {
        let credentials = Credentials::new(options.identity.as_deref(), options.insecure)?;
        let caller = Caller { from: None, credentials, patience: patience(options, moves) };
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (options, (tell, seen)) = (options.clone(), channel());
        let (over, is_over) = oneshot::channel();
        std::thread::Builder::new().name("lookout".into()).spawn(move || {
            runtime.block_on(async {
                select! {
                    // Nobody listens any more if the lookout is over.
                    place = keep_looking(&options, &sets, &caller) => drop(tell.send(place)),
                    _ = is_over => {}
                }
            });
        })?;
        Ok(Self { seen, _over: over })
    }
}

/// Looks until others of the job wait at every aggregator of a set; returns the place of the set.
async fn keep_looking(
    options: &ConnectOptions,
    sets: &[(usize, Vec<String>)],
    caller: &Caller,
) -> usize {
    let mut pause = FIRST_PAUSE;
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        for (place, set) in sets {
            if others_wait(options, set, caller).await {
                return *place;
            }
        }
    }
}

async fn others_wait(options: &ConnectOptions, set: &[String], caller: &Caller) -> bool {
    for host in set {
        let Ok(to) = resolve(host) else { return false };
        match look(to, &options.job, options.generation, caller).await {
            Ok(ranks) if ranks.iter().any(|rank| *rank != options.rank) => {}
            Ok(_) => return false,
            Err(error) => {
                tracing::debug!(aggregator = host, %error, "looked in vain");
                return false;
            }
        }
    }
    !set.is_empty()
}
