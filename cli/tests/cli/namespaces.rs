//! Tests of MTUs, segmentation and multicast, which cannot be tested over loopback. Two network
//! namespaces with a wire between them serve as hosts.

use std::process::Command;

use crate::files::{Folder, captured, check};
use crate::process::{Ended, Process, RACKSUM, Serving};

/// Two hosts: `a` with the aggregator and `b` with the ranks. Dropping this value removes them.
pub(crate) struct Hosts {
    name: String,
}

impl Hosts {
    /// Creates the hosts; the error says why they cannot be created.
    fn make(name: &str, mtu: u32) -> Result<Self, String> {
        let hosts = Self { name: format!("rs{}{name}", std::process::id()) };
        let [a, b] = [hosts.of('a'), hosts.of('b')];
        let mtu = mtu.to_string();
        ip(&["netns", "add", &a])?;
        ip(&["netns", "add", &b])?;
        // Both ends can have the same name, because they are in different namespaces.
        let pair = ["link", "add", "wire", "mtu", &mtu, "netns", &a, "type", "veth", "peer"];
        ip(&[&pair[..], &["name", "wire", "mtu", &mtu, "netns", &b]].concat())?;
        for (host, last) in [(&a, 1), (&b, 2)] {
            ip(&["-n", host, "link", "set", "lo", "up"])?;
            let four = format!("10.77.0.{last}/24");
            ip(&["-n", host, "addr", "add", &four, "dev", "wire"])?;
            let six = format!("fd77::{last}/64");
            ip(&["-n", host, "-6", "addr", "add", &six, "dev", "wire", "nodad"])?;
            ip(&["-n", host, "link", "set", "wire", "up"])?;
        }
        Ok(hosts)
    }

    pub(crate) fn of(&self, side: char) -> String {
        format!("{}{side}", self.name)
    }

    /// Starts the program on a host.
    pub(crate) fn start(&self, side: char, args: &[&str]) -> Process {
        let exec = ["netns", "exec", &self.of(side), RACKSUM];
        Process::spawn(Command::new("ip").args(exec).args(args))
    }

    /// Starts an aggregator on host `a`.
    fn serve(&self, bind: &str, flags: &[&str]) -> Serving {
        let args = ["aggregator", "--insecure", "--port", "0", "--pool-mib", "64", "--bind", bind];
        Serving::of(self.start('a', &[&args, flags].concat()))
    }

    /// Runs all ranks of a command on host `b` and checks that all succeed.
    fn ranks(&self, serving: &Serving, command: &str, flags: &[Vec<String>]) -> Vec<String> {
        let world = flags.len().to_string();
        let ranks: Vec<_> = flags
            .iter()
            .enumerate()
            .map(|(rank, flags)| {
                let rank = rank.to_string();
                let mut args = vec![command, "--insecure", "--aggregator", &serving.addr];
                args.extend(["--rank", &rank, "--world", &world]);
                args.extend(flags.iter().map(|flag| &flag[..]));
                self.start('b', &args)
            })
            .collect();
        ranks.into_iter().map(|rank| rank.end(60).ok().out).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for side in ['a', 'b'] {
            // The namespace may not have been created.
            ip(&["netns", "del", &self.of(side)]).unwrap_or(());
        }
    }
}

pub(crate) fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .map_err(|error| format!("cannot run `ip`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Creates the hosts; if that fails, reports a skip and returns `None`.
pub(crate) fn hosts(name: &str, mtu: u32) -> Option<Hosts> {
    match Hosts::make(name, mtu) {
        Ok(hosts) => Some(hosts),
        Err(why) => {
            racksum_test_report::skip(&format!("network namespaces need root and iproute2: {why}"));
            None
        }
    }
}

fn flags(all: &[&str]) -> Vec<String> {
    all.iter().map(|flag| (*flag).to_owned()).collect()
}

/// Parses the rows of a benchmark and checks that no sum is wrong.
fn rows(out: &str) -> Vec<serde_json::Value> {
    let rows: Vec<serde_json::Value> =
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{out}");
    rows
}

#[test]
fn sums_are_right_at_every_mtu() {
    for mtu in [1280, 1500, 9000] {
        let Some(hosts) = hosts("m", mtu) else { return };
        for (bind, fanout) in [
            ("10.77.0.1", "unicast"),
            ("10.77.0.1", "multicast"),
            ("fd77::1", "unicast"),
            ("fd77::1", "multicast"),
        ] {
            let serving = hosts.serve(bind, &["--fanout", fanout, "--shards", "2"]);
            let bench = flags(&["-b", "4K", "-e", "2M", "-n", "2", "-w", "1", "--format", "json"]);
            for out in hosts.ranks(&serving, "bench", &vec![bench; 3]) {
                let rows = rows(&out);
                assert_eq!(rows.len(), 8, "{mtu} {bind} {fanout}: {out}");
                assert!(rows.iter().all(|row| row["fanout"] == fanout), "{mtu} {bind}: {out}");
            }
        }
    }
}

#[test]
fn captured_gradients_are_reduced_between_hosts() {
    let Some(hosts) = hosts("g", 1500) else { return };
    let folder = Folder::new("namespaces");
    for (bind, what) in [("10.77.0.1", "digits"), ("fd77::1", "words")] {
        let serving = hosts.serve(bind, &[]);
        let files = captured(what);
        let outs: Vec<_> = (0..4).map(|rank| folder.path(&format!("{what}{rank}"))).collect();
        let each = files.iter().zip(&outs).map(|(file, out)| flags(&["--out", out, file]));
        hosts.ranks(&serving, "reduce", &each.collect::<Vec<_>>());
        check(&files, &outs[0], "sum", 4e-7);
        let first = std::fs::read(&outs[0]).unwrap();
        assert!(outs.iter().all(|out| std::fs::read(out).unwrap() == first));
    }
}

#[test]
fn a_wire_that_loses_and_reorders_changes_no_sum() {
    let Some(hosts) = hosts("l", 1500) else { return };
    // The wire loses packets in both directions; the program drops none itself.
    for side in ['a', 'b'] {
        let netem = ["netem", "delay", "1ms", "500us", "loss", "2%", "duplicate", "1%"];
        let qdisc = ["qdisc", "add", "dev", "wire", "root"];
        let tc = Command::new("tc").args(["-n", &hosts.of(side)]).args(qdisc).args(netem).output();
        match tc {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                return racksum_test_report::skip(&format!("cannot add a netem queue: {why}"));
            }
            Err(error) => return racksum_test_report::skip(&format!("cannot run `tc`: {error}")),
        }
    }
    for fanout in ["unicast", "multicast"] {
        let serving = hosts.serve("10.77.0.1", &["--fanout", fanout]);
        let bench = flags(&["-b", "64K", "-e", "4M", "-n", "2", "-w", "0", "--format", "json"]);
        for out in hosts.ranks(&serving, "bench", &vec![bench; 3]) {
            assert_eq!(rows(&out).len(), 6, "{fanout}: {out}");
        }
    }
}

#[test]
fn a_link_that_cannot_do_what_is_asked_is_named() {
    let Some(hosts) = hosts("n", 1500) else { return };
    let set = |side, what: [&str; 2]| {
        ip(&[&["-n", &hosts.of(side), "link", "set", "wire"][..], &what].concat()).unwrap();
    };
    set('a', ["multicast", "off"]);
    let demanded = ["--port", "0", "--bind", "10.77.0.1", "--fanout", "multicast"];
    let args = [&["aggregator", "--insecure"], &demanded[..]].concat();
    let ended = hosts.start('a', &args).end(10);
    let why = "--fanout multicast is not possible: cannot use wire for multicast: the interface \
               does not";
    assert!(ended.failed(3).starts_with(why), "{ended:?}");
    // With `auto`, the aggregator falls back to unicast.
    let serving = hosts.serve("10.77.0.1", &["--fanout", "auto"]);
    let bench = flags(&["-b", "4K", "-e", "4K", "-n", "2", "-w", "0", "--format", "json"]);
    for out in hosts.ranks(&serving, "bench", &vec![bench; 3]) {
        assert!(rows(&out).iter().all(|row| row["fanout"] == "unicast"), "{out}");
    }
    set('b', ["mtu", "1000"]);
    let rank = ["--insecure", "--aggregator", &serving.addr, "--rank", "0", "--world", "1"];
    let ended = hosts.start('b', &[&["bench"], &rank[..]].concat()).end(10);
    assert!(ended.failed(3).starts_with("MTU 1000 is too small; racksum needs"), "{ended:?}");
}

#[test]
fn without_insecure_nothing_beyond_loopback_is_served_or_called() {
    let Some(hosts) = hosts("i", 1500) else { return };
    let ended = hosts.start('a', &["aggregator", "--port", "0", "--bind", "10.77.0.1"]).end(10);
    assert!(ended.failed(2).contains("or set --insecure if"), "{ended:?}");
    let serving = hosts.serve("10.77.0.1", &[]);
    let args = ["bench", "--aggregator", &serving.addr, "--rank", "0", "--world", "1"];
    let ended = hosts.start('b', &args).end(10);
    assert!(ended.failed(2).contains("or set --insecure if"), "{ended:?}");
    assert_eq!(serving.port().parse::<u16>().map(|port| port > 0), Ok(true));
}

#[test]
fn all_ranks_on_one_host_need_its_loopback_interface_and_proc() {
    let bench = ["bench", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0"];
    for (unshared, script, advice) in [
        ("-n", "true", "; run `ip link set lo up`"),
        ("-m", "umount -l /proc", "; run `mount -t proc proc /proc`"),
    ] {
        let Some(ended) = unsharing(unshared, script, &bench) else { return };
        assert!(ended.failed(3).ends_with(advice), "{ended:?}");
    }
}

#[test]
fn a_host_without_a_way_to_the_aggregator_says_so() {
    let why = "no route from this host to 10.0.0.1:7: ";
    let asking = ["status", "10.0.0.1:7", "--insecure"];
    let Some(ended) = unsharing("-n", "true", &asking) else { return };
    assert!(ended.failed(3).starts_with(why), "{ended:?}");
    assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
    let joining = ["bench", "--aggregator", "10.0.0.1:7", "--rank", "0", "--world", "1"];
    let joining = [&joining[..], &["--insecure", "--join-timeout", "2"]].concat();
    let Some(ended) = unsharing("-n", "true", &joining) else { return };
    assert!(ended.failed(3).starts_with(why), "{ended:?}");
}

/// Runs a script and then the program in new namespaces. Returns `None` if the user may not create
/// namespaces.
fn unsharing(unshared: &str, script: &str, args: &[&str]) -> Option<Ended> {
    let script = format!("{script}; exec {RACKSUM} \"$@\"");
    let shell = [&[unshared, "sh", "-c", &script, "sh"][..], args].concat();
    let ended = Process::spawn(Command::new("unshare").args(shell)).end(60);
    if ended.err.starts_with("unshare: ") {
        racksum_test_report::skip(&format!("namespaces need root: {}", ended.err));
        return None;
    }
    Some(ended)
}
