//! Tests of `racksum status` for aggregators.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Command;

use serde_json::Value;

use crate::files::Folder;
use crate::identity::{authority, issue};
use crate::ports::own_port;
use crate::process::{Ended, Process, RACKSUM, Serving, bench_rank, run, signal, stop};
use crate::waits::await_that;

/// Returns the status as JSON.
pub(crate) fn status_of(socket: &str) -> Value {
    serde_json::from_str(&run(&["status", socket, "--format", "json"]).ok().out).unwrap()
}

#[test]
fn a_rank_that_holds_up_a_job_is_named_with_how_long() {
    let folder = Folder::new("status-behind");
    let socket = folder.path("status.sock");
    let serving = Serving::start(&["--status-socket", &socket]);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only the owner may connect to the socket");
    assert_eq!(status_of(&socket)["jobs"].as_array().unwrap().len(), 0);
    let flags = ["-b", "1M", "-e", "1M", "-n", "1000000", "--job", "stuck", "--generation", "7"];
    let ranks: Vec<_> = (0..3).map(|rank| bench_rank(&serving.addr, rank, 3, &flags)).collect();
    await_that("the ranks run", || ranks.iter().all(|rank| rank.out().contains('#')));
    stop(ranks[1].id());
    let behind = |job: &Value| {
        let behind = |rank: &&Value| rank["behind"].as_bool().unwrap();
        let behind = job["ranks"].as_array().unwrap().iter().filter(behind);
        behind.map(|rank| rank["rank"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    await_that("an op has waited for more than a second", || {
        status_of(&socket)["jobs"][0]["stalled_ms"].as_u64().is_some_and(|stalled| stalled > 1000)
    });
    let job = &status_of(&socket)["jobs"][0];
    assert_eq!((&job["job"], &job["generation"]), (&"stuck".into(), &7.into()), "{job}");
    assert_eq!((&job["state"], behind(job)), (&"running".into(), vec![1]), "{job}");
    assert!(job["ranks"][1]["silent_ms"].as_u64().unwrap() > 900, "{job}");
    assert!(job["ranks"][0]["next_op"].as_u64().unwrap() > 0, "{job}");
    let text = run(&["status", &socket]).ok().out;
    assert!(text.contains("job \"stuck\", generation 7, number "), "{text}");
    assert!(text.contains("; has waited ") && text.contains(" ms for rank 1"), "{text}");
    assert!(text.contains("BEHIND"), "{text}");
    signal(ranks[1].id(), "CONT");
    drop(ranks);
    serving.end().ok();
    assert!(
        !std::fs::exists(&socket).unwrap(),
        "the aggregator must remove its socket when it ends"
    );
}

#[test]
fn a_job_that_gathers_shows_who_is_not_there() {
    let folder = Folder::new("status-gathers");
    let socket = folder.path("status.sock");
    let serving = Serving::start(&["--status-socket", &socket]);
    let rank = bench_rank(&serving.addr, 1, 3, &[]);
    await_that("the rank has joined", || status_of(&socket)["jobs"][0]["state"] == "gathering");
    assert_eq!(status_of(&socket)["jobs"][0]["missing"], serde_json::json!([0, 2]));
    let text = run(&["status", &socket]).ok().out;
    assert!(text.contains("gathering, 3 ranks, ") && text.contains("; missing: 0, 2"), "{text}");
    drop(rank);
}

#[test]
fn an_aggregator_is_asked_by_its_address_and_tells_each_what_it_may_know() {
    let (folder, ours) = authority("status", "rack");
    let issue = |name, role| issue(&folder, &ours, name, role);
    let (served, team) = (issue("agg", "aggregator"), issue("team-1", "worker"));
    let other = issue("other-1", "worker");
    let config = folder.path("racksum.toml");
    let rules = ["team", "other"]
        .map(|who| format!("[[admit]]\nidentity = \"{who}-*\"\njobs = [\"{who}\"]\n"));
    std::fs::write(&config, rules.concat()).unwrap();
    let serving = Serving::start(&["--identity", &served, "--config", &config]);
    let wait = |identity: &str, job: &str| {
        bench_rank(&serving.addr, 0, 2, &["--identity", identity, "--job", job])
    };
    let ranks = [wait(&team, "team"), wait(&other, "other")];
    let ask = |identity: &str| {
        let asked = ["status", &serving.addr, "--format", "json", "--identity", identity];
        let status: Value = serde_json::from_str(&run(&asked).ok().out).unwrap();
        let jobs = status["jobs"].as_array().unwrap().iter();
        jobs.map(|job| job["job"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    await_that("both ranks have joined", || ask(&served) == ["other", "team"]);
    assert_eq!((ask(&team), ask(&other)), (vec!["team".to_owned()], vec!["other".to_owned()]));
    let text = run(&["status", &serving.addr, "--identity", &team]).ok().out;
    assert!(text.contains("job \"team\", generation 0") && !text.contains("other"), "{text}");
    let stranger = run(&["status", &serving.addr]);
    assert!(stranger.failed(3).contains("this process has none"), "{stranger:?}");
    let nobody = run(&["status", &format!("127.0.0.1:{}", own_port())]);
    assert_eq!(nobody.code, Some(3), "{nobody:?}");
    drop(ranks);
}

#[test]
fn a_socket_that_cannot_be_is_refused_and_one_of_the_dead_is_replaced() {
    let folder = Folder::new("status-sockets");
    let socket = folder.path("status.sock");
    let start = |socket: &str| {
        run(&["aggregator", "--port", "0", "--pool-mib", "16", "--status-socket", socket])
    };
    let ended = start(&folder.path("none/status.sock"));
    assert!(ended.failed(2).starts_with("cannot bind the status socket "), "{ended:?}");
    std::fs::write(&socket, "precious").unwrap();
    let ended = start(&socket);
    assert!(ended.failed(2).contains("a file that is not a socket exists there"), "{ended:?}");
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
    // `status` does not accept the file as a socket either.
    for which in [&socket, &folder.path("."), &format!("unix:{socket}")] {
        let why = format!("cannot query {}: not a socket;", which.trim_start_matches("unix:"));
        let ended = run(&["status", which]);
        assert!(ended.failed(2).starts_with(&why), "{ended:?}");
    }
    std::fs::remove_file(&socket).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    let serving = Serving::start(&["--status-socket", &socket]);
    let ended = start(&socket);
    assert!(ended.failed(3).contains("use"), "{ended:?}");
    assert_eq!(status_of(&socket)["addr"].as_str().unwrap(), serving.addr);
}

#[test]
fn all_aggregators_of_a_user_are_found() {
    let folder = Folder::new("status-found");
    let command = |args: &[&str]| {
        let mut command = Command::new(RACKSUM);
        command.args(args).env("XDG_RUNTIME_DIR", folder.path(""));
        Process::spawn(&mut command)
    };
    let status = || -> Ended { command(&["status", "--format", "json"]).end(20) };
    let why = status().failed(3).to_owned();
    assert!(why.starts_with("no aggregator of this user has a status socket in "), "{why}");
    let start = || Serving::of(command(&["aggregator", "--port", "0", "--pool-mib", "16"]));
    let [one, two] = [start(), start()];
    assert_eq!(status().ok().out.lines().count(), 2);
    // `status` skips the socket of a killed aggregator.
    signal(one.process.id(), "KILL");
    drop(one);
    let left = status().ok().out;
    assert_eq!(left.lines().count(), 1);
    assert!(left.contains(&two.addr), "{left}");
}

#[test]
fn an_aggregator_without_a_place_for_its_status_socket_names_the_folder() {
    let folder = Folder::new("status-nowhere");
    let mut command = Command::new(RACKSUM);
    let nowhere = folder.path("none");
    command.args(["aggregator", "--port", "0", "--pool-mib", "16"]);
    let serving = Serving::of(Process::spawn(command.env("XDG_RUNTIME_DIR", &nowhere)));
    let why =
        format!("without a status socket: cannot use the folder {nowhere}/racksum: No such file");
    let err = serving.end().err;
    assert!(err.contains(&why), "{err}");
}

#[test]
fn a_folder_that_others_can_write_to_is_not_used() {
    let folder = Folder::new("status-shared");
    let shared = folder.path("racksum");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
    let command = |args: &[&str]| {
        let mut command = Command::new(RACKSUM);
        command.args(args).env("XDG_RUNTIME_DIR", folder.path(""));
        Process::spawn(&mut command)
    };
    let why = "is not a folder that only this user or root can write to";
    let serving = Serving::of(command(&["aggregator", "--port", "0", "--pool-mib", "16"]));
    assert!(command(&["status"]).end(20).failed(3).contains(why));
    let err = serving.end().err;
    assert!(err.contains("without a status socket") && err.contains(why), "{err}");
}

#[test]
fn an_aggregator_that_does_not_answer_hides_no_other() {
    let folder = Folder::new("status-hides");
    let command = |args: &[&str]| {
        let mut command = Command::new(RACKSUM);
        command.args(args).env("XDG_RUNTIME_DIR", folder.path(""));
        Process::spawn(&mut command)
    };
    let start = || Serving::of(command(&["aggregator", "--port", "0", "--pool-mib", "16"]));
    let mut all = [start(), start(), start()];
    // `status` queries the sockets in the order of their names. Stop the first aggregator.
    all.sort_by_key(|one| format!("{}.sock", one.process.id()));
    let silent = all[0].process.id();
    stop(silent);
    let ended = command(&["status", "--format", "json"]).end(20);
    signal(silent, "CONT");
    let why = ended.failed(3);
    assert!(why.contains(&format!("/{silent}.sock: no answer within 5 s")), "{why}");
    assert_eq!(ended.out.lines().count(), 2, "{ended:?}");
    assert!(all[1..].iter().all(|one| ended.out.contains(&one.addr)), "{ended:?}");
}

#[test]
fn a_path_that_no_socket_can_have_is_a_wrong_command_line() {
    let long = format!("/tmp/{}", "n".repeat(200));
    for (which, code) in [(&long[..], 2), ("/tmp/racksum-no-such-socket", 3)] {
        for which in [which.to_owned(), format!("unix:{which}")] {
            assert!(run(&["status", &which]).failed(code).starts_with("cannot query "), "{which}");
        }
    }
}

#[test]
fn what_names_no_aggregator_is_a_wrong_command_line() {
    for (which, why) in [
        ("127.0.0.1", "\"127.0.0.1\" is not an aggregator address (HOST:PORT): the port is"),
        ("127.0.0.1:99999", "its port must be a number from 1 to 65535"),
        (":32030", "its host is neither a name nor an IP address"),
        ("::1:32040", "write an IPv6 address with a port as [ADDRESS]:PORT"),
        ("unix:", "unix: lacks the path of a sidecar; give unix:PATH"),
        ("[::ffff:127.0.0.1]:7", "an IPv4-mapped address (write 127.0.0.1)"),
    ] {
        let ended = run(&["status", which]);
        assert!(ended.failed(2).contains(why), "{ended:?}");
    }
}

#[test]
fn several_aggregators_are_asked_as_a_job_names_them() {
    let serving = [(); 2].map(|()| Serving::start(&[]));
    let [one, two] = [0, 1].map(|at: usize| &serving[at].addr[..]);
    for list in [format!("{one},{two}"), format!("{one}+{two}")] {
        let printed = run(&["status", &list, "--format", "JSON"]).ok().out;
        let of = |line: &str| serde_json::from_str::<Value>(line).unwrap()["addr"].clone();
        assert_eq!(printed.lines().map(of).collect::<Vec<_>>(), [one, two]);
    }
    // An answer is printed even if another address fails.
    let ended = run(&["status", &format!("bogus,{one}")]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.out.contains(one) && ended.err.contains("\"bogus\" is not an aggregator address"),
        "{ended:?}"
    );
}

#[test]
fn an_aggregator_that_does_not_answer_is_not_waited_for() {
    let folder = Folder::new("status-silent");
    let socket = folder.path("status.sock");
    let serving = Serving::start(&["--status-socket", &socket]);
    stop(serving.process.id());
    let ended = run(&["status", &socket]);
    signal(serving.process.id(), "CONT");
    assert!(ended.failed(3).contains("no answer within 5 s"), "{ended:?}");
}
