//! Effects of environment variables on commands.

use std::process::Command;

use crate::files::captured;
use crate::identity::{authority, issue};
use crate::process::{Ended, Process, RACKSUM, Serving};

/// Runs the program with variables set. A shell sets them, because [`Process`] removes
/// `RACKSUM_LOG`.
fn run(variables: &[(&str, &str)], args: &[&str]) -> Ended {
    let set = variables.iter().map(|(name, value)| format!("export {name}='{value}'; "));
    let script = format!("{}exec \"$0\" \"$@\"", set.collect::<String>());
    Process::spawn(Command::new("sh").args(["-c", &script, RACKSUM]).args(args)).end(60)
}

/// A variable that names an aggregator that does not exist.
const NOBODY: (&str, &str) = ("RACKSUM_AGGREGATOR", "127.0.0.1:9");

#[test]
fn a_variable_makes_no_rank_of_a_command_that_runs_on_this_host() {
    let small = ["bench", "--workers", "2", "-b", "4K", "-e", "4K", "-n", "2", "-w", "0"];
    run(&[NOBODY], &small).ok();
    run(&[NOBODY, ("RACKSUM_IDENTITY", "/nowhere.pem")], &small).ok();
    run(&[("RACKSUM_INTERFACE", "no-such")], &small).ok();
    let files = captured("digits");
    let args: Vec<&str> = std::iter::once("reduce").chain(files.iter().map(|it| &it[..])).collect();
    run(&[NOBODY], &args).ok();
}

#[test]
fn a_variable_completes_what_the_command_line_says_of_a_rank() {
    let serving = Serving::start(&[]);
    let rank = ["bench", "--rank", "0", "--world", "1", "-b", "4K", "-e", "4K", "-n", "2"];
    run(&[("RACKSUM_AGGREGATOR", &serving.addr)], &rank).ok();
    let nowhere = run(&[], &rank);
    let why = "--rank and --world start one rank of a distributed run, which needs an aggregator; \
               set --aggregator HOST:PORT or RACKSUM_AGGREGATOR";
    assert!(nowhere.failed(2).starts_with(why), "{nowhere:?}");
    // The command line overrides the variable.
    let named = [&rank[..], &["--aggregator", &serving.addr]].concat();
    run(&[NOBODY], &named).ok();
}

#[test]
fn an_error_names_the_variable_that_set_the_value() {
    let rank = ["bench", "--rank", "0", "--world", "1"];
    let ended = run(&[("RACKSUM_AGGREGATOR", "a:1,")], &rank);
    let why = "RACKSUM_AGGREGATOR=\"a:1,\": an aggregator in the list is empty";
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    let ended = run(&[("RACKSUM_AGGREGATOR", "bogus")], &rank);
    let why = "RACKSUM_AGGREGATOR=\"bogus\": \"bogus\" is not an aggregator address (HOST:PORT): ";
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    let insecure = [&rank[..], &["--aggregator", "127.0.0.1:9", "--insecure"]].concat();
    let aggregator = ["aggregator", "--port", "0", "--insecure"];
    let status = ["status", "127.0.0.1:9", "--insecure"];
    for args in [&insecure[..], &aggregator, &status] {
        let ended = run(&[("RACKSUM_IDENTITY", "node.pem")], args);
        let why = "RACKSUM_IDENTITY=\"node.pem\" conflicts with";
        assert!(ended.failed(2).starts_with(why), "{ended:?}");
    }
    let ended = run(&[("RACKSUM_LOG", "a=b=c")], &["bench", "-e", "4K"]);
    assert!(ended.failed(2).starts_with("RACKSUM_LOG \"a=b=c\": "), "{ended:?}");
    let ended = run(&[("RACKSUM_LOG", "nonsense")], &["bench", "-e", "4K"]);
    let why = "RACKSUM_LOG \"nonsense\": \"nonsense\" is not a log level; use off, error, warn, ";
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
}

#[test]
fn a_variable_that_is_not_utf_8_is_a_path_or_refused() {
    let run = |name: &str, args: &[&str]| {
        let script = format!("{name}=$(printf 'a\\377'); export {name}; exec \"$0\" \"$@\"");
        Process::spawn(Command::new("sh").args(["-c", &script, RACKSUM]).args(args)).end(60)
    };
    let rank = ["bench", "--rank", "0", "--world", "1"];
    let sidecar = ["worker", "--aggregator", "127.0.0.1:9"];
    for (name, args) in [
        ("RACKSUM_AGGREGATOR", &rank[..]),
        ("RACKSUM_INTERFACE", &sidecar),
        ("RACKSUM_LOG", &["status"]),
    ] {
        let ended = run(name, args);
        let why = format!("{name}=\"a\\xFF\" is not UTF-8; correct the variable, or unset it");
        assert_eq!(ended.failed(2), why);
    }
    // An aggregator that ignored the variable would serve callers without identities.
    let ended = run("RACKSUM_IDENTITY", &["aggregator", "--port", "0"]);
    assert!(ended.failed(2).contains("a\u{fffd}: No such file"), "{ended:?}");
    assert!(ended.failed(2).starts_with("RACKSUM_IDENTITY=\"a\\xFF\": identity "), "{ended:?}");
}

#[test]
fn a_variable_that_is_empty_says_nothing() {
    let serving = Serving::start(&[]);
    for flags in [&[][..], &["--insecure"]] {
        let ask = [&["status", &serving.addr], flags].concat();
        run(&[("RACKSUM_IDENTITY", ""), ("RACKSUM_LOG", "")], &ask).ok();
    }
    let sidecar = ["worker", "--aggregator", &serving.addr];
    let ended = run(&[("RACKSUM_INTERFACE", ""), ("RACKSUM_IDENTITY", "")], &sidecar);
    assert!(ended.failed(2).starts_with("no socket path given"), "{ended:?}");
    let why = "RACKSUM_INTERFACE=\"no-such\": no usable interface matches \"no-such\"";
    let ended = run(&[("RACKSUM_INTERFACE", "no-such")], &sidecar);
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    let rank = ["bench", "--aggregator", &serving.addr, "--rank", "0", "--world", "1", "-e", "4K"];
    let ended = run(&[("RACKSUM_INTERFACE", "no-such")], &rank);
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    // Every command that takes an identity names the variable in its error.
    let none = "/no/such.pem";
    let why = "RACKSUM_IDENTITY=\"/no/such.pem\": identity /no/such.pem: No such file";
    let serve = ["aggregator", "--port", "0"];
    for args in [&rank[..], &sidecar, &["status", &serving.addr], &serve] {
        let ended = run(&[("RACKSUM_IDENTITY", none)], args);
        assert!(ended.failed(2).starts_with(why), "{ended:?}");
        let flag = [args, &["--identity", none]].concat();
        let ended = run(&[("RACKSUM_IDENTITY", "/other")], &flag);
        assert!(ended.failed(2).starts_with("identity /no/such.pem: "), "{ended:?}");
    }
    let named = [&rank[..], &["--interface", "=lo"]].concat();
    run(&[("RACKSUM_INTERFACE", "no-such")], &named).ok();
}

#[test]
fn a_variable_lets_those_that_connect_do_so_without_an_identity_and_no_server() {
    let small = ["-b", "4K", "-e", "4K", "-n", "2"];
    // A host that does not answer: only a missing identity is refused before the connection.
    let beyond = "192.0.2.1:9";
    let rank = ["bench", "--rank", "0", "--world", "1", "--aggregator", beyond];
    let rank = [&rank[..], &["--join-timeout", "1"], &small].concat();
    let status = ["status", beyond];
    let sidecar = ["worker", "--aggregator", "127.0.0.1:9"];
    for args in [&rank[..], &status] {
        let refused = run(&[("RACKSUM_INSECURE", "0")], args);
        assert!(refused.failed(2).contains("--insecure"), "{refused:?}");
        let tried = run(&[("RACKSUM_INSECURE", "Yes")], args);
        tried.failed(3);
    }
    for args in [&rank[..], &status, &sidecar] {
        let ended = run(&[("RACKSUM_INSECURE", "maybe")], args);
        let why = "RACKSUM_INSECURE=\"maybe\" must be 1 or 0; correct the variable";
        assert_eq!(ended.failed(2), why);
        let both = [("RACKSUM_INSECURE", "1"), ("RACKSUM_IDENTITY", "node.pem")];
        let ended = run(&both, args);
        let why = "RACKSUM_INSECURE=\"1\" conflicts with the identity \"node.pem\"; unset the";
        assert!(ended.failed(2).starts_with(why), "{ended:?}");
        let flag = [args, &["--insecure"]].concat();
        let ended = run(&[("RACKSUM_INSECURE", "maybe")], &flag);
        assert!(!format!("{ended:?}").contains("RACKSUM_INSECURE"), "{ended:?}");
    }
    let (folder, ours) = authority("variable", "rack");
    let served = issue(&folder, &ours, "agg", "aggregator");
    let serving = Serving::start(&["--identity", &served]);
    let status = ["status", &serving.addr];
    let needed = format!("{} requires an identity, and this process has none", serving.addr);
    let ended = run(&[("RACKSUM_INSECURE", "1")], &status);
    let why = format!("RACKSUM_INSECURE=\"1\": {needed}");
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    let ended = run(&[("RACKSUM_INSECURE", "0")], &status);
    assert!(ended.failed(3).starts_with(&needed), "{ended:?}");
    // The ranks of one host have an identity of their own.
    run(&[("RACKSUM_INSECURE", "1")], &[&["bench", "--workers", "2"], &small[..]].concat()).ok();
    let serve = ["aggregator", "--port", "0", "--bind", "0.0.0.0"];
    let ended = run(&[("RACKSUM_INSECURE", "1")], &serve);
    assert!(ended.failed(2).contains("--insecure"), "{ended:?}");
}
