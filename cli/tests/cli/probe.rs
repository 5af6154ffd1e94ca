//! `racksum probe`: agents, measurements, and network files.

use std::process::Command;

use crate::files::Folder;
use crate::identity::{authority, issue};
use crate::namespaces::hosts;
use crate::process::{Ended, Process, RACKSUM, run, signal};
use crate::waits::await_that;

/// Agents on loopback, and the file that lists them as hosts of two zones.
struct Agents {
    folder: Folder,
    agents: Vec<Process>,
}

impl Agents {
    fn start(test: &str, count: usize, flags: &[&str]) -> Self {
        let serve = ["probe", "serve", "--port", "0", "--data-port", "0"];
        let serve = [&serve[..], flags].concat();
        let agents: Vec<_> = (0..count).map(|_| Process::start(&serve)).collect();
        for agent in &agents {
            await_that("the agent serves", || agent.out().contains('\n'));
        }
        let agents = Self { folder: Folder::new(&format!("probe-{test}")), agents };
        let hosts = agents.agents.iter().enumerate().map(|(number, agent)| {
            let out = agent.out();
            let address = out.split_once(" on ").unwrap().1.split_once(',').unwrap().0.to_owned();
            let zone = if number < count.div_ceil(2) { "a" } else { "b" };
            format!(
                "[[hosts]]\nname = \"h{number}\"\naddress = \"{address}\"\n\
                 labels = {{ zone = \"{zone}\" }}\nnic_mbit = 100\n"
            )
        });
        let nodes = format!("levels = [\"zone\"]\n{}", hosts.collect::<String>());
        std::fs::write(agents.path("nodes.toml"), nodes).unwrap();
        agents
    }

    fn path(&self, name: &str) -> String {
        self.folder.path(name)
    }

    fn measure(&self, out: &str, flags: &[&str]) -> Ended {
        let (nodes, out) = (self.path("nodes.toml"), self.path(out));
        let line = ["probe", "run", "--nodes", &nodes, "--out", &out, "--share", "1"];
        run(&[&line[..], flags].concat())
    }
}

#[test]
fn a_measurement_is_written_shown_and_planned_with() {
    let mut agents = Agents::start("whole", 4, &[]);
    let ended = agents.measure("net.toml", &[]).ok();
    assert!(ended.out.starts_with("12 measured paths between 4 hosts, at most "), "{ended:?}");
    assert!(ended.out.contains(" p99 us "), "{ended:?}");
    let (nodes, net, svg) =
        (agents.path("nodes.toml"), agents.path("net.toml"), agents.path("map.svg"));
    let shown = run(&["probe", "show", "--net", &net, "--nodes", &nodes, "--svg", &svg]).ok().out;
    assert!(shown.lines().any(|line| line.starts_with("h3    up")), "{shown}");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.matches("<rect class=\"cell").count() == 12, "{svg}");
    std::fs::write(agents.path("job.toml"), "name = 'j'\nranks = 4\nbytes = 1000000").unwrap();
    let job = agents.path("job.toml");
    run(&["place", "--job", &job, "--nodes", &nodes, "--net", &net]).ok();

    // An agent that is gone is named, and the file keeps what was known of its link.
    signal(agents.agents[3].id(), "TERM");
    let gone = agents.agents.pop().unwrap().end(20).ok();
    assert!(gone.out.ends_with("racksum probe stops\n"), "{gone:?}");
    let ended = agents.measure("net.toml", &[]).ok();
    assert!(ended.err.contains("warning: h3 was not measured: no answer from "), "{ended:?}");
    assert!(ended.out.starts_with("6 measured paths between 3 hosts"), "{ended:?}");
    assert!(ended.out.lines().any(|line| line.starts_with("h3    up")), "{ended:?}");
}

#[test]
fn what_cannot_be_measured_leaves_the_file_as_it_was() {
    let agents = Agents::start("nothing", 1, &[]);
    let why = agents.measure("net.toml", &[]);
    assert_eq!(why.failed(3), "a measurement needs two agents, and 1 answered");
    assert_eq!(agents.folder.names(), ["nodes.toml"]);
    std::fs::write(agents.path("net.toml"), "half_life_s = 1\nlinks = 3").unwrap();
    let why = agents.measure("net.toml", &[]);
    assert!(why.failed(2).contains("net.toml: line 2: invalid type"), "{why:?}");
    let why = agents.measure("none/net.toml", &[]);
    assert!(why.failed(2).contains("none does not exist"), "{why:?}");
    for (flag, value) in [("--share", "0"), ("--share", "2"), ("--budget", "much")] {
        assert_eq!(agents.measure("net.toml", &[flag, value]).code, Some(2), "{flag}");
    }
}

#[test]
fn a_measurement_that_a_full_disk_has_no_room_for_is_shown() {
    let agents = Agents::start("full", 2, &[]);
    std::fs::write(agents.path("net.toml"), "half_life_s = 7\n").unwrap();
    // A limit on the size of files simulates the full disk.
    let (nodes, net) = (agents.path("nodes.toml"), agents.path("net.toml"));
    let script = format!(
        "trap '' XFSZ; ulimit -f 0; exec {RACKSUM} probe run --nodes {nodes} --out {net} --share 1"
    );
    let ended = Process::spawn(Command::new("sh").args(["-c", &script])).end(60);
    assert!(ended.failed(1).starts_with(&format!("cannot write {net}: ")), "{ended:?}");
    assert!(ended.out.lines().any(|line| line.starts_with("h1    up")), "{ended:?}");
    assert_eq!(std::fs::read_to_string(&net).unwrap(), "half_life_s = 7\n");
    assert_eq!(agents.folder.names(), ["net.toml", "nodes.toml"]);
}

#[test]
fn two_hosts_with_the_same_agent_are_named_with_their_file() {
    let agents = Agents::start("same", 1, &[]);
    let nodes = std::fs::read_to_string(agents.path("nodes.toml")).unwrap();
    let (head, host) = nodes.split_once('\n').unwrap();
    let twice = format!("{head}\n{host}{}", host.replace("h0", "h1"));
    std::fs::write(agents.path("nodes.toml"), twice).unwrap();
    let why = agents.measure("net.toml", &[]);
    assert!(why.failed(2).contains("nodes.toml: h0 and h1 have the same agent, 127."), "{why:?}");
}

#[test]
fn only_an_operator_may_order_measurements() {
    let (folder, authority) = authority("probe", "rack");
    let agent = issue(&folder, &authority, "agent", "aggregator");
    let operator = issue(&folder, &authority, "operator", "operator");
    let worker = issue(&folder, &authority, "worker", "worker");
    let agents = Agents::start("identity", 2, &["--identity", &agent]);
    agents.measure("net.toml", &["--identity", &operator]).ok();
    for wrong in [&worker, &agent] {
        let why = agents.measure("other.toml", &["--identity", wrong]);
        let needed = "measuring needs an identity with role operator; issue one with `racksum \
                      identity issue NAME --role operator`";
        assert!(why.failed(3).contains(needed), "{why:?}");
    }
    let why = agents.measure("other.toml", &[]);
    assert!(why.failed(3).contains("this process has none; set --identity to"), "{why:?}");
    for wrong in [&worker, &operator] {
        let why = run(&["probe", "serve", "--port", "0", "--identity", wrong]);
        assert!(why.failed(2).contains("role aggregator is needed"), "{why:?}");
    }
    let why = run(&["probe", "serve", "--bind", "10.0.0.1"]);
    assert_eq!(why.code, Some(2), "{why:?}");
}

#[test]
fn an_old_network_file_is_named_with_its_age() {
    let folder = Folder::new("probe-old");
    let net = folder.path("net.toml");
    let text = "measured_at = 1000\n[[links]]\nof = \"h1\"\nup = { mbit = 5 }\n";
    std::fs::write(&net, text).unwrap();
    let shown = run(&["probe", "show", "--net", &net]).ok();
    assert!(shown.err.contains("hours old and count little or, after"), "{shown:?}");
    assert!(shown.out.contains("0.00"), "{shown:?}");
}

#[test]
fn a_second_measurement_is_refused_and_leaves_the_file_as_it_was() {
    let agents = Agents::start("twice", 2, &[]);
    std::fs::write(agents.path("net.toml"), "half_life_s = 7\n").unwrap();
    let (nodes, out) = (agents.path("nodes.toml"), agents.path("other.toml"));
    // At this share, the first measurement takes minutes.
    let line = ["probe", "run", "--nodes", &nodes, "--out", &out, "--share", "0.0001"];
    let (mut first, mut why) = (Process::start(&line), None);
    await_that("the first measurement has the agents", || {
        // It may be the one that was refused.
        if !first.runs() {
            first = Process::start(&line);
        }
        let ended = agents.measure("net.toml", &["--budget", "1"]);
        why.insert(ended).err.contains("serves another measurement")
    });
    let why = why.unwrap();
    let text = why.failed(3);
    assert!(text.contains("of a coordinator without an identity at 127.0.0.1:"), "{text}");
    assert_eq!(std::fs::read_to_string(agents.path("net.toml")).unwrap(), "half_life_s = 7\n");
    // The agents are free once the first one has died.
    signal(first.id(), "KILL");
    assert_eq!(agents.folder.names(), ["net.toml", "nodes.toml"]);
    await_that("the agents are free", || agents.measure("net.toml", &[]).code == Some(0));
    let kept = std::fs::read_to_string(agents.path("net.toml")).unwrap();
    assert!(kept.contains("half_life_s = 7.0") && kept.contains("rtt_p99_us"), "{kept}");
}

#[test]
fn an_interface_that_is_faster_than_the_inventory_says_is_named() {
    let folder = Folder::new("probe-faster");
    let [nodes, net] = ["nodes.toml", "net.toml"].map(|name| folder.path(name));
    std::fs::write(&nodes, "[[hosts]]\nname = 'h1'\nnic_mbit = 100\n").unwrap();
    let up = "up = { mbit = 124.5, is_least = true }";
    std::fs::write(&net, format!("[[links]]\nof = 'h1'\n{up}\nrtt_us = 50\nrtt_p99_us = 80\n"))
        .unwrap();
    let shown = run(&["probe", "show", "--net", &net, "--nodes", &nodes]).ok();
    let warning = "warning: h1: nic_mbit is 100, but 124.5 Mbit/s were measured; correct it";
    assert!(shown.err.contains(warning), "{shown:?}");
    assert!(shown.out.contains("h1    up         >= 124.5  0.00 %  50      80 "), "{shown:?}");
}

#[test]
fn a_host_with_a_wrong_label_is_named_when_the_file_is_shown() {
    let folder = Folder::new("probe-label");
    let [nodes, net] = ["nodes.toml", "net.toml"].map(|name| folder.path(name));
    let host = "[[hosts]]\nname = 'h1'\nlabels = { rack = 'a' }\nnic_mbit = 100\n";
    std::fs::write(&nodes, format!("levels = ['rack']\n{host}")).unwrap();
    let tree = "[tree]\nlevels = ['rack']\n[tree.hosts]\nh1 = { labels = ['b'] }\n";
    std::fs::write(&net, tree).unwrap();
    let shown = run(&["probe", "show", "--net", &net, "--nodes", &nodes]).ok();
    let warning = "warning: h1 counts as a host of b, where it was measured; its labels say a";
    assert!(shown.err.contains(warning), "{shown:?}");
}

#[test]
fn a_tree_that_is_old_or_of_other_hosts_is_named() {
    let folder = Folder::new("probe-tree");
    let path = |name: &str| folder.path(name);
    let host = |name: &str| format!("[[hosts]]\nname = \"{name}\"\nnic_mbit = 100\n");
    std::fs::write(path("nodes.toml"), ["h1", "h2", "h3"].map(host).concat()).unwrap();
    std::fs::write(path("job.toml"), "name = 'j'\nranks = 1\nbytes = 1").unwrap();
    let place = |net: &str| {
        std::fs::write(path("net.toml"), net).unwrap();
        let [job, nodes, net] = ["job.toml", "nodes.toml", "net.toml"].map(path);
        run(&["place", "--job", &job, "--nodes", &nodes, "--net", &net])
    };
    let tree = "[tree]\nlevels = ['tier1']\n[tree.hosts]\nh1 = { labels = ['1'] }\n";
    let links = "[[links]]\nof = '1'\nup = { mbit = 50 }\n";
    let fresh = place(&format!("{tree}{links}")).ok();
    assert!(
        fresh.err.contains("net.toml: no measurement places h2, h3; measure again"),
        "{fresh:?}"
    );
    let old = place(&format!("measured_at = 1000\n{tree}{links}")).ok();
    assert!(old.err.contains("net.toml: too old to count are the places of h1;"), "{old:?}");
    let gone = place(&tree.replace("h1", "h9"));
    assert!(gone.failed(2).contains("\"h9\", which is neither a host nor a domain"), "{gone:?}");
}

#[test]
fn the_bytes_that_a_measurement_reports_are_those_of_the_interfaces() {
    let Some(hosts) = hosts("p", 1500) else { return };
    let folder = Folder::new("probe-bytes");
    let addrs = [('a', "10.77.0.1"), ('b', "10.77.0.2")];
    let agents = addrs.map(|(side, addr)| {
        let agent = hosts.start(side, &["probe", "serve", "--insecure", "--bind", addr]);
        await_that("the agent serves", || agent.out().contains('\n'));
        agent
    });
    let host = |(name, addr): (char, &str)| {
        format!("[[hosts]]\nname = \"{name}\"\naddress = \"{addr}\"\nnic_mbit = 100\n")
    };
    let [nodes, net] = ["nodes.toml", "net.toml"].map(|name| folder.path(name));
    std::fs::write(&nodes, addrs.map(host).concat()).unwrap();
    // The coordinator is on host b, so its orders to host a cross the wire too.
    let counted = || {
        let count = |which: &str| {
            let file = format!("/sys/class/net/wire/statistics/{which}_bytes");
            let cat = ["netns", "exec", &hosts.of('a'), "cat", &file];
            let output = Command::new("ip").args(cat).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse::<u64>().unwrap()
        };
        count("rx") + count("tx")
    };
    let before = counted();
    let line = ["probe", "run", "--insecure", "--nodes", &nodes, "--out", &net, "--share", "1"];
    let ended = hosts.start('b', &line).end(60).ok();
    let crossed = counted() - before;
    let said = ended.out.split_once("at most ").unwrap().1.split_once(' ').unwrap().0;
    let said: u64 = said.parse().unwrap();
    // Other packets, such as those of IPv6, may cross the wire. The interfaces count a batch of
    // datagrams as one packet, with one header.
    assert!(crossed <= said + said / 50 && crossed >= said - said / 10, "{crossed} of {said}");
    drop(agents);
}
