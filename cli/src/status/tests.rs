use std::io::Write;

use racksum_proto::status::{Buffers, OwnCounters, Traffic, Transfers};

use super::*;

pub(super) fn status(text: &str) -> AggregatorStatus {
    let name = || text.to_owned();
    let rank = RankStatus {
        rank: 0,
        number: 0,
        rack: vec![0],
        addr: name(),
        identity: Some(name()),
        next_op: 0,
        opened: 0,
        delivered: 0,
        silent_ms: 0,
        behind: true,
        contributed: Transfers::default(),
        results: Transfers::default(),
        busy_ms: 0,
        waited_ms: 0,
        round_trip_us: Some(1),
        own: Some(OwnCounters::default()),
    };
    let job = JobStatus {
        job: name(),
        group: name(),
        id: 1,
        generation: 0,
        world: 1,
        lanes: 1,
        state: name(),
        age_ms: 0,
        missing: vec![1],
        absent: vec![2],
        moving_to: Some(name()),
        stalled_ms: Some(1),
        ranks: vec![rank],
    };
    let shard = ShardStatus {
        addr: name(),
        datagrams: Traffic::default(),
        bytes: Traffic::default(),
        folds: 0,
        duplicates: 0,
        fragments_again: 0,
        asks: 0,
        kernel_drops: 1,
        send_failures: 1,
        rejects: [(name(), 1)].into(),
        buffers: Buffers::default(),
    };
    AggregatorStatus {
        version: name(),
        addr: name(),
        up_ms: 0,
        parent: Some(name()),
        insecure: true,
        data_auth: name(),
        max_jobs: 1,
        draining: true,
        jobs: vec![job],
        queued: vec![JobName::new(name(), name())],
        moved: vec![MovedJob { job: JobName::new(name(), name()), to: name(), ago_ms: 0 }],
        shards: vec![shard],
    }
}

#[test]
fn a_job_of_racks_waits_for_no_rank_by_name_that_it_cannot_know() {
    let mut job = status("job").jobs.remove(0);
    let like = job.ranks.remove(0);
    let of = |rank: u16, rack: &[u16]| RankStatus { rank, rack: rack.to_vec(), ..like.clone() };
    let ranks = [of(0, &[]), of(2, &[2, 3, 4]), of(1, &[]), of(5, &[5, 6])];
    for (n, expected) in [
        (0..1, "; has waited 1 ms for rank 0"),
        (1..2, "; has waited 1 ms for some of the ranks 2, 3, 4"),
        (
            0..4,
            "; has waited 1 ms for ranks 0, 1 and some of the ranks 2, 3, 4 and some of the ranks \
             5, 6",
        ),
    ] {
        job.ranks = ranks[n].to_vec();
        let text = job_text(&job);
        assert!(text.contains(expected), "{text}");
    }
}

/// Creates a socket, and returns its path and its listener.
fn listener(name: &str) -> (PathBuf, std::os::unix::net::UnixListener) {
    let path = std::env::temp_dir().join(format!("racksum-{name}-{}.sock", std::process::id()));
    drop(fs::remove_file(&path));
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    (path, listener)
}

/// Queries a server that sends this answer, and returns the result.
fn asked(name: &str, answer: Vec<u8>) -> Result<AggregatorStatus, CallError> {
    let (path, listener) = listener(name);
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Ignore errors: the client may disconnect before the end of the answer.
        drop(stream.write_all(&answer));
    });
    let asked = ask(&path, own_uid(), PATIENCE);
    answering.join().unwrap();
    fs::remove_file(path).unwrap();
    asked
}

#[test]
fn a_runtime_folder_that_is_empty_or_relative_counts_as_unset() {
    let of = |runtime: &str| folder_in(Some(runtime.into()), 7);
    assert_eq!(of("/run/user/7"), Path::new("/run/user/7/racksum"));
    for runtime in ["", ".", "run/user/7"] {
        assert_eq!(of(runtime), Path::new("/tmp/racksum-7"), "{runtime:?}");
    }
    assert_eq!(folder_in(None, 0), Path::new("/run/racksum"));
}

#[test]
fn no_text_of_an_answer_reaches_the_terminal_as_it_came() {
    let evil = "\n\x1b[31m\x07\u{202e}".to_owned() + &"x".repeat(1 << 19);
    let json = serde_json::to_vec(&status(&evil)).unwrap();
    assert!(json.len() < MAX_ANSWER, "{}", json.len());
    let answer = asked("evil", json).unwrap();
    for shown in [text(&answer), serde_json::to_string(&answer).unwrap()] {
        let is_plain = |c: char| c == '\n' || PeerText::is_plain(c.encode_utf8(&mut [0; 4]));
        assert!(shown.chars().all(is_plain), "{shown:?}");
        assert!(shown.len() < 20 * PeerText::MAX, "{} bytes", shown.len());
    }
    assert_eq!(text(&answer).lines().count(), text(&status("plain")).lines().count());
}

#[test]
fn an_answer_that_is_none_is_quoted_plainly_and_one_without_end_is_not_read() {
    let error = asked("wrong", br#"{"version": 1, "\u001b[31m": 2}"#.to_vec()).unwrap_err();
    assert!(PeerText::is_plain(&error.to_string()), "{error:?}");
    let error = asked("long", vec![b' '; MAX_ANSWER + 1]).unwrap_err();
    assert!(error.to_string().starts_with("the answer is longer than "), "{error}");
}

#[test]
fn who_answers_a_little_at_a_time_is_not_waited_for_without_end() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let drips = std::thread::spawn(move || {
        while theirs.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let error = read(ours, Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.to_string(), "no answer within 1 s; the aggregator may be suspended");
    drips.join().unwrap();
}

#[test]
fn sockets_that_do_not_answer_are_not_asked_without_end() {
    let (silent, _listener) = listener("silent");
    let sockets = vec![(silent.clone(), own_uid()); 5 * AT_A_TIME];
    let (each, all) = (Duration::from_millis(50), Duration::from_millis(60));
    let mut asked = 0;
    let unasked = ask_each(sockets, each, all, |_, answer| {
        assert!(answer.is_err());
        asked += 1;
        Ok(())
    });
    let unasked = unasked.ok().unwrap();
    assert_eq!(asked + unasked, 5 * AT_A_TIME);
    assert!(unasked >= 3 * AT_A_TIME, "{unasked}");
    fs::remove_file(silent).unwrap();
}

#[test]
fn a_user_with_many_sockets_does_not_keep_root_from_those_of_others() {
    let sockets = [("a", 1), ("b", 1), ("c", 1), ("d", 2), ("e", 3), ("f", 3)];
    let sockets = sockets.map(|(path, owner)| (PathBuf::from(path), owner)).to_vec();
    let turns: Vec<_> = in_turns(sockets).into_iter().map(|(path, _)| path).collect();
    assert_eq!(turns, ["a", "d", "e", "b", "f", "c"].map(PathBuf::from));
}

#[test]
fn an_address_is_told_from_a_path() {
    let (there, _listener) = listener("path");
    // Text that is neither a path nor an address counts as an address, because the parser of
    // addresses explains the problem.
    for addr in ["10.0.0.1:7177", "agg-1:7177", "[fd00::1]:7177", "agg:0", "agg:x", "agg", ":1"] {
        assert!(!is_path(addr), "{addr}");
    }
    for path in ["/run/x.sock", "/tmp/a:1", "./a:7177", "Cargo.toml", there.to_str().unwrap()] {
        assert!(is_path(path), "{path}");
    }
    fs::remove_file(there).unwrap();
}

#[test]
fn a_folder_counts_only_if_it_is_of_the_user_that_it_is_named_after() {
    let at = std::env::temp_dir().join(format!("racksum-folders-{}", std::process::id()));
    let own = own_uid();
    let (each, shared) = (at.join("run"), at.join("tmp"));
    let theirs = [each.join(format!("{own}/racksum")), shared.join(format!("racksum-{own}"))];
    let others = [each.join("4294967294/racksum"), shared.join("racksum-4294967294")];
    for folder in theirs.iter().chain(&others).chain([&shared.join("racksum-x")]) {
        fs::create_dir_all(folder).unwrap();
    }
    assert_eq!(folders_of_others(&each, &shared), theirs.map(|path| (path, own)));
    fs::remove_dir_all(&at).unwrap();
}
