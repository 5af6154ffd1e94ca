//! Polls of other aggregators, by a rank that waits at an aggregator.
//!
//! Ranks try their aggregators in the same order, but at different times. If the first aggregator
//! is down, early ranks wait at the next one. Ranks that start once the first aggregator is back
//! wait there instead. So a waiting rank polls the aggregators that come earlier in the order. If
//! other ranks of its job wait there, it moves to them.
//!
//! All ranks move towards the first aggregator, so they meet. A rank never moves to an aggregator
//! without ranks of its job, because that aggregator may be full. A rank that waits only for room
//! has no place to lose, and no rank moves to it. So such a rank polls all other aggregators.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::quic::{CallOptions, Credentials, ask_present};
use racksum_net::runtime::single_threaded;
use racksum_proto::control::{Join, Resume};
use racksum_proto::time::{Span, Time};
use tokio::sync::oneshot;

use crate::control::patience;
use crate::error::ConnectError;
use crate::join_message::join_message;
use crate::options::ConnectOptions;
use crate::route::{Route, find_ways};

/// The pause of rank 0 before its first poll; a higher rank pauses up to twice as long. The pause
/// doubles before each further poll.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause between polls. It leaves time for several polls before the other ranks may
/// count as lost.
const LONGEST_PAUSE: Duration = Duration::from_secs(4);

/// A set of aggregators to poll.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    /// The set's index in the order of the sets.
    pub(crate) place: usize,
    pub(crate) hosts: Vec<String>,
    /// The time at which polling may start.
    pub(crate) from: Time,
}

/// The state of a rank at its current set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JoinState {
    /// The rank has no answer yet, or its job is beginning.
    Busy,
    /// The rank waits for room.
    Queued,
    /// The rank waits for other ranks.
    Waits,
}

/// The polls that one rank, waiting at its current set, sends to other sets.
#[derive(Debug)]
pub(crate) struct PeerPoll<'a> {
    options: &'a ConnectOptions,
    /// The point at which the job resumes, if the rank moves with its job.
    resume: Option<&'a Resume>,
    /// The index of the rank's current set.
    at: usize,
    candidates: Vec<Candidate>,
    /// The latest poll, with the state that it was started for. The inner `None` means that it
    /// failed to start.
    polling: Option<(JoinState, Option<Polling>)>,
}

/// A handle to a thread that polls candidates. The thread ends soon after the handle is dropped.
#[derive(Debug)]
struct Polling {
    seen: Receiver<usize>,
    _over: oneshot::Sender<()>,
}

impl<'a> PeerPoll<'a> {
    /// Creates the polls of a rank at the set with index `at`, without starting one.
    pub(crate) const fn new(
        options: &'a ConnectOptions,
        resume: Option<&'a Resume>,
        at: usize,
        candidates: Vec<Candidate>,
    ) -> Self {
        Self { options, resume, at, candidates, polling: None }
    }

    /// Forgets the latest poll, so that the next call of [`Self::seen`] starts a new one.
    pub(crate) fn restart(&mut self) {
        self.polling = None;
    }

    /// Returns the index of a set where other ranks wait and to which a rank in `state` may move,
    /// if a poll found one. Starts a new poll if the state has changed since the last call.
    pub(crate) fn seen(&mut self, state: JoinState) -> Option<usize> {
        if self.polling.as_ref().is_none_or(|(before, _)| *before != state) {
            self.polling = None;
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
            let polling = Polling::start(self.options, self.resume, candidates)
                .inspect_err(|error| tracing::warn!(%error, "cannot poll other aggregators"));
            self.polling = Some((state, polling.ok()));
        }
        let (_, polling) = self.polling.as_ref()?;
        polling.as_ref()?.seen.try_recv().ok()
    }
}

/// The inputs that all polls of a thread share.
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
        let (sender, seen) = channel();
        let (over, is_over) = oneshot::channel::<()>();
        std::thread::Builder::new().name("peer-poll".into()).spawn(move || {
            for candidate in candidates {
                let (task, sender) = (Arc::clone(&task), sender.clone());
                runtime.spawn(async move {
                    task.poll(&candidate).await;
                    // Sending fails if the rank has stopped polling.
                    sender.send(candidate.place).unwrap_or_default();
                });
            }
            drop(runtime.block_on(is_over));
            runtime.shutdown_background();
        })?;
        Ok(Self { seen, _over: over })
    }
}

impl PollTask {
    /// Polls a set until other ranks of the job wait at each of its aggregators.
    async fn poll(&self, candidate: &Candidate) {
        let ConnectOptions { rank, world, .. } = self.options;
        let early = candidate.from.since(Clock::start().now());
        tokio::time::sleep(Duration::from_nanos(early.0)).await;
        // Ranks that arrive together should poll at different times.
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
            match self.present_at(host, &ways.concat(), &join).await {
                // A list that contains this rank is out of date: it shows the rank's own earlier
                // attempt.
                Some(ranks) if ranks.is_empty() || ranks.contains(&options.rank) => return false,
                Some(_) => {}
                None => return false,
            }
        }
        !hosts.is_empty()
    }

    /// Asks the addresses of a host in order which ranks wait there, and returns the first answer.
    async fn present_at(&self, host: &str, ways: &[Route], join: &Join) -> Option<Vec<u16>> {
        for route in ways {
            let (from, credentials) = (route.caller(), self.credentials.clone());
            let caller = CallOptions { from, credentials, patience: self.patience };
            match ask_present(route.to, join.clone(), &caller).await {
                Ok(ranks) => return Some(ranks),
                Err(error) => tracing::debug!(
                    aggregator = host,
                    %error,
                    "cannot ask this aggregator which ranks wait there"
                ),
            }
        }
        None
    }
}
