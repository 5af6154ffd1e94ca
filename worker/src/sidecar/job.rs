//! A job at a sidecar: its ranks, and the ops that they have called.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use racksum_net::clock::Clock;
use racksum_net::local::{Line, Peer};
use racksum_proto::control::Loss;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::Generation;
use racksum_proto::time::{Span, Time};

use super::fold::{Fold, Place};
use super::message::{Called, FromSidecar, Join, Outcome};

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
    /// Ops that not all ranks have called.
    gathering: BTreeMap<u32, Gathering>,
    /// How many ops are being folded.
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

    /// Adds a rank; refused with a sentence.
    pub(super) fn join(&self, join: &Join, line: &Arc<Line>, peer: Peer) -> Result<(), String> {
        self.check(join, peer)?;
        let mut state = self.lock();
        if let Some(member) = state.members.get(&join.rank) {
            return Err(format!(
                "rank {} has joined already, as process {}",
                join.rank, member.pid
            ));
        }
        if state.began {
            return Err(format!("job {:?} is running: its ranks have joined", join.job));
        }
        let member = Member { line: Arc::clone(line), pid: peer.pid, next_op: 0 };
        state.members.insert(join.rank, member);
        let missing = usize::from(self.local_world) - state.members.len();
        state.began = missing == 0;
        if state.began {
            state.tell_all(&FromSidecar::Ready);
        } else {
            let missing =
                (0..self.world).filter(|rank| !state.members.contains_key(rank)).collect();
            state.tell_all(&FromSidecar::Waiting { missing });
        }
        Ok(())
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
            return None;
        }
        let places = called.into_values().map(|(_, place)| place).collect();
        let fold = Fold::new(descriptor, places, self.world.into());
        if fold.is_empty() {
            state.tell_all(&FromSidecar::Ended { op, outcome: Outcome::Reduced });
            return None;
        }
        state.folding += 1;
        Some((op, fold))
    }

    /// Tells the ranks what came of a fold.
    pub(super) fn ended(&self, op: u32, outcome: &Outcome) {
        let mut state = self.lock();
        state.folding -= 1;
        state.tell_all(&FromSidecar::Ended { op, outcome: outcome.clone() });
        state.tell_end();
    }

    /// Lets a rank go. Returns whether it was the last.
    pub(super) fn part(&self, rank: u16, why: Loss) -> bool {
        let mut state = self.lock();
        if state.members.remove(&rank).is_none() {
            return false;
        }
        if state.began {
            let is_needed = !state.gathering.is_empty();
            if why == Loss::Left && !is_needed {
                state.left.insert(rank);
            } else {
                state.end(FromSidecar::Lost { ranks: vec![rank], why });
            }
        }
        state.members.is_empty()
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
            if member.line.send(message, None).is_err() {
                // Its thread hears that, and lets the rank go.
                member.line.hang_up();
            }
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

/// Two ranks that have called an op differently.
fn disagreement(called: &BTreeMap<u16, (Descriptor, Place)>) -> Option<Outcome> {
    let mut called = called.iter().map(|(rank, (descriptor, _))| (*rank, descriptor));
    let (first, descriptor) = called.next()?;
    let (other, differs) = called.find(|(_, other)| *other != descriptor)?;
    let (one, other) = (Called::new(first, descriptor), Called::new(other, differs));
    Some(Outcome::Mismatch { one, other })
}
