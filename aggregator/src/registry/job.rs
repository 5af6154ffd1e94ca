//! A job: its ranks, its state, and its grant.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use racksum_proto::aggregator::Config;
use racksum_proto::auth::{DataAuth, Key};
use racksum_proto::control::{
    CallerId, FromAggregator, Join, LostRank, MAX_OPS, OnRankLoss, POOL_SLOTS, Welcome,
};
use racksum_proto::counted::counted;
use racksum_proto::geometry::{Fragmentation, WINDOW_BYTES};
use racksum_proto::ids::{Generation, JobId, OpId, Rank};
use racksum_proto::job_name::JobName;
use racksum_proto::status::{JobState, JobStatus, RankStatus, Transfers};
use racksum_proto::wire::{Flags, Header};
use tokio::sync::watch;
use tokio::time::Instant;

use super::member::{Left, Member, Return};
use super::parent_link::ParentLink;
use super::planned_move::PlannedMove;
use super::progress::Progress;
use crate::config::Config as AggregatorConfig;
use crate::job_keys::JobKeys;
use crate::quotas::Tenant;
use crate::shard::ShardHandle;

/// A job that is gathering its ranks or running.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: JobId,
    /// The identity that opened the job: the name in its first rank's certificate.
    pub(super) identity: Option<String>,
    /// The callers that have joined this generation, the opener first. Only the most recent of
    /// those that have disconnected are kept.
    pub(super) callers: Vec<CallerId>,
    /// The secret that all generations of the job share, if any.
    pub(super) secret: Option<Key>,
    /// The job's granted share of each shard's packet buffers, in per cent.
    pub(super) share: f64,
    pub(super) generation: Generation,
    pub(super) world: u16,
    pub(super) lanes: u8,
    pub(super) on_rank_loss: OnRankLoss,
    /// Whether any rank joined with a standby to which the job can move, or was lost or left when
    /// it knew one.
    pub(super) may_move: bool,
    /// The lost ranks that the job continues without, in the order of their loss.
    pub(super) absent: Vec<LostRank>,
    /// The ranks that have left, with the op at which each may rejoin.
    pub(super) left: BTreeMap<u16, Left>,
    /// The ranks that are rejoining, each with its caller.
    pub(super) returns: BTreeMap<u16, Return>,
    pub(super) last_return: u64,
    /// The channel for the job's progress, while it is watched.
    pub(super) progress: Option<watch::Sender<Progress>>,
    /// The size in bytes of the smallest receive buffer among the job's members when the job
    /// started.
    pub(super) least_buffer: u32,
    /// The grant and the keys, once the job has started.
    pub(super) granted: Option<(Welcome, JobKeys)>,
    /// The ranks that have moved to another aggregator. `departed_at` is the time at which the
    /// first of them moved.
    pub(super) departed: Vec<u16>,
    pub(super) departed_at: Option<Instant>,
    /// The move that an operator has asked for, if it is in progress.
    pub(super) planned: Option<PlannedMove>,
    /// The first op at this aggregator, if the job has moved to it.
    pub(super) moved_at: Option<OpId>,
    /// The index of this aggregator among the job's aggregators, and their number.
    pub(super) stripe: (u8, u8),
    /// The members by rank. An aggregator has the place of the first rank that it joined for.
    pub(super) members: Vec<Option<Member>>,
    /// The places of the members that have a number in datagrams, in the order of those numbers.
    pub(super) order: Vec<u16>,
    /// The link to the parent, if this aggregator has one.
    pub(super) parent: Option<ParentLink>,
    pub(super) state: JobState,
    pub(super) opened: Instant,
}

impl Job {
    /// Checks that a rank may still join the job, and that its join matches the parameters that the
    /// job was opened with.
    pub(super) fn check(&self, join: &Join) -> Result<(), String> {
        let name = &join.job;
        self.check_secret(join)?;
        if self.is_absent(join.rank) {
            return Err(given_up(name, join.rank));
        }
        if self.state != JobState::Gathering && self.left.contains_key(&join.rank) {
            return Err(format!(
                "rank {} has left job {name:?}; a rank that left between two ops can join again \
                 with `rejoin`; otherwise restart all ranks with a greater `generation`",
                join.rank
            ));
        }
        if self.state != JobState::Gathering {
            return Err(format!(
                "job {name:?} is running in generation {}, begun by {}, and all its ranks ({}) \
                 have joined; choose another `job`, wait until it ends, or restart all its ranks \
                 with a greater `generation`",
                self.generation.0,
                self.begun_by(),
                self.world
            ));
        }
        // A job without results may have lost its earlier aggregator before all ranks learned that
        // the job had started. Joins with and without a resume at op 0 are therefore compatible.
        let (here, there) = (self.moved_at, join.resume.as_ref().map(|resume| resume.first_op));
        if here.is_some() != there.is_some() && here.max(there) != Some(OpId(0)) {
            let (new, old) = ("starts from its first op", "continues from another aggregator");
            let (one, other) = if join.resume.is_some() { (old, new) } else { (new, old) };
            return Err(format!(
                "rank {} of job {name:?} {one}, but the job here {other}; restart all ranks with a \
                 greater `generation`",
                join.rank
            ));
        }
        let (mine, theirs) = (self.on_rank_loss.name(), join.on_rank_loss.name());
        if mine != theirs {
            return Err(format!(
                "job {name:?} was opened with `on_rank_loss` {mine}, but rank {} has {theirs}; set \
                 the same value at all ranks",
                join.rank
            ));
        }
        self.check_shape(join)?;
        self.check_tree(join)?;
        if join.resume.as_ref().is_some_and(|resume| !self.has_names_for(resume)) {
            return Err(too_many_absent());
        }
        Ok(())
    }

    /// Checks that the world, the lanes and the aggregators of a join match those of the job.
    pub(super) fn check_shape(&self, join: &Join) -> Result<(), String> {
        let name = &join.job;
        let (stripe, its) = (self.stripe, join.stripe);
        let order = "; set the same aggregators in the same order at all ranks";
        for (what, mine, theirs, advice) in [
            ("world", self.world, join.world, "; set the same value at all ranks"),
            ("lanes", self.lanes.into(), join.lanes.into(), "; set the same value at all ranks"),
            ("aggregator count", stripe.1.into(), its.1.into(), order),
            ("aggregator index", stripe.0.into(), its.0.into(), order),
        ] {
            if mine != theirs {
                return Err(format!(
                    "job {name:?} was opened with {what} {mine}, but rank {} has {theirs}{advice}",
                    join.rank
                ));
            }
        }
        Ok(())
    }

    /// Returns the ranks that have joined neither here nor at another aggregator of the tree, and
    /// those that have withdrawn. Ranks that are known to be lost are not included.
    pub(super) fn missing(&self) -> Vec<u16> {
        if let Some(missing) = self.parent.as_ref().and_then(|parent| parent.missing.as_ref()) {
            return missing.clone();
        }
        let members = self.members.iter().flatten().filter(|member| !member.withdraws);
        let here: BTreeSet<_> = members.flat_map(Member::ranks).collect();
        let ranks = 0..self.world;
        ranks.filter(|rank| !here.contains(rank) && !self.is_absent(*rank)).collect()
    }

    /// Returns the member that includes this rank.
    pub(super) fn member_with(&self, rank: u16) -> Option<&Member> {
        self.members.iter().flatten().find(|member| member.ranks().any(|other| other == rank))
    }

    /// Assigns the members their numbers in datagrams. Outside a tree, ranks keep their own
    /// numbers. In a tree, members are numbered in the order of their smallest ranks.
    pub(super) fn number(&mut self) {
        self.order = (0..self.world).collect();
        if self.is_of_tree() {
            let members = (0..).zip(&self.members);
            let mut named: Vec<(u16, u16)> =
                members.filter_map(|(at, member)| Some((member.as_ref()?.name(), at))).collect();
            named.sort_unstable();
            self.order = named.into_iter().map(|(_, at)| at).collect();
        }
    }

    /// Returns the number that the member at this place has in datagrams.
    pub(super) fn number_of(&self, at: u16) -> Option<Rank> {
        let number = self.order.iter().position(|other| *other == at)?;
        u16::try_from(number).ok().map(Rank)
    }

    /// Returns the members in the order of their numbers; `None` for a lost member.
    pub(super) fn numbered(&self) -> impl Iterator<Item = Option<&Member>> + '_ {
        self.order.iter().map(|at| self.members[usize::from(*at)].as_ref())
    }

    /// Returns the job as a tenant, with its granted share.
    pub(super) fn tenant<'a>(&'a self, config: &AggregatorConfig, name: &'a JobName) -> Tenant<'a> {
        let tenant = Tenant::new(config, name, self.identity.as_deref(), (self.world, self.lanes));
        Tenant { granted: Some(self.share), ..tenant }
    }

    /// Returns the job's status without its progress.
    pub(super) fn status(&self, name: &JobName) -> JobStatus {
        let rank = |member: &Member| RankStatus {
            rank: member.join.rank,
            number: self.number_of(member.join.rank).map_or(0, |number| number.0),
            rack: member.rack(),
            addr: member.data_addr(0).to_string(),
            identity: member.identity.clone(),
            next_op: 0,
            opened: 0,
            delivered: 0,
            silent_ms: 0,
            behind: false,
            contributed: Transfers::default(),
            results: Transfers::default(),
            busy_ms: 0,
            waited_ms: 0,
            round_trip_us: None,
            own: member.own,
        };
        JobStatus {
            job: name.name.clone(),
            group: name.group.clone(),
            id: self.id.0,
            generation: self.generation.0,
            world: self.world,
            lanes: self.lanes,
            state: self.state.name().to_owned(),
            age_ms: millis(self.opened),
            missing: self.missing(),
            absent: self.absent.iter().map(|absent| absent.rank).collect(),
            moving_to: self.planned.as_ref().map(|planned| planned.to.to_string()),
            stalled_ms: None,
            ranks: self.members.iter().flatten().map(rank).collect(),
        }
    }

    /// Sends a message to all members.
    pub(super) fn send_to_all(&self, message: &FromAggregator) {
        self.members.iter().flatten().for_each(|member| member.send(message.clone()));
    }

    /// Returns, by number, whether each member receives multicast; false for lost members.
    pub(super) fn receives_multicast(&self) -> Vec<bool> {
        self.numbered()
            .map(|member| member.is_some_and(|member| member.receives_multicast))
            .collect()
    }

    /// Returns, by number, the data address of each member at a shard; the unspecified address for
    /// lost members.
    pub(super) fn data_addrs(&self, shard: usize) -> Vec<SocketAddr> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let addr = |member: Option<&Member>| member.map_or(nowhere, |it| it.data_addr(shard));
        self.numbered().map(addr).collect()
    }

    /// Returns the job's grant: the welcome for its ranks, and the configuration of each shard.
    pub(super) fn grant(
        &self,
        pool_slots: u32,
        auth: DataAuth,
        handles: &[ShardHandle],
    ) -> Result<(Welcome, Vec<Config>), String> {
        if pool_slots < *POOL_SLOTS.start() {
            return Err(format!(
                "{} with {} would take more packet buffers than the job's share holds, or than \
                 its other groups leave free; raise --pool-mib or lower --max-jobs at the \
                 aggregator, or raise share_percent of the job's [[admit]] rule",
                counted(self.order.len(), "rank"),
                counted(self.lanes, "lane")
            ));
        }
        let members = || self.members.iter().flatten();
        let joins = members().flat_map(Member::joins);
        let datagram = joins.map(|join| usize::from(join.max_datagram)).min().unwrap_or(0);
        let parent = self.parent.as_ref().and_then(|parent| parent.granted.as_ref());
        // Windows are cut as at the parent, both for the sums that go to the parent and for the
        // results that go to the ranks.
        let cut = match parent {
            Some((_, parent)) => Fragmentation::new(parent.fragment_payload.into()),
            None => fragmentation_of(datagram),
        };
        let too_small = || format!("datagrams of {datagram} bytes are too small for a window");
        let cut = cut.ok_or_else(too_small)?.with_trailer(auth);
        let buffers = members().map(|member| member.join.receive_buffer);
        let lowest = buffers.min().unwrap_or(0) as usize;
        let receive = handles.iter().map(|shard| shard.receive_buffer).min().unwrap_or(0);
        let most = if cut.payload() == WINDOW_BYTES { MAX_LOCAL_IN_FLIGHT } else { usize::MAX };
        let senders = self.order.len() + usize::from(self.parent.is_some());
        let in_flight = (receive / senders.max(1)).clamp(2 * WINDOW_BYTES, most);
        let mine = u8::try_from(handles.len()).unwrap_or(u8::MAX);
        let (place, aggregators) = self.stripe;
        let shards = mine.checked_mul(aggregators).ok_or_else(|| {
            format!(
                "{aggregators} aggregators with {mine} shards each exceed the limit of 255 shards; \
                 lower --shards, or use fewer aggregators"
            )
        })?;
        let first = mine * place;
        let welcome = Welcome {
            job: self.id,
            rank: Rank(0),
            rack: Vec::new(),
            data_ports: handles.iter().map(|shard| shard.addr.port()).collect(),
            pool_slots,
            max_ops: MAX_OPS,
            fragment_payload: u16::try_from(cut.payload()).unwrap_or(u16::MAX),
            in_flight: u32::try_from(in_flight).unwrap_or(u32::MAX),
            first_op: self.moved_at.unwrap_or(OpId(0)),
            group: None,
            data_auth: auth,
            keys: None,
            sealed: Vec::new(),
            may_move: self.may_move,
            in_tree: self.is_of_tree(),
        };
        let config = |shard| Config {
            job: self.id,
            generation: self.generation,
            world: u16::try_from(self.order.len()).unwrap_or(self.world),
            lanes: self.lanes,
            shard,
            shards,
            pool_slots,
            max_ops: MAX_OPS,
            cut,
            // The results of all streams share each rank's receive buffer.
            results_in_flight: lowest / usize::from(shards) / usize::from(self.lanes.max(1)) / 2,
            moved_at: self.moved_at,
            weight: self.has_racks().then_some(self.world),
            has_parent: self.parent.is_some(),
        };
        Ok((welcome, (first..first + mine).map(config).collect()))
    }
}

/// Returns how a window is cut into datagrams of at most this size, or `None` if the size is too
/// small.
pub(super) fn fragmentation_of(datagram: usize) -> Option<Fragmentation> {
    let payload = datagram.saturating_sub(Header::LEN + DataAuth::MAX_TRAILER);
    Fragmentation::new(payload.min(WINDOW_BYTES))
}

/// Returns the group that a job's results are multicast to. The address identifies the job within
/// an aggregator, and the port identifies the aggregator on its network.
pub(super) fn group_of(id: JobId, shard: SocketAddr) -> SocketAddr {
    let [a, b, c, d] = id.0.to_be_bytes();
    let ip = match shard.ip() {
        // Organisation-local scope, RFC 2365.
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(239, 192 + b % 4, c, d)),
        // Link-local scope, transient, RFC 4291.
        IpAddr::V6(_) => {
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            IpAddr::V6(Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0x7273, high, low))
        }
    };
    SocketAddr::new(ip, shard.port())
}

/// The maximum number of bytes that a rank may have in flight towards a shard if a datagram holds a
/// whole window, as between processes of one host. Copying limits the speed in this case, so the
/// data in flight of two ranks should stay in the processor's cache. Other links use small
/// datagrams, and recover from losses sooner if more bytes are in flight.
const MAX_LOCAL_IN_FLIGHT: usize = 1 << 19;

/// Returns the error for a job that has lost too many ranks to continue.
pub(super) fn too_many_absent() -> String {
    format!(
        "the job has lost more than {} ranks, the most that a job can continue without; restart \
         all ranks with a greater `generation`",
        Flags::MAX_ABSENT
    )
}

/// Returns why a rank that the others have lost can no longer join the job.
pub(super) fn given_up(job: &JobName, rank: u16) -> String {
    format!(
        "job {job:?} lost rank {rank} and continues without it; to include it again, restart all \
         ranks with a greater `generation`"
    )
}

/// Returns the number of milliseconds since an instant.
pub(super) fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
