//! Random clusters of three zones, each with one thing that labels do not tell.

use std::fmt;

use fastrand::Rng;
use racksum_placer::inventory::{Amount, Host as Listed, Inventory};
use serde_json::{Value, json};

/// A cluster, and the job to place in it.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    pub(crate) flaw: Flaw,
    pub(crate) hosts: Vec<SceneHost>,
    pub(crate) uplink_mbit: [u32; ZONES],
    pub(crate) ranks: u32,
}

/// The number of ranks on each host, and the host of the aggregator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seats {
    pub(crate) ranks: Vec<u32>,
    pub(crate) aggregator: usize,
}

/// A host as it is, and the zone that its label names.
#[derive(Debug, Clone)]
pub(crate) struct SceneHost {
    pub(crate) name: String,
    pub(crate) mbit: u32,
    /// Share of the datagrams that are lost in each direction.
    pub(crate) loss: f64,
    /// Round-trip time that the host adds, in milliseconds.
    pub(crate) delay_ms: f64,
    pub(crate) label: usize,
    pub(crate) free_gpus: u32,
}

/// The thing in a scene that labels do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// All links are equal and all labels are right.
    None,
    /// One host is slow.
    Host(usize),
    /// One host loses datagrams.
    Lossy(usize),
    /// The uplink of a zone is slow.
    Uplink(usize),
    /// The label of a host names another zone than its own.
    Label(usize),
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("uniform"),
            Self::Host(host) => write!(f, "h{host} slow"),
            Self::Lossy(host) => write!(f, "h{host} lossy"),
            Self::Uplink(zone) => write!(f, "uplink of {} slow", ZONE_NAMES[*zone]),
            Self::Label(host) => write!(f, "label of h{host} wrong"),
        }
    }
}

impl Scene {
    /// Draws a scene: zones at 100, 40 and 10 Mbit/s in random order, and a flaw of each kind in
    /// turn.
    pub(crate) fn draw(number: usize, random: &mut Rng) -> Self {
        let mut rates = RATES;
        random.shuffle(&mut rates);
        let mut scene = Self::plain(rates, random);
        let (host, zone) = (random.usize(..scene.hosts.len()), random.usize(..ZONES));
        scene.flaw = match number % 4 {
            0 => Flaw::Host(host),
            1 => Flaw::Uplink(zone),
            2 => Flaw::Label(host),
            _ => Flaw::Lossy(host),
        };
        match scene.flaw {
            Flaw::None => {}
            Flaw::Host(host) => scene.hosts[host].mbit = SLOW_MBIT,
            Flaw::Lossy(host) => scene.hosts[host].loss = LOSS,
            Flaw::Uplink(zone) => scene.uplink_mbit[zone] = SLOW_MBIT,
            Flaw::Label(host) => {
                let other = random.usize(1..ZONES);
                scene.hosts[host].label = (scene.hosts[host].label + other) % ZONES;
            }
        }
        scene
    }

    /// Draws a scene in which all links have the same rate and all labels are right.
    pub(crate) fn uniform(random: &mut Rng) -> Self {
        Self::plain([RATES[0]; ZONES], random)
    }

    /// Returns a scene in which hosts have different rates, losses and delays, to compare them with
    /// what the probe measures.
    pub(crate) fn varied() -> Self {
        let mut scene = Self::plain([RATES[0]; ZONES], &mut Rng::with_seed(1));
        let hosts = [
            (100, 0.0, 0.0),
            (100, 0.0, 0.0),
            (100, 0.0, 0.0),
            (60, 0.0, 0.0),
            (100, 0.01, 0.0),
            (40, 0.05, 0.0),
            (25, 0.0, 0.0),
            (100, 0.0, 0.0),
            (10, 0.0, 0.0),
            (80, 0.02, 0.0),
            (50, 0.0, 5.0),
            (50, 0.0, 20.0),
        ];
        for (host, (mbit, loss, delay_ms)) in scene.hosts.iter_mut().zip(hosts) {
            (host.mbit, host.loss, host.delay_ms) = (mbit, loss, delay_ms);
        }
        scene
    }

    fn plain(zone_mbit: [u32; ZONES], random: &mut Rng) -> Self {
        let host = |number: usize, free_gpus: u32| SceneHost {
            name: format!("h{number}"),
            mbit: zone_mbit[number / HOSTS_PER_ZONE],
            loss: 0.0,
            delay_ms: 0.0,
            label: number / HOSTS_PER_ZONE,
            free_gpus,
        };
        let hosts: Vec<_> =
            (0..ZONES * HOSTS_PER_ZONE).map(|number| host(number, random.u32(1..=2))).collect();
        let ranks = random.u32(3..=5);
        Self { flaw: Flaw::None, hosts, uplink_mbit: [RATES[0]; ZONES], ranks }
    }

    /// Returns what an operator knows of the cluster: labels and nominal rates.
    pub(crate) fn inventory(&self, address: impl Fn(usize) -> String) -> Inventory {
        let host = |(number, host): (usize, &SceneHost)| Listed {
            name: host.name.clone(),
            address: Some(address(number)),
            labels: [("zone".into(), ZONE_NAMES[host.label].into())].into(),
            nic_mbit: RATES[0].into(),
            cpus: Amount::default(),
            gpus: [("gpu".into(), Amount { total: 2, used: 2 - host.free_gpus })].into(),
            aggregator: None,
            taints: vec![],
            max_aggregators: None,
        };
        Inventory {
            levels: vec!["zone".into()],
            hosts: self.hosts.iter().enumerate().map(host).collect(),
        }
    }

    /// Returns the job of the scene, which reduces `bytes` bytes a step, as a job file.
    pub(crate) fn job(&self, bytes: u64) -> Value {
        json!({ "name": "scene", "ranks": self.ranks, "gpus_per_rank": 1, "bytes": bytes })
    }

    /// Returns the hosts of the ranks and of the aggregator that a best fit by labels chooses: the
    /// zone with the fewest free GPUs that has enough, and in it the hosts in their order. The
    /// aggregator joins the first rank. Without such a zone, it fills the zones in their order.
    pub(crate) fn best_fit(&self) -> Seats {
        let of = |zone: usize| move |host: &&SceneHost| host.label == zone;
        let free =
            |zone: usize| self.hosts.iter().filter(of(zone)).map(|h| h.free_gpus).sum::<u32>();
        let fitting = (0..ZONES).filter(|zone| free(*zone) >= self.ranks).min_by_key(|z| free(*z));
        let mut left = self.ranks;
        let mut ranks = vec![0; self.hosts.len()];
        let mut order: Vec<_> = (0..self.hosts.len()).collect();
        order.sort_by_key(|host| (self.hosts[*host].label, *host));
        for host in order {
            if fitting.is_none_or(|zone| self.hosts[host].label == zone) {
                ranks[host] = left.min(self.hosts[host].free_gpus);
                left -= ranks[host];
            }
        }
        let first = ranks.iter().position(|ranks| *ranks > 0).unwrap_or(0);
        Seats { ranks, aggregator: first }
    }

    /// Draws a placement that differs from another one by a move of the aggregator to another host
    /// with ranks or of a rank to another host with a free GPU.
    pub(crate) fn neighbour(&self, seats: &Seats, random: &mut Rng) -> Seats {
        let mut near = seats.clone();
        let hosts = || 0..self.hosts.len();
        let used: Vec<_> =
            hosts().filter(|h| seats.ranks[*h] > 0 && *h != seats.aggregator).collect();
        if random.bool() && !used.is_empty() {
            near.aggregator = used[random.usize(..used.len())];
        } else {
            let from: Vec<_> = hosts().filter(|host| seats.ranks[*host] > 0).collect();
            let from = from[random.usize(..from.len())];
            let has_room = |h: &usize| *h != from && seats.ranks[*h] < self.hosts[*h].free_gpus;
            let to: Vec<_> = hosts().filter(has_room).collect();
            near.ranks[from] -= 1;
            near.ranks[to[random.usize(..to.len())]] += 1;
        }
        near
    }

    /// Draws a placement at random: the ranks in one zone if it has room, or anywhere.
    pub(crate) fn random_placement(&self, random: &mut Rng) -> Seats {
        let zone = random.usize(..=ZONES);
        let is_in = |host: usize| zone == ZONES || host / HOSTS_PER_ZONE == zone;
        let mut seats: Vec<usize> = (0..self.hosts.len())
            .filter(|host| is_in(*host))
            .flat_map(|host| std::iter::repeat_n(host, self.hosts[host].free_gpus as usize))
            .collect();
        if seats.len() < self.ranks as usize {
            return self.random_placement(random);
        }
        let mut ranks = vec![0; self.hosts.len()];
        for _ in 0..self.ranks {
            ranks[seats.swap_remove(random.usize(..seats.len()))] += 1;
        }
        let near: Vec<_> = (0..self.hosts.len()).filter(|host| is_in(*host)).collect();
        Seats { ranks, aggregator: near[random.usize(..near.len())] }
    }
}

pub(crate) const ZONES: usize = 3;
pub(crate) const HOSTS_PER_ZONE: usize = 4;
const ZONE_NAMES: [&str; ZONES] = ["a", "b", "c"];
/// Rates of the zones' hosts in Mbit/s. The first is the nominal rate of all interfaces.
const RATES: [u32; ZONES] = [100, 40, 10];
/// Rate of a slow host or uplink in Mbit/s.
const SLOW_MBIT: u32 = 10;
/// Share of datagrams that a lossy host loses in each direction.
const LOSS: f64 = 0.03;
