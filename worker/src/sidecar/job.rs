//! A job at a sidecar: its ranks, and the ops that they have called.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{Line, Peer};
use racksum_proto::control::{Loss, MAX_OPS};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{Generation, Rank};
use racksum_proto::time::{Span, Time};

use super::fold::{Fold, Place};
use super::message::{Called, FromSidecar, Join, Outcome};
use super::upstream::{Folded, Upstream};
use crate::client::{Connecting, GiveUp};
use crate::error::Error;
use crate::options::ConnectOptions;

/// Ranks give up when they have waited for long enough.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);

/// A life of a job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) generation: Generation,
    world: u16,
    local_world: u16,
    lanes: u8,
    op_timeout: Span,
    /// Whose processes its ranks are.
    uid: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    members: BTreeMap<u16, Member>,
    /// Ranks that have left since the job began.
    left: BTreeSet<u16>,
    /// All ranks have joined.
    began: bool,
    /// Where the sums go, if not all ranks are on this host.
    upstream: Option<Arc<Upstream>>,
    /// Gives up to call the aggregator, if it is being called.
    give_up: Option<GiveUp>,
    /// Ops that not all ranks have called.
    gathering: BTreeMap<u32, Gathering>,
    /// How many ops are being folded, or summed with those of other hosts.
    folding: usize,
    /// What ended the job.
    over: Option<FromSidecar>,
    /// The ranks were told so.
    told: bool,
}

#[derive(Debug)]
struct Member {
    line: Arc<Line>,
    pid: i32,
    /// The number of the op that it calls next.
    next_op: u32,
}

/// An op that not all ranks have called.
#[derive(Debug)]
struct Gathering {
    since: Time,
    called: BTreeMap<u16, (Descriptor, Place)>,
}

impl Job {
    /// The job that a first rank wants.
    pub(super) fn new(join: &Join, peer: Peer) -> Self {
        Self {
            generation: join.generation,
            world: join.world,
            local_world: join.local_world,
            lanes: join.lanes,
            op_timeout: Span::from_millis(join.op_timeout),
            uid: peer.uid,
            state: Mutex::default(),
        }
    }

    /// Adds a rank; refused with a sentence. Returns whether it was the last of this host, and
    /// there are others.
    pub(super) fn join(&self, join: &Join, line: &Arc<Line>, peer: Peer) -> Result<bool, String> {
        self.check(join, peer)?;
        let mut state = self.lock();
        if let Some(member) = state.members.get(&join.rank) {
            return Err(format!(
                "rank {} has joined already, as process {}",
                join.rank, member.pid
            ));
        }
        if state.began || state.members.len() == usize::from(self.local_world) {
            return Err(format!("job {:?} is running: its ranks have joined", join.job));
        }
        let member = Member { line: Arc::clone(line), pid: peer.pid, next_op: 0 };
        state.members.insert(join.rank, member);
        let all_here = state.members.len() == usize::from(self.local_world);
        let is_alone = self.local_world == self.world;
        state.began = all_here && is_alone;
        if state.began {
            state.tell_all(&FromSidecar::Ready);
        } else if is_alone {
            // Of other hosts nothing is known.
            let is_missing = |rank: &u16| !state.members.contains_key(rank);
            let missing = (0..self.world).filter(is_missing).collect();
            state.tell_all(&FromSidecar::Waiting { missing });
        }
        Ok(all_here && !is_alone)
    }

    /// Joins the job at the aggregator, for all ranks of this host: they are told what comes of it.
    pub(super) fn call(self: &Arc<Self>, name: &str, upstream: &ConnectOptions) {
        let connecting = Connecting::new();
        let mut state = self.lock();
        if state.members.len() < usize::from(self.local_world) {
            let reason = "a rank has gone before the job was complete".into();
            return state.tell_all(&FromSidecar::Refused { reason });
        }
        let mut ranks = state.members.keys().copied();
        let Some(rank) = ranks.next() else { return };
        let options = ConnectOptions {
            job: name.to_owned(),
            generation: self.generation,
            rank,
            also: ranks.collect(),
            world: self.world,
            lanes: self.lanes,
            join_timeout: FOR_EVER,
            op_timeout: Duration::from_nanos(self.op_timeout.0),
            ..upstream.clone()
        };
        state.give_up = Some(connecting.giver_up());
        drop(state);
        let started =
            connecting.run(&options).map_err(|error| error.to_string()).and_then(|client| {
                let upstream = Upstream::start(client, Arc::downgrade(self));
                upstream.map_err(|error| error.to_string())
            });
        let mut state = self.lock();
        match started {
            Ok(upstream) if state.give_up.take().is_some() => {
                (state.upstream, state.began) = (Some(Arc::new(upstream)), true);
                state.tell_all(&FromSidecar::Ready);
            }
            Ok(_) => {}
            Err(reason) => state.tell_all(&FromSidecar::Refused { reason }),
        }
    }

    /// Checks that a rank means the job that there is.
    fn check(&self, join: &Join, peer: Peer) -> Result<(), String> {
        let job = &join.job;
        if peer.uid != self.uid {
            return Err(format!("job {job:?} is of user {}, and not of {}", self.uid, peer.uid));
        }
        let differs = |what: &str, has, says| {
            Err(format!("job {job:?} has {has} {what}, and rank {} says {says}", join.rank))
        };
        if join.world != self.world {
            return differs("ranks", self.world, join.world);
        }
        if join.local_world != self.local_world {
            return differs("ranks on this host", self.local_world, join.local_world);
        }
        if join.lanes != self.lanes {
            return differs("lanes", self.lanes.into(), join.lanes.into());
        }
        Ok(())
    }

    /// Takes a rank's call of its next op. Returns a fold once all have called it.
    pub(super) fn submit(
        &self,
        rank: u16,
        descriptor: Descriptor,
        place: Place,
    ) -> Option<(u32, Fold)> {
        let mut state = self.lock();
        let member = state.members.get_mut(&rank)?;
        let op = member.next_op;
        member.next_op += 1;
        if !state.left.is_empty() {
            let ranks = state.left.iter().copied().collect();
            state.end(FromSidecar::Lost { ranks, why: Loss::Left });
        }
        if state.gathering.len() >= MAX_OPS.into() && !state.gathering.contains_key(&op) {
            // More than its client may have in flight.
            state.end(FromSidecar::Lost { ranks: vec![rank], why: Loss::Broke });
        }
        if state.over.is_some() {
            return None;
        }
        let new = || Gathering { since: Clock::start().now(), called: BTreeMap::new() };
        let called = &mut state.gathering.entry(op).or_insert_with(new).called;
        called.insert(rank, (descriptor, place));
        if called.len() < usize::from(self.local_world) {
            return None;
        }
        let called = state.gathering.remove(&op)?.called;
        if let Some(outcome) = disagreement(&called) {
            state.tell_all(&FromSidecar::Ended { op, outcome });
            if self.local_world < self.world {
                // Ranks of other hosts have called the op, and wait for this one's.
                let why = "its ranks on this host disagree about an op".into();
                state.end(FromSidecar::CutOff { why });
            }
            return None;
        }
        let places = called.into_values().map(|(_, place)| place).collect();
        let fold = Fold::new(descriptor, places, self.world.into());
        state.folding += 1;
        Some((op, fold))
    }

    /// Passes on what was folded, if it is not all.
    pub(super) fn folded(&self, op: u32, fold: &Fold) {
        let upstream = self.lock().upstream.clone();
        match upstream {
            None => self.ended(op, Ok(())),
            Some(upstream) => {
                let (descriptor, places) = (fold.descriptor(), fold.places().to_vec());
                upstream.pass(Folded { op, descriptor, places });
            }
        }
    }

    /// Tells the ranks what came of an op.
    pub(super) fn ended(&self, op: u32, result: Result<(), Error>) {
        let mut state = self.lock();
        state.folding -= 1;
        let (outcome, end) = match result {
            Ok(()) => (Some(Outcome::Reduced), None),
            Err(error) => said(error),
        };
        if let Some(outcome) = outcome {
            state.tell_all(&FromSidecar::Ended { op, outcome });
        }
        if let Some(end) = end {
            state.end(end);
        }
        state.tell_end();
    }

    /// Lets a rank go. Returns whether it was the last.
    pub(super) fn part(&self, rank: u16, why: Loss) -> bool {
        let mut state = self.lock();
        if state.members.remove(&rank).is_none() {
            return false;
        }
        if let Some(give_up) = state.give_up.take() {
            give_up.give_up();
            let reason = format!("rank {rank} has gone before the job was complete");
            state.tell_all(&FromSidecar::Refused { reason });
        }
        if state.began {
            let is_needed = !state.gathering.is_empty();
            if why == Loss::Left && !is_needed {
                state.left.insert(rank);
            } else {
                state.end(FromSidecar::Lost { ranks: vec![rank], why });
            }
        }
        let is_last = state.members.is_empty();
        let upstream = state.upstream.clone().filter(|_| is_last || state.over.is_some());
        let gone = state.over.is_some().then_some((rank, why));
        drop(state);
        if let Some(upstream) = upstream {
            upstream.close(gone);
        }
        is_last
    }

    /// Ends the job, whose next life has begun.
    pub(super) fn supersede(&self) {
        self.lock().end(FromSidecar::Superseded);
    }

    /// Ends the job if an op has taken too long.
    pub(super) fn check_time(&self) {
        let mut state = self.lock();
        let now = Clock::start().now();
        let late = |op: &Gathering| now.since(op.since) > self.op_timeout;
        let Some((&op, gathering)) = state.gathering.iter().find(|(_, op)| late(op)) else {
            return;
        };
        let is_missing = |rank: &u16| !gathering.called.contains_key(rank);
        let missing = state.members.keys().copied().filter(is_missing).collect();
        let outcome = Outcome::Timeout { after: self.op_timeout.as_millis(), missing };
        state.gathering.remove(&op);
        state.tell_all(&FromSidecar::Ended { op, outcome });
        state.end(FromSidecar::TimedOut);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn tell_all(&self, message: &FromSidecar) {
        for member in self.members.values() {
            // A line that fails is hung up, so that its thread lets the rank go.
            drop(member.line.send_now(message));
        }
    }

    /// Ends the job. Its ranks hear so when nothing writes to their tensors any more.
    fn end(&mut self, why: FromSidecar) {
        self.over.get_or_insert(why);
        self.gathering.clear();
        self.tell_end();
    }

    fn tell_end(&mut self) {
        if let Some(why) = self.over.as_ref().filter(|_| self.folding == 0 && !self.told) {
            self.tell_all(why);
            self.told = true;
        }
    }
}

/// What ranks are told of an op that has failed at the aggregator: what came of it, and what has
/// ended the job.
fn said(error: Error) -> (Option<Outcome>, Option<FromSidecar>) {
    let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|rank| rank.0).collect();
    match error {
        Error::Op(OpError::Mismatch { one, other, .. }) => {
            let called = |(rank, descriptor): (Rank, Descriptor)| Called::new(rank.0, &descriptor);
            let (one, other) = (called(one), called(other));
            (Some(Outcome::Mismatch { one, other }), None)
        }
        Error::Op(OpError::Overflow { element, .. }) => (Some(Outcome::Overflow { element }), None),
        Error::Op(OpError::Timeout { after, missing, .. }) => {
            let missing = missing.into_iter().map(|(rank, _)| rank.0).collect();
            let outcome = Outcome::Timeout { after: after.as_millis(), missing };
            (Some(outcome), Some(FromSidecar::TimedOut))
        }
        Error::Op(OpError::PeerLost { ranks, why })
        | Error::Submit(SubmitError::PeerLost { ranks, why }) => {
            (None, Some(FromSidecar::Lost { ranks: numbers(ranks), why }))
        }
        error => (None, Some(FromSidecar::CutOff { why: error.to_string() })),
    }
}

/// Two ranks that have called an op differently.
fn disagreement(called: &BTreeMap<u16, (Descriptor, Place)>) -> Option<Outcome> {
    let mut called = called.iter().map(|(rank, (descriptor, _))| (*rank, descriptor));
    let (first, descriptor) = called.next()?;
    let (other, differs) = called.find(|(_, other)| *other != descriptor)?;
    let (one, other) = (Called::new(first, descriptor), Called::new(other, differs));
    Some(Outcome::Mismatch { one, other })
}
