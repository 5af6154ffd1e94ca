//! A look at other aggregators from those where a rank waits for others.
//!
//! Ranks try their aggregators in one order, but not at one time: those that come while one is gone
//! wait at the next, and those that come once it is back wait there. So who waits asks at those
//! that come before whether others of the job wait there, and goes to them.
//!
//! All go towards the first, so they meet. Nobody leaves for an aggregator where nobody of the job
//! is, which may be full. Who waits only for room has no place to lose, and nobody comes to it: it
//! goes to others wherever they are.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::{Caller, Credentials, look};
use racksum_net::runtime::single_threaded;
use racksum_proto::control::{Join, Resume};
use racksum_proto::time::{Span, Time};
use tokio::sync::oneshot;

use crate::control::patience;
use crate::error::ConnectError;
use crate::join_message::join_message;
use crate::options::ConnectOptions;
use crate::route::{Route, find_ways};

/// How long a rank waits before it looks for the first time, and twice as long before each next.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest that it waits: several looks before the others may be taken for lost.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A set of aggregators that is looked at.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    /// Its place in the order of the sets.
    pub(crate) place: usize,
    pub(crate) hosts: Vec<String>,
    /// From when on it is looked at.
    pub(crate) from: Time,
}

/// How a rank stands where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JoinState {
    /// It has no answer yet, or its job begins.
    Busy,
    /// It waits for room.
    Queued,
    /// It waits for others.
    Waits,
}

/// A lookout from one set of aggregators.
#[derive(Debug)]
pub(crate) struct PeerPoll<'a> {
    options: &'a ConnectOptions,
    /// Where the job goes on, of a rank that moves with it.
    resume: Option<&'a Resume>,
    /// The place of the set where the rank is.
    at: usize,
    candidates: Vec<Candidate>,
    /// The last look that was begun, for this standing, if it could be.
    looking: Option<(JoinState, Option<Polling>)>,
}

/// A thread that looks. It ends soon after this is dropped, or has told what it has seen.
#[derive(Debug)]
struct Polling {
    seen: Receiver<usize>,
    _over: oneshot::Sender<()>,
}

impl<'a> PeerPoll<'a> {
    /// A lookout from the set `at` this place to others.
    pub(crate) const fn new(
        options: &'a ConnectOptions,
        resume: Option<&'a Resume>,
        at: usize,
        candidates: Vec<Candidate>,
    ) -> Self {
        Self { options, resume, at, candidates, looking: None }
    }

    /// Looks as if it had not looked yet.
    pub(crate) fn look_again(&mut self) {
        self.looking = None;
    }

    /// The place of a set where others wait, to whom a rank that stands so may go.
    pub(crate) fn seen(&mut self, state: JoinState) -> Option<usize> {
        if self.looking.as_ref().is_none_or(|(before, _)| *before != state) {
            self.looking = None;
            let at = self.at;
            let is_reached = |candidate: &&Candidate| match state {
                JoinState::Busy => false,
                JoinState::Queued => candidate.place != at,
                JoinState::Waits => candidate.place < at,
            };
            let candidates: Vec<_> = self.candidates.iter().filter(is_reached).cloned().collect();
            if candidates.is_empty() {
                return None;
            }
            let looking = Polling::start(self.options, self.resume, candidates)
                .inspect_err(|error| tracing::warn!(%error, "cannot look for other ranks"));
            self.looking = Some((state, looking.ok()));
        }
        let (_, looking) = self.looking.as_ref()?;
        looking.as_ref()?.seen.try_recv().ok()
    }
}

/// What looks need.
struct PollTask {
    options: ConnectOptions,
    resume: Option<Resume>,
    credentials: Credentials,
    patience: Span,
}

impl Polling {
    fn start(
        options: &ConnectOptions,
        resume: Option<&Resume>,
        candidates: Vec<Candidate>,
    ) -> Result<Self, ConnectError> {
        let credentials = Credentials::read_blocking(options.identity.clone(), options.insecure)?;
        let patience = patience(options, resume.is_some(), 1);
        let (options, resume) = (options.clone(), resume.cloned());
        let task = Arc::new(PollTask { options, resume, credentials, patience });
        let runtime = single_threaded()?;
        let (tell, seen) = channel();
        let (over, is_over) = oneshot::channel::<()>();
        std::thread::Builder::new().name("lookout".into()).spawn(move || {
            for candidate in candidates {
                let (task, tell) = (Arc::clone(&task), tell.clone());
                runtime.spawn(async move {
                    task.keep_looking(&candidate).await;
                    // Nobody listens any more if the lookout is over.
                    tell.send(candidate.place).unwrap_or_default();
                });
            }
            drop(runtime.block_on(is_over));
            runtime.shutdown_background();
        })?;
        Ok(Self { seen, _over: over })
    }
}

impl PollTask {
    /// Looks until others of the job wait at every aggregator of a set.
    async fn keep_looking(&self, candidate: &Candidate) {
        let ConnectOptions { rank, world, .. } = self.options;
        let early = candidate.from.since(Clock::start().now());
        tokio::time::sleep(Duration::from_nanos(early.0)).await;
        // Ranks that came at one time do not look at one time.
        let mut pause = FIRST_PAUSE + FIRST_PAUSE * u32::from(rank) / u32::from(world.max(1));
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            if self.others_wait(&candidate.hosts).await {
                return;
            }
        }
    }

    async fn others_wait(&self, hosts: &[String]) -> bool {
        let options = &self.options;
        let count = u8::try_from(hosts.len()).unwrap_or(u8::MAX);
        for (place, host) in (0..).zip(hosts) {
            let (hosts, interface) = ([host.clone()], options.interface.clone());
            let find = move || find_ways(&hosts, interface.as_deref());
            let Ok(Ok(ways)) = tokio::task::spawn_blocking(find).await else { return false };
            let join = join_message(options, (place, count), self.resume.as_ref());
            match self.look_at(host, &ways.concat(), &join).await {
                // Where this rank is itself, what is said is of earlier.
                Some(ranks) if ranks.is_empty() || ranks.contains(&options.rank) => return false,
                Some(_) => {}
                None => return false,
            }
        }
        !hosts.is_empty()
    }

    /// The ranks that wait at the first of a host's addresses that answers.
    async fn look_at(&self, host: &str, ways: &[Route], join: &Join) -> Option<Vec<u16>> {
        for route in ways {
            let (from, credentials) = (route.caller(), self.credentials.clone());
            let caller = Caller { from, credentials, patience: self.patience };
            match look(route.to, join.clone(), &caller).await {
                Ok(ranks) => return Some(ranks),
                Err(error) => tracing::debug!(aggregator = host, %error, "looked in vain"),
            }
        }
        None
    }
}
