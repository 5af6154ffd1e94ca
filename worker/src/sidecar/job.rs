//! A job at a sidecar: its ranks, and the ops that they have called.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{Line, Peer};
use racksum_proto::auth::Key;
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::ids::Generation;
use racksum_proto::job_name::JobName;
use racksum_proto::loss::Loss;
use racksum_proto::stats::Stats;
use racksum_proto::status::{SidecarJobState, SidecarJobStatus, SidecarRankStatus};
use racksum_proto::time::{Span, Time};

use super::calls::{Folding, Gathering};
use super::error_map::{describe, disagreement, not_joined, split_error};
use super::fold::{Fold, Handed, Memory, Share};
use super::fold_error::FoldError;
use super::member::{LOST, Member};
use super::message::{FromSidecar, Join, Outcome};
use super::sums::Sums;
use super::upstream::{Folded, OpSink, Upstream};
use crate::control::{CancelHandle, Mailbox};
use crate::error::Error;
use crate::options::ConnectOptions;
use crate::span::span;
use crate::udp_transport::UdpTransport;

mod leaving;

/// A limit that no wait reaches: ranks give up joining earlier, and folds end earlier.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);
/// The most time to reserve at the end of the join timeout, to send the ranks the reason why their
/// job cannot be joined.
const REPORT: Duration = Duration::from_secs(2);

/// One life of a job.
#[derive(Debug)]
pub(super) struct HostJob {
    pub(super) generation: Generation,
    /// The secret that the first rank presented; see [`Join::secret`].
    pub(super) secret: Option<Key>,
    /// Process id of the rank that joined first.
    pub(super) begun_by: i32,
    world: u16,
    local_world: u16,
    pub(super) lanes: u8,
    /// The user that all ranks of the job belong to.
    pub(super) uid: u32,
    /// The time at which the first rank joined.
    opened: Time,
    state: Mutex<State>,
    /// Notified when a fold, an op or the job ends.
    changed: Arc<Condvar>,
}

#[derive(Debug, Default)]
struct State {
    job: JobName,
    /// Timeout of ops: the smallest value that any rank asks for.
    op_timeout: Span,
    /// The earliest time at which a rank gives up joining.
    join_by: Option<Time>,
    members: BTreeMap<u16, Member>,
    /// Ranks that have left since the job began.
    left: BTreeSet<u16>,
    /// Whether all ranks have joined.
    began: bool,
    /// The connection to the aggregator, if the job has ranks on other hosts.
    upstream: Option<Arc<Upstream>>,
    /// Whether the call to the aggregator has started. After that, no rank may join.
    is_called: bool,
    /// Cancels the call to the aggregator while it is in progress.
    cancel: Option<CancelHandle>,
    /// Ops that some ranks have not called yet.
    gathering: BTreeMap<u32, Gathering>,
    /// Ops that are being folded here, or summed across hosts.
    folding: BTreeMap<u32, Folding>,
    /// The reason why the job was refused, if it was refused before it began.
    refused: Option<FromSidecar>,
    /// The reason why the job is over, if it is over.
    over: Option<FromSidecar>,
    /// Whether the reason in `refused` or `over` was sent to the ranks.
    notified: bool,
    /// Whether the next life has begun, even if this life was already over for another reason.
    superseded: bool,
    /// The condition variable of [`HostJob::changed`], for notifications from methods of the state.
    changed: Arc<Condvar>,
}

impl HostJob {
    /// Creates a job from the request of the first rank that joins.
    pub(super) fn new(join: &Join, peer: Peer) -> Self {
        let changed = Arc::<Condvar>::default();
        Self {
            generation: join.generation,
            secret: join.secret,
            begun_by: peer.pid,
            world: join.world,
            local_world: join.local_world,
            lanes: join.lanes,
            uid: peer.uid,
            opened: Clock::start().now(),
            state: Mutex::new(State {
                job: join.job.clone(),
                op_timeout: Span::from_millis(join.op_timeout),
                changed: Arc::clone(&changed),
                ..State::default()
            }),
            changed,
        }
    }

    /// Adds a rank, or returns the reason why the rank is refused. Returns true if all ranks of
    /// this host have now joined and other hosts have ranks too.
    pub(super) fn join(&self, join: &Join, line: &Arc<Line>, peer: Peer) -> Result<bool, String> {
        self.check(join)?;
        let mut state = self.lock();
        if let Some(refused) = &state.refused {
            return Err(describe(refused));
        }
        if let Some(member) = state.members.get(&join.rank) {
            return Err(format!(
                "rank {} has already joined as process {}; give each process its own `rank`",
                join.rank, member.pid
            ));
        }
        if state.began || state.members.len() == usize::from(self.local_world) {
            return Err(format!(
                "job {:?} already has all its ranks on this host ({}), or has started; check \
                 `local_world`, or restart all ranks with a greater `generation`",
                join.job, self.local_world
            ));
        }
        state.members.insert(join.rank, Member::new(Arc::clone(line), peer.pid));
        state.op_timeout = state.op_timeout.min(Span::from_millis(join.op_timeout));
        let join_timeout = Duration::from_millis(join.join_timeout).min(FOR_EVER);
        let join_by = Clock::start().now() + span(join_timeout);
        state.join_by = Some(state.join_by.map_or(join_by, |before| before.min(join_by)));
        let all_here = state.members.len() == usize::from(self.local_world);
        let is_alone = self.local_world == self.world;
        state.began = all_here && is_alone;
        if state.began {
            state.send_to_all(&FromSidecar::Ready);
            tracing::info!(job = ?join.job, "the job started, with all ranks on this host");
        } else if is_alone {
            // The sidecar can tell which ranks are missing only if the job has no ranks on other
            // hosts.
            let is_missing = |rank: &u16| !state.members.contains_key(rank);
            let missing = (0..self.world).filter(is_missing).collect();
            state.send_to_all(&FromSidecar::Waiting { missing });
        }
        state.is_called = all_here && !is_alone;
        Ok(state.is_called)
    }

    /// Joins the job at the aggregator for all ranks of this host, and tells the ranks whether that
    /// succeeded.
    pub(super) fn call(self: &Arc<Self>, upstream: &ConnectOptions) {
        let mailbox = Mailbox::new();
        let mut state = self.lock();
        if state.refused.is_some() || state.over.is_some() {
            return;
        }
        let ranks: Vec<_> = state.members.keys().copied().collect();
        let [rank, also @ ..] = &*ranks else { return };
        let left = state.join_by.map_or(Span::ZERO, |join_by| join_by.since(Clock::start().now()));
        let left = Duration::from_nanos(left.0);
        let options = ConnectOptions {
            job: state.job.name.clone(),
            group: state.job.group.clone(),
            generation: self.generation,
            secret: self.secret,
            rank: *rank,
            also: also.to_vec(),
            world: self.world,
            lanes: self.lanes,
            // The attempt ends slightly before the ranks give up, so that they still receive the
            // reason for a failure.
            join_timeout: left - (left / 10).min(REPORT),
            op_timeout: Duration::from_nanos(state.op_timeout.0),
            ..upstream.clone()
        };
        state.cancel = Some(mailbox.cancel_handle());
        drop(state);
        let started = UdpTransport::join(&options, mailbox).and_then(|transport| {
            Ok(Upstream::start(transport, ranks, Arc::downgrade(self) as Weak<dyn OpSink>)?)
        });
        let mut state = self.lock();
        match started {
            // The ranks have already received the refusal.
            Ok(upstream) if state.refused.is_some() => {
                drop(state);
                upstream.close();
            }
            Err(_) if state.refused.is_some() => {}
            Ok(upstream) => {
                state.cancel = None;
                (state.upstream, state.began) = (Some(Arc::new(upstream)), true);
                state.send_to_all(&FromSidecar::Ready);
                tracing::info!(job = ?state.job, "the job started, with ranks on other hosts");
            }
            Err(error) => {
                LOST.note(|left_out| {
                    tracing::warn!(job = ?state.job, %error, left_out, "cannot join the job");
                });
                state.refuse(FromSidecar::NotJoined(not_joined(error)));
            }
        }
    }

    /// Checks that a rank's request to join agrees with this job.
    fn check(&self, join: &Join) -> Result<(), String> {
        let job = &join.job;
        let differs = |what: &str, has, wanted| {
            let rank = join.rank;
            Err(format!(
                "job {job:?}: the number of {what} is {has}, but rank {rank} asks for {wanted}"
            ))
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

    /// Handles a rank's call of its next op. Returns the op's number and fold if all ranks of the
    /// host have now called the op.
    pub(super) fn submit(
        &self,
        rank: u16,
        descriptor: Descriptor,
        handed: Handed,
        memory: &Arc<Memory>,
    ) -> Option<(u32, Fold)> {
        let mut state = self.lock();
        if state.is_over() {
            return None;
        }
        let Some(op) = state.members.get_mut(&rank)?.call(&handed) else {
            state.break_with(rank, "passed memory that an op in flight uses");
            return None;
        };
        let gathering = state.gather(rank, op)?;
        gathering.called.insert(rank, (descriptor, Some(handed)));
        gathering.memories.push(Arc::clone(memory));
        self.gathered(&mut state, op)
    }

    /// Handles a rank's refusal of its next op.
    pub(super) fn refuse_op(&self, rank: u16, refused: Descriptor) {
        let mut state = self.lock();
        if state.is_over() {
            return;
        }
        let Some(op) = state.members.get_mut(&rank).map(Member::refuse) else { return };
        let Some(gathering) = state.gather(rank, op) else { return };
        gathering.called.insert(rank, (refused, None));
        let fold = self.gathered(&mut state, op);
        debug_assert!(fold.is_none(), "an op that a rank refused has no fold");
    }

    /// Returns the number and fold of an op if all ranks of the host have called it. If they called
    /// it with different descriptors, or if all of them refused it, ends the op instead.
    fn gathered(&self, state: &mut State, op: u32) -> Option<(u32, Fold)> {
        if state.gathering.get(&op)?.called.len() < usize::from(self.local_world) {
            return None;
        }
        let Gathering { since, called, memories } = state.gathering.remove(&op)?;
        let (descriptor, outcome) = (called.first_key_value()?.1.0, disagreement(&called));
        let share = |(rank, (_, handed)): (u16, (_, Option<Handed>))| {
            handed.map(|handed| Share { rank, handed })
        };
        let shares: Option<Vec<_>> = called.into_iter().map(share).collect();
        let (None, Some(shares)) = (&outcome, shares) else {
            state.let_go(op);
            // An op that all ranks refused ends without a sum.
            let outcome = outcome.unwrap_or(Outcome::Reduced);
            state.send_to_all(&FromSidecar::Ended { op, outcome });
            // Refuse the op at the aggregator too, because ranks of other hosts may have called it
            // and may be waiting for this host.
            state.upstream.iter().for_each(|upstream| upstream.refuse(op, descriptor.call));
            return None;
        };
        let fold = Fold::new(descriptor, shares, self.world.into());
        state.folding.insert(op, Folding { since, is_passed: false, _memories: memories });
        Some((op, fold))
    }

    /// Handles the end of a fold. Sends the ranks the outcome, or passes a partial sum to the
    /// aggregator.
    pub(super) fn folded(&self, op: u32, fold: &Arc<Fold>) {
        let mut state = self.lock();
        let upstream = state.upstream.clone();
        let since = state.folding.get_mut(&op).map(|folding| {
            folding.is_passed = upstream.is_some();
            folding.since
        });
        drop(state);
        self.changed.notify_all();
        match (fold.sums(), upstream.zip(since)) {
            (Ok(_), Some((upstream, since))) => {
                upstream.pass(Folded { op, since, fold: Arc::clone(fold) });
            }
            (Ok(sums), None) => match sums.map(Sums::seal).transpose() {
                Ok(_) => self.ended(op, fold.shares(), Ok(sums)),
                Err(spoilt) => self.spoilt(op, spoilt),
            },
            (Err(spoilt), upstream) => {
                self.spoilt(op, spoilt);
                upstream.iter().for_each(|(upstream, _)| upstream.spoil());
            }
        }
    }

    /// Returns whether the job has no ranks left on this host.
    pub(super) fn is_deserted(&self) -> bool {
        self.lock().members.is_empty()
    }

    /// Returns how many ranks the job needs on this host.
    pub(super) fn seats(&self) -> usize {
        self.local_world.into()
    }

    /// Returns how many ranks the job currently has on this host.
    pub(super) fn ranks(&self) -> usize {
        self.lock().members.len()
    }

    /// Ends the job, because its next life has begun or the sidecar is stopping. If the next life
    /// has begun, the ranks are disconnected even if this life was already over.
    pub(super) fn end(&self, why: FromSidecar) {
        self.lock().end(why);
    }

    /// Refuses the job if it has not begun.
    pub(super) fn refuse(&self, reason: &str) {
        let mut state = self.lock();
        if !state.began {
            state.refuse(FromSidecar::Refused { reason: reason.to_owned() });
        }
    }

    /// Returns whether the job was refused. If so, the next rank that joins starts a new job in its
    /// place.
    pub(super) fn is_refused(&self) -> bool {
        self.lock().refused.is_some()
    }

    /// Records how many bytes of memory a rank has lent.
    pub(super) fn note_lent(&self, rank: u16, lent: usize) {
        if let Some(member) = self.lock().members.get_mut(&rank) {
            member.lent = lent;
        }
    }

    /// Returns the job's network statistics.
    pub(super) fn stats(&self) -> Stats {
        let upstream = self.lock().upstream.clone();
        upstream.map_or_else(Stats::default, |upstream| upstream.stats())
    }

    /// Returns the job's status.
    pub(super) fn status(&self) -> SidecarJobStatus {
        let state = self.lock();
        let now = Clock::start().now();
        let oldest = state.gathering.values().next();
        let rank = |(rank, member): (&u16, &Member)| SidecarRankStatus {
            rank: *rank,
            pid: member.pid,
            next_op: member.next_op,
            lent_bytes: member.lent as u64,
            behind: oldest.is_some_and(|oldest| !oldest.called.contains_key(rank)),
        };
        SidecarJobStatus {
            job: state.job.name.clone(),
            group: state.job.group.clone(),
            generation: self.generation.0,
            uid: self.uid,
            world: self.world,
            local_world: self.local_world,
            lanes: self.lanes,
            state: state.stage().name().to_owned(),
            age_ms: now.since(self.opened).as_millis(),
            awaited: self.seats().saturating_sub(state.members.len()),
            awaited_ops: state.gathering.len(),
            summed_ops: state.folding.len(),
            stalled_ms: oldest.map(|oldest| now.since(oldest.since).as_millis()),
            ranks: state.members.iter().map(rank).collect(),
        }
    }

    /// Ends the job if an op has timed out because some ranks of this host have not called it.
    pub(super) fn check_time(&self) {
        let mut state = self.lock();
        let now = Clock::start().now();
        let late = |op: &Gathering| now.since(op.since) > state.op_timeout;
        let Some((&op, gathering)) = state.gathering.iter().find(|(_, op)| late(op)) else {
            return;
        };
        let is_missing = |rank: &u16| !gathering.called.contains_key(rank);
        let missing = state.members.keys().copied().filter(is_missing).collect();
        let outcome = Outcome::Timeout { after: state.op_timeout.as_millis(), missing };
        state.gathering.remove(&op);
        state.let_go(op);
        state.send_to_all(&FromSidecar::Ended { op, outcome });
        state.end(FromSidecar::TimedOut);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpSink for HostJob {
    /// Ends the job because the ranks cannot receive an op's sums.
    fn spoilt(&self, op: u32, spoilt: FoldError) {
        let mut state = self.lock();
        match spoilt {
            FoldError::By(rank) => state.break_with(rank, "passed an invalid block list"),
            FoldError::NoMemory(why) => {
                LOST.note(|left_out| tracing::error!(left_out, "{why}"));
                state.end(FromSidecar::CutOff { why });
            }
        }
        state.let_go(op);
        state.send_end();
    }

    /// Sends the ranks the outcome of an op, with the sums for ranks that passed lists.
    fn ended(&self, op: u32, shares: &[Share], result: Result<Option<&Sums>, Error>) {
        let mut state = self.lock();
        let since = state.let_go(op);
        match result {
            Ok(sums) => {
                sums.iter().for_each(|sums| sums.free());
                shares.iter().for_each(|share| state.send_sums(op, share, sums));
            }
            Err(error) => {
                let (mut outcome, end) = split_error(error);
                if let (Some(Outcome::Timeout { after, .. }), Some(since)) = (&mut outcome, since) {
                    // `after` covers only the time at the aggregator, so replace it with the time
                    // since the first call.
                    *after = Clock::start().now().since(since).as_millis();
                }
                if let Some(outcome) = outcome {
                    state.send_to_all(&FromSidecar::Ended { op, outcome });
                }
                if let Some(end) = end {
                    state.end(end);
                }
            }
        }
        state.send_end();
    }
}

impl State {
    /// Returns whether the job is over. Ends it first if a rank has left, because every op needs
    /// all ranks.
    fn is_over(&mut self) -> bool {
        if !self.left.is_empty() {
            let ranks = self.left.iter().copied().collect();
            self.end(FromSidecar::Lost { ranks, why: Loss::Left });
        }
        self.over.is_some()
    }

    /// Returns the entry of an op that a rank has called. If the job has too many ops in flight,
    /// ends the job and returns `None`.
    fn gather(&mut self, rank: u16, op: u32) -> Option<&mut Gathering> {
        let in_flight = self.gathering.len() + self.folding.len();
        if in_flight >= MAX_OPS.into() && !self.gathering.contains_key(&op) {
            self.break_with(rank, "called more ops than its client may have in flight");
            return None;
        }
        Some(self.gathering.entry(op).or_insert_with(Gathering::begin))
    }

    /// Sends all ranks the reason why the job will not begin, and disconnects them.
    fn refuse(&mut self, why: FromSidecar) {
        self.cancel.take().iter().for_each(CancelHandle::cancel);
        self.send_to_all(&why);
        self.hang_up();
        // The ranks need no later message about the job.
        self.notified = true;
        self.refused = Some(why);
    }

    fn send_to_all(&self, message: &FromSidecar) {
        self.members.values().for_each(|member| member.send(message, None));
    }

    /// Forgets the operands of an op. Call this before telling the ranks that the op has ended,
    /// because they may pass the same memory again as soon as they know. If the op was being folded
    /// or summed across hosts, returns the time at which the first rank called it.
    fn let_go(&mut self, op: u32) -> Option<Time> {
        self.members.values_mut().for_each(|member| member.end(op));
        self.changed.notify_all();
        self.folding.remove(&op).map(|folding| folding.since)
    }

    /// Sends a rank the outcome of a successful op, with the sums if the rank passed a list.
    fn send_sums(&self, op: u32, share: &Share, sums: Option<&Sums>) {
        let Some(member) = self.members.get(&share.rank) else { return };
        let sums = sums.filter(|_| matches!(share.handed, Handed::List(_)));
        let outcome =
            sums.map_or(Outcome::Reduced, |sums| Outcome::Union { blocks: sums.blocks() });
        let ended = FromSidecar::Ended { op, outcome };
        member.send(&ended, sums.map(AsFd::as_fd));
    }

    /// Disconnects all ranks, so that their threads remove them and free their memory.
    fn hang_up(&self) {
        self.members.values().for_each(Member::hang_up);
    }

    /// Ends the job because a rank broke the protocol.
    fn break_with(&mut self, rank: u16, what: &str) {
        LOST.note(|left_out| tracing::warn!(job = ?self.job, rank, left_out, "rank {what}"));
        self.end(FromSidecar::Lost { ranks: vec![rank], why: Loss::Broke });
        // Disconnect the rank if it is still in the job; its own thread then removes it.
        self.members.get(&rank).into_iter().for_each(Member::hang_up);
    }

    /// Returns the stage that the job has reached.
    const fn stage(&self) -> SidecarJobState {
        match (&self.over, self.began, self.is_called) {
            (Some(_), ..) => SidecarJobState::Over,
            (None, true, _) => SidecarJobState::Running,
            (None, false, true) => SidecarJobState::Calling,
            (None, false, false) => SidecarJobState::Gathering,
        }
    }

    /// Ends the job. If there are several reasons, the ranks receive only the first, once no op in
    /// flight writes to their tensors.
    fn end(&mut self, why: FromSidecar) {
        self.superseded |= matches!(why, FromSidecar::Superseded { .. });
        if self.over.is_none() {
            LOST.note(|left_out| {
                tracing::warn!(job = ?self.job, left_out, "job ended: {}", describe(&why));
            });
        }
        self.over.get_or_insert(why);
        self.changed.notify_all();
        self.cancel.take().iter().for_each(CancelHandle::cancel);
        for op in std::mem::take(&mut self.gathering).into_keys() {
            self.let_go(op);
        }
        self.send_end();
    }

    /// If the job is over and no op is in flight, sends the ranks the reason why the job is over.
    /// Disconnects them if the next life has begun.
    fn send_end(&mut self) {
        let Some(why) = self.over.as_ref().filter(|_| self.folding.is_empty()) else { return };
        if !self.notified {
            self.send_to_all(why);
            self.notified = true;
            if let (FromSidecar::Lost { ranks, why }, Some(upstream)) = (why, &self.upstream) {
                upstream.lose(ranks, *why);
            }
        }
        if self.superseded {
            // These ranks no longer count towards the limits. Disconnect them, because stuck ranks
            // would otherwise keep their threads and lent memory forever.
            self.hang_up();
        }
    }
}
