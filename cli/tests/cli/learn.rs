//! `racksum probe learn`: a running job improves a network file.

use serde_json::Value;

use crate::files::Folder;
use crate::process::{Ended, Process, Serving, bench_rank, run};
use crate::status::status_of;
use crate::waits::await_that;

/// A host for the ranks and one for the aggregator, with interfaces slower than loopback.
fn nodes(aggregator: &str) -> String {
    format!(
        "[[hosts]]\nname = \"ranks\"\naddress = \"127.0.0.1\"\nnic_mbit = 10\n\
         [[hosts]]\nname = \"sums\"\naddress = \"127.0.0.2\"\naggregator = \"{aggregator}\"\n\
         nic_mbit = 10\n"
    )
}

/// An aggregator on 127.0.0.2, two ranks that call it from 127.0.0.1, and the files of a plan.
struct Running {
    folder: Folder,
    addr: String,
    _processes: (Serving, [Process; 2]),
}

impl Running {
    fn start(test: &str) -> Self {
        let serving = Serving::start(&["--bind", "127.0.0.2"]);
        let flags = ["-b", "16M", "-e", "16M", "-n", "1000000", "--job", "long"];
        let ranks = [0, 1].map(|rank| bench_rank(&serving.addr, rank, 2, &flags));
        let folder = Folder::new(&format!("learn-{test}"));
        let running = Self { folder, addr: serving.addr.clone(), _processes: (serving, ranks) };
        running.write("nodes.toml", &nodes(&running.addr));
        running.write("job.toml", "name = 'long'\nranks = 2\nbytes = 16777216\n");
        let hosts = r#"{"hosts":[{"host":"ranks","ranks":[0,1]},{"host":"sums","aggregators":1}]}"#;
        running.write("placement.json", hosts);
        running
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path(name)).unwrap()
    }

    fn rank(&self, rank: usize) -> Value {
        status_of(&self.addr)["jobs"][0]["ranks"][rank].clone()
    }

    /// Waits until both ranks have reduced more than they need to tell about their link.
    fn await_evidence(&self) {
        let tells = |rank: &Value| {
            let bytes = rank["contributed"]["bytes"].as_u64().unwrap_or(0);
            bytes > 100 << 20 && rank["busy_ms"].as_u64().unwrap_or(0) > 200
        };
        await_that("the ranks reduce", || [0, 1].iter().all(|rank| tells(&self.rank(*rank))));
    }

    fn learn(&self, flags: &[&str]) -> Ended {
        let [nodes, net] = ["nodes.toml", "net.toml"].map(|name| self.folder.path(name));
        let line = ["probe", "learn", &self.addr, "--nodes", &nodes, "--net", &net];
        run(&[&line[..], flags].concat())
    }

    /// Returns the step time that `racksum place` expects of the job where it is.
    fn expected_step_s(&self) -> f64 {
        let [job, nodes, net, placement] = ["job.toml", "nodes.toml", "net.toml", "placement.json"]
            .map(|name| self.folder.path(name));
        let line = ["place", "--job", &job, "--nodes", &nodes, "--net", &net];
        let json = run(&[&line[..], &["--placement", &placement, "--format", "json"]].concat());
        let json: Value = serde_json::from_str(&json.ok().out).unwrap();
        json["step_s"].as_f64().unwrap()
    }
}

#[test]
fn a_running_job_corrects_a_network_file() {
    let running = Running::start("corrects");
    running.await_evidence();
    // A file whose rates are far too low, by an old measurement of the ranks' host.
    running.write(
        "net.toml",
        "[[links]]\nof = \"ranks\"\nup = { mbit = 1, age_s = 86400 }\nrtt_us = 900000\n",
    );
    let before_s = running.expected_step_s();
    let learned = running.learn(&[]).ok();
    assert!(learned.out.starts_with("learned of 2 links from 2 ranks\n"), "{learned:?}");
    for row in ["ranks  up ", "ranks  down", "sums   up ", "sums   down"] {
        assert!(learned.out.lines().any(|line| line.starts_with(row)), "{learned:?}");
    }
    let net = running.read("net.toml");
    assert!(net.contains("is_inferred = true") && net.contains("measured_at = "), "{net}");
    // The ranks reduce within less than 13 s what the file expected to take minutes.
    let after_s = running.expected_step_s();
    assert!(after_s < before_s / 2.0, "{before_s} {after_s}");

    // What a second measurement shows is merged with the first.
    let learned = running.learn(&["--over", "1"]).ok();
    assert!(!learned.err.contains("warning"), "{learned:?}");
    assert!(running.expected_step_s() < before_s / 2.0);
}

#[test]
fn what_cannot_be_learned_leaves_the_file_as_it_was() {
    let running = Running::start("nothing");
    let net = "[[links]]\nof = \"sums\"\nup = { mbit = 5 }\n";
    running.write("net.toml", net);
    let unchanged = || assert_eq!(running.read("net.toml"), net);
    running.await_evidence();

    // The hosts of the ranks are unknown.
    running.write("nodes.toml", &nodes(&running.addr).replace("127.0.0.1", "127.0.0.9"));
    let learned = running.learn(&[]).ok();
    assert!(learned.out.starts_with("nothing to learn: "), "{learned:?}");
    let warning = "rank 0 of job \"long\" tells nothing: no host has the address 127.0.0.1";
    assert!(learned.err.contains(warning), "{learned:?}");
    unchanged();

    // Two hosts have the address of the ranks.
    running.write("nodes.toml", &nodes(&running.addr).replace("127.0.0.2\"\n", "127.0.0.1\"\n"));
    let learned = running.learn(&[]).ok();
    let warning = "tells nothing: ranks and sums both have the address 127.0.0.1";
    assert!(learned.err.contains(warning), "{learned:?}");
    unchanged();

    // The host of the aggregator is unknown.
    running.write("nodes.toml", "[[hosts]]\nname = \"sums\"\naddress = \"10.0.0.1\"\nnic_mbit = 1");
    let learned = running.learn(&[]);
    assert!(learned.failed(2).contains("cannot tell the host of the aggregator"), "{learned:?}");
    unchanged();

    let nobody = ["probe", "learn", "127.0.0.1:1", "--nodes"];
    let nodes = running.folder.path("nodes.toml");
    let file = running.folder.path("net.toml");
    let learned = run(&[&nobody[..], &[&nodes, "--net", &file]].concat());
    assert!(learned.failed(3).contains("127.0.0.1:1"), "{learned:?}");
    unchanged();
    assert_eq!(running.learn(&["--over", "0"]).code, Some(2));
}
