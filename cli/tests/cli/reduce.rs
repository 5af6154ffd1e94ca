//! Tests of `racksum reduce` end to end: gradients captured in real training, files of every dtype,
//! and invalid files.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use racksum_test_report::time;
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::files::{Folder, Tensor, captured, check, read, union};
use crate::process::{Ended, Process, RACKSUM, Serving, bench_rank, run, signal};
use crate::waits::{await_that, timed};

/// Reduces files on this host.
fn reduce(files: &[String], out: &str, flags: &[&str]) -> Ended {
    let files: Vec<&str> = files.iter().map(|file| &file[..]).collect();
    run(&[&["reduce", "--out", out], flags, &files[..]].concat())
}

fn lines(ended: &Ended) -> Vec<Value> {
    ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn captured_gradients_are_reduced_as_in_f64() {
    let folder = Folder::new("captured");
    for what in ["digits", "words"] {
        let files = captured(what);
        let out = folder.path(what);
        for (flags, op, epsilon) in [
            (&[][..], "sum", 4e-7),
            (&["--op", "avg"], "avg", 4e-7),
            (&["--op", "min"], "min", 0.0),
            (&["--op", "max"], "max", 0.0),
            // The error consists of each rank's rounding and the rounding of the sum.
            (&["--wire", "bf16"], "sum", 1.0 / 128.0),
            (&["--wire", "f16", "--op", "avg"], "avg", 1.0 / 1024.0),
        ] {
            let ended = reduce(&files, &out, flags).ok();
            assert!(ended.err.is_empty(), "{ended:?}");
            // Skip f16: tiny gradients are close to its smallest value, so the bound does not hold.
            if flags.contains(&"f16") {
                continue;
            }
            check(&files, &out, op, epsilon);
        }
    }
    assert_eq!(folder.names(), ["digits", "words"]);
}

#[test]
fn a_result_has_the_same_bits_over_shards_and_fanouts_and_faults() {
    let folder = Folder::new("same");
    let files = captured("words");
    let plain = folder.path("plain");
    reduce(&files, &plain, &[]).ok();
    let plain = std::fs::read(plain).unwrap();
    for flags in [
        &["--shards", "2"][..],
        &["--shards", "3", "--fanout", "unicast"],
        &["--fanout", "multicast"],
        &["--drop", "0.05", "--dup", "0.05", "--reorder", "0.05", "--seed", "7"],
        &["--shards", "2", "--drop", "0.1", "--fanout", "multicast"],
        &["--block", "64"],
        &["--block", "1024", "--timeout", "20"],
    ] {
        let out = folder.path("other");
        reduce(&files, &out, flags).ok();
        assert!(std::fs::read(&out).unwrap() == plain, "{flags:?}");
    }
}

#[test]
fn the_report_counts_what_the_files_hold() {
    let folder = Folder::new("report");
    for what in ["digits", "words"] {
        let files = captured(what);
        let out = folder.path("sum");
        let ended = reduce(&files, &out, &["--format", "json", "--fanout", "unicast"]).ok();
        let lines = lines(&ended);
        let ranks: Vec<_> = files.iter().map(read).collect();
        let (total, rows) = lines.split_last().unwrap();
        assert_eq!(rows.len(), ranks[0].len());
        for row in rows {
            let name = row["tensor"].as_str().unwrap();
            let tensors: Vec<_> = ranks.iter().map(|rank| &rank[name]).collect();
            let held: Vec<_> = tensors.iter().map(|tensor| union(&[tensor], 256)).collect();
            assert_eq!(row["rank_blocks"], Value::from(held), "{row}");
            assert_eq!(row["union_blocks"], Value::from(union(&tensors, 256)), "{row}");
            assert_eq!(row["dense_bytes"], Value::from(tensors[0].bytes.len()), "{row}");
            assert_eq!(row["elements"], Value::from(tensors[0].bytes.len() / 4), "{row}");
            assert_eq!(row["shape"], Value::from(tensors[0].shape.clone()), "{row}");
            assert_eq!((&row["dtype"], &row["wire"]), (&"f32".into(), &"f32".into()));
        }
        assert_eq!((&total["ranks"], &total["rank"]), (&4.into(), &Value::Null));
        assert_eq!(total["out"], Value::from(out));
        for rank in 0..4 {
            // I3 allows an excess of 6 %, plus one datagram for each op.
            let room = 1500 * rows.len() as u64;
            let bytes = |key: &str| total[key][rank].as_u64().unwrap();
            let own = bytes("rank_bytes");
            assert!((own..own * 106 / 100 + room).contains(&bytes("tx_bytes")), "{total}");
            let all = total["union_bytes"].as_u64().unwrap();
            assert!((all..all * 106 / 100 + room).contains(&bytes("rx_bytes")), "{total}");
        }
        let text = reduce(&files, &folder.path("sum"), &[]).ok().out;
        assert!(ranks[0].keys().all(|name| text.contains(name)), "{text}");
    }
}

#[test]
fn every_dtype_and_shape_is_reduced() {
    let folder = Folder::new("dtypes");
    let files: Vec<_> = (0..3)
        .map(|rank| {
            let numbers: Vec<f64> = (0..6).map(|i| f64::from(i * (rank + 1) - 3)).collect();
            let long: Vec<f64> = (0..70_000).map(|i| f64::from(i % 5 + rank)).collect();
            let of = |dtype| Tensor::of(dtype, &[2, 3], &numbers);
            folder.write(
                &format!("rank{rank}"),
                &[
                    ("f32", of(Dtype::F32)),
                    ("f64", of(Dtype::F64)),
                    ("f16", of(Dtype::F16)),
                    ("bf16", of(Dtype::BF16)),
                    ("i32", of(Dtype::I32)),
                    ("i64", of(Dtype::I64)),
                    ("a scalar", Tensor::of(Dtype::F32, &[], &[f64::from(rank)])),
                    ("nothing", Tensor::of(Dtype::F64, &[0, 7], &[])),
                    ("long \u{1f}\n\"name\"", Tensor::of(Dtype::F32, &[7, 10_000], &long)),
                ],
            )
        })
        .collect();
    let out = folder.path("sum");
    for (flags, op) in [(&[][..], "sum"), (&["--op", "max", "--shards", "2"], "max")] {
        let ended = reduce(&files, &out, flags).ok();
        assert!(!ended.out.contains('\u{1f}'), "{}", ended.out);
        check(&files, &out, op, 0.0);
    }
    reduce(&files[..1], &out, &[]).ok();
    assert_eq!(read(&out), read(&files[0]), "the sum of one file must equal the file");
    let narrow = reduce(&files, &out, &["--wire", "bf16"]).ok();
    // Wire type bf16 cannot carry f16, i32 or i64, so these tensors keep their own types.
    assert_eq!(narrow.err.matches(" and 2 more keep their own types").count(), 1, "{narrow:?}");
    for (tensor, wire) in [("i32", "i32"), ("i64", "i64"), ("f16", "f16"), ("f32", "bf16")] {
        let row = narrow.out.lines().find(|line| line.starts_with(&format!("{tensor} "))).unwrap();
        assert_eq!(row.split_whitespace().nth(2), Some(wire), "{row}");
    }
    let whole = [Dtype::F16, Dtype::I32, Dtype::I64];
    let as_is = |path: &str| read(path).into_iter().filter(|(_, it)| whole.contains(&it.dtype));
    let narrowed: Vec<_> = as_is(&out).collect();
    reduce(&files, &out, &[]).ok();
    assert_eq!(
        narrowed,
        as_is(&out).collect::<Vec<_>>(),
        "tensors that keep their types must keep their bits"
    );
}

#[test]
fn files_without_tensors_are_reduced_to_one() {
    let folder = Folder::new("none");
    let file = folder.write("none", &[]);
    let out = folder.path("sum");
    reduce(&[file.clone(), file], &out, &[]).ok();
    assert!(read(&out).is_empty());
}

#[test]
fn a_result_may_replace_a_file_and_even_an_input() {
    let folder = Folder::new("replace");
    let one = Tensor::of(Dtype::F32, &[2], &[1.0, 2.0]);
    let two = Tensor::of(Dtype::F32, &[2], &[2.0, 4.0]);
    let file = folder.write("own", &[("w", one)]);
    reduce(&[file.clone(), file.clone()], &file, &[]).ok();
    assert_eq!(read(&file)["w"], two);
    assert_eq!(folder.names(), ["own"]);
}

#[test]
fn a_result_that_there_is_no_room_for_is_named() {
    let folder = Folder::new("full");
    let file = folder.write("rank", &[("w", Tensor::of(Dtype::F32, &[4096], &[1.0; 4096]))]);
    let out = folder.path("sum");
    // A write beyond the limit on file size fails but does not kill the program, which ignores
    // SIGXFSZ. The rank's identity, a file in memory, stays below the limit.
    let script = format!("ulimit -f 8; exec {RACKSUM} reduce --out {out} {file}");
    let ended = Process::spawn(Command::new("sh").args(["-c", &script])).end(60);
    let why = format!("rank 0: cannot write {out}: File too large");
    assert!(ended.failed(1).starts_with(&why), "{ended:?}");
    assert_eq!(folder.names(), ["rank"]);
}

#[test]
fn what_cannot_be_reduced_is_refused_in_a_sentence_and_nothing_is_written() {
    let folder = Folder::new("bad");
    let vector = |dtype, len: usize| Tensor::of(dtype, &[len], &vec![1.0; len]);
    let good = folder.write("good", &[("a", vector(Dtype::F32, 6)), ("b", vector(Dtype::F32, 2))]);
    let garbage = folder.path("garbage");
    std::fs::write(&garbage, "this is no file of tensors").unwrap();
    let cut = folder.path("cut");
    std::fs::write(&cut, &std::fs::read(&good).unwrap()[..60]).unwrap();
    let shape = folder.write(
        "shape",
        &[("a", Tensor::of(Dtype::F32, &[2, 3], &[1.0; 6])), ("b", vector(Dtype::F32, 2))],
    );
    let dtype =
        folder.write("dtype", &[("a", vector(Dtype::I32, 6)), ("b", vector(Dtype::F32, 2))]);
    let fewer = folder.write("fewer", &[("a", vector(Dtype::F32, 6))]);
    let other =
        folder.write("other", &[("a", vector(Dtype::F32, 6)), ("c", vector(Dtype::F32, 2))]);
    let bytes = folder.write("bytes", &[("a", vector(Dtype::U8, 6)), ("b", vector(Dtype::F32, 2))]);
    let before = folder.names();
    let missing = folder.path("missing");
    let own = folder.path("");
    let of = |second: &str| vec![good.clone(), second.to_owned()];
    for (files, why) in [
        (of(&missing), format!("cannot read {missing}: No such file")),
        (of(&own), "is a directory, not a file".to_owned()),
        (of(&garbage), format!("{garbage} is not a safetensors file: ")),
        (of(&cut), format!("{cut} is not a safetensors file: ")),
        (of(&shape), format!("tensor \"a\" has the shape [2, 3] in {shape}, but [6] in {good}")),
        (of(&dtype), format!("tensor \"a\" is i32 in {dtype}, but f32 in {good}")),
        (of(&fewer), format!("{fewer} lacks tensor \"b\", which {good} has")),
        (of(&other), format!("{other} lacks tensor \"b\", which {good} has")),
        (
            vec![fewer.clone(), good.clone()],
            format!("{good} has tensor \"b\", which {fewer} lacks"),
        ),
        (of(&bytes), format!("tensor \"a\" of {bytes} has dtype U8, which racksum cannot reduce")),
        (vec![bytes.clone()], format!("tensor \"a\" of {bytes} has dtype U8")),
    ] {
        let ended = reduce(&files, &folder.path("sum"), &[]);
        assert!(ended.failed(2).contains(&why), "{why}: {ended:?}");
        assert!(ended.out.is_empty(), "{ended:?}");
        assert_eq!(folder.names(), before);
    }
    let nowhere = folder.path("nowhere/sum");
    for (out, why) in [(&nowhere, "does not exist"), (&own, "does not name a file")] {
        let ended = reduce(&of(&good), out, &[]);
        assert!(ended.failed(2).contains(why), "{ended:?}");
        assert_eq!(folder.names(), before);
    }
    for (flags, why) in [
        (&["--block", "48"][..], "tensor \"a\": the number of elements in a block"),
        (&["--wire", "i32"], "tensor \"a\": wire type i32 cannot carry a tensor of f32"),
    ] {
        let ended = reduce(&of(&good), &folder.path("sum"), flags);
        assert!(ended.failed(2).contains(why), "{ended:?}");
        assert_eq!(folder.names(), before);
    }
}

#[test]
fn a_reduction_that_fails_on_the_way_leaves_what_was_there() {
    let folder = Folder::new("fails");
    let fine = Tensor::of(Dtype::F32, &[3], &[1.0; 3]);
    let broken = Tensor::of(Dtype::F32, &[3], &[1.0, f64::NAN, 1.0]);
    let files = [
        folder.write("rank0", &[("fine", fine.clone()), ("w", fine.clone())]),
        folder.write("rank1", &[("fine", fine), ("w", broken)]),
    ];
    let out = folder.path("sum");
    std::fs::write(&out, "what was there").unwrap();
    let ended = reduce(&files, &out, &["--wire", "fixed32"]);
    let why = ended.failed(1);
    assert!(why.contains("tensor \"w\": ") && why.contains("fixed32 cannot carry"), "{why}");
    assert_eq!(std::fs::read(&out).unwrap(), b"what was there");
    assert_eq!(folder.names(), ["rank0", "rank1", "sum"]);
}

#[test]
fn tensors_that_the_host_has_no_memory_for_are_refused_before_they_are_read() {
    let folder = Folder::new("memory");
    let header =
        r#"{"w":{"dtype":"F64","shape":[1099511627776],"data_offsets":[0,8796093022208]}}"#;
    let path = folder.path("rank");
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat())
        .unwrap();
    let end = 8 + header.len() as u64 + (8 << 40);
    File::options().write(true).open(&path).unwrap().set_len(end).unwrap();
    let out = folder.path("sum");
    for (member, need) in [
        (&[&path[..]][..], "need 16777216 MiB for 2 ranks on this host, which has "),
        (&RANK, "need 8388608 MiB for 1 rank on this host, which has "),
    ] {
        let args = [&["reduce", "--out", &out, &path], member].concat();
        let ended = Process::start(&args).end(10);
        let why = format!("the tensors of {path} (at most 8796093022208 bytes each) {need}");
        assert!(ended.failed(2).starts_with(&why), "{ended:?}");
        assert_eq!(folder.names(), ["rank"]);
    }
}

/// Flags of one rank of two, for commands that fail before they call the aggregator.
const RANK: [&str; 6] = ["--aggregator", "127.0.0.1:1", "--rank", "0", "--world", "2"];

/// Starts a reduction of three ranks with so much loss that it runs until a signal ends it.
fn endless(folder: &Folder) -> Process {
    let numbers = vec![1.0; 4_000_000];
    let file = folder.write("rank", &[("w", Tensor::of(Dtype::F32, &[4_000_000], &numbers))]);
    let out = folder.path("sum");
    let args = ["reduce", "--out", &out, "--drop", "0.9", &file, &file, &file];
    let parent = Process::start(&args);
    await_that("the ranks run", || parent.children().len() == 3);
    std::thread::sleep(Duration::from_millis(300));
    parent
}

#[test]
fn a_reduction_that_is_interrupted_leaves_nothing() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)] {
        if name == "HUP" && hangup_is_ignored() {
            racksum_test_report::skip("SIGHUP is ignored here, as under nohup");
            continue;
        }
        let folder = Folder::new(&format!("interrupted-{name}"));
        let parent = endless(&folder);
        assert!(has_result_open(&folder, parent.id()), "the output file must be open");
        signal(parent.id(), name);
        assert_eq!(parent.end(10).code, Some(code));
        assert_eq!(folder.names(), ["rank"]);
    }
}

/// Returns whether a process has any file of the folder open, other than the ranks' file.
fn has_result_open(folder: &Folder, process: u32) -> bool {
    let (folder, rank) = (folder.path(""), folder.path("rank"));
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    open.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .any(|path| path.starts_with(&folder) && path != Path::new(&rank))
}

#[test]
fn a_reduction_that_is_killed_leaves_nothing() {
    let folder = Folder::new("kill");
    let unnamed = File::options().write(true).custom_flags(libc::O_TMPFILE).open(folder.path(""));
    if unnamed.is_err() {
        racksum_test_report::skip("this file system does not support unnamed files");
        return;
    }
    let parent = endless(&folder);
    assert!(has_result_open(&folder, parent.id()), "the output file must be open");
    signal(parent.id(), "KILL");
    parent.end(10);
    assert_eq!(folder.names(), ["rank"]);
}

/// Returns whether processes started here ignore SIGHUP.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn a_reduction_under_nohup_outlives_its_terminal() {
    let folder = Folder::new("nohup");
    let file = folder.write("rank", &[("w", Tensor::of(Dtype::F32, &[9], &[1.0; 9]))]);
    let serving = Serving::start(&[]);
    let aggregator = &serving.addr;
    let script = format!(
        "trap '' HUP; exec {RACKSUM} reduce --log info --aggregator {aggregator} --rank 0 --world \
         2 --out {} {file}",
        folder.path("sum")
    );
    let first = Process::spawn(Command::new("sh").args(["-c", &script]));
    await_that("the first rank has joined", || first.err().contains("waiting for ranks"));
    signal(first.id(), "HUP");
    rank(&serving, 1, 2, &file, &[]).end(30).ok();
    first.end(30).ok();
    assert_eq!(folder.names(), ["rank", "sum"]);
}

#[test]
fn a_rank_that_is_killed_ends_the_reduction_at_once() {
    let folder = Folder::new("killed");
    let parent = endless(&folder);
    signal(parent.children()[1], "KILL");
    let (ended, ms) = timed(|| parent.end(10));
    assert!(ended.failed(1).starts_with("rank 1 exited early (signal: 9"), "{ended:?}");
    time("a reduction ends when a rank is killed", ms, 5_000);
    assert_eq!(folder.names(), ["rank"]);
}

#[test]
fn a_timeout_says_which_tensor_and_leaves_nothing() {
    let folder = Folder::new("timeout");
    let file = folder.write("rank", &[("w", Tensor::of(Dtype::F32, &[9], &[1.0; 9]))]);
    let out = folder.path("sum");
    let ended = run(&["reduce", "--out", &out, "--drop", "1", "--timeout", "1", &file, &file]);
    let why = ended.failed(1);
    assert!(
        why.contains("no result after 10") && why.contains("the aggregator named no missing rank"),
        "{why}"
    );
    assert_eq!(folder.names(), ["rank"]);
}

/// Starts a rank of a distributed reduction.
fn rank(serving: &Serving, rank: usize, world: usize, file: &str, flags: &[&str]) -> Process {
    let (rank, world) = (rank.to_string(), world.to_string());
    let args = ["reduce", "--aggregator", &serving.addr, "--rank", &rank, "--world", &world, file];
    Process::start(&[&args, flags].concat())
}

#[test]
fn ranks_of_a_distributed_run_end_as_those_of_one_host() {
    let folder = Folder::new("distributed");
    let serving = Serving::start(&["--shards", "2"]);
    let files = captured("digits");
    let local = folder.path("local");
    reduce(&files, &local, &["--op", "avg"]).ok();
    let outs: Vec<_> = (0..4).map(|rank| folder.path(&format!("sum{rank}"))).collect();
    let ranks: Vec<_> = (0..4)
        .map(|at| {
            let out = ["--op", "avg", "--format", "json", "--out", &outs[at]];
            // Rank 1 writes no file.
            let flags = if at == 1 { &out[..4] } else { &out[..] };
            rank(&serving, at, 4, &files[at], flags)
        })
        .collect();
    for (at, process) in ranks.into_iter().enumerate() {
        let ended = process.end(30).ok();
        let lines = lines(&ended);
        let total = lines.last().unwrap();
        assert_eq!((&total["ranks"], &total["rank"]), (&4.into(), &at.into()));
        // Every rank knows the block counts of all ranks.
        assert_eq!(total["rank_blocks"], Value::from(vec![71, 69, 69, 77]));
        assert_eq!(total["union_blocks"], Value::from(79));
        if at != 1 {
            assert!(std::fs::read(&outs[at]).unwrap() == std::fs::read(&local).unwrap());
        }
    }
    assert_eq!(folder.names(), ["local", "sum0", "sum2", "sum3"]);
}

#[test]
fn ranks_with_other_tensors_are_told_which_before_any_is_sent() {
    let folder = Folder::new("differ");
    let serving = Serving::start(&[]);
    let vector = |len: usize| Tensor::of(Dtype::F32, &[len], &vec![1.0; len]);
    let one = folder.write("one", &[("a", vector(4)), ("b", vector(6)), ("c", vector(4))]);
    let size = folder.write("size", &[("a", vector(4)), ("b", vector(7)), ("c", vector(4))]);
    let name = folder.write("name", &[("a", vector(4)), ("bb", vector(6)), ("c", vector(4))]);
    let table = Tensor::of(Dtype::F32, &[2, 3], &[1.0; 6]);
    let shape = folder.write("shape", &[("a", vector(4)), ("b", table), ("c", vector(4))]);
    let fewer = folder.write("fewer", &[("a", vector(4)), ("b", vector(6))]);
    let before = folder.names();
    let out = folder.path("sum");
    for (other, flags, why) in [
        (&size, &[][..], "tensor \"b\" differs between ranks: rank "),
        (&name, &[], "give it different names or shapes"),
        (&shape, &[], "tensor \"b\" differs between ranks: rank "),
        (&fewer, &[], ", but rank "),
        (&one, &["--op", "max"], "the ranks have different --op: rank "),
        (
            &one,
            &["--block", "64", "--wire", "bf16"],
            "the ranks have different --wire and --block: rank ",
        ),
    ] {
        let (results, ms) = timed(|| {
            let ranks =
                [rank(&serving, 0, 2, &one, &["--out", &out]), rank(&serving, 1, 2, other, flags)];
            ranks.map(|rank| rank.end(30))
        });
        for ended in results {
            assert!(ended.failed(1).contains(why), "{why}: {ended:?}");
        }
        time("ranks that disagree get an error", ms, 5_000);
        assert_eq!(folder.names(), before);
    }
}

#[test]
fn another_command_with_the_same_job_is_told_from_a_rank_that_disagrees() {
    let serving = Serving::start(&[]);
    let reduces = rank(&serving, 0, 2, &captured("digits")[0], &["--job", "bench"]);
    let benches = bench_rank(&serving.addr, 1, 2, &["-e", "4K"]);
    let ended = reduces.end(30);
    let why = "rank 1 of the job does not run `racksum reduce`: it has max of 20 x i64, ";
    assert!(ended.failed(1).starts_with(why), "{ended:?}");
    assert!(ended.failed(1).ends_with("; give each command its own --job"), "{ended:?}");
    let ended = benches.end(30);
    assert!(ended.failed(1).ends_with("and give every other command its own --job"), "{ended:?}");
}

#[test]
fn arguments_that_contradict_each_other_are_refused() {
    let file = &captured("digits")[0];
    for args in [
        &["reduce"][..],
        &["reduce", "--op", "median", file],
        &["reduce", "--aggregator", "127.0.0.1:1", file],
        &["reduce", "--rank", "1", file],
        &[
            "reduce",
            "--aggregator",
            "127.0.0.1:1",
            "--rank",
            "0",
            "--world",
            "1",
            "--shards",
            "2",
            file,
        ],
        &["reduce", "--insecure", file],
        &["reduce", "--drop", "1.5", file],
        &["reduce", "--timeout", "0", file],
        &["reduce", "--out"],
    ] {
        let ended = run(args);
        assert_eq!(ended.code, Some(2), "{args:?}: {ended:?}");
        assert!(ended.err.starts_with("error: "), "{ended:?}");
    }
    for flags in [&["--wait"][..], &["--insecure"], &["--rank", "1"], &["--job", "a"]] {
        for command in [&["bench"][..], &["reduce", file]] {
            let ended = run(&[command, flags].concat());
            let tip = "tip: these flags configure one rank of a distributed run; add --rank";
            assert!(ended.code == Some(2) && ended.err.contains(tip), "{ended:?}");
        }
    }
    let file_less = run(&["reduce"]);
    assert!(!file_less.err.contains("tip:"), "{file_less:?}");
    let two = ["reduce", "--aggregator", "127.0.0.1:1", "--rank", "0", "--world", "2", file, file];
    assert!(run(&two).failed(2).contains("give only this rank's file, not 2"));
    let mut many = vec!["reduce"];
    many.extend([&file[..]; 257]);
    assert!(run(&many).failed(2).contains("give 1 to 256 files, one per rank, not 257"));
}
