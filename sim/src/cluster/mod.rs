//! A cluster: hosts and links in the engine, and the protocol's machines on the hosts.
//!
//! Every host is connected to one switch. A datagram first crosses its sender's uplink, where a
//! fault may hit it. The switch then forwards the datagram, with one copy to each recipient of a
//! multicast. Another fault may hit each copy, which then crosses its recipient's downlink, and
//! waits in the recipient's socket until the host reads it.

mod host;
mod strangers;

use std::collections::BTreeMap;
use std::rc::Rc;

use racksum_proto::ids::{OpId, Rank};
use racksum_proto::observer::EventCounts;
use racksum_proto::wire::Header;

use self::host::{HostState, Role, ShardHost, WorkerHost};
use self::strangers::Strangers;
use crate::check::{Checkers, Invariant, Violation};
use crate::engine::{Engine, Picos};
use crate::fault::{Faults, Leg};
use crate::host::Host;
use crate::link::Passage;
use crate::node::{Datagram, Endpoint};
use crate::plan::{Life, Plan};
use crate::random::{Random, mix};
use crate::run::{Ended, Run, Totals};

/// A run in progress.
#[derive(Debug)]
pub struct Cluster<'a> {
    plan: &'a Plan,
    engine: Engine<Event>,
    hosts: Vec<HostState>,
    faults: Faults,
    strangers: Strangers,
    checkers: Checkers,
    trace: u64,
    totals: Totals,
    /// The number of steps so far in which ranks were prepared to move, or that was cancelled.
    preparations: u64,
    /// The number of moves that have begun.
    deaths: usize,
    /// The number of moves that have ended.
    moved: usize,
    /// The lives that the jobs began with the last move.
    lives: Vec<Life>,
    /// The order in which ranks leave and join in moves.
    turns: Random,
}

#[derive(Debug)]
enum Event {
    /// A datagram has reached the switch.
    AtSwitch { from: Host, job: usize, datagram: Datagram, marked: bool },
    /// The switch forwards a datagram to its recipients.
    Spread { job: usize, datagram: Datagram, marked: bool },
    /// A datagram enters the downlink of the host with index `to`.
    Enter { to: usize, bytes: Rc<[u8]>, marked: bool },
    /// A datagram has reached the socket of the host with index `to`.
    Arrive { to: usize, bytes: Rc<[u8]>, marked: bool },
    /// The host with this index wakes up.
    Wake(usize),
    /// The plan's pause with this index begins.
    Pause(usize),
    /// The plan's move with this index begins: the shards die, or the ranks begin to leave them.
    Die(usize),
    /// The host with this index leaves the shards.
    Leave(usize),
    /// All ranks have left in the plan's move with this index, and the shards stop.
    Stop(usize),
    /// The plan's move with this index ends: the jobs continue at new shards.
    Move(usize),
    /// The host with index `at` joins the new shards in the plan's move with index `number`.
    Join { number: usize, at: usize },
    /// A stranger's datagram arrives at some host.
    Foreign,
}

impl<'a> Cluster<'a> {
    /// Creates a cluster that runs `plan` while `checkers` observe it.
    #[must_use]
    pub fn new(plan: &'a Plan, checkers: Checkers) -> Self {
        let random = Random::new(plan.seed);
        Self {
            plan,
            engine: Engine::default(),
            hosts: plan.hosts().map(|host| state(plan, host)).collect(),
            faults: Faults::new(plan.faults.clone(), random.child("faults")),
            strangers: Strangers::new(plan.noise, random.child("strangers")),
            checkers,
            trace: mix(plan.seed),
            totals: Totals::default(),
            preparations: 0,
            deaths: 0,
            moved: 0,
            lives: Vec::new(),
            turns: random.child("turns"),
        }
    }

    /// Runs `plan` under all checkers.
    ///
    /// # Errors
    /// Returns the first violation of an invariant.
    pub fn check(plan: &'a Plan) -> Result<Run, Violation> {
        Cluster::new(plan, Checkers::of(plan)).run()
    }

    /// Runs until every op has ended and every datagram has arrived.
    ///
    /// # Errors
    /// Returns the first violation of an invariant.
    pub fn run(mut self) -> Result<Run, Violation> {
        self.begin();
        let mut done_at = None;
        while let Some(event) = self.engine.next_event() {
            self.happen(event)?;
            self.checkers.verdict()?;
            let now = self.engine.now();
            if self.engine.scheduled() > MAX_EVENTS {
                return Invariant::I5
                    .broken(format!("the run has not ended after {MAX_EVENTS} events"));
            }
            if done_at.is_none() && self.is_done() {
                done_at = Some(now);
            }
            if done_at.is_some_and(|done_at| now > done_at + MAX_AFTERMATH) {
                return Invariant::I5.broken("events continue long after all ops have ended");
            }
        }
        self.checkers.conclude()?;
        Ok(self.conclude(done_at))
    }

    fn begin(&mut self) {
        for at in 0..self.hosts.len() {
            self.rouse(at, Picos::ZERO);
        }
        for (number, pause) in self.plan.pauses.iter().enumerate() {
            self.engine.schedule(pause.at, Event::Pause(number));
        }
        for (number, death) in self.plan.moves.iter().enumerate() {
            self.engine.schedule(death.at, Event::Die(number));
        }
        if let Some(pause) = self.strangers.next_pause() {
            self.engine.schedule(pause, Event::Foreign);
        }
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.engine.now();
        match event {
            Event::AtSwitch { from, job, datagram, marked } => {
                self.at_switch(from, job, datagram, marked);
            }
            Event::Spread { job, datagram, marked } => self.spread(job, &datagram, marked),
            Event::Enter { to, bytes, marked } => self.enter(to, bytes, marked),
            Event::Arrive { to, bytes, marked } => {
                self.totals.marked += u64::from(marked);
                if self.hosts[to].receive(bytes, marked) {
                    self.totals.received += 1;
                    self.rouse(to, now);
                } else {
                    self.totals.dropped += 1;
                }
            }
            Event::Wake(at) => return self.wake(at),
            Event::Pause(number) => {
                let pause = self.plan.pauses[number];
                self.hosts[self.plan.place(pause.host)].occupy(now + pause.lasts);
            }
            Event::Die(number) => self.die(number),
            Event::Leave(at) => self.hosts[at].leave(),
            Event::Stop(number) => self.stop(number),
            Event::Join { number, at } => self.join(number, at),
            Event::Move(number) => self.move_jobs(number),
            Event::Foreign => self.foreign(),
        }
        Ok(())
    }

    /// Schedules a wake-up of the host with index `at` for `when`, or for the earliest later time
    /// at which the host can act.
    fn rouse(&mut self, at: usize, when: Picos) {
        let host = &mut self.hosts[at];
        let when = host.acts_at(when);
        if when < Picos::NEVER && host.wakes_at.is_none_or(|wakes_at| when < wakes_at) {
            host.wakes_at = Some(when);
            self.engine.schedule(when, Event::Wake(at));
        }
    }

    fn wake(&mut self, at: usize) -> Result<(), Violation> {
        let now = self.engine.now();
        let host = &mut self.hosts[at];
        if host.wakes_at != Some(now) {
            return Ok(());
        }
        host.wakes_at = None;
        if host.acts_at(now) != now {
            // The host is busy, so the wake-up moves to the time at which it can act.
            self.rouse(at, now);
            return Ok(());
        }
        let mut out = Vec::new();
        host.act(now, self.plan, &mut out, &mut self.checkers);
        if let Role::Worker(worker) = &host.role
            && worker.spins()
        {
            return Invariant::I5
                .broken("a rank's timer was due again immediately too many times in a row");
        }
        self.post(at, out);
        self.pass_failures(at);
        let due = self.hosts[at].next_due(self.plan);
        self.rouse(at, due.max(now));
        Ok(())
    }

    /// Reports the ops that have failed at a shard to the other shards, as an aggregator does.
    fn pass_failures(&mut self, at: usize) {
        let now = self.engine.now();
        for (job, failed) in self.hosts[at].poll_failed() {
            for other in (0..self.hosts.len()).filter(|other| *other != at) {
                if self.hosts[other].tell_failed(job, failed) {
                    self.rouse(other, now);
                }
            }
        }
    }

    /// Sends datagrams from the host with index `at`.
    fn post(&mut self, at: usize, out: Vec<(usize, Datagram)>) {
        let now = self.engine.now();
        let from = self.hosts[at].host;
        for (job, datagram) in out {
            self.totals.sent += 1;
            self.trace = trace(self.trace, now, at, &datagram);
            let len = datagram.bytes.len() as u64 + OVERHEAD_BYTES;
            match self.hosts[at].up.send(now, len) {
                Passage::Dropped => self.totals.dropped += 1,
                Passage::Arrives { at, marked } => {
                    self.engine.schedule(at, Event::AtSwitch { from, job, datagram, marked });
                }
            }
        }
    }

    fn at_switch(&mut self, from: Host, job: usize, datagram: Datagram, marked: bool) {
        let now = self.engine.now();
        let Some(fate) = self.faults.judge(now, Leg::Up, from, &datagram.bytes) else {
            self.totals.lost += 1;
            return;
        };
        if let Some(late) = fate.copy {
            self.totals.doubled += 1;
            let datagram = datagram.clone();
            self.engine.schedule(now + late, Event::Spread { job, datagram, marked });
        }
        if fate.late == Picos::ZERO {
            return self.spread(job, &datagram, marked);
        }
        self.totals.delayed += 1;
        self.engine.schedule(now + fate.late, Event::Spread { job, datagram, marked });
    }

    fn spread(&mut self, job: usize, datagram: &Datagram, marked: bool) {
        let worker = |rank| Host::Worker { job, rank: Rank(rank) };
        match datagram.to {
            Endpoint::Worker(rank) => self.forward(worker(rank), &datagram.bytes, marked),
            Endpoint::Shard(shard) => self.forward(Host::Shard(shard), &datagram.bytes, marked),
            Endpoint::Workers => {
                for rank in 0..self.plan.jobs[job].world {
                    self.forward(worker(rank), &datagram.bytes, marked);
                }
            }
        }
    }

    fn forward(&mut self, host: Host, bytes: &Rc<[u8]>, marked: bool) {
        let now = self.engine.now();
        let to = self.plan.place(host);
        let Some(fate) = self.faults.judge(now, Leg::Down, host, bytes) else {
            self.totals.lost += 1;
            return;
        };
        if let Some(late) = fate.copy {
            self.totals.doubled += 1;
            let bytes = Rc::clone(bytes);
            self.engine.schedule(now + late, Event::Enter { to, bytes, marked });
        }
        if fate.late == Picos::ZERO {
            return self.enter(to, Rc::clone(bytes), marked);
        }
        self.totals.delayed += 1;
        let bytes = Rc::clone(bytes);
        self.engine.schedule(now + fate.late, Event::Enter { to, bytes, marked });
    }

    fn enter(&mut self, to: usize, bytes: Rc<[u8]>, marked: bool) {
        let len = bytes.len() as u64 + OVERHEAD_BYTES;
        match self.hosts[to].down.send(self.engine.now(), len) {
            Passage::Dropped => self.totals.dropped += 1,
            Passage::Arrives { at, marked: here } => {
                let marked = marked || here;
                self.engine.schedule(at, Event::Arrive { to, bytes, marked });
            }
        }
    }

    /// Begins a move: the shards die, or serve on until the ranks have left one by one. If the plan
    /// prepares the ranks, first waits until all of them are ready.
    fn die(&mut self, number: usize) {
        if self.plan.prepares && !(self.moved == number && self.may_hand_over(number)) {
            self.engine.schedule(self.engine.now() + PREPARE_POLL, Event::Die(number));
            return;
        }
        self.deaths = number + 1;
        let spread = self.plan.moves[number].spread;
        if spread == Picos::ZERO {
            return self.stop(number);
        }
        for at in self.workers() {
            let when = self.turn(spread);
            self.engine.schedule(when, Event::Leave(at));
        }
        self.engine.schedule(self.engine.now() + spread, Event::Stop(number));
    }

    /// Returns the indices of the workers' hosts, which come before those of the shards.
    fn workers(&self) -> std::ops::Range<usize> {
        0..self.hosts.len() - usize::from(self.plan.network.shards)
    }

    /// Draws the time at which one of several ranks acts within `spread`.
    fn turn(&mut self, spread: Picos) -> Picos {
        self.engine.now() + Picos(self.turns.below(spread.0.max(1)))
    }

    /// Stops the shards until the jobs move. The shards lose their state.
    fn stop(&mut self, number: usize) {
        let again = self.engine.now() + self.plan.moves[number].lasts;
        for host in &mut self.hosts {
            if matches!(host.role, Role::Shard(_)) {
                host.occupy(again);
                host.forget();
            }
        }
        self.engine.schedule(again, Event::Move(number));
    }

    /// Prepares all ranks to move, or cancels that if the plan still has to. Returns whether the
    /// jobs may move now.
    fn may_hand_over(&mut self, number: usize) -> bool {
        self.preparations += 1;
        // Every second step cancels what the step before has prepared.
        let cancels = number == 0 && self.preparations <= 2 * self.plan.cancels;
        if cancels && self.preparations.is_multiple_of(2) {
            for at in 0..self.hosts.len() {
                let Role::Worker(worker) = &mut self.hosts[at].role else { continue };
                worker.node.machine.stop_keeping();
                let due = self.hosts[at].next_due(self.plan).max(self.engine.now());
                self.rouse(at, due);
            }
            return false;
        }
        self.is_prepared() && !cancels
    }

    /// Prepares all ranks to move. Returns whether all are ready.
    fn is_prepared(&mut self) -> bool {
        let mut all_ready = true;
        for at in 0..self.hosts.len() {
            let Role::Worker(worker) = &mut self.hosts[at].role else { continue };
            worker.node.machine.prepare_to_move();
            all_ready &= worker.node.machine.is_ready_to_move();
            // The rank may have to acknowledge, or to ask, although it rests.
            let due = self.hosts[at].next_due(self.plan).max(self.engine.now());
            self.rouse(at, due);
        }
        all_ready
    }

    /// Moves every job to new shards, starting at the oldest op whose results some rank may lack.
    fn move_jobs(&mut self, number: usize) {
        self.moved = number + 1;
        self.lives = (0..self.plan.jobs.len()).map(|job| self.next_life(job, number)).collect();
        for at in self.workers().end..self.hosts.len() {
            self.begin_life(at);
        }
        for at in self.workers() {
            match self.plan.moves[number].spread {
                Picos::ZERO => self.begin_life(at),
                spread => {
                    let when = self.turn(spread);
                    self.engine.schedule(when, Event::Join { number, at });
                }
            }
        }
    }

    /// Makes a rank join the new shards, unless the next move has begun.
    fn join(&mut self, number: usize, at: usize) {
        if self.deaths == number + 1 {
            self.begin_life(at);
        }
    }

    /// Starts the host with index `at` on the jobs' present lives.
    fn begin_life(&mut self, at: usize) {
        let now = self.engine.now();
        self.hosts[at].begin_life(now, self.plan, &self.lives, &mut self.checkers);
        self.rouse(at, now);
    }

    /// Returns the life that a job begins after the plan's move with index `number`.
    fn next_life(&self, job: usize, number: usize) -> Life {
        let of_job = self.hosts.iter().filter_map(|host| match &host.role {
            Role::Worker(worker) if worker.job == job => Some(worker.first_kept()),
            _ => None,
        });
        let first_op = of_job.max().unwrap_or(OpId(0));
        Life { number: u8::try_from(number + 1).expect("a plan has few deaths"), first_op }
    }

    /// Delivers a stranger's datagram. It bypasses links and sockets, so that it uses none of their
    /// capacity.
    fn foreign(&mut self) {
        if self.is_done() {
            return;
        }
        let now = self.engine.now();
        let at = self.strangers.victim(self.hosts.len());
        let host = &mut self.hosts[at];
        if host.acts_at(now) == now {
            self.totals.foreign += 1;
            let bytes = self.strangers.imitate(host.last.as_ref());
            let mut out = Vec::new();
            host.act_foreign(now, &bytes, &mut out, &mut self.checkers);
            self.post(at, out);
            let due = self.hosts[at].next_due(self.plan);
            self.rouse(at, due.max(now));
        }
        if let Some(pause) = self.strangers.next_pause() {
            self.engine.schedule(now + pause, Event::Foreign);
        }
    }

    /// Returns whether every op has ended at every rank that never dies.
    fn is_done(&self) -> bool {
        self.hosts.iter().all(HostState::is_done)
    }

    fn conclude(mut self, done_at: Option<Picos>) -> Run {
        let EventCounts { folds, duplicates, fragments_again: again, asks, probes, .. } =
            *self.checkers.counts();
        let events = self.engine.scheduled();
        let totals = Totals { events, folds, again, duplicates, asks, probes, ..self.totals };
        let mut ended = BTreeMap::new();
        for host in &mut self.hosts {
            if let Role::Worker(worker) = &mut host.role {
                let machine = worker.machine();
                let ops = worker.ended.drain(..);
                ended.extend(ops.map(|(op, ended)| ((machine, op), ended)));
            }
        }
        let took = done_at.unwrap_or_else(|| self.engine.now());
        Run { trace: self.trace, ended, took, totals }
    }
}

fn state(plan: &Plan, host: Host) -> HostState {
    let network = &plan.network;
    match host {
        Host::Worker { job, rank } => {
            let role = Role::Worker(Box::new(WorkerHost::new(plan, job, rank)));
            let dies_at = plan.jobs[job].dies(rank).unwrap_or(Picos::NEVER);
            HostState::new(host, network.worker, dies_at, role)
        }
        Host::Shard(shard) => {
            let lives = vec![Life::FIRST; plan.jobs.len()];
            let role = Role::Shard(ShardHost::new(plan, shard, &lives, Picos::ZERO));
            HostState::new(host, network.shard, Picos::NEVER, role)
        }
    }
}

/// Extends a trace by one fact: the host with index `at` sent `datagram` at `now`.
fn trace(hash: u64, now: Picos, at: usize, datagram: &Datagram) -> u64 {
    let bytes = datagram.bytes.len() as u64;
    let words = datagram.bytes.as_chunks().0.iter().take(Header::LEN / 8);
    let header = words.fold(0, |hash, word| mix(hash ^ u64::from_le_bytes(*word)));
    [now.0, at as u64, bytes, header].iter().fold(hash, |hash, word| mix(hash ^ word))
}

/// Bytes that Ethernet, IP and UDP add to a datagram, including the preamble and the gap between
/// frames.
pub const OVERHEAD_BYTES: u64 = 66;
/// The number of events after which a run counts as a livelock.
const MAX_EVENTS: u64 = 5_000_000;
/// How often to check whether all ranks are ready to move.
const PREPARE_POLL: Picos = Picos::from_millis(1);
/// How long events may continue after the last op has ended.
const MAX_AFTERMATH: Picos = Picos::from_millis(30_000);
