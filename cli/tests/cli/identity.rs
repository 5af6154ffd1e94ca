//! Identities: how they are created and shown, and which callers they admit.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use safetensors::Dtype;

use crate::files::{Folder, Tensor};
use crate::ports::own_port;
use crate::process::{Process, RACKSUM, Serving, bench_rank, run, signal};
use crate::waits::await_that;

/// Creates a folder for a test, with the authority `name` in it.
pub(crate) fn authority(test: &str, name: &str) -> (Folder, String) {
    let folder = Folder::new(&format!("identity-{test}-{name}"));
    let file = folder.path("authority.pem");
    run(&["identity", "init", "--name", name, "--out", &file]).ok();
    (folder, file)
}

/// Issues an identity; returns its file.
pub(crate) fn issue(folder: &Folder, authority: &str, name: &str, role: &str) -> String {
    let file = folder.path(&format!("{name}.pem"));
    run(&["identity", "issue", name, "--role", role, "--authority", authority, "--out", &file])
        .ok();
    file
}

/// Flags of a short benchmark.
const SHORT: [&str; 8] = ["-b", "4K", "-e", "4K", "-n", "2", "--timeout", "20"];

#[test]
fn keys_are_for_their_owner_and_never_written_over() {
    let (folder, authority) = authority("keys", "rack");
    let node = issue(&folder, &authority, "node-7", "worker");
    for file in [&authority, &node] {
        let mode = std::fs::metadata(file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    let before = std::fs::read(&authority).unwrap();
    let ended = run(&["identity", "init", "--out", &authority]);
    assert!(
        ended.failed(2).contains("already exists, and racksum never overwrites a key"),
        "{ended:?}"
    );
    assert_eq!(std::fs::read(&authority).unwrap(), before);
    let ended = run(&["identity", "issue", "x", "--authority", &node, "--out", &folder.path("x")]);
    assert!(ended.failed(2).contains("\"node-7\" has role worker, not authority"), "{ended:?}");
    let ended = run(&["identity", "issue", "x", "--authority", &folder.path("no")]);
    assert!(ended.failed(2).starts_with("authority ") && ended.err.contains("no: No such file"));
    let ended = run(&["identity", "init", "--out", &folder.path("none/a.pem")]);
    assert!(ended.failed(2).starts_with("cannot write "), "{ended:?}");
    // A full disk, which a limit on the file size simulates, is not a usage error.
    let full = folder.path("full.pem");
    let script = format!("trap '' XFSZ; ulimit -f 0; exec {RACKSUM} identity init --out {full}");
    let ended = Process::spawn(Command::new("sh").args(["-c", &script])).end(60);
    assert!(ended.failed(1).starts_with(&format!("cannot write {full}: ")), "{ended:?}");
    assert_eq!(folder.names(), ["authority.pem", "node-7.pem"], "no temporary file may remain");
}

#[test]
fn an_identity_says_whose_it_is_and_until_when() {
    let (folder, authority) = authority("shown", "rack");
    let node = issue(&folder, &authority, "agg-1", "aggregator");
    let shown = run(&["identity", "show", &node]).ok().out;
    assert!(shown.starts_with(&format!("{node}: aggregator \"agg-1\" of \"rack\", 20")), "{shown}");
    assert!(shown.contains(": authority \"rack\" of \"rack\", 20"), "{shown}");
    let short = folder.path("short.pem");
    let issue = |name: &str, days: &[&str]| {
        let out = folder.path(name);
        run(&[&["identity", "issue", name, "--authority", &short, "--out", &out], days].concat())
    };
    run(&["identity", "init", "--days", "30", "--out", &short]).ok();
    let printed = issue("node-1", &[]).ok().out;
    assert!(printed.contains("the identity of worker \"node-1\", valid until 20"), "{printed}");
    let ended = issue("node-2", &["--days", "31"]);
    assert!(ended.failed(2).contains("31 days exceed the life of the authority"), "{ended:?}");
    let shown = run(&["identity", "show", "--format", "json", &authority, &node]).ok().out;
    let roles: Vec<_> = shown
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| (line["role"].as_str().unwrap().to_owned(), line["valid"].as_bool().unwrap()))
        .collect();
    let expected = ["authority", "aggregator", "authority"].map(|role| (role.to_owned(), true));
    assert_eq!(roles, expected);
    let ended = run(&["identity", "show", "/dev/null"]);
    assert_eq!(ended.failed(2), "certificates /dev/null: not a regular file; pass a PEM file");
}

#[test]
fn members_get_in_and_strangers_do_not() {
    let (folder, ours) = authority("members", "rack");
    let (other, theirs) = authority("members", "elsewhere");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let serving = Serving::start(&["--identity", &served]);
    let node = issue(&folder, &ours, "node", "worker");
    let ranks = [0, 1].map(|rank| {
        bench_rank(&serving.addr, rank, 2, &[&SHORT[..], &["--identity", &node]].concat())
    });
    for rank in ranks {
        rank.end(40).ok();
    }

    let stranger = issue(&other, &theirs, "node", "worker");
    let ended = bench_rank(&serving.addr, 0, 1, &["--identity", &stranger]).end(20);
    assert!(ended.failed(3).contains("it was issued by another authority"), "{ended:?}");
    let ended = bench_rank(&serving.addr, 0, 1, &[]).end(20);
    let why = format!("{} requires an identity, and this process has none", serving.addr);
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    let ended = bench_rank(&serving.addr, 0, 1, &["--insecure"]).end(20);
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    let ended = bench_rank(&serving.addr, 0, 1, &["--insecure", "--identity", &node]).end(20);
    assert_eq!(ended.code, Some(2), "{ended:?}");

    // An aggregator does not accept the identity of a worker or an operator as its own.
    let ops = issue(&folder, &ours, "ops", "operator");
    for (identity, role) in [(&node, "worker"), (&ops, "operator")] {
        let ended = run(&["aggregator", "--port", "0", "--identity", identity]);
        let why = format!("has role {role}, but role aggregator is needed");
        assert!(ended.failed(2).contains(&why), "{ended:?}");
    }

    // The operator sees the refusals in the log.
    let serving = serving.end();
    let refusals = serving.err.lines().filter(|line| line.contains("refused: "));
    assert_eq!(refusals.count(), 3, "{serving:?}");
}

#[test]
fn an_operator_joins_no_job_but_sees_all() {
    let (folder, ours) = authority("operator", "rack");
    let [served, node, ops] = [("agg", "aggregator"), ("node", "worker"), ("ops", "operator")]
        .map(|(name, role)| issue(&folder, &ours, name, role));
    let config = folder.path("racksum.toml");
    std::fs::write(&config, "[[admit]]\nidentity = \"node\"\njobs = [\"*\"]\n").unwrap();
    let serving = Serving::start(&["--identity", &served, "--config", &config]);
    let shown = run(&["identity", "show", &ops]).ok().out;
    assert!(shown.starts_with(&format!("{ops}: operator \"ops\" of \"rack\", 20")), "{shown}");
    let ended = bench_rank(&serving.addr, 0, 1, &["--identity", &ops]).end(20);
    let why = "\"ops\" has role operator, which joins no jobs; issue an identity for the rank with \
               `racksum identity issue NAME --role worker`";
    assert!(ended.failed(3).ends_with(why), "{ended:?}");
    let waiting = bench_rank(&serving.addr, 0, 2, &["--identity", &node, "--job", "waiting"]);
    await_that("the operator sees the job", || {
        let status = run(&["status", &serving.addr, "--identity", &ops]).ok().out;
        status.contains("job \"waiting\"")
    });
    drop(waiting);
}

#[test]
fn who_calls_for_others_learns_at_the_start_that_it_cannot() {
    let (folder, ours) = authority("starts", "rack");
    let node = issue(&folder, &ours, "node", "worker");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let ops = issue(&folder, &ours, "ops", "operator");
    let socket = folder.path("sidecar");
    let worker = |flags: &[&str]| {
        let ended = run(&[&["worker", "--socket", &socket, "--aggregator"], flags].concat());
        assert!(
            !std::fs::exists(&socket).unwrap(),
            "the sidecar must not bind its socket: {ended:?}"
        );
        ended.failed(2).to_owned()
    };
    for (flags, why) in [
        (&["192.0.2.1:7177"][..], "only loopback addresses"),
        (&["192.0.2.1:7177", "--identity", &node], "has role worker, but role aggregator is"),
        (&["192.0.2.1:7177", "--identity", &ops], "has role operator, but role aggregator is"),
        (&["127.0.0.1:7177", "--identity", "/nowhere"], "identity /nowhere: No such file"),
        (&["127.0.0.1:7177", "--interface", "=none"], "no usable interface matches \"=none\""),
        (&["127.0.0.1:7177,127.0.0.1:7177"], "is listed twice"),
        (&["127.0.0.1"], "HOST:PORT"),
        (&["127.0.0.1:0"], "HOST:PORT"),
    ] {
        let error = worker(flags);
        assert!(error.contains(why), "{flags:?}: {error}");
    }
    let parent = |flags: &[&str]| {
        let start = ["aggregator", "--port", "0", "--pool-mib", "16", "--parent"];
        run(&[&start[..], flags].concat()).failed(2).to_owned()
    };
    for (flags, why) in [
        (&["192.0.2.1:7177"][..], "serves on 127.0.0.1, which cannot reach 192.0.2.1:7177"),
        (&["[::1]:7177"], "serves on 127.0.0.1, which cannot reach any of"),
        (&["127.0.0.1:7177", "--identity", &node], "has role worker, but role aggregator is"),
    ] {
        let error = parent(flags);
        assert!(error.contains(why), "{flags:?}: {error}");
    }
    // A standby is an aggregator too, so it does not accept a worker's identity as its own.
    let file = folder.write("one", &[("x", Tensor::of(Dtype::F32, &[1], &[1.0]))]);
    let addr = format!("127.0.0.1:{}", own_port());
    let ended = run(&[
        "reduce",
        &file,
        "--aggregator",
        &addr,
        "--rank",
        "0",
        "--world",
        "1",
        "--standby",
        &addr,
        "--standby-identity",
        &node,
        "--identity",
        &served,
    ]);
    assert!(ended.failed(2).contains("has role worker, but role aggregator is"), "{ended:?}");
}

#[test]
fn rules_say_who_may_join_which_job() {
    let (folder, ours) = authority("rules", "rack");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let config = folder.path("racksum.toml");
    let rules = "[[admit]]\nidentity = \"vision-*\"\njobs = [\"vision/*\"]\n";
    std::fs::write(&config, rules).unwrap();
    let ended = run(&["aggregator", "--port", "0", "--config", &config]);
    assert!(ended.failed(2).starts_with("[[admit]] rules match names"), "{ended:?}");
    let serving = Serving::start(&["--identity", &served, "--config", &config]);
    let join = |name: &str, job: &str| {
        let node = folder.path(&format!("{name}.pem"));
        let flags = [&SHORT[..], &["--identity", &node, "--job", job]].concat();
        bench_rank(&serving.addr, 0, 1, &flags).end(40)
    };
    issue(&folder, &ours, "vision-1", "worker");
    issue(&folder, &ours, "speech-1", "worker");
    join("vision-1", "vision/resnet").ok();
    for (name, job) in [("vision-1", "speech"), ("speech-1", "vision/resnet")] {
        let ended = join(name, job);
        let why = format!(
            "the aggregator refused: identity {name:?} may not join job {job:?} here; set --job to \
             a job that this identity may join, or ask the operator to add the identity to the \
             [[admit]] rules of the aggregator's configuration"
        );
        assert_eq!(ended.failed(3), why);
    }
    // An identity that may not join cannot end the job with a greater generation either.
    let node = folder.path("vision-1.pem");
    let long = ["-b", "4K", "-e", "4K", "-n", "100000000", "--identity", &node];
    let flags = [&long[..], &["--job", "vision/resnet"]].concat();
    let mut running = bench_rank(&serving.addr, 0, 1, &flags);
    await_that("the rank runs", || running.out().contains('#'));
    let node = folder.path("speech-1.pem");
    let stolen = ["--identity", &node, "--job", "vision/resnet", "--generation", "7"];
    let ended = bench_rank(&serving.addr, 0, 1, &[&SHORT[..], &stolen].concat()).end(40);
    assert!(ended.failed(3).contains("may not join job"), "{ended:?}");
    assert!(running.runs());
}

#[test]
fn limits_rules_and_certificates_are_reloaded_while_jobs_run() {
    let (folder, ours) = authority("reload", "rack");
    let (other, theirs) = authority("reload", "new-rack");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let node = issue(&folder, &ours, "node", "worker");
    let config = folder.path("racksum.toml");
    let rules = |job: &str| format!("[[admit]]\nidentity = \"*\"\njobs = [{job:?}]\n");
    std::fs::write(&config, rules("one")).unwrap();
    let serving = Serving::start(&["--identity", &served, "--config", &config]);
    let long = ["-b", "4K", "-e", "4K", "-n", "100000000", "--identity", &node, "--job", "one"];
    let mut running = bench_rank(&serving.addr, 0, 1, &long);
    await_that("the rank runs", || running.out().contains('#'));
    let join = |identity: &str, job: &str| {
        let flags = [&SHORT[..], &["--identity", identity, "--job", job]].concat();
        bench_rank(&serving.addr, 0, 1, &flags).end(40)
    };
    assert!(join(&node, "two").failed(3).contains("may not join job \"two\""));
    let reload = |text: &str| {
        std::fs::write(&config, text).unwrap();
        signal(serving.process.id(), "HUP");
    };
    // An invalid file changes nothing.
    reload("max_jobs = 0\n");
    await_that("the refused reload is logged", || {
        serving.process.err().contains("max_jobs must be from")
    });
    reload(&format!("port = 1\nmax_jobs = 3\n{}", rules("two")));
    await_that("the configuration is reloaded", || {
        serving.process.out().contains("configuration reloaded")
    });
    // The port on the command line overrides the file, so the change of `port` needs no restart.
    assert!(
        !serving.process.err().contains("restart the aggregator to apply the changes to"),
        "{}",
        serving.process.err()
    );
    join(&node, "two").ok();
    assert!(join(&node, "one").failed(3).contains("may not join job \"one\""));
    // Replace the identity file with one from a new authority.
    let renewed = issue(&other, &theirs, "agg", "aggregator");
    std::fs::copy(&renewed, &served).unwrap();
    reload(&format!("shards = 2\n{}", rules("two")));
    let warning = "warning: restart the aggregator to apply the changes to shards";
    await_that("the key that needs a restart is named", || serving.process.err().contains(warning));
    let new_node = issue(&other, &theirs, "new-node", "worker");
    join(&new_node, "two").ok();
    assert!(join(&node, "two").failed(3).contains("rejected the certificate of"));
    assert!(running.runs(), "a reload must not end a running job");
}

#[test]
fn an_identity_that_is_named_no_more_stays_although_its_file_is_gone() {
    let (folder, ours) = authority("unnamed", "rack");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let node = issue(&folder, &ours, "node", "worker");
    let config = folder.path("racksum.toml");
    std::fs::write(&config, "identity = \"agg.pem\"\n").unwrap();
    let serving = Serving::start(&["--config", &config]);
    std::fs::remove_file(&served).unwrap();
    let reload = |text: &str| {
        std::fs::write(&config, text).unwrap();
        signal(serving.process.id(), "HUP");
    };
    reload("identity = \"agg.pem\"\nmax_jobs = 2\n");
    let gone = format!("nothing was reloaded: identity {served}: No such file");
    await_that("the refused reload is logged", || serving.process.err().contains(&gone));
    reload("max_jobs = 3\n");
    await_that("the configuration is reloaded", || {
        serving.process.out().contains("configuration reloaded")
    });
    let warning = "warning: restart the aggregator to apply the changes to identity";
    await_that("the warning names the identity", || serving.process.err().contains(warning));
    let flags = [&SHORT[..], &["--identity", &node]].concat();
    bench_rank(&serving.addr, 0, 1, &flags).end(40).ok();
}

#[test]
fn each_file_that_cannot_be_shown_is_told_of() {
    let (folder, ours) = authority("show", "rack");
    let [none, no_other] = ["none.pem", "no-other.pem"].map(|name| folder.path(name));
    for format in ["text", "json"] {
        let ended = run(&["identity", "show", "--format", format, &none, &no_other, &ours]);
        assert!(ended.code == Some(2) && ended.out.contains(&ours), "{ended:?}");
        for file in [&none, &no_other] {
            let why = format!("racksum: certificates {file}: No such file");
            assert_eq!(ended.err.matches(&why).count(), 1, "{ended:?}");
        }
    }
}

#[test]
fn a_run_on_one_host_needs_no_identity_although_the_environment_names_one() {
    let (folder, ours) = authority("local", "rack");
    let node = issue(&folder, &ours, "node", "worker");
    let mut command = Command::new(RACKSUM);
    command.args(["bench", "--workers", "2"]).args(SHORT).env("RACKSUM_IDENTITY", &node);
    Process::spawn(&mut command).end(60).ok();
}

#[test]
fn each_aggregator_of_a_tree_admits_by_its_own_rules_also_once_they_are_reloaded() {
    let (folder, ours) = authority("tree", "site");
    let [root, rack] = ["root", "rack-1"].map(|name| issue(&folder, &ours, name, "aggregator"));
    let node = issue(&folder, &ours, "node", "worker");
    let [above, below] = ["root.toml", "rack.toml"].map(|name| folder.path(name));
    let rule = |identity: &str, jobs: &[&str]| {
        format!("[[admit]]\nidentity = {identity:?}\njobs = {jobs:?}\n")
    };
    std::fs::write(&above, rule("rack-*", &["vision"])).unwrap();
    std::fs::write(&below, rule("node", &["vision", "speech"])).unwrap();
    let root = Serving::start(&["--identity", &root, "--config", &above]);
    let flags = ["--identity", &rack, "--config", &below, "--parent", &root.addr];
    let rack = Serving::start(&flags);
    let flags = |job| [&SHORT[..], &["--identity", &node, "--job", job]].concat();
    let join = |at: &Serving, job| bench_rank(&at.addr, 0, 1, &flags(job)).end(40);

    let long = ["-b", "4K", "-e", "4K", "-n", "100000000", "--identity", &node, "--job", "vision"];
    let mut running = bench_rank(&rack.addr, 0, 1, &long);
    await_that("the rank runs", || running.out().contains('#'));
    let ended = join(&root, "vision");
    assert!(ended.failed(3).contains("may not join job \"vision\""), "{ended:?}");
    let ended = join(&rack, "other");
    assert!(ended.failed(3).contains("may not join job \"other\""), "{ended:?}");
    let ended = join(&rack, "speech");
    let ended = ended.failed(3);
    assert!(ended.contains("may not join job \"speech\""), "{ended}");
    assert!(ended.contains(&root.addr), "the message must name the root: {ended}");

    std::fs::write(&above, rule("rack-*", &["vision", "speech"])).unwrap();
    signal(root.process.id(), "HUP");
    await_that("the configuration is reloaded", || {
        root.process.out().contains("configuration reloaded")
    });
    join(&rack, "speech").ok();
    let elsewhere = rule("node", &["vision", "speech"]);
    std::fs::write(&below, format!("shards = 2\n{elsewhere}")).unwrap();
    signal(rack.process.id(), "HUP");
    let shards = "restart the aggregator to apply the changes to shards";
    await_that("the key that needs a restart is named", || rack.process.err().contains(shards));
    join(&rack, "speech").ok();
    assert!(running.runs(), "a reload must not end a running job");
}
