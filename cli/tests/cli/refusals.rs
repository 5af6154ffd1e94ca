//! Refusals: each is one sentence, and its exit code tells usage errors from other failures.

use std::net::UdpSocket;
use std::process::{Command, Stdio};

use crate::files::{Folder, captured};
use crate::ports::own_port;
use crate::process::{Process, RACKSUM, Serving, bench_rank, run, signal};
use crate::waits::await_that;

#[test]
fn an_aggregator_that_cannot_serve_says_why() {
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = run(&["aggregator", "--port", &port]);
    let why =
        format!("cannot bind 127.0.0.1:{port}: address in use; choose another port with --port");
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");

    let ended = run(&["aggregator", "--bind", "203.0.113.7", "--insecure"]);
    assert!(ended.failed(3).contains("no interface of this host has this address"), "{ended:?}");
    let ended = run(&["aggregator", "--bind", "0.0.0.0", "--port", "0"]);
    assert!(ended.failed(2).contains("or set --insecure if"), "{ended:?}");
    let everywhere = ["aggregator", "--bind", "0.0.0.0", "--port", "0", "--insecure"];
    let ended = run(&[&everywhere[..], &["--fanout", "multicast"]].concat());
    assert!(ended.failed(2).contains("--fanout multicast needs --bind with the"), "{ended:?}");

    let six = ["aggregator", "--bind", "::1", "--port", "0", "--fanout", "multicast"];
    let why = "--fanout multicast is not possible: cannot use lo for multicast: the interface does \
               not ";
    assert!(run(&six).failed(3).starts_with(why));

    let folder = Folder::new("config");
    let config = folder.path("racksum.toml");
    let ended = run(&["aggregator", "--config", &config]);
    assert!(ended.failed(2).starts_with(&format!("cannot read {config}: ")), "{ended:?}");
    std::fs::write(&config, "port = 0\nshards = 0\n").unwrap();
    let ended = run(&["aggregator", "--config", &config]);
    assert!(ended.failed(2).ends_with("shards must be from 1 to 64, not 0"), "{ended:?}");
    std::fs::write(&config, "join_timeout_s = 0\n").unwrap();
    let ended = run(&["aggregator", "--config", &config]);
    assert!(ended.failed(2).ends_with("join_timeout_s must be from 1 to 604800, not 0"));
    std::fs::write(&config, "prot = 0\n").unwrap();
    let ended = run(&["aggregator", "--config", &config]);
    let why = format!("{config}: line 1: unknown field `prot`, expected one of `bind`, `port`, ");
    assert!(ended.failed(2).starts_with(&why), "{ended:?}");
    assert!(
        ended.failed(2).contains("`identity`, `insecure`"),
        "the error must name keys, not flags: {ended:?}"
    );
    let ended = run(&["aggregator", "--pool-mib", "1048576"]);
    assert!(ended.failed(2).ends_with("of this host; lower --pool-mib or --shards"), "{ended:?}");
    let ended = run(&["aggregator", "--bind", "224.0.0.1", "--insecure"]);
    assert!(ended.err.contains("cannot serve at 224.0.0.1, which is a multicast group"));
    assert_eq!(ended.code, Some(2));
    let ended = run(&["worker", "--socket", &folder.path("worker"), "--memory", "100T"]);
    assert!(ended.failed(2).ends_with(" MiB; lower --memory"), "{ended:?}");
    let ended = bench_rank("0.0.0.0:7177", 0, 1, &[]).end(30);
    assert!(ended.failed(2).contains("its host is 0.0.0.0, which is not a host's address"));
}

#[test]
fn a_number_of_a_flag_that_is_out_of_its_bounds_is_refused_with_them() {
    for (command, flag, wrong, bounds) in [
        ("aggregator", "--shards <K>", "300", "must be from 1 to 64"),
        ("aggregator", "--pool-slots <P>", "0", "must be from 2 to 4096"),
        ("aggregator", "--pool-slots <P>", "99999999999", "must be from 2 to 4096"),
        ("aggregator", "--pool-mib <MIB>", "0", "must be from 1 to 1048576"),
        ("aggregator", "--max-jobs <N>", "1025", "must be from 1 to 1024"),
        ("aggregator", "--max-ranks <N>", "0", "must be from 1 to 262144"),
        ("aggregator", "--join-timeout-s <S>", "0", "must be from 1 to 604800"),
        (
            "bench",
            "--pool-slots <POOL_SLOTS>",
            "1",
            "must be from 2 to 4096, or 0 to let the aggregator",
        ),
        ("bench", "--mtu <MTU>", "1279", "must be from 1280 to 65536"),
        ("bench", "--mtu <MTU>", "70000", "must be from 1280 to 65536"),
        ("bench", "--timeout <TIMEOUT>", "-1", "must be from 1 to 31536000"),
        ("bench", "--iters <ITERS>", "-1", "must be from 1 to 4294967295"),
        ("bench", "--iters <ITERS>", "99999999999999999999999", "must be from 1 to 4294967295"),
        ("bench", "--iters <ITERS>", "many", "must be a whole number without a unit, from 1 to 42"),
        ("bench", "--rank <RANK>", "70000", "must be from 0 to 255"),
        ("bench", "--density <DENSITY>", "-1", "must be a number from 0 to 1"),
        ("bench", "--density <DENSITY>", "1.1", "must be a number from 0 to 1"),
        ("bench", "--density <DENSITY>", "NaN", "must be a number from 0 to 1"),
        ("identity issue", "--days <DAYS>", "-1", "must be from 1 to 36500"),
        ("worker", "--memory <SIZE>", "0", "0 B is too little memory for ranks to share; give 1M"),
    ] {
        let (name, _) = flag.split_once(' ').unwrap();
        let command: Vec<_> = command.split(' ').collect();
        let ended = run(&[&command[..], &[name, wrong]].concat());
        assert_eq!((ended.code, &ended.out[..]), (Some(2), ""), "{ended:?}");
        let expected = format!("error: invalid value '{wrong}' for '{flag}': {bounds}");
        assert!(ended.err.starts_with(&expected), "{ended:?}");
    }
}

#[test]
fn a_flag_that_is_mistyped_brings_up_none_that_the_help_leaves_out() {
    for args in [
        &["bench", "--ra"][..],
        &["bench", "--interactiv"],
        &["reduce", "--int", "file"],
        &["--raw", "bench"],
    ] {
        let ended = run(args);
        assert!(ended.code == Some(2) && ended.err.contains("unexpected argument"), "{ended:?}");
        assert!(!ended.err.contains("tip:"), "{ended:?}");
    }
    let ended = run(&["bench", "--worker", "2"]);
    assert!(ended.err.contains("a similar argument exists: '--workers'"), "{ended:?}");
}

#[test]
fn a_limit_on_memory_that_is_too_small_is_said_in_a_sentence() {
    let limited = |kib: u32, args: &str| {
        let script = format!("ulimit -v {kib}; exec {RACKSUM} {args}");
        Process::spawn(Command::new("sh").args(["-c", &script])).end(60)
    };
    let ended = limited(600_000, "aggregator --port 0 --pool-mib 1024");
    let why = "cannot allocate 1024 MiB of packet buffers for each shard; ";
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    let ended = limited(600_000, "bench --workers 1 -e 4K");
    assert!(ended.failed(2).starts_with(why), "{ended:?}");
    assert!(ended.failed(2).contains("for each shard; raise the limit"), "{ended:?}");
    let ended = limited(600_000, "bench --workers 1 -e 4K --shards 2");
    assert!(ended.failed(2).contains("; lower --shards, or raise"), "{ended:?}");
    let ended = limited(2_000_000, "bench -b 1900M -e 1900M --workers 1 -n 1");
    // The benchmark prints the error that its rank reported.
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.err.contains("racksum: rank 0: cannot allocate a tensor of 1992294400 bytes; "),
        "{ended:?}"
    );
}

#[test]
fn a_configuration_that_is_a_pipe_is_refused_and_may_be_read_again_later() {
    let folder = Folder::new("pipe");
    let config = folder.path("racksum.toml");
    let pipe = || {
        // No process writes to the pipe, so a read would block.
        assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    };
    let why = format!("cannot read {}: not a regular file", config);
    pipe();
    let ended = run(&["aggregator", "--config", &config]);
    assert_eq!(ended.failed(2), why);
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, "max_jobs = 4\n").unwrap();
    let serving = Serving::start(&["--config", &config]);
    std::fs::remove_file(&config).unwrap();
    pipe();
    signal(serving.process.id(), "HUP");
    let refused = format!("nothing was reloaded: {why}");
    await_that("the pipe is refused", || serving.process.err().contains(&refused));
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, "max_jobs = 5\n").unwrap();
    signal(serving.process.id(), "HUP");
    await_that("the configuration is reloaded", || {
        serving.process.out().contains("configuration reloaded")
    });
    serving.end();
}

#[test]
fn an_aggregator_names_the_port_of_a_shard_that_is_taken() {
    let control = own_port();
    let port = control + 1;
    let taken = UdpSocket::bind(("127.0.0.1", port)).unwrap();
    let ended = run(&["aggregator", "--port", &control.to_string(), "--pool-mib", "1"]);
    let why = format!("cannot bind 127.0.0.1:{port}: address in use; choose another");
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    drop(taken);
}

#[test]
fn an_aggregator_for_ipv6_says_so_to_who_comes_by_ipv4() {
    let serving = Serving::start(&["--bind", "::", "--insecure"]);
    let ended = bench_rank(&format!("127.0.0.1:{}", serving.port()), 0, 1, &[]).end(30);
    let why = "the aggregator refused: this aggregator serves IPv6, but the worker called \
               it over IPv4; ";
    assert!(ended.failed(3).starts_with(why), "{ended:?}");
}

#[test]
fn a_job_that_an_aggregator_has_held_for_too_long_names_who_is_missing() {
    let serving = Serving::start(&["--join-timeout-s", "1", "--max-jobs", "1"]);
    for (rank, missing) in [(0, 1), (1, 0)] {
        let ended = bench_rank(&serving.addr, rank, 2, &["--join-timeout", "30"]).end(60);
        let why = format!(
            "the aggregator refused: job \"bench\" waited 1 s for rank {missing}; start the \
             missing ranks, or raise --join-timeout-s at the aggregator"
        );
        assert_eq!(ended.failed(3), why);
    }
    // The only place for a job is free again.
    bench_rank(&serving.addr, 0, 1, &["-e", "4K"]).end(30).ok();
}

#[test]
fn ranks_that_call_other_ops_are_told_both_at_every_rank() {
    let serving = Serving::start(&[]);
    let rank = |at, op, wire| {
        bench_rank(&serving.addr, at, 3, &["-b", "4K", "-e", "4K", "--op", op, "--wire", wire])
    };
    for (op, wire) in [("max", "f32"), ("sum", "bf16")] {
        let theirs = format!("{op} of 1024 x f32, wire {wire}");
        let ranks = [rank(0, "sum", "f32"), rank(1, op, wire), rank(2, "sum", "f32")];
        for ended in ranks.map(|rank| rank.end(30)) {
            let why = ended.failed(1);
            assert!(why.contains("the ranks disagree: rank "), "{why}");
            assert!(why.contains(&format!("rank 1 has {theirs}, block 256")), "{why}");
            assert!(why.contains("has sum of 1024 x f32, wire f32, block 256"), "{why}");
            assert!(why.contains("give all ranks of a benchmark the same flags"), "{why}");
        }
    }
    // The aggregator continues to serve.
    bench_rank(&serving.addr, 0, 1, &["-e", "4K"]).end(30).ok();
}

#[test]
fn ranks_with_other_flags_are_told_which_before_they_measure() {
    let serving = Serving::start(&[]);
    let same = ["-e", "4K"];
    for (flags, others, named) in [
        (["--seed", "1"], ["--seed", "2"], "--seed"),
        (["-n", "20"], ["-n", "30"], "-n"),
        (["-b", "4K"], ["-b", "1K"], "-b"),
    ] {
        let rank = |at, flags| bench_rank(&serving.addr, at, 2, &[same, flags].concat());
        for ended in [rank(0, flags), rank(1, others)].map(|rank| rank.end(30)) {
            let why = format!(
                "the ranks have different {named}; give all ranks of a benchmark the same flags"
            );
            assert_eq!(ended.failed(1), why);
        }
    }
}

#[test]
fn a_rank_that_finds_no_aggregator_says_so() {
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for (limit, warnings) in [("3", 0), ("7", 1)] {
        let ended = bench_rank(&free, 0, 1, &["--join-timeout", limit]).end(60);
        let why = format!("no answer from {free} within {limit} s; check the address");
        assert!(ended.failed(3).starts_with(&why), "{ended:?}");
        assert_eq!(ended.err.matches("no answer from ").count(), 1 + warnings, "{ended:?}");
        assert_eq!(ended.err.matches("; check the address").count(), 1, "{ended:?}");
    }

    let unknown = "no-such-host.invalid:7177";
    let ended = bench_rank(unknown, 0, 1, &["--join-timeout", "2"]).end(60);
    let why = format!("the name of the aggregator {unknown:?} does not resolve: ");
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    assert_eq!(ended.err.matches("retrying for up to ").count(), 1, "{ended:?}");
    let ended = bench_rank("127.0.0.1", 0, 1, &[]).end(30);
    assert!(ended.failed(2).starts_with("\"127.0.0.1\" is not an aggregator address"), "{ended:?}");
    for missing in ["", "127.0.0.1:7177,", "+127.0.0.1:7177", "127.0.0.1:7177, ,127.0.0.1:7178"] {
        let ended = bench_rank(missing, 0, 1, &[]).end(30);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(
            ended.err.contains("an aggregator in the list is empty; give each as"),
            "{ended:?}"
        );
    }
    for (wrong, why) in [
        (
            "127.0.0.1:0",
            "\"127.0.0.1:0\" is not an aggregator address (HOST:PORT): its port must not be 0",
        ),
        ("127.0.0.1:7,127.0.0.1:7", "the aggregator 127.0.0.1:7 is listed twice"),
        ("127.1:7", "\"127.1:7\" is not an aggregator address (HOST:PORT): its host is"),
        (
            "[fe80::1%lo]:7",
            "\"[fe80::1%lo]:7\" is not an aggregator address (HOST:PORT): link-local addresses \
             (fe80::/10) are not supported; give another address of that host",
        ),
        ("255.255.255.255:7", "\"255.255.255.255:7\" is not an aggregator address (HOST:PORT): "),
    ] {
        let ended = bench_rank(wrong, 0, 1, &["--join-timeout", "2"]).end(60);
        assert!(ended.failed(2).starts_with(why), "{ended:?}");
    }
}

#[test]
fn an_aggregator_that_starts_after_its_ranks_is_found() {
    let port = own_port().to_string();
    let rank = bench_rank(&format!("127.0.0.1:{port}"), 0, 1, &["-e", "4K"]);
    await_that("the rank logs that it retries", || rank.err().contains("retrying"));
    let args = ["aggregator", "--port", &port, "--pool-mib", "64"];
    let _serving = Serving::of(Process::start(&args));
    let ended = rank.end(60).ok();
    assert_eq!(ended.err.matches("retrying for up to ").count(), 1, "{ended:?}");
}

#[test]
fn the_next_aggregator_has_its_share_of_a_short_time() {
    let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let serving = Serving::start(&[]);
    let both = format!("{nobody},{}", serving.addr);
    bench_rank(&both, 0, 1, &["-e", "4K", "--join-timeout", "3"]).end(30).ok();
}

#[test]
fn who_waits_for_room_is_not_told_to_wait() {
    let serving = Serving::start(&["--max-jobs", "1"]);
    let holds = bench_rank(&serving.addr, 0, 2, &["--log", "info"]);
    await_that("the first rank has joined", || holds.err().contains("waiting for ranks"));
    let flags = ["--job", "two", "--join-timeout", "2"];
    let refused = bench_rank(&serving.addr, 0, 1, &flags).end(30);
    assert!(refused.failed(3).contains("; try again later, set --wait, or ask "), "{refused:?}");
    let waits = bench_rank(&serving.addr, 0, 1, &[&flags[..], &["--wait"]].concat()).end(30);
    let why = "no room for the job within 2 s: there is 1 job";
    assert!(waits.failed(3).starts_with(why), "{waits:?}");
    assert!(waits.err.contains("waiting for room: ") && !waits.err.contains(" set "), "{waits:?}");
}

#[test]
fn ranks_that_name_aggregators_in_other_orders_are_told_so() {
    let serving = [(); 2].map(|()| Serving::start(&[]));
    let [one, two] = [0, 1].map(|at: usize| &serving[at].addr[..]);
    let pair = |ranks: [String; 2]| {
        let rank = |at: u16| {
            let flags = ["--join-timeout", "4"];
            bench_rank(&ranks[usize::from(at)], at, 2, &flags)
        };
        [rank(0), rank(1)].map(|rank| rank.end(30))
    };
    // At least one of the two ranks prints the reason; the other may have ended earlier.
    let spread = pair([format!("{one}+{two}"), format!("{two}+{one}")]);
    let order = "the same aggregators in the same order";
    assert!(spread.iter().any(|ended| ended.err.contains(order)), "{spread:?}");
    for ended in pair([format!("{one},{two}"), format!("{two},{one}")]) {
        let why = ended.failed(1);
        assert!(why.contains(" had not joined"), "{why}");
        assert!(why.ends_with(order), "{why}");
    }
}

#[test]
fn a_standby_that_no_rank_names_is_refused() {
    let serving = Serving::start(&[]);
    let both = format!("{},127.0.0.1:{}", serving.addr, own_port());
    let file = captured("digits")[0].clone();
    let start = |aggregators: &str, standby: &str| {
        let member = ["--aggregator", aggregators, "--rank", "0", "--world", "1"];
        run(&[&["reduce", &file, "--standby", standby], &member[..]].concat())
    };
    for standby in [format!("127.0.0.1:{}", own_port()), "127.0.0.2:1".to_owned()] {
        let why = format!("--aggregator does not list the standby {standby}, ");
        assert!(start(&both, &standby).failed(2).starts_with(&why));
    }
    let why = format!(
        "cannot start the standby: cannot bind {}: address in use; choose another port with --s",
        serving.addr
    );
    let ended = start(&both, &serving.addr);
    assert!(ended.failed(3).starts_with(&why), "{ended:?}");
    let (_, standby) = both.split_once(',').unwrap();
    start(&both, standby).ok();
}

#[test]
fn a_configuration_that_nobody_could_use_is_refused_at_the_start() {
    for parent in ["here", "127.0.0.1:7177"] {
        let ended = run(&["aggregator", "--parent", parent]);
        let why = format!("parent must be the HOST:PORT of another aggregator, not {parent:?}");
        assert_eq!(ended.failed(2), why);
    }
    let ended = run(&["aggregator", "--config", "/dev/zero"]);
    assert_eq!(ended.failed(2), "cannot read /dev/zero: not a regular file");
    let folder = Folder::new("large");
    let large = folder.path("large.toml");
    std::fs::File::create(&large).unwrap().set_len(2 << 20).unwrap();
    let ended = run(&["aggregator", "--config", &large]);
    assert_eq!(ended.failed(2), format!("cannot read {large}: larger than 1024 KiB"));
}

#[test]
fn a_rank_that_does_not_fit_says_why() {
    let serving = Serving::start(&["--log", "info"]);
    let rank = |rank, world, flags: &[&str]| bench_rank(&serving.addr, rank, world, flags);
    let ended = rank(2, 2, &[]).end(30);
    let why = "rank 2 must be below the number of ranks, 2; ranks count from 0";
    assert_eq!(ended.failed(2), why);
    let first = rank(0, 2, &["-e", "4K"]);
    await_that("the first rank has joined", || serving.process.err().contains("rank joined"));
    let second = rank(0, 2, &["-e", "4K", "--join-timeout", "3"]);
    let wrong = rank(1, 3, &["-e", "4K", "--join-timeout", "3"]);
    let refused = wrong.end(30);
    let why = "rank 1 has 3";
    assert!(refused.failed(3).contains(why), "{refused:?}");
    let last = rank(1, 2, &["-e", "4K"]);
    first.end(60).ok();
    let refused = second.end(60);
    let why = refused.failed(3);
    assert!(
        why.starts_with("the aggregator refused: rank 0 of job \"bench\" has already joined from")
            || why.contains("all its ranks (2) have joined"),
        "{why}"
    );
    last.end(60).ok();
}

#[test]
fn a_world_that_stays_incomplete_names_who_is_missing() {
    let serving = Serving::start(&[]);
    let ranks = [0, 3].map(|rank| bench_rank(&serving.addr, rank, 4, &["--join-timeout", "2"]));
    for ended in ranks.map(|rank| rank.end(30)) {
        let why = ended.failed(1);
        // The other rank may have left a moment earlier.
        let whom = ["1, 2", "0, 1, 2", "1, 2, 3"];
        let expected = whom.map(|whom| format!("after 2 s ranks {whom} had not joined"));
        assert!(expected.contains(&why.to_owned()), "{why}");
    }
}

#[test]
fn an_aggregator_ends_well_when_it_is_told_to() {
    for name in ["TERM", "INT"] {
        let serving = Serving::start(&[]);
        signal(serving.process.id(), name);
        let ended = serving.process.end(10).ok();
        assert!(ended.out.ends_with("racksum aggregator stops\n"), "{ended:?}");
    }
}

#[test]
fn help_says_what_there_is() {
    let ended = run(&["--help"]).ok();
    for command in ["aggregator", "bench", "reduce", "status", "worker", "sim", "identity"] {
        assert!(ended.out.contains(command), "{}", ended.out);
        let help = run(&[command, "--help"]).ok().out;
        assert!(help.contains("Exit codes:"), "{help}");
        assert!(!help.contains("--raw") && !help.contains("--into"), "{help}");
    }
    let ended = run(&["nonsense"]);
    assert_eq!((ended.code, ended.err.is_empty()), (Some(2), false));
    let ended = run(&["--log", "a=b=c", "bench", "-e", "4K"]);
    assert!(ended.failed(2).starts_with("--log \"a=b=c\": "), "{ended:?}");
}

#[test]
fn a_benchmark_on_one_host_checks_its_sums() {
    let ended = run(&["bench", "--workers", "3", "-e", "64K", "-n", "3", "--shards", "2"]).ok();
    assert_eq!(ended.out.lines().filter(|line| !line.starts_with('#')).count(), 4, "{ended:?}");
    let flags = ["--drop", "0.02", "--dup", "0.02", "--reorder", "0.02", "--format", "json"];
    let args = ["bench", "--workers", "2", "-e", "300K", "-n", "3", "--input", "blocks"];
    let ended = run(&[&args[..], &flags].concat()).ok();
    for line in ended.out.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&row["wrong"], &row["workers"]), (&0.into(), &2.into()), "{row}");
    }
    let much = run(&["bench", "-b", "200G", "-e", "200G", "--ops-in-flight", "64"]);
    assert!(much.failed(2).contains(" MiB for 4 ranks on this host, which has "), "{much:?}");
    let nothing = Process::start(&["bench", "-b", "8K", "-e", "4K"]).end(10);
    assert!(nothing.failed(2).contains("no size lies between"), "{nothing:?}");
}

#[test]
fn a_benchmark_that_cannot_be_is_refused_before_it_starts() {
    let far = ["--aggregator", "127.0.0.1:1", "--rank", "0", "--world", "2"];
    for (flags, why) in [
        (&["-b", "0"][..], "-b must be at least 4 bytes, one element of f32, not 0"),
        (&["-b", "1", "-e", "1"], "-b must be at least 4 bytes, one element of f32, not 1"),
        (&["-b", "7", "-d", "f64"], "-b must be at least 8 bytes, one element of f64, not 7"),
        (&["-i", "0"], "-i must be at least 1"),
        (&["--block", "100"], "a block must be a power of two from 32 to 1024, not 100"),
        (&["-d", "i32", "--wire", "int8"], "wire type int8 cannot carry a tensor of i32"),
        (&["--overlap", "none", "--density", "0.3"], "at most 0.250 of the blocks, not 0.3"),
        (&["--overlap", "none"], "at most 0.250 of the blocks, not 1; lower --density"),
        (&[&far[..], &["--workers", "2"]].concat(), "--workers applies only to a run on this host"),
        (&[&far[..], &["--shards", "2"]].concat(), "--shards applies only to a run on this host"),
        (
            &[&far[..], &["--fanout", "auto"]].concat(),
            "--fanout applies only to a run on this host",
        ),
    ] {
        let ended = run(&[&["bench"], flags].concat());
        assert!(ended.failed(2).contains(why), "{ended:?}");
        assert_eq!(ended.err.lines().count(), 1, "{ended:?}");
    }
    let long = "x".repeat(129);
    for (job, why) in [
        ("a\nb", "\"a\\nb\" has unprintable characters"),
        (&long, "1 to 128 bytes, not 129"),
        ("", "not 0"),
    ] {
        for command in [&["bench"][..], &["reduce", "file"]] {
            let ended = run(&[command, &far[..], &["--job", job]].concat());
            assert_eq!(ended.code, Some(2), "{ended:?}");
            assert!(ended.err.contains(why), "{ended:?}");
        }
    }
    for args in [
        &["reduce", "--seed", "3", "file"][..],
        &["reduce", "--mtu", "1500", "file"],
        &["status", "--insecure"],
        &["status", "/tmp/none", "--identity", "node.pem"],
        &["status", "unix:/tmp/none", "--insecure"],
        &["sim", "swarm", "--threads", "0"],
        &["sim", "swarm", "--threads", "99999"],
    ] {
        let ended = run(args);
        assert_eq!((ended.code, &ended.out[..]), (Some(2), ""), "{ended:?}");
    }
    for flags in [["--timeout", "0"], ["--check", "2"], ["--job", "x"], ["--density", "nan"]] {
        let ended = run(&[&["bench"][..], &flags].concat());
        assert_eq!((ended.code, &ended.out[..]), (Some(2), ""), "{ended:?}");
    }
}

#[test]
fn a_benchmark_says_whose_figures_it_shows() {
    let serving = Serving::start(&[]);
    let flags = ["-b", "4K", "-e", "4K", "-n", "2", "--density", "1"];
    let ranks = [0, 1].map(|rank| bench_rank(&serving.addr, rank, 2, &flags));
    for (rank, process) in ranks.into_iter().enumerate() {
        let out = process.end(30).ok().out;
        assert!(out.contains(&format!("all figures are for rank {rank} only")), "{out}");
    }
    let all = run(&[&["bench", "--workers", "2"], &flags[..]].concat()).ok().out;
    assert!(all.contains("time is that of the slowest rank"), "{all}");
}

#[test]
fn a_row_for_programs_has_every_field() {
    // 1001 bytes hold 125 elements of 8 bytes.
    let args = ["bench", "--workers", "2", "-b", "1001", "-e", "1001", "-d", "f64", "-n", "2"];
    let more = ["--format", "json", "--density", "0.5", "--lanes", "3", "--fanout", "unicast"];
    let out = run(&[&args[..], &more, &["--ops-in-flight", "4"]].concat()).ok().out;
    let row: serde_json::Value = serde_json::from_str(out.trim_end()).unwrap();
    for (field, value) in [
        ("workers", 2.into()),
        ("bytes", 1000.into()),
        ("count", 125.into()),
        ("dtype", "f64".into()),
        ("wire", "f64".into()),
        ("op", "sum".into()),
        ("density", 0.5.into()),
        ("overlap", "random".into()),
        ("block", 256.into()),
        ("shards", 1.into()),
        ("lanes", 3.into()),
        ("ops_in_flight", 4.into()),
        ("fanout", "unicast".into()),
        ("iters", 2.into()),
        ("retransmits", 0.into()),
        ("wrong", 0.into()),
    ] {
        let value: serde_json::Value = value;
        assert_eq!(row[field], value, "{field} of {row}");
    }
    for field in ["algbw_gb_s", "busbw_gb_s", "pool_slots", "tx_bytes_per_rank"] {
        assert!(row[field].is_number(), "{field} of {row}");
    }
    for field in ["min", "p50", "p99", "max"] {
        assert!(row["time_us"][field].as_f64().unwrap() > 0.0, "{field} of {row}");
    }
    assert!(row["rx_bytes_per_rank"].is_number(), "{row}");
}

#[test]
fn a_reader_that_is_gone_is_no_panic() {
    let binary = env!("CARGO_BIN_EXE_racksum");
    let mut child = Command::new(binary)
        .args(["bench", "--workers", "1", "-e", "64K", "-f", "2", "-n", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    let err = String::from_utf8(ended.stderr).unwrap();
    // The program ends silently, as if SIGPIPE had ended it.
    assert_eq!((ended.status.code(), &err[..]), (Some(141), ""));
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    for args in [&["--help"][..], &["--version"], &["bench", "--help"]] {
        let full = std::fs::File::create("/dev/full").unwrap();
        let mut command = Command::new(RACKSUM);
        let ended = Process::spawn_into(command.args(args), full.into(), Stdio::piped()).end(10);
        let why = "cannot write to standard output: No space left on device (os error 28)";
        assert_eq!(ended.failed(1), why);
    }
}
