//! Errors in the command line: each message says what to type instead.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::process::Command;

use crate::files::Folder;
use crate::process::{Process, RACKSUM, Serving, run, signal};

#[test]
fn a_value_that_is_no_value_brings_up_one_that_is() {
    let far = ["--rank", "0", "--world", "2", "--aggregator"];
    let whole = "must be a whole number without a unit";
    for (args, why) in [
        (&["bench", "--timeout", "5s"][..], whole),
        (&["bench", "-f", "0.5"], whole),
        (&["aggregator", "--port", "0x"], whole),
        (&["aggregator", "--port", ""], whole),
        (
            &["aggregator", "--bind", "10.0.0.1:7177"],
            "\"10.0.0.1:7177\" includes a port; set bind to 10.0.0.1 and port to 7177",
        ),
        (&["aggregator", "--bind", "localhost"], "\"localhost\" is not an IP address"),
        (
            &[&["bench"], &far[..], &["127.0.0.1:7177 127.0.0.1:7178"]].concat(),
            "\"127.0.0.1:7177 127.0.0.1:7178\" contains a space; separate aggregators with + or ,",
        ),
        (
            &[&["bench"], &far[..], &["127.0.0.1:1;127.0.0.1:2"]].concat(),
            "\"127.0.0.1:1;127.0.0.1:2\" contains a semicolon; separate aggregators with + or ,",
        ),
        (
            &["aggregator", "--bind", "::ffff:10.0.0.1"],
            "::ffff:10.0.0.1, which is an IPv4-mapped address (write 10.0.0.1)",
        ),
        (&["reduce", "file", "--out"], "a value is required for '--out"),
    ] {
        let ended = run(args);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.err.contains(why), "{ended:?}");
        assert!(!ended.err.contains("digit found"), "{ended:?}");
    }
}

#[test]
fn help_says_whose_default_the_authentication_of_datagrams_is() {
    for command in ["bench", "reduce", "worker"] {
        let help = run(&[command, "--help"]).ok().out;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, description) = help.split_once("--data-auth").unwrap();
        let default =
            "[default: the aggregator's setting, which defaults to mac, or to none on loopback]";
        assert!(description.contains(default), "{description}");
    }
}

#[test]
fn a_socket_that_cannot_be_asked_brings_up_what_helps() {
    let folder = Folder::new("asked");
    let dead = folder.path("dead");
    drop(UnixListener::bind(&dead).unwrap());
    for (which, whose) in [(dead.clone(), "aggregator"), (format!("unix:{dead}"), "sidecar")] {
        let ended = run(&["status", &which]);
        let why = format!("; the {whose} has exited; start it again");
        assert!(ended.failed(3).ends_with(&why), "{ended:?}");
    }
    std::fs::set_permissions(&dead, PermissionsExt::from_mode(0o0)).unwrap();
    if is_root() {
        racksum_test_report::skip("root may connect to every socket");
        return;
    }
    for (which, whose) in [(dead.clone(), "aggregator"), (format!("unix:{dead}"), "sidecar")] {
        let ended = run(&["status", &which]);
        let why = format!("; run this as the {whose}'s user, or as root");
        assert!(ended.failed(3).ends_with(&why), "{ended:?}");
    }
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

#[test]
fn ranks_of_one_host_say_which_of_them_failed() {
    let args = ["bench", "--workers", "2", "-e", "4K", "--drop", "1", "--timeout", "1"];
    let ended = run(&args);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let lines: Vec<_> = ended.err.lines().filter(|line| line.contains("no result")).collect();
    assert!(!lines.is_empty(), "{ended:?}");
    let named = |line: &&str| {
        line.starts_with("racksum: rank 0: ") || line.starts_with("racksum: rank 1: ")
    };
    assert!(lines.iter().all(named), "{ended:?}");
}

#[test]
fn an_aggregator_removes_the_sockets_of_those_that_were_killed() {
    let folder = Folder::new("sockets");
    let start = || {
        let args = ["aggregator", "--port", "0", "--pool-mib", "8"];
        let mut command = Command::new(RACKSUM);
        Serving::of(Process::spawn(command.args(args).env("XDG_RUNTIME_DIR", folder.path(""))))
    };
    let socket = |serving: &Serving| folder.path(&format!("racksum/{}.sock", serving.process.id()));
    let (lives, killed) = (start(), start());
    let (kept, dead) = (socket(&lives), socket(&killed));
    assert!([&kept, &dead].iter().all(|socket| std::fs::exists(socket).unwrap()));
    signal(killed.process.id(), "KILL");
    killed.process.end(10);
    let _next = start();
    assert!(std::fs::exists(&kept).unwrap(), "the socket of a running aggregator must stay");
    assert!(!std::fs::exists(&dead).unwrap());
}
