//! `racksum probe learn`: a running job improves a network file.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::cluster::{Cluster, cluster};
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
        self.start_to_learn(flags).end(60)
    }

    fn start_to_learn(&self, flags: &[&str]) -> Process {
        let [nodes, net] = ["nodes.toml", "net.toml"].map(|name| self.folder.path(name));
        let line = ["probe", "learn", &self.addr, "--nodes", &nodes, "--net", &net];
        Process::start(&[&line[..], flags].concat())
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
    assert!(!learned.err.contains("tells nothing"), "{learned:?}");
    assert!(running.expected_step_s() < before_s / 2.0);

    // A measurement that is written while the counters run is kept.
    let learning = running.start_to_learn(&["--over", "3"]);
    std::thread::sleep(Duration::from_secs(1));
    running.write("net.toml", "half_life_s = 77\n");
    learning.end(60).ok();
    let net = running.read("net.toml");
    assert!(net.contains("half_life_s = 77.0") && net.contains("is_inferred = true"), "{net}");
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
    // A path that cannot be written costs no time.
    let file = running.folder.path("none/net.toml");
    let learned = run(&[&nobody[..], &[&nodes, "--net", &file]].concat());
    assert!(learned.failed(2).contains("none does not exist"), "{learned:?}");
    assert_eq!(running.learn(&["--over", "0"]).code, Some(2));
}

/// A job whose ranks are on three hosts behind a bridge, with the aggregator on a fourth. The first
/// rank's host is `bad`.
struct Shaped {
    _ranks: Vec<Process>,
    serving: Serving,
    cluster: Cluster,
}

impl Shaped {
    /// Starts the job on the hosts of a cluster. `bad` are the flags of the first rank.
    fn start(cluster: Cluster, bad: &[&str]) -> Self {
        let serving = cluster.serve();
        let bench = ["-b", "1M", "-e", "1M", "-n", "1000000", "--timeout", "600"];
        let ranks = cluster.ranks_with(&serving, |rank| {
            let own = if rank == 0 { bad } else { &[] };
            [&bench[..], own].concat()
        });
        let shaped = Self { _ranks: ranks, serving, cluster };
        let hosts = ["bad", "one", "two"].iter().zip(2..).map(|(name, last)| {
            format!(
                "[[hosts]]\nname = \"{name}\"\naddress = \"10.78.0.{last}\"\nnic_mbit = 10000\n\
                 max_aggregators = 0\n"
            )
        });
        let hub = "[[hosts]]\nname = \"sums\"\naddress = \"10.78.0.1\"\nnic_mbit = 100000\n";
        shaped.write("nodes.toml", &format!("{hub}{}", hosts.collect::<String>()));
        // The aggregator stays where it is, and two of the three other hosts get a rank.
        let job = "name = 'j'\nranks = 2\nbytes = 1000000\nmax_ranks_per_host = 1\n\
                   has_dedicated_aggregators = true\n";
        shaped.write("job.toml", job);
        shaped
    }

    fn path(&self, name: &str) -> String {
        self.cluster.folder.path(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Waits until the first rank has reported enough transfers since it joined.
    fn await_reports(&self, bytes: u64) {
        await_that("the first rank reports its counters", || {
            let own = &self.cluster.status()["jobs"][0]["ranks"][0]["own"];
            own["results"]["bytes"].as_u64() > Some(bytes)
        });
    }

    /// Learns from the job what the file `older` says otherwise, until `is_right` accepts the
    /// record of the bad host's link. Returns the output and the record.
    ///
    /// Other programs may keep the ranks from running, and a rate is then too low.
    fn learn(&self, older: &str, is_right: impl Fn(&Value) -> bool) -> (Ended, Value) {
        let [nodes, net] = ["nodes.toml", "net.json"].map(|name| self.path(name));
        let identity = self.path("agg.pem");
        let args = ["probe", "learn", &self.serving.addr, "--nodes", &nodes, "--net", &net];
        let args = [&args[..], &["--identity", &identity, "--over", "10"]].concat();
        let mut tries = 0;
        loop {
            std::fs::write(&net, older).unwrap();
            // The aggregator is reachable only from its own network.
            let learned = self.cluster.start(&self.cluster.worker(0), &args).end(60).ok();
            let json = std::fs::read_to_string(&net).unwrap();
            let json: Value = serde_json::from_str(&json).unwrap();
            let mut links = json["links"].as_array().unwrap().iter();
            let bad = links.find(|link| link["of"] == "bad").unwrap().clone();
            tries += 1;
            if is_right(&bad) || tries == 10 {
                return (learned, bad);
            }
        }
    }

    /// Returns the hosts that `racksum place` gives ranks.
    fn placed(&self) -> Vec<String> {
        let [job, nodes, net] = ["job.toml", "nodes.toml", "net.json"].map(|name| self.path(name));
        let line = ["place", "--job", &job, "--nodes", &nodes, "--net", &net, "--format", "json"];
        let plan: Value = serde_json::from_str(&run(&line).ok().out).unwrap();
        let hosts = plan["hosts"].as_array().unwrap().iter();
        let with_ranks = hosts.filter(|host| host["ranks"] != serde_json::json!([]));
        with_ranks.map(|host| host["host"].as_str().unwrap().to_owned()).collect()
    }
}

/// Returns whether a figure is within an error of what was set.
fn is_near(figure: &Value, set: f64, error: f64) -> bool {
    figure.as_f64().is_some_and(|figure| (figure - set).abs() <= error)
}

#[test]
fn a_slow_link_of_a_running_job_is_learned_and_avoided() {
    let Some(cluster) = cluster("s", 3) else { return };
    let shape = ["qdisc", "add", "dev", "wire", "root", "tbf", "rate", "20mbit"];
    let shape = [&shape[..], &["burst", "16kb", "limit", "16mb"]].concat();
    let tc = Command::new("tc").args(["-n", &cluster.worker(0)]).args(shape).output();
    match tc {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return racksum_test_report::skip(&format!("cannot add a token bucket: {why}"));
        }
        Err(error) => return racksum_test_report::skip(&format!("cannot run `tc`: {error}")),
    }
    let shaped = Shaped::start(cluster, &[]);
    // All that is known is that another host is not as fast as its interface.
    let rate = serde_json::json!({ "mbit": 60 });
    let two = serde_json::json!({ "of": "two", "up": rate, "down": rate });
    let older = serde_json::json!({ "links": [two] }).to_string();
    shaped.write("net.json", &older);
    assert_eq!(shaped.placed(), ["bad", "one"]);
    shaped.await_reports(4 << 20);
    let (learned, bad) = shaped.learn(&older, |bad| is_near(&bad["up"]["mbit"], 20.0, 4.0));
    assert!(is_near(&bad["up"]["mbit"], 20.0, 4.0) && bad["up"]["is_least"] != true, "{learned:?}");
    assert_eq!(shaped.placed(), ["one", "two"], "{learned:?}");
}

#[test]
fn the_loss_of_a_running_job_is_learned_by_direction_and_avoided() {
    let Some(cluster) = cluster("o", 3) else { return };
    let shaped = Shaped::start(cluster, &["--drop", "0.1"]);
    // An older measurement, which counts little, says that the link loses more.
    let rate = serde_json::json!({ "mbit": 94, "loss": 0.3, "confidence": 0.01 });
    let bad = serde_json::json!({ "of": "bad", "up": rate, "down": rate });
    let older = serde_json::json!({ "links": [bad] }).to_string();
    shaped.await_reports(4 << 20);
    // The counters give an upper bound: on a busy machine full buffers lose datagrams too, and some
    // fragments are sent again before they are late. Neither makes 0.1 look like 0.3 or like none.
    let is_right = |bad: &Value| {
        let losses = ["up", "down"].map(|way| bad[way]["loss"].as_f64().unwrap_or(0.0));
        losses.iter().all(|loss| (0.08..0.2).contains(loss))
    };
    let (learned, bad) = shaped.learn(&older, is_right);
    assert!(is_right(&bad), "{learned:?}");
    assert_eq!(shaped.placed(), ["one", "two"], "{learned:?}");
}
