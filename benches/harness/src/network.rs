//! Hosts behind slow links. Each host is a network namespace with one link to the switch.
//!
//! Token buckets limit a worker's link in both directions: at the worker and at the switch. An
//! aggregator's link is limited in the same manner, or not at all.
//!
//! The switch is a bridge with IGMP snooping and a querier, as a rack's switch is: multicast goes
//! only to its subscribers. The bridge speaks IGMPv3. With IGMPv2, a new bridge would forward a
//! host's report to the other hosts, and these would then suppress their own reports.
//!
//! The switch has a namespace too, so the machine's own network stays untouched. Dropping
//! [`Network`] removes the namespaces.

use std::net::Ipv4Addr;
use std::ops::AddAssign;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use racksum_tools::shell::Cmd;
use serde::{Deserialize, Serialize};

/// Limit on the data that a host sends, in the syntax of `tc`. The burst is one batch of 64 KiB
/// with its headers, the largest unit that passes a link in one piece. The queue holds more than a
/// socket buffer, so a host's own queue makes a sender wait and drops nothing.
pub(crate) const HOST_TBF: &str = "tbf rate 1000mbit burst 72kb limit 16mb";

/// Limit on the data that the switch sends to a host. It is like [`HOST_TBF`], but the queue holds
/// 8 ms of data and drops the rest.
pub(crate) const SWITCH_TBF: &str = "tbf rate 1000mbit burst 72kb limit 1mb";

/// The name of a host's only interface.
pub(crate) const INTERFACE: &str = "eth0";

/// Network namespaces of this process. Dropping this value removes them.
#[derive(Debug, Default)]
pub(crate) struct Namespaces(Vec<String>);

impl Namespaces {
    /// Creates a namespace with a loopback interface, and returns its name.
    pub(crate) fn add(&mut self, name: &str) -> Result<String> {
        let namespace = format!("{PREFIX}{}-{name}", std::process::id());
        run(&format!("ip netns add {namespace}"))?;
        self.0.push(namespace.clone());
        run(&format!("ip -n {namespace} link set lo up"))?;
        Ok(namespace)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.0.iter().for_each(|namespace| remove(namespace));
    }
}

/// Workers and aggregators around a switch.
#[derive(Debug)]
pub(crate) struct Network {
    namespaces: Namespaces,
    workers: Vec<Host>,
    aggregators: Vec<Host>,
}

/// Numbers of packets that the links' queues have dropped. A batch that was sent as one packet
/// counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct Drops {
    pub(crate) at_hosts: u64,
    pub(crate) at_switch: u64,
}

impl Drops {
    /// Returns the drops since `before`.
    pub(crate) const fn since(self, before: Self) -> Self {
        Self {
            at_hosts: self.at_hosts - before.at_hosts,
            at_switch: self.at_switch - before.at_switch,
        }
    }
}

impl AddAssign for Drops {
    fn add_assign(&mut self, other: Self) {
        self.at_hosts += other.at_hosts;
        self.at_switch += other.at_switch;
    }
}

/// A host with one link.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) namespace: String,
    pub(crate) addr: Ipv4Addr,
}

impl Host {
    /// Creates a command that runs `program` on this host.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program);
        command
    }
}

impl Network {
    /// Creates the hosts and their links.
    pub(crate) fn build(workers: u16, aggregators: u8, aggregators_limited: bool) -> Result<Self> {
        // Namespaces are recorded one by one, so that dropping a half-built network removes those
        // that exist.
        let mut network =
            Self { namespaces: <_>::default(), workers: Vec::new(), aggregators: Vec::new() };
        let switch = network.namespaces.add("switch")?;
        run(&format!(
            "ip -n {switch} link add br0 type bridge stp_state 0 mcast_snooping 1 \
             mcast_querier 1 mcast_query_response_interval 100 mcast_igmp_version 3"
        ))?;
        run(&format!("ip -n {switch} link set br0 up"))?;
        for i in 0..workers {
            let addr = Ipv4Addr::from(u32::from(SUBNET) + 1 + u32::from(i));
            let host = network.attach(&switch, &format!("w{i}"), addr, true)?;
            network.workers.push(host);
        }
        for i in 0..aggregators {
            let addr = Ipv4Addr::from(u32::from(SUBNET) + AGGREGATORS + u32::from(i));
            let host = network.attach(&switch, &format!("a{i}"), addr, aggregators_limited)?;
            network.aggregators.push(host);
        }
        Ok(network)
    }

    /// Returns the number of packets that the links' queues have dropped so far.
    pub(crate) fn drops(&self) -> Result<Drops> {
        let of = |namespace: &String| {
            let json = Cmd::line(&format!("tc -n {namespace} -s -j qdisc show"));
            drops(&json.output(Path::new("."))?)
        };
        // The switch's namespace was created first.
        let mut drops = self.namespaces.0.iter().map(of);
        let at_switch = drops.next().unwrap_or(Ok(0))?;
        Ok(Drops { at_switch, at_hosts: drops.sum::<Result<u64>>()? })
    }

    pub(crate) fn workers(&self) -> &[Host] {
        &self.workers
    }

    pub(crate) fn aggregators(&self) -> &[Host] {
        &self.aggregators
    }

    fn attach(&mut self, switch: &str, name: &str, addr: Ipv4Addr, limited: bool) -> Result<Host> {
        let namespace = self.namespaces.add(name)?;
        let port = format!("port-{name}");
        for line in [
            format!(
                "ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {namespace}"
            ),
            format!("ip -n {switch} link set {port} master br0 up"),
            format!("ip -n {namespace} addr add {addr}/{SUBNET_BITS} brd + dev {INTERFACE}"),
            format!("ip -n {namespace} link set {INTERFACE} up"),
            format!("ip -n {namespace} route add default dev {INTERFACE}"),
        ] {
            run(&line)?;
        }
        if limited {
            run(&format!("tc -n {switch} qdisc add dev {port} root {SWITCH_TBF}"))?;
            run(&format!("tc -n {namespace} qdisc add dev {INTERFACE} root {HOST_TBF}"))?;
        }
        Ok(Host { namespace, addr })
    }
}

/// Removes the namespaces of earlier runs that ended without cleanup.
pub(crate) fn sweep() {
    let listed = Cmd::line("ip netns list").output(Path::new(".")).unwrap_or_default();
    for namespace in listed.lines().filter_map(|line| line.split_whitespace().next()) {
        if owner(namespace).is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(namespace);
        }
    }
}

/// Returns the id of the process that created a namespace, if a bench created it.
fn owner(namespace: &str) -> Option<&str> {
    namespace.strip_prefix(PREFIX)?.split('-').next()
}

fn remove(namespace: &str) {
    if !Cmd::new("ip", &["netns", "del", namespace]).succeeds(Path::new(".")) {
        eprintln!("cannot remove the network namespace {namespace}; remove it with `ip netns del`");
    }
}

/// Adds up the dropped packets of all queues that `tc` lists.
fn drops(json: &str) -> Result<u64> {
    let queues: Vec<Queue> =
        serde_json::from_str(json).context("cannot parse the queues that tc lists")?;
    Ok(queues.iter().map(|queue| queue.drops).sum())
}

#[derive(Debug, Deserialize)]
struct Queue {
    #[serde(default)]
    drops: u64,
}

/// Runs a command that sets up a network.
pub(crate) fn run(line: &str) -> Result<()> {
    Cmd::line(line).output(Path::new(".")).map(drop).context("cannot create the network")
}

/// Prefix of our namespaces' names; the process id follows.
const PREFIX: &str = "racksum-bench-";

/// The subnet of all hosts; the workers have its first addresses.
const SUBNET: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 0);
const SUBNET_BITS: u8 = 24;

/// Offset of the first aggregator's address in the subnet.
const AGGREGATORS: u32 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_namespaces_have_an_owner() {
        assert_eq!(owner("racksum-bench-123-w0"), Some("123"));
        assert_eq!(owner("racksum-bench-7-switch"), Some("7"));
        for other in ["w0", "racksum-123-w0", "my-racksum-bench-1-w0"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }

    #[test]
    fn drops_of_all_queues_are_added() {
        let json = r#"[{"kind": "tbf", "drops": 3, "qlen": 0}, {"kind": "noqueue"},
            {"kind": "tbf", "drops": 4}]"#;
        assert_eq!(drops(json).unwrap(), 7);
        assert!(drops("no JSON").is_err());
    }

    #[test]
    fn a_network_connects_its_hosts_and_leaves_nothing_behind() {
        if let Some(why) = racksum_tools::machine::link_tools(Path::new(".")).unwrap() {
            return racksum_test_report::skip(&why);
        }
        let network = Network::build(2, 1, false).unwrap();
        let [first, second] = network.workers() else {
            panic!("the network must have two workers")
        };
        let of_first = |program: &str, args: &[&str]| {
            let output = first.command(Path::new(program)).args(args).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let route = of_first("ip", &["route", "get", &second.addr.to_string()]);
        assert!(route.contains(INTERFACE), "{route}");
        let limit = of_first("tc", &["qdisc", "show", "dev", INTERFACE]);
        assert!(limit.contains("tbf") && limit.contains("rate 1Gbit"), "{limit}");
        let of_aggregator = network.aggregators()[0].command(Path::new("tc"));
        let free = { of_aggregator }.args(["qdisc", "show"]).output().unwrap();
        assert!(!String::from_utf8_lossy(&free.stdout).contains("tbf"));
        assert_eq!(network.drops().unwrap(), Drops::default());
        let names = network.namespaces.0.clone();
        drop(network);
        let left = Cmd::line("ip netns list").output(Path::new(".")).unwrap();
        assert!(names.iter().all(|name| !left.contains(name.as_str())), "{left}");
    }
}
