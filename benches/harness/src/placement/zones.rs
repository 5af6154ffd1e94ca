//! Three zones of four hosts. Each host and each uplink of a zone has rates of its own.
//!
//! A host is a network namespace. The switches of the zones and the one between them are bridges in
//! one more namespace. Token buckets limit each link in both directions. A host with a delay is a
//! namespace behind another one, and a program forwards packets between the two.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::scene::{HOSTS_PER_ZONE, Scene};
use crate::network::{Host, INTERFACE, Namespaces, run};
use crate::process_group::ProcessGroup;

/// The hosts of a scene. Dropping this value removes them.
#[derive(Debug)]
pub(crate) struct Zones {
    _namespaces: Namespaces,
    /// The programs that delay packets.
    _delays: Vec<ProcessGroup>,
    pub(crate) hosts: Vec<Host>,
}

impl Zones {
    /// Creates the hosts and links of a scene, whose names begin with `prefix`. Logs go to the
    /// folder `work`.
    pub(crate) fn build(root: &Path, work: &Path, prefix: &str, scene: &Scene) -> Result<Self> {
        let mut delays = vec![];
        let mut namespaces = Namespaces::default();
        let fabric = namespaces.add(&format!("{prefix}fabric"))?;
        bridge(&fabric, "core")?;
        for (zone, mbit) in scene.uplink_mbit.iter().enumerate() {
            bridge(&fabric, &format!("zone{zone}"))?;
            run(&format!("ip -n {fabric} link add up{zone} type veth peer name down{zone}"))?;
            run(&format!("ip -n {fabric} link set up{zone} master zone{zone} up"))?;
            run(&format!("ip -n {fabric} link set down{zone} master core up"))?;
            limit(&fabric, &format!("up{zone}"), *mbit, SWITCH_QUEUE)?;
            limit(&fabric, &format!("down{zone}"), *mbit, SWITCH_QUEUE)?;
        }
        let mut hosts = vec![];
        for (number, host) in scene.hosts.iter().enumerate() {
            let zone = number / HOSTS_PER_ZONE;
            let namespace = namespaces.add(&format!("{prefix}{}", host.name))?;
            let addr = Ipv4Addr::from(u32::from(SUBNET) + 1 + u32::try_from(number)?);
            // A host with a delay asks for the addresses of others in its own name.
            let outer = Ipv4Addr::from(u32::from(addr) + 100);
            for line in [
                format!(
                    "ip -n {fabric} link add port{number} type veth peer name {INTERFACE} netns \
                     {namespace}"
                ),
                format!("ip -n {fabric} link set port{number} master zone{zone} up"),
                format!("ip -n {namespace} link set {INTERFACE} up"),
            ] {
                run(&line)?;
            }
            limit(&fabric, &format!("port{number}"), host.mbit, SWITCH_QUEUE)?;
            if host.delay_ms == 0.0 {
                limit(&namespace, INTERFACE, host.mbit, HOST_QUEUE)?;
            }
            if host.loss > 0.0 {
                for chain in ["INPUT -i", "OUTPUT -o"] {
                    run(&format!(
                        "ip netns exec {namespace} iptables -A {chain} {INTERFACE} -m statistic \
                         --mode random --probability {} -j DROP",
                        host.loss
                    ))?;
                }
            }
            let namespace = if host.delay_ms > 0.0 {
                let inner = namespaces.add(&format!("{prefix}{}i", host.name))?;
                delays.push(delay(root, work, &namespace, &inner, host.delay_ms)?);
                for line in [
                    format!("ip -n {inner} link set slow0 up"),
                    format!("ip -n {inner} addr add {addr}/32 dev slow0"),
                    format!("ip -n {inner} route add default dev slow0 src {addr}"),
                    format!("ip -n {namespace} link set slow0 up"),
                    format!("ip -n {namespace} addr add {outer}/24 dev {INTERFACE}"),
                    format!("ip -n {namespace} route add {addr}/32 dev slow0"),
                    format!("ip netns exec {namespace} sysctl -qw net.ipv4.ip_forward=1"),
                    format!(
                        "ip netns exec {namespace} sysctl -qw net.ipv4.conf.{INTERFACE}.proxy_arp=1"
                    ),
                    // By default, each answer waits up to 0.8 s, which pings would count.
                    format!(
                        "ip netns exec {namespace} sysctl -qw \
                         net.ipv4.neigh.{INTERFACE}.proxy_delay=0"
                    ),
                ] {
                    run(&line)?;
                }
                // Only a queue in the sender's own namespace makes the sender wait.
                limit(&inner, "slow0", host.mbit, HOST_QUEUE)?;
                inner
            } else {
                run(&format!("ip -n {namespace} addr add {addr}/24 brd + dev {INTERFACE}"))?;
                namespace
            };
            hosts.push(Host { namespace, addr });
        }
        Ok(Self { _namespaces: namespaces, _delays: delays, hosts })
    }
}

/// Starts a program that delays packets between two namespaces.
fn delay(root: &Path, work: &Path, outer: &str, inner: &str, ms: f64) -> Result<ProcessGroup> {
    let mut command = Command::new("python3");
    command.arg(root.join("benches/peers/delay.py")).args([outer, inner, &ms.to_string()]);
    let mut delay = ProcessGroup::start("delay", [command], work)?;
    delay.lines(Duration::from_secs(20))?;
    Ok(delay)
}

fn bridge(fabric: &str, name: &str) -> Result<()> {
    run(&format!("ip -n {fabric} link add {name} type bridge stp_state 0 mcast_snooping 0"))?;
    run(&format!("ip -n {fabric} link set {name} up"))
}

fn limit(namespace: &str, interface: &str, mbit: u32, queue: &str) -> Result<()> {
    run(&format!(
        "tc -n {namespace} qdisc add dev {interface} root tbf rate {mbit}mbit burst {BURST} limit \
         {queue}"
    ))
}

/// The bytes that pass a link at once after a pause.
const BURST: &str = "16kb";
/// A switch's queue drops what it cannot hold: 26 ms of data at 100 Mbit/s.
const SWITCH_QUEUE: &str = "320kb";
/// A host's queue holds more than a socket's buffer, so that it makes senders wait.
const HOST_QUEUE: &str = "16mb";
const SUBNET: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 0);
