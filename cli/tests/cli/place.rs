//! `racksum place`: plans, their formats, and files that are wrong.

use serde_json::{Value, json};

use crate::files::Folder;
use crate::process::run;

/// Two zones of two hosts. The second host of zone `a` was measured at a tenth of its rate.
const NODES: &str = r#"
levels = ["zone"]
[[hosts]]
name = "a1"
labels = { zone = "a" }
nic_mbit = 1000
gpus = { h100 = 1 }
[[hosts]]
name = "a2"
labels = { zone = "a" }
nic_mbit = 1000
gpus = { h100 = 1 }
[[hosts]]
name = "b1"
labels = { zone = "b" }
nic_mbit = 1000
gpus = { h100 = 1 }
[[hosts]]
name = "b2"
labels = { zone = "b" }
nic_mbit = 1000
gpus = { h100 = { total = 4, used = 3 } }
taints = ["spot"]
"#;
const NET: &str = r#"
[[links]]
of = "a2"
up = { mbit = 94 }
down = { mbit = 94 }
"#;
const JOB: &str = r#"
name = "vision"
ranks = 2
gpus_per_rank = 1
bytes = 100_000_000
tolerates = ["spot"]
"#;

/// A folder with the files of a plan.
struct Files(Folder);

impl Files {
    fn new(test: &str) -> Self {
        let files = Self(Folder::new(&format!("place-{test}")));
        files.write("job.toml", JOB);
        files.write("nodes.toml", NODES);
        files.write("net.toml", NET);
        files
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path(name), text).unwrap();
    }

    /// Returns the standard output of a plan.
    fn plan(&self, flags: &[&str]) -> String {
        let [job, nodes, net] =
            ["job.toml", "nodes.toml", "net.toml"].map(|name| self.0.path(name));
        let line = ["place", "--job", &job, "--nodes", &nodes, "--net", &net];
        run(&[&line[..], flags].concat()).ok().out
    }

    /// Returns the message of a plan that fails with exit code `exit`.
    fn fails(&self, exit: i32) -> String {
        self.fails_with(&[], exit)
    }

    fn fails_with(&self, flags: &[&str], exit: i32) -> String {
        let [job, nodes, net] =
            ["job.toml", "nodes.toml", "net.toml"].map(|name| self.0.path(name));
        let line = ["place", "--job", &job, "--nodes", &nodes, "--net", &net];
        run(&[&line[..], flags].concat()).failed(exit).to_owned()
    }
}

#[test]
fn a_plan_avoids_the_host_with_the_slow_link() {
    let files = Files::new("slow");
    let text = files.plan(&[]);
    let expected = "job vision: 2 ranks and 1 aggregator of 1 shard on 2 of 4 hosts, in b\n";
    assert!(text.starts_with(expected), "{text}");
    for row in ["b1    b       0             1", "b2    b       1             0"] {
        assert!(text.contains(row), "{text}");
    }
    let json: Value = serde_json::from_str(&files.plan(&["--format", "json"])).unwrap();
    assert_eq!(json["hosts"][0]["host"], "b1");
    assert_eq!(json["hosts"][1]["ranks"][0], 1);
    assert!(json.get("explain").is_none());
    // 106 MB at 94 % of 1 Gbit/s.
    let step_s = json["step_s"].as_f64().unwrap();
    assert!((step_s - 0.9021).abs() < 1e-3, "{step_s}");
    assert_eq!(json["gap"], 0.0);
    let dot = files.plan(&["--format", "dot"]);
    assert!(dot.starts_with("graph \"vision\" {\n") && dot.ends_with("}\n"), "{dot}");
    assert!(dot.contains(r#""/" -- "b" "#) && dot.contains(r#""b" -- "b1" "#), "{dot}");
}

#[test]
fn an_explanation_names_each_host_and_what_would_help() {
    let files = Files::new("explain");
    let text = files.plan(&["--explain"]);
    assert!(text.contains("\na2    outside the domain of the plan\n"), "{text}");
    assert!(text.contains("\na       step 9021.3 ms (+900.0 %)\n"), "{text}");
    assert!(text.contains("\nwith 1 more free GPU in b: step 0.0 ms (-100 %)\n"), "{text}");
    let json: Value =
        serde_json::from_str(&files.plan(&["--explain", "--format", "json"])).unwrap();
    assert_eq!(json["explain"]["hosts"][2]["reason"], "used");
    // Without the tainted host, zone b has room for one rank only.
    files.write("job.toml", &JOB.replace("\"spot\"", ""));
    let text = files.plan(&["--explain"]);
    assert!(text.contains("in the whole cluster\n"), "{text}");
    for row in [
        "a2    a rank here: step 9021.3 ms (+900.0 %)",
        "b2    taint \"spot\" is not tolerated",
        "b       room for 1 rank",
    ] {
        assert!(text.contains(&format!("\n{row}\n")), "{text}");
    }
}

#[test]
fn a_job_avoids_links_that_running_jobs_load() {
    let files = Files::new("jobs");
    // Between the hosts of zone b, half of each link is taken.
    let mut jobs = String::from(
        r#"
        [[jobs]]
        job = { name = "words", ranks = 1, bytes = 100_000_000 }
        placement.hosts = [{ host = "b1", ranks = [0] }, { host = "b2", aggregators = 1 }]
        "#,
    );
    files.write("jobs.toml", &jobs);
    let path = files.0.path("jobs.toml");
    let text = files.plan(&["--jobs", &path]);
    assert!(text.contains("\nstep 1804.3 ms,"), "{text}");
    // At 5.3 MB/s the job leaves the rest of each link.
    jobs += "period_s = 20.0";
    files.write("jobs.toml", &jobs);
    let text = files.plan(&["--jobs", &path]);
    assert!(text.contains("\nstep 944.7 ms,"), "{text}");
    for (from, to, expected) in [
        ("20.0", "nan", "job \"words\": period_s is NaN; it must be a positive number"),
        (
            "\"b2\"",
            "\"b1\"",
            "the placement of job \"words\" lists host \"b1\" twice; list each host once",
        ),
        (
            "[0]",
            "[1]",
            "the placement of job \"words\" does not have each rank from 0 to 0 once; see rank 0",
        ),
    ] {
        files.write("jobs.toml", &jobs.replace(from, to));
        let why = files.fails_with(&["--jobs", &path], 2);
        assert_eq!(why, format!("{path}: {expected}"));
    }
}

#[test]
fn a_plan_names_the_standbys_and_their_step() {
    let files = Files::new("standby");
    files.write("job.toml", &format!("{JOB}\nstandbys = 1"));
    let text = files.plan(&["--explain"]);
    assert!(text.contains("\nstandby 1: a1; step 1804.3 ms once it has taken over\n"), "{text}");
    assert!(text.contains("\na1    standby 1\n"), "{text}");
    let json: Value = serde_json::from_str(&files.plan(&["--format", "json"])).unwrap();
    assert_eq!(json["standbys"][0]["hosts"][0]["host"], "a1");
    let dot = files.plan(&["--format", "dot"]);
    assert!(dot.contains(r#""a1" [label="a1\n1 aggregator of standby 1"]"#), "{dot}");
    // The present placement keeps its standbys, and shows their step.
    let path = files.0.path("placement.json");
    files.write("placement.json", &json.to_string());
    for format in ["text", "dot", "svg"] {
        let flags = ["--placement", &path, "--format", format];
        assert_eq!(files.plan(&flags), files.plan(&["--format", format]));
    }
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    let kept = "\nno moves of standbys, which ranks learn when they start: none saves enough\n";
    assert!(text.contains(kept), "{text}");
    // A slow standby moves.
    let slow = json.to_string().replace("\"host\":\"a1\"", "\"host\":\"a2\"");
    files.write("placement.json", &slow);
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    let moved = "\nmoves of standbys, which ranks learn when they start:\n  standby 1: a1; step ";
    assert!(text.contains(moved), "{text}");
    let json = files.plan(&["--placement", &path, "--rebalance", "--format", "json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["rebalance"]["standbys"]["standbys"][0]["hosts"][0]["host"], "a1");
    files.write("job.toml", JOB);
    let why = files.fails_with(&["--placement", &path], 2);
    let expected = "the placement of job \"vision\" has more standbys (1) than the job (0); raise \
                    `standbys`";
    assert_eq!(why, format!("{path}: {expected}"));
}

#[test]
fn a_placement_on_a_link_that_carries_nothing_never_ends_a_step() {
    let files = Files::new("dead");
    files.write("net.toml", &NET.replace("up = { mbit = 94 }", "up = { mbit = 0 }"));
    let path = files.0.path("placement.json");
    files.write(
        "placement.json",
        r#"{"hosts": [
            {"host": "a1", "ranks": [0]},
            {"host": "a2", "ranks": [1], "aggregators": 1}
        ]}"#,
    );
    let text = files.plan(&["--placement", &path, "--explain", "--rebalance"]);
    assert!(text.contains("\nstep never ends: nothing passes the link from a2\n"), "{text}");
    assert!(text.contains("\nb       step 902.1 ms\n"), "{text}");
    assert!(!text.contains("inf") && !text.contains("NaN"), "{text}");
    let json = files.plan(&["--placement", &path, "--format", "json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["step_s"], &json["gap"]), (&Value::Null, &Value::Null));
    let svg = files.plan(&["--placement", &path, "--format", "svg"]);
    assert!(svg.contains("<title>vision: step never ends</title>"), "{svg}");
}

#[test]
fn the_age_of_an_old_network_file_is_a_warning() {
    let files = Files::new("stale");
    files.write("net.toml", &format!("measured_at = 1000\n{NET}"));
    let [job, nodes, net] = ["job.toml", "nodes.toml", "net.toml"].map(|name| files.0.path(name));
    let ended = run(&["place", "--job", &job, "--nodes", &nodes, "--net", &net]).ok();
    let start = format!("racksum: warning: {net}: some measurements are ");
    assert!(ended.err.starts_with(&start) && ended.err.contains(" hours old"), "{ended:?}");
    files.write("net.toml", &format!("measured_at = 99_999_999_999\n{NET}"));
    let ended = run(&["place", "--job", &job, "--nodes", &nodes, "--net", &net]).ok();
    let start = format!("racksum: warning: {net}: measured_at is in the future, ");
    assert!(ended.err.starts_with(&start), "{ended:?}");
}

#[test]
fn a_plan_notes_constraints_that_match_nothing_and_links_without_a_measurement() {
    let files = Files::new("notes");
    files.write("job.toml", &format!("{JOB}except = [{{ zone = 'c' }}]"));
    let text = files.plan(&[]);
    for note in [
        "`except` names { zone = \"c\" }, which no host has; the values of zone are a, b",
        "links in use were not measured: b1, b2",
    ] {
        assert!(text.contains(&format!("\nnote: {note}\n")), "{text}");
    }
    let json: Value = serde_json::from_str(&files.plan(&["--format", "json"])).unwrap();
    assert_eq!(json["notes"].as_array().unwrap().len(), 2);
}

#[test]
fn the_number_of_aggregators_can_be_left_to_the_plan() {
    let files = Files::new("auto");
    let job = JOB.replace("ranks = 2", "ranks = 3");
    files.write("job.toml", &format!("{job}\naggregators = 'auto'\nmax_ranks_per_host = 1"));
    let json: Value = serde_json::from_str(&files.plan(&["--format", "json"])).unwrap();
    let aggregators = [0, 1, 2].map(|host| json["hosts"][host]["aggregators"].as_u64().unwrap());
    assert_eq!((aggregators, json["shards"].as_u64()), ([1, 1, 1], Some(1)));
    files.write("job.toml", &format!("{JOB}\naggregators = 'many'"));
    let why = files.fails(2);
    assert!(why.ends_with("line 8: expected a value, or \"auto\""), "{why}");
    files.write("job.toml", &format!("{JOB}\nshards = 8\ncpus_per_aggregator = 4"));
    let why = files.fails(2);
    assert!(
        why.ends_with("shards is 8, but cpus_per_aggregator is 4; give each shard a core"),
        "{why}"
    );
}

#[test]
fn a_present_placement_stays_unless_a_move_saves_enough() {
    let files = Files::new("rebalance");
    let path = files.0.path("placement.json");
    files.write(
        "placement.json",
        r#"{"hosts": [
            {"host": "a1", "ranks": [0]},
            {"host": "a2", "ranks": [1], "aggregators": 1}
        ]}"#,
    );
    let text = files.plan(&["--placement", &path]);
    assert!(
        text.contains("\nstep 9021.3 ms,") && text.contains("\na2    a       1             1\n"),
        "{text}"
    );
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    let expected = "\nno moves of aggregators, while the job runs: none saves enough\n\
        moves of ranks, which restart the job: step 902.1 ms (-90.0 %)\n";
    assert!(text.contains(expected), "{text}");
    for moved in
        ["  1 aggregator from a2 to b1", "  1 rank from a1 to b1", "  1 rank from a2 to b2"]
    {
        assert!(text.contains(&format!("\n{moved}")), "{text}");
    }
    let flags = ["--placement", &path, "--rebalance", "--threshold", "0.95", "--format", "json"];
    let json: Value = serde_json::from_str(&files.plan(&flags)).unwrap();
    assert_eq!(json["rebalance"]["ranks"], Value::Null);
    // What a plan prints is its placement.
    files.write("placement.json", &files.plan(&["--format", "json"]));
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    assert!(
        text.contains("\nno moves of ranks, which restart the job: none saves enough"),
        "{text}"
    );
    // Ranks keep their numbers, since the job runs.
    files.write(
        "placement.json",
        r#"{"hosts": [
            {"host": "b1", "ranks": [1], "aggregators": 1}, {"host": "b2", "ranks": [0]}
        ]}"#,
    );
    let text = files.plan(&["--placement", &path]);
    for row in ["b1    b       1             1", "b2    b       0             0"] {
        assert!(text.contains(row), "{text}");
    }
    let json = files.plan(&["--placement", &path, "--format", "json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        [&json["hosts"][0]["ranks"], &json["hosts"][1]["ranks"]],
        [&json!([1]), &json!([0])]
    );
    // A step may get longer if the job does not allow its placement.
    files.write(
        "placement.json",
        r#"{"hosts": [{"host": "b2", "ranks": [0, 1], "aggregators": 1}]}"#,
    );
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    let expected = "\nmoves of ranks, which restart the job: step 902.1 ms\n";
    assert!(text.contains("\nthe job does not allow its present placement any more\n"), "{text}");
    assert!(text.contains(expected), "{text}");
    for flag in ["--rebalance", "--explain"] {
        let why = files.fails_with(&["--placement", &path, flag, "--format", "dot"], 2);
        assert_eq!(why, format!("{flag} needs --format text or json"));
    }
    files.write(
        "placement.json",
        r#"{"hosts": [{"host": "c9", "ranks": [0, 1], "aggregators": 1}]}"#,
    );
    let expected =
        "the placement of job \"vision\" names host \"c9\", which the inventory does not list";
    assert_eq!(files.fails_with(&["--placement", &path], 2), format!("{path}: {expected}"));
}

#[test]
fn an_image_shows_the_members_and_the_bottleneck() {
    let files = Files::new("svg");
    files.write("job.toml", &JOB.replace("vision", "a<b> & c"));
    let svg = files.plan(&["--format", "svg"]);
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    for part in [
        "<title>a&lt;b&gt; &amp; c: step 902.1 ms</title>",
        ">b1</text>",
        ">1 aggregator</text>",
        ">rank 1</text>",
        "<text class=\"rates limit\"",
        "prefers-color-scheme:dark",
    ] {
        assert!(svg.contains(part), "{part} {svg}");
    }
    assert!(!svg.contains(">a1</text>"), "{svg}");
}

#[test]
fn the_aggregators_of_racks_have_a_parent() {
    let files = Files::new("racks");
    let job = JOB.replace("ranks = 2", "ranks = 4");
    files.write("job.toml", &format!("{job}\nracks = true"));
    let text = files.plan(&["--explain"]);
    assert!(text.contains("\naggregator of b: b1, with parent a1\n"), "{text}");
    let json: Value = serde_json::from_str(&files.plan(&["--format", "json"])).unwrap();
    assert_eq!(json["racks"][0]["domain"], "b");
    assert_eq!(json["racks"][0]["parent"], "a1");
    let times =
        ["step_least_s", "step_s", "step_greatest_s"].map(|key| json[key].as_f64().unwrap());
    assert!(times.is_sorted() && times[2] < 2.0 * times[0], "{times:?}");
    for format in ["dot", "svg"] {
        assert!(files.plan(&["--format", format]).contains("rack aggregator, parent a1"));
    }
    // The printed placement has the same step, and stays.
    let path = files.0.path("placement.json");
    files.write("placement.json", &json.to_string());
    let present = files.plan(&["--placement", &path, "--format", "json"]);
    let present: Value = serde_json::from_str(&present).unwrap();
    assert_eq!((&present["step_s"], &present["racks"]), (&json["step_s"], &json["racks"]));
    let text = files.plan(&["--placement", &path, "--rebalance"]);
    let title = "moves of aggregators alone, which restart a job with racks: ";
    assert!(text.contains(&format!("\nno {title}none saves enough\n")), "{text}");
    // A root behind the slow link moves, and only a restart of the job moves it.
    let slow = json!({
        "hosts": [
            { "host": "a1", "ranks": [0] }, { "host": "a2", "ranks": [1], "aggregators": 1 },
            { "host": "b1", "ranks": [2] }, { "host": "b2", "ranks": [3] },
        ],
        "racks": [{ "host": "b1" }],
    });
    files.write("placement.json", &slow.to_string());
    let flags = ["--placement", &path, "--rebalance"];
    let text = files.plan(&flags);
    let moves = format!(
        "\n{title}step 9021.3 ms (-50.0 %)\n  1 aggregator from a2 to a1\n  aggregator of b: b1, \
         with parent a1\n"
    );
    assert!(text.contains(&moves), "{text}");
    let moved: Value =
        serde_json::from_str(&files.plan(&[&flags[..], &["--format", "json"]].concat())).unwrap();
    assert_eq!(moved["rebalance"]["aggregators"]["racks"][0]["parent"], "a1");
    assert_eq!(moved["rebalance"]["ranks"], Value::Null);
    let why = files.fails_with(&[&flags[..], &["--apply"]].concat(), 3);
    assert!(why.starts_with("the moves are not applied: the job has racks, and "), "{why}");
    // As a running job, it loads the links of another one.
    let racks = json!({ "jobs": [{
        "job": {
            "name": "words", "ranks": 4, "bytes": 100_000_000, "racks": "auto",
            "aggregators": "auto",
        },
        "placement": json,
    }] });
    files.write("jobs.json", &racks.to_string());
    files.write("job.toml", JOB);
    let text = files.plan(&["--jobs", &files.0.path("jobs.json")]);
    assert!(text.contains("\nstep 1804.3 ms,"), "{text}");
}

#[test]
fn a_job_that_does_not_fit_is_told_what_binds() {
    let files = Files::new("room");
    files.write("job.toml", &JOB.replace("ranks = 2", "ranks = 5").replace("\"spot\"", ""));
    assert_eq!(
        files.fails(3),
        "job \"vision\" has 5 ranks, and there is room for 3; without taints, 4 fit"
    );
}

#[test]
fn a_file_that_is_wrong_is_named() {
    let files = Files::new("wrong");
    let case = |name: &str, text: &str, expected: &str| {
        files.write(name, text);
        let why = files.fails(2);
        assert!(why.starts_with(&files.0.path(name)) && why.ends_with(expected), "{why}");
        let whole = [("job.toml", JOB), ("nodes.toml", NODES), ("net.toml", NET)];
        let (_, whole) = whole.into_iter().find(|(whole, _)| *whole == name).unwrap();
        files.write(name, whole);
    };
    case(
        "job.toml",
        &format!("{JOB}\nscope = 'rack'"),
        "unknown level \"rack\"; the inventory has zone",
    );
    case(
        "job.toml",
        &JOB.replace("ranks = 2", "ranks = 0"),
        "ranks is 0; it must be from 1 to 65536",
    );
    case(
        "job.toml",
        "name = 'x'\nranks =",
        "line 2: string values must be quoted, expected literal string",
    );
    case(
        "net.toml",
        &NET.replace("\"a2\"", "\"c9\""),
        "names \"c9\", which is neither a host nor a domain of the inventory",
    );
    case(
        "net.toml",
        &NET.replace("mbit = 94", "mbit = nan"),
        "a2: mbit is NaN; it must be a number from 0 to 1e9",
    );
    case(
        "net.toml",
        &NET.replace("mbit = 94", "mbit = -1"),
        "a2: mbit is -1; it must be a number from 0 to 1e9",
    );
    case(
        "nodes.toml",
        &NODES.replace("\"a2\"", "\"a1\""),
        "host \"a1\" is listed twice; give each host a name of its own",
    );
    case("nodes.toml", "hosts = []", "the inventory has no hosts; list at least one");
    let missing = run(&["place", "--job", "/nowhere", "--nodes", &files.0.path("nodes.toml")]);
    assert!(missing.failed(2).starts_with("cannot read /nowhere: No such file"), "{missing:?}");
}
