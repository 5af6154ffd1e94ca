//! A host: its links, its socket and its state machines.

use std::collections::{BTreeMap, VecDeque};
use std::iter;
use std::rc::Rc;

use racksum_proto::aggregator::Failed;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::schedule::{DeficitRoundRobin, Schedule, cost};
use racksum_proto::time::Time;
use racksum_proto::wire::{self, Header};

use super::Ended;
use crate::check::{Checkers, Sight, Watch};
use crate::engine::Picos;
use crate::host::Host;
use crate::link::Link;
use crate::node::{Datagram, ShardNode, WorkerNode};
use crate::plan::{JobPlan, Life, Plan, PortPlan};
use crate::random::mix;
use crate::run::Machine;

/// The state of a host.
#[derive(Debug)]
pub(super) struct HostState {
    pub(super) host: Host,
    pub(super) up: Link,
    pub(super) down: Link,
    port: PortPlan,
    /// The datagrams in the socket, and whether each has a congestion mark.
    socket: VecDeque<(Rc<[u8]>, bool)>,
    socket_bytes: usize,
    /// The earliest time at which the host can act again.
    free_at: Picos,
    /// The time from which the host is dead.
    dies_at: Picos,
    /// The time of the next scheduled wake-up.
    pub(super) wakes_at: Option<Picos>,
    pub(super) role: Role,
    /// The last genuine datagram that the host has read. Strangers imitate it.
    pub(super) last: Option<Rc<[u8]>>,
}

/// The role of a host, with its state machines.
#[derive(Debug)]
pub(super) enum Role {
    Worker(Box<WorkerHost>),
    Shard(ShardHost),
}

/// A shard, with one machine for each job.
#[derive(Debug)]
pub(super) struct ShardHost {
    shard: u8,
    jobs: Vec<ShardNode>,
    /// The ops that have failed at other shards, each with its job.
    told: Vec<(usize, Failed)>,
    /// The jobs' turns. A job that waits for a turn has work left.
    schedule: DeficitRoundRobin<usize>,
}

/// A rank and the ops it has yet to call.
#[derive(Debug)]
pub(super) struct WorkerHost {
    pub(super) job: usize,
    pub(super) rank: Rank,
    pub(super) node: WorkerNode,
    called: usize,
    calls: usize,
    /// Whether the next call must wait for an op to end.
    full: bool,
    /// Whether the machine has more to send than fits in the send buffer.
    blocked: bool,
    /// The op at which the rank has said that the job resumes, if the rank has left the shards and
    /// not joined the next ones. It then neither sends nor receives, but calls ops.
    left_at: Option<OpId>,
    /// Ops in flight, with the time of each call.
    open: BTreeMap<OpId, Picos>,
    pub(super) ended: Vec<(OpId, Ended)>,
    /// How many times in a row the machine's timer was due again immediately.
    spins: u32,
}

impl HostState {
    pub(super) fn new(host: Host, port: PortPlan, dies_at: Picos, role: Role) -> Self {
        Self {
            host,
            up: Link::new(port.up),
            down: Link::new(port.down),
            port,
            socket: VecDeque::new(),
            socket_bytes: 0,
            free_at: Picos::ZERO,
            dies_at,
            wakes_at: None,
            role,
            last: None,
        }
    }

    /// Puts a datagram into the socket. Returns false if it does not fit.
    pub(super) fn receive(&mut self, bytes: Rc<[u8]>, marked: bool) -> bool {
        let room = self.port.receive_buffer - self.socket_bytes;
        if bytes.len() > room {
            return false;
        }
        self.socket_bytes += bytes.len();
        self.socket.push_back((bytes, marked));
        true
    }

    /// Discards the datagrams in the socket. Also clears a shard's schedule, so that the shard has
    /// no work until its next life.
    pub(super) fn forget(&mut self) {
        self.socket.clear();
        self.socket_bytes = 0;
        if let Role::Shard(host) = &mut self.role {
            host.schedule = DeficitRoundRobin::new(0);
        }
    }

    /// Starts a new life of the shards: a rank resumes, and a shard starts with no state.
    pub(super) fn begin_life(
        &mut self,
        now: Picos,
        plan: &Plan,
        lives: &[Life],
        checkers: &mut Checkers,
    ) {
        match &mut self.role {
            Role::Worker(worker) => worker.resume(now, plan, lives[worker.job], checkers),
            Role::Shard(host) => *host = ShardHost::new(plan, host.shard, lives, now),
        }
    }

    /// Makes a rank leave the shards, until its next life begins.
    pub(super) fn leave(&mut self) {
        if let Role::Worker(worker) = &mut self.role {
            worker.left_at = Some(worker.first_kept());
            worker.blocked = false;
        }
    }

    /// Keeps the host busy until `at`.
    pub(super) fn occupy(&mut self, at: Picos) {
        self.free_at = self.free_at.max(at);
    }

    /// Returns the time at which the host can act on an event at `at`, or [`Picos::NEVER`] if it is
    /// dead by then.
    pub(super) fn acts_at(&self, at: Picos) -> Picos {
        let at = at.max(self.free_at);
        if at < self.dies_at { at } else { Picos::NEVER }
    }

    /// Returns whether all ops of the host have ended. Shards and dying ranks always count as done.
    pub(super) fn is_done(&self) -> bool {
        match &self.role {
            Role::Worker(worker) => worker.is_done() || self.dies_at < Picos::NEVER,
            Role::Shard(_) => true,
        }
    }

    /// Handles a batch of datagrams from the socket, then does everything that is due. Outgoing
    /// datagrams go to `out`, each with its job.
    pub(super) fn act(
        &mut self,
        now: Picos,
        plan: &Plan,
        out: &mut Vec<(usize, Datagram)>,
        checkers: &mut Checkers,
    ) {
        let batch: Vec<_> = self.socket.drain(..self.socket.len().min(BATCH)).collect();
        self.socket_bytes -= batch.iter().map(|(bytes, _)| bytes.len()).sum::<usize>();
        self.occupy(now + Picos(self.port.service.0 * batch.len() as u64));
        if let Some((bytes, _)) = batch.last() {
            self.last = Some(Rc::clone(bytes));
        }
        match &mut self.role {
            Role::Worker(worker) if worker.left_at.is_some() => {
                worker.call(now, &plan.jobs[worker.job], checkers);
            }
            Role::Worker(worker) => {
                for (bytes, marked) in batch {
                    worker.handle(now, &bytes, marked, checkers);
                }
                let queued = usize::try_from(self.up.queued(now)).unwrap_or(usize::MAX);
                let room = match self.port.send_buffer.saturating_sub(queued) {
                    room if worker.blocked && room < self.port.send_buffer / 2 => 0,
                    room => room,
                };
                worker.drive(now, room, &plan.jobs[worker.job], out, checkers);
            }
            Role::Shard(host) => {
                host.fail_told(now, checkers);
                for (bytes, marked) in batch {
                    host.handle(now, &bytes, marked, checkers);
                }
                let spent = host.serve(now, out, checkers);
                self.occupy(now + Picos(plan.network.work.0 * spent as u64 / 1024));
            }
        }
    }

    /// Returns the ops that have failed at a shard, each with its job.
    pub(super) fn poll_failed(&mut self) -> Vec<(usize, Failed)> {
        let Role::Shard(host) = &mut self.role else { return Vec::new() };
        let jobs = host.jobs.iter_mut().enumerate();
        let failed = |(job, node): (usize, &mut ShardNode)| {
            iter::from_fn(|| node.machine.poll_failed()).map(|failed| (job, failed)).collect()
        };
        let failed: Vec<Vec<_>> = jobs.map(failed).collect();
        failed.into_iter().flatten().collect()
    }

    /// Tells a shard that an op has failed at another shard. The shard handles this when it next
    /// acts. Returns whether the host is a shard.
    pub(super) fn tell_failed(&mut self, job: usize, failed: Failed) -> bool {
        let Role::Shard(host) = &mut self.role else { return false };
        host.told.push((job, failed));
        true
    }

    /// Returns the time at which the host next has something to do, unless a datagram arrives
    /// earlier.
    pub(super) fn next_due(&self, plan: &Plan) -> Picos {
        if !self.socket.is_empty() {
            return self.free_at;
        }
        match &self.role {
            Role::Worker(worker) => {
                let due = worker.next_due(&plan.jobs[worker.job]);
                let half = (self.port.send_buffer / 2) as u64;
                if worker.blocked { due.min(self.up.falls_to(half)) } else { due }
            }
            Role::Shard(host) if host.schedule.waiting() > 0 => self.free_at,
            Role::Shard(_) => Picos::NEVER,
        }
    }

    /// Handles a stranger's datagram, which bypasses the socket, and then sends the datagrams that
    /// are due.
    pub(super) fn act_foreign(
        &mut self,
        now: Picos,
        bytes: &[u8],
        out: &mut Vec<(usize, Datagram)>,
        checkers: &mut Checkers,
    ) {
        match &mut self.role {
            Role::Worker(worker) if worker.left_at.is_some() => {}
            Role::Worker(worker) => {
                let mut watch = worker.watch(now, checkers);
                watch.foreign = true;
                worker.node.handle(now.time(), bytes, false, &mut watch);
                let mut sent = Vec::new();
                // Data that waits for the send buffer is not a reaction to the stranger's datagram.
                if !worker.blocked {
                    let mut watch = worker.watch(now, checkers);
                    worker.node.drive(now.time(), usize::MAX, &mut sent, &mut watch);
                }
                out.extend(sent.into_iter().map(|datagram| (worker.job, datagram)));
            }
            Role::Shard(host) => {
                for (job, node) in host.jobs.iter_mut().enumerate() {
                    let machine = Machine::Shard { job, shard: host.shard };
                    let mut watch = Watch { at: now, machine, foreign: true, checkers };
                    node.handle(now.time(), bytes, false, &mut watch);
                }
                host.serve(now, out, checkers);
            }
        }
    }
}

impl WorkerHost {
    pub(super) fn new(plan: &Plan, job: usize, rank: Rank) -> Self {
        let of_job = &plan.jobs[job];
        let config = plan.worker(job, rank, Life::FIRST);
        let mut node = WorkerNode::new(config, of_job.world, Time(0));
        set_numbers(&mut node, plan, job, Life::FIRST);
        Self {
            job,
            rank,
            node,
            called: 0,
            calls: of_job.calls(rank),
            full: false,
            blocked: false,
            left_at: None,
            open: BTreeMap::new(),
            ended: Vec::new(),
            spins: 0,
        }
    }

    /// Continues the job at new shards.
    fn resume(&mut self, now: Picos, plan: &Plan, life: Life, checkers: &mut Checkers) {
        let config = plan.worker(self.job, self.rank, life);
        let mut watch = self.watch(now, checkers);
        self.node.resume(config, now.time(), &mut watch);
        set_numbers(&mut self.node, plan, self.job, life);
        (self.blocked, self.left_at) = (false, None);
    }

    /// Returns the oldest op whose results another rank may lack, as far as the rank knew when it
    /// left.
    pub(super) fn first_kept(&self) -> OpId {
        self.left_at.unwrap_or_else(|| self.node.machine.first_kept())
    }

    /// Returns whether all ops that the rank calls have ended.
    pub(super) fn is_done(&self) -> bool {
        self.called == self.calls && self.open.is_empty()
    }

    /// Returns whether the machine's timer was due again immediately too many times in a row.
    pub(super) fn spins(&self) -> bool {
        self.spins > MAX_SPINS
    }

    pub(super) fn machine(&self) -> Machine {
        Machine::Worker { job: self.job, rank: self.rank }
    }

    fn watch<'a>(&self, at: Picos, checkers: &'a mut Checkers) -> Watch<'a> {
        Watch { at, machine: self.machine(), foreign: false, checkers }
    }

    fn handle(&mut self, now: Picos, bytes: &[u8], marked: bool, checkers: &mut Checkers) {
        checkers.see(now, self.machine(), &Sight::Received(bytes));
        let mut watch = self.watch(now, checkers);
        self.node.handle(now.time(), bytes, marked, &mut watch);
    }

    /// Calls ops, handles timeouts and sends the datagrams that are due.
    fn drive(
        &mut self,
        now: Picos,
        room: usize,
        plan: &JobPlan,
        out: &mut Vec<(usize, Datagram)>,
        checkers: &mut Checkers,
    ) {
        self.call(now, plan, checkers);
        let mut sent = Vec::new();
        let mut watch = self.watch(now, checkers);
        if self.node.machine.poll_timeout() <= now.time() {
            self.node.handle_timeout(now.time(), &mut watch);
        }
        self.blocked = !self.node.drive(now.time(), room, &mut sent, &mut watch);
        if self.call(now, plan, checkers) && !self.blocked {
            let mut watch = self.watch(now, checkers);
            self.blocked = !self.node.drive(now.time(), room, &mut sent, &mut watch);
        }
        let due_at_once = self.node.machine.poll_timeout() <= now.time();
        self.spins = if due_at_once { self.spins + 1 } else { 0 };
        for datagram in sent {
            checkers.see(now, self.machine(), &Sight::Sent(&datagram.bytes));
            out.push((self.job, datagram));
        }
    }

    /// Reports ops that have ended, then calls the ops that are due, up to the job's limit on ops
    /// in flight. Returns whether any op was called.
    fn call(&mut self, now: Picos, plan: &JobPlan, checkers: &mut Checkers) -> bool {
        let machine = self.machine();
        self.full &= self.node.done.is_empty();
        for (op, result) in self.node.done.drain(..) {
            checkers.see(now, machine, &Sight::Ended(op, &result));
            let called = self.open.remove(&op).unwrap_or(Picos::NEVER);
            let result = result.map(|tensor| hash(&tensor));
            self.ended.push((op, Ended { called, at: now, result }));
        }
        let before = self.called;
        while self.called < self.calls && !self.full {
            let op = &plan.ops[self.called];
            if op.starts[self.rank.index()] > now {
                break;
            }
            let id = OpId(u32::try_from(self.called).unwrap_or(u32::MAX));
            let descriptor = op.descriptor(self.rank);
            let tensor = op.tensor(self.rank);
            let called = self.node.submit(now.time(), descriptor, tensor, op.timeout);
            match called {
                Ok(given) => {
                    assert_eq!(given, id, "ops are numbered in the order of the calls");
                    self.open.insert(id, now);
                    checkers.see(now, machine, &Sight::Called(id));
                }
                Err(SubmitError::TooManyOps { .. }) => {
                    self.full = true;
                    break;
                }
                Err(_) => checkers.see(now, machine, &Sight::Refused(id)),
            }
            self.called += 1;
        }
        self.called > before
    }

    fn next_due(&self, plan: &JobPlan) -> Picos {
        let timer = match self.left_at.is_some() {
            true => Picos::NEVER,
            false => Picos::from(self.node.machine.poll_timeout()),
        };
        let call = if self.called < self.calls && !self.full {
            plan.ops[self.called].starts[self.rank.index()]
        } else {
            Picos::NEVER
        };
        timer.min(call)
    }
}

/// Sets the job's wire id at each shard.
fn set_numbers(node: &mut WorkerNode, plan: &Plan, job: usize, life: Life) {
    for shard in 0..plan.network.shards {
        node.machine.set_shard_job(shard, plan.job_id(job, shard, life));
    }
}

impl ShardHost {
    /// Creates a shard without state. `lives` holds the life that each job begins.
    pub(super) fn new(plan: &Plan, shard: u8, lives: &[Life], now: Picos) -> Self {
        let mut schedule = DeficitRoundRobin::new(plan.network.quantum);
        let mut node = |job: usize| {
            schedule.add(job, plan.jobs[job].share);
            let config = plan.aggregator(job, shard, lives[job]);
            ShardNode::new(config, plan.network.multicast, now.time())
        };
        let jobs = (0..plan.jobs.len()).map(&mut node).collect();
        Self { shard, jobs, told: Vec::new(), schedule }
    }

    /// Fails the ops that have failed at other shards.
    fn fail_told(&mut self, now: Picos, checkers: &mut Checkers) {
        for (job, Failed { op, why, .. }) in self.told.drain(..) {
            let machine = Machine::Shard { job, shard: self.shard };
            let mut watch = Watch { at: now, machine, foreign: false, checkers };
            self.jobs[job].machine.handle_failed_beside(op, why, &mut watch);
        }
    }

    /// Passes a datagram to the machine of its job.
    fn handle(&mut self, now: Picos, bytes: &[u8], marked: bool, checkers: &mut Checkers) {
        let Ok((header, ..)) = Header::decode_first(bytes) else { return };
        let mut nodes = self.jobs.iter_mut().enumerate();
        let mine = nodes.find(|(_, node)| node.machine.config().job == header.job);
        let Some((job, node)) = mine else { return };
        let machine = Machine::Shard { job, shard: self.shard };
        checkers.see(now, machine, &Sight::Received(bytes));
        let mut watch = Watch { at: now, machine, foreign: false, checkers };
        node.handle(now.time(), bytes, marked, &mut watch);
        for (header, _) in wire::messages(bytes).filter_map(Result::ok) {
            self.schedule.charge(job, cost::of_message(header.kind));
        }
    }

    /// Gives every job one turn. Returns the bytes spent.
    fn serve(
        &mut self,
        now: Picos,
        out: &mut Vec<(usize, Datagram)>,
        checkers: &mut Checkers,
    ) -> usize {
        let mut spent = 0;
        (0..self.jobs.len()).for_each(|job| self.schedule.enqueue(job));
        let mut sent = Vec::new();
        for _ in 0..self.schedule.waiting() {
            let Some(mut turn) = self.schedule.next() else { break };
            let (job, node) = (turn.job, &mut self.jobs[turn.job]);
            let machine = Machine::Shard { job, shard: self.shard };
            let mut watch = Watch { at: now, machine, foreign: false, checkers };
            node.serve(now.time(), &mut turn, &mut sent, &mut watch);
            for datagram in sent.drain(..) {
                checkers.see(now, machine, &Sight::Sent(&datagram.bytes));
                out.push((job, datagram));
            }
            checkers.see(now, machine, &Sight::Driven { held: node.held() });
            if turn.is_over() {
                self.schedule.enqueue(job);
            }
            spent += turn.spent();
            self.schedule.finish(turn);
        }
        spent
    }
}

fn hash(tensor: &[u8]) -> u64 {
    let (words, rest) = tensor.as_chunks();
    let hash = words.iter().fold(1, |hash, word| mix(hash ^ u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, byte| mix(hash ^ u64::from(*byte)))
}

/// The maximum number of datagrams that a host handles at once, like a batch of a real driver.
const BATCH: usize = 64;
/// How many times in a row a timer may be due again immediately before the run counts as a
/// livelock.
const MAX_SPINS: u32 = 1_000;
