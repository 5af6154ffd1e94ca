//! `racksum place --rebalance --apply`: the aggregators of a running job move to better hosts.

use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;

use serde_json::{Value, json};

use crate::failover::{Load, serve};
use crate::files::Folder;
use crate::ports::own_port;
use crate::process::{Ended, Process, RACKSUM, Serving, run};
use crate::status::status_of;

/// The files of the running job "load". Its ranks are on two hosts, and its aggregators on others.
struct Files(Folder);

impl Files {
    /// Returns the files for aggregators on hosts of these rates in Mbit/s, the first `running` of
    /// which serve the job.
    fn new(test: &str, aggregators: &[(&str, f64)], running: usize) -> Self {
        let files = Self(Folder::new(&format!("apply-{test}")));
        let mut nodes = String::new();
        let mut net = String::new();
        for rank_host in ["r0", "r1"] {
            nodes += &format!("[[hosts]]\nname = \"{rank_host}\"\nnic_mbit = 1000\ncpus = 2\n");
        }
        let mut hosts =
            vec![json!({"host": "r0", "ranks": [2, 1]}), json!({"host": "r1", "ranks": [0, 3]})];
        for (number, (addr, mbit)) in aggregators.iter().enumerate() {
            let name = format!("a{number}");
            nodes += &format!(
                "[[hosts]]\nname = \"{name}\"\nnic_mbit = 1000\naggregator = \"{addr}\"\n"
            );
            net += &format!("[[links]]\nof = \"{name}\"\nup = {{ mbit = {mbit} }}\n");
            net += &format!("down = {{ mbit = {mbit} }}\n");
            if number < running {
                hosts.push(json!({"host": name, "aggregators": 1}));
            }
        }
        files.write("nodes.toml", &nodes);
        files.write("net.toml", &net);
        files.write("placement.json", &json!({ "hosts": hosts }).to_string());
        let job = "name = 'load'\nranks = 4\nbytes = 1000000\ncpus_per_rank = 1\n\
                   has_dedicated_aggregators = true\n";
        files.write("job.toml", &format!("{job}aggregators = {running}\n"));
        files
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path(name), text).unwrap();
    }

    fn apply(&self, placement: &str, flags: &[&str]) -> Ended {
        let line = self.line(placement, flags);
        run(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the words of a command that applies moves.
    fn line(&self, placement: &str, flags: &[&str]) -> Vec<String> {
        let [job, nodes, net, placement] =
            ["job.toml", "nodes.toml", "net.toml", placement].map(|name| self.0.path(name));
        let line = ["place", "--job", &job, "--nodes", &nodes, "--net", &net];
        let line = [&line[..], &["--placement", &placement, "--rebalance", "--apply"]].concat();
        [&line[..], flags].concat().into_iter().map(str::to_owned).collect()
    }
}

fn serves(serving: &Serving) -> bool {
    status_of(&serving.addr)["jobs"][0]["job"] == "load"
}

#[test]
fn a_running_job_moves_to_the_better_host_and_its_sums_stay_the_same() {
    let [slow, fast] = [(); 2].map(|()| serve(own_port()));
    let files = Files::new("moves", &[(&slow.addr, 10.0), (&fast.addr, 900.0)], 1);
    let load = Load::new(1 << 18, &[&slow]);
    load.run(|load| {
        let placement = std::fs::read(files.0.path("placement.json")).unwrap();
        let applied = files.apply("placement.json", &[]).ok();
        let moved = format!("job \"load\" moved from {} to {}: step ", slow.addr, fast.addr);
        assert!(applied.err.contains(&moved), "{applied:?}");
        assert!(serves(&fast) && !serves(&slow));
        load.await_ops(1);
        // The ranks keep their numbers, and the old file stays as it is.
        let after: Value = serde_json::from_str(&applied.out).unwrap();
        let expected = json!({"hosts": [
            {"host": "r0", "ranks": [2, 1], "aggregators": 0},
            {"host": "r1", "ranks": [0, 3], "aggregators": 0},
            {"host": "a1", "ranks": [], "aggregators": 1},
        ]});
        assert_eq!(after, expected);
        assert_eq!(std::fs::read(files.0.path("placement.json")).unwrap(), placement);

        // From there, nothing is worth a move.
        files.write("placement.json", &applied.out);
        let out = files.0.path("placement.json");
        let applied = files.apply("placement.json", &["--out", &out]).ok();
        assert!(applied.err.contains("no aggregator moves: no such move saves"), "{applied:?}");
        assert_eq!(applied.out, "");
        let kept: Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
        assert_eq!(kept, expected);

        // A limit on the size of files simulates a full disk.
        let script = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
        let full = files.0.path("full.json");
        let mut line = Command::new("sh");
        line.args(["-c", script, RACKSUM]).args(files.line("placement.json", &["--out", &full]));
        let ended = Process::spawn(&mut line).end(60);
        let why = format!("cannot write {full}: ");
        assert!(ended.code == Some(1) && ended.err.contains(&why), "{ended:?}");
        assert_eq!(serde_json::from_str::<Value>(&ended.out).unwrap(), expected);
        load.await_ops(1);
    });
    // Each rank has compared each sum with its first one.
    assert!(load.ended.iter().all(|ops| ops.load(SeqCst) > 3));
}

#[test]
fn a_move_that_is_refused_leaves_the_job_and_the_files_as_they_were() {
    let serving = serve(own_port());
    let nobody = format!("127.0.0.1:{}", own_port());
    let files = Files::new("refused", &[(&serving.addr, 10.0), (&nobody, 900.0)], 1);
    let load = Load::new(1 << 16, &[&serving]);
    load.run(|load| {
        let out = files.0.path("after.json");
        let why = files.apply("placement.json", &["--out", &out]);
        let sentence = why.failed(3);
        assert!(sentence.contains("cannot move the aggregators of job \"load\": "), "{why:?}");
        assert!(sentence.contains("no answer from"), "{why:?}");
        assert!(!std::fs::exists(out).unwrap());
        assert!(serves(&serving));
        load.await_ops(1);
        // The placement file names a host on which the job does not run.
        let files = Files::new("stale", &[(&nobody, 10.0), (&serving.addr, 900.0)], 1);
        let why = files.apply("placement.json", &[]);
        assert!(why.failed(3).contains("cannot move the aggregators of job"), "{why:?}");
        load.await_ops(1);
    });
    for (flags, why) in [
        (&["--format", "json"][..], "--format"),
        (&["--insecure", "--identity", "x"], "--identity"),
    ] {
        let ended = files.apply("placement.json", flags);
        assert!(ended.code == Some(2) && ended.err.contains(why), "{ended:?}");
    }
    let ended = run(&["place", "--job", "j", "--nodes", "n", "--port", "7"]);
    assert_eq!(ended.failed(2), "--port needs --slurm or --apply");
    let ended = run(&["place", "--job", "j", "--nodes", "n", "--apply"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
}

#[test]
fn two_aggregators_move_together_or_not_at_all() {
    let serving = [(); 4].map(|()| serve(own_port()));
    let [one, other, fast, faster] = &serving;
    let load = Load::spread(1 << 18, &[one, other]);
    load.run(|load| {
        // An aggregator that the job keeps cannot take it over.
        let rates = [(&*one.addr, 900.0), (&other.addr, 10.0), (&fast.addr, 900.0)];
        let why = Files::new("kept", &rates, 2).apply("placement.json", &[]);
        let sentence = "the moves are not applied: the job would keep its aggregator on a0, ";
        assert!(why.failed(3).starts_with(sentence), "{why:?}");
        assert!(serves(one) && serves(other) && !serves(fast));
        load.await_ops(1);

        let rates =
            [(&*one.addr, 10.0), (&other.addr, 10.0), (&fast.addr, 900.0), (&faster.addr, 900.0)];
        let applied = Files::new("both", &rates, 2).apply("placement.json", &[]).ok();
        let after: Value = serde_json::from_str(&applied.out).unwrap();
        let names = ["r0", "r1", "a2", "a3"];
        assert!((0..4).all(|at| after["hosts"][at]["host"] == names[at]), "{after}");
        assert!(!serves(one) && !serves(other) && serves(fast) && serves(faster));
        load.await_ops(1);
    });
}
