//! `racksum probe`: agents, measurements, and network files.

use crate::files::Folder;
use crate::identity::{authority, issue};
use crate::process::{Ended, Process, run, signal};
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
    let (nodes, net, svg) =
        (agents.path("nodes.toml"), agents.path("net.toml"), agents.path("map.svg"));
    let shown = run(&["probe", "show", "--net", &net, "--nodes", &nodes, "--svg", &svg]).ok().out;
    assert!(shown.lines().any(|line| line.starts_with("h3    up")), "{shown}");
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.matches("<rect ").count() == 12, "{svg}");
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
fn only_an_operator_may_order_measurements() {
    let (folder, authority) = authority("probe", "rack");
    let agent = issue(&folder, &authority, "agent", "aggregator");
    let operator = issue(&folder, &authority, "operator", "aggregator");
    let worker = issue(&folder, &authority, "worker", "worker");
    let agents = Agents::start("identity", 2, &["--identity", &agent]);
    agents.measure("net.toml", &["--identity", &operator]).ok();
    let why = agents.measure("other.toml", &["--identity", &worker]);
    assert!(why.failed(3).contains("needs an identity with role aggregator"), "{why:?}");
    let why = agents.measure("other.toml", &[]);
    assert!(why.failed(3).contains("identity"), "{why:?}");
    let why = run(&["probe", "serve", "--port", "0", "--identity", &worker]);
    assert!(why.failed(2).contains("role aggregator is needed"), "{why:?}");
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
    assert!(shown.err.contains("hours old and count little; measure again"), "{shown:?}");
    assert!(shown.out.contains("0.00"), "{shown:?}");
}
