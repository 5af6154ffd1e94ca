//! Two hosts with two routers between them, as network namespaces. The middle link has a smaller
//! MTU than both ends, or a firewall blocks data.

use std::process::Command;

use crate::namespaces::ip;
use crate::ports::own_port;
use crate::process::{Ended, Process, RACKSUM, Serving};

/// Names of the hosts and of the routers between them, in order.
const NAMES: [&str; 4] = ["a", "m", "n", "b"];
/// The aggregator's address.
const AGGREGATOR: &str = "10.81.0.1";

/// A chain of namespaces: `a` with the aggregator, routers `m` and `n`, `b` with the rank.
struct Chain {
    name: String,
}

impl Chain {
    /// Creates the chain with an MTU of `middle_mtu` between the routers; the error says why that
    /// fails.
    fn make(name: &str, middle_mtu: u32) -> Result<Self, String> {
        let chain = Self { name: format!("rp{}{name}", std::process::id()) };
        for name in NAMES {
            ip(&["netns", "add", &chain.of(name)])?;
            ip(&["-n", &chain.of(name), "link", "set", "lo", "up"])?;
        }
        for (at, pair) in NAMES.windows(2).enumerate() {
            let [left, right] = [chain.of(pair[0]), chain.of(pair[1])];
            let mtu = if at == 1 { middle_mtu } else { 1500 }.to_string();
            let one = ["link", "add", "right", "mtu", &mtu, "netns", &left, "type", "veth", "peer"];
            ip(&[&one[..], &["name", "left", "mtu", &mtu, "netns", &right]].concat())?;
            for (host, end, last) in [(&left, "right", 1), (&right, "left", 2)] {
                let addr = format!("10.8{}.0.{last}/24", at + 1);
                ip(&["-n", host, "addr", "add", &addr, "dev", end])?;
                ip(&["-n", host, "link", "set", end, "up"])?;
            }
        }
        for (host, by) in
            [("a", "10.81.0.2"), ("m", "10.82.0.2"), ("n", "10.82.0.1"), ("b", "10.83.0.1")]
        {
            ip(&["-n", &chain.of(host), "route", "add", "default", "via", by])?;
        }
        for router in ["m", "n"] {
            let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
            ip(&["netns", "exec", &chain.of(router), "sh", "-c", forward])?;
        }
        Ok(chain)
    }

    fn of(&self, name: &str) -> String {
        format!("{}{name}", self.name)
    }

    fn start(&self, host: &str, args: &[&str]) -> Process {
        let exec = ["netns", "exec", &self.of(host), RACKSUM];
        Process::spawn(Command::new("ip").args(exec).args(args))
    }

    /// Starts an aggregator on a given port.
    fn serve(&self, port: u16, flags: &[&str]) -> Serving {
        let port = port.to_string();
        let args = ["aggregator", "--insecure", "--pool-mib", "64", "--bind", AGGREGATOR];
        Serving::of(self.start("a", &[&args[..], &["--port", &port], flags].concat()))
    }

    /// Runs a benchmark of one rank to completion.
    fn bench(&self, serving: &Serving, flags: &[&str]) -> Ended {
        let rank = ["--aggregator", &serving.addr, "--insecure", "--rank", "0", "--world", "1"];
        let sizes = ["-b", "4K", "-e", "1M", "-n", "2", "-w", "0"];
        self.start("b", &[&["bench"], &rank[..], &sizes, flags].concat()).end(60)
    }

    /// Makes router `m` drop UDP packets that match a rule.
    fn drop_what(&self, matches: &[&str]) {
        let rule = ["-n", &self.of("m"), "rule", "add", "ipproto", "udp"];
        ip(&[&rule[..], matches, &["blackhole"]].concat()).unwrap();
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        for name in NAMES {
            // The namespace may not have been created.
            ip(&["netns", "del", &self.of(name)]).unwrap_or(());
        }
    }
}

/// Creates the chain; if that fails, reports a skip and returns `None`.
fn chain(name: &str, middle_mtu: u32) -> Option<Chain> {
    match Chain::make(name, middle_mtu) {
        Ok(chain) => Some(chain),
        Err(why) => {
            racksum_test_report::skip(&format!("network namespaces need root and iproute2: {why}"));
            None
        }
    }
}

#[test]
fn a_path_that_is_narrow_in_the_middle_is_used_as_it_is() {
    let Some(chain) = chain("w", 1400) else { return };
    for auth in ["none", "mac", "aead"] {
        let serving = chain.serve(own_port(), &["--data-auth", auth, "--shards", "2"]);
        let ended = chain.bench(&serving, &[]).ok();
        // wire: W-76
        // 1400 bytes less the headers of IPv4 and UDP.
        let expected = "passes datagrams of 1372 bytes, but the interface allows 1472";
        assert_eq!(ended.err.matches(expected).count(), 1, "{ended:?}");
        // An MTU that the user sets is not lowered silently.
        let why = chain.bench(&serving, &["--mtu", "1500"]);
        let why = why.failed(3).to_owned();
        let port = serving.port().parse::<u16>().unwrap() + 1;
        let data_port = format!("{AGGREGATOR}:{port} (UDP)");
        let expected = format!(
            "datagrams of 1472 bytes do not arrive at the aggregator's data port {data_port}, but \
             those of 1372 bytes do"
        );
        assert!(why.starts_with(&expected), "{why}");
        chain.bench(&serving, &["--mtu", "1400"]).ok();
    }
}

#[test]
fn a_path_that_is_too_narrow_to_join_by_is_named_with_its_mtu() {
    let Some(chain) = chain("s", 1000) else { return };
    let serving = chain.serve(own_port(), &[]);
    let ended = chain.bench(&serving, &["--join-timeout", "2"]);
    let why = ended.failed(3);
    let narrow = "; the path passes no IP packet larger than 1000 bytes, and racksum needs 1280";
    assert!(why.contains(narrow), "{why}");
}

#[test]
fn a_firewall_before_the_data_port_is_named_by_port_and_direction() {
    let Some(chain) = chain("f", 1500) else { return };
    let port = own_port();
    let serving = chain.serve(port, &[]);
    chain.bench(&serving, &[]).ok();
    let (data_port, addr) = ((port + 1).to_string(), format!("{AGGREGATOR}:{}", port + 1));
    chain.drop_what(&["sport", &data_port]);
    let ended = chain.bench(&serving, &[]);
    let why = ended.failed(3);
    let back = format!("no datagram from the aggregator's data port {addr} reaches UDP port ");
    assert!(why.starts_with(&back), "{why}");
    chain.drop_what(&["dport", &data_port]);
    let ended = chain.bench(&serving, &[]);
    let why = ended.failed(3);
    let there = format!("no datagram from this host arrives at the aggregator's data port {addr}");
    assert!(why.starts_with(&there), "{why}");
}

#[test]
fn an_aggregator_proves_its_path_to_its_parent() {
    let Some(chain) = chain("t", 1400) else { return };
    let root = chain.serve(own_port(), &[]);
    let args = ["aggregator", "--insecure", "--pool-mib", "64", "--bind", "10.83.0.2"];
    let below = ["--port", "0", "--parent", &root.addr];
    let rack = Serving::of(chain.start("b", &[&args[..], &below].concat()));
    chain.bench(&rack, &[]).ok();
    assert!(
        rack.process.err().contains("passes datagrams of 1372 bytes"),
        "{}",
        rack.process.err()
    );
    let port: u16 = root.port().parse().unwrap();
    chain.drop_what(&["dport", &(port + 1).to_string()]);
    let ended = chain.bench(&rack, &[]);
    let why = ended.failed(3);
    let there = format!("arrives at the aggregator's data port {AGGREGATOR}:{}", port + 1);
    assert!(why.contains(&there), "{why}");
}
