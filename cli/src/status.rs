//! `racksum status`: prints the state of aggregators or of a sidecar, and the ranks that their jobs
//! wait for.

mod remote;
mod sidecar;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Peer, call_for_stream, remove_dead};
use racksum_proto::counted::counted;
use racksum_proto::job_name::JobName;
use racksum_proto::peer_text::PeerText;
use racksum_proto::rank_list::{listed, named};
use racksum_proto::status::{AggregatorStatus, JobStatus, MovedJob, RankStatus, ShardStatus};
use racksum_worker::{aggregator_sets, check_address};

use crate::args::{self, Format};
use crate::exit::{Failure, print_line};
use crate::stderr;

#[derive(Debug, clap::Args)]
#[command(after_long_help = args::EXIT_CODES)]
pub(crate) struct Args {
    /// Aggregator as HOST:PORT or as the path of its status socket, several as A,B or A+B, or a
    /// sidecar as unix:PATH [default: all aggregators of this user on this host; for root, of all
    /// users].
    #[arg(value_name = "WHICH")]
    socket: Option<PathBuf>,
    /// Identity file for an aggregator at HOST:PORT. An identity with role operator or
    /// aggregator sees all jobs, and one with role worker only the jobs that it may join [env:
    /// RACKSUM_IDENTITY].
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    identity: Option<PathBuf>,
    /// Connect beyond loopback without an identity [env: RACKSUM_INSECURE].
    #[arg(long)]
    insecure: bool,
    /// Output format.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Format::Text)]
    format: Format,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let named = args.socket.as_deref().and_then(Path::to_str);
    let beside = named.and_then(|named| named.strip_prefix("unix:"));
    let addr = named.filter(|named| beside.is_none() && !is_path(named));
    if addr.is_none() && (args.identity.is_some() || args.insecure) {
        return Err(Failure::usage(
            "--identity and --insecure apply only to an aggregator at HOST:PORT; leave them out, \
             or pass HOST:PORT",
        ));
    }
    if let Some(path) = beside {
        if path.is_empty() {
            return Err(Failure::usage(
                "unix: lacks the path of a sidecar; give unix:PATH, with the path of the sidecar's \
                 --socket",
            ));
        }
        return sidecar::print(Path::new(path), args.format);
    }
    if let Some(addrs) = addr {
        return ask_addresses(addrs, args);
    }
    match &args.socket {
        Some(socket) => print(&ask_socket(socket)?, args.format),
        None => ask_all(args.format),
    }
}

/// Queries the aggregator at a status socket.
pub(crate) fn ask_socket(socket: &Path) -> Result<AggregatorStatus, Failure> {
    ask(socket, own_uid(), PATIENCE).map_err(|error| {
        let question = "check that the path is the --status-socket of a running aggregator; for a \
                        sidecar give unix:PATH";
        let advice = advice(&error, "aggregator", question);
        let why = format!("cannot query {}: {error}; {advice}", socket.display());
        Failure::of_call(why, &error)
    })
}

/// Queries the aggregator at HOST:PORT or at the path of its status socket.
pub(crate) fn ask_one(
    which: &str,
    identity: Option<&Path>,
    insecure: bool,
) -> Result<AggregatorStatus, Failure> {
    match is_path(which) {
        true => ask_socket(Path::new(which)),
        false => remote::ask(which, identity, insecure),
    }
}

/// Queries the aggregators of this user on this host (for root, of all users). Returns the answers.
pub(crate) fn ask_local() -> Result<Vec<AggregatorStatus>, Failure> {
    let mut answers = Vec::new();
    ask_each(in_turns(sockets()?), PATIENCE, 2 * PATIENCE, |_, answer| {
        answers.extend(answer);
        Ok(())
    })?;
    Ok(answers)
}

/// Queries the aggregators in `addrs`, which has the format of a job's `--aggregator`, and prints
/// each answer. Returns the first failure, and prints the others.
fn ask_addresses(addrs: &str, args: &Args) -> Result<(), Failure> {
    let addrs = aggregator_sets(addrs).map_err(Failure::usage)?;
    let mut failed: Option<Failure> = None;
    for addr in addrs.iter().flatten() {
        match remote::ask(addr, args.identity.as_deref(), args.insecure) {
            Ok(status) => print(&status, args.format)?,
            Err(failure) if failed.is_some() => stderr::print_line(&failure),
            Err(failure) => failed = Some(failure),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Returns advice about a socket that could not be queried. The advice is `question` if the error
/// does not show the cause; for example, another program may own the socket.
fn advice(error: &CallError, whose: &str, question: &str) -> String {
    match error {
        CallError::Io(error) if error.kind() == ErrorKind::PermissionDenied => {
            format!("run this as the {whose}'s user, or as root")
        }
        CallError::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            format!("the {whose} has exited; start it again")
        }
        CallError::Untrusted(_) => {
            format!(
                "run this as the {whose}'s user; this program trusts only processes of its own \
                 user and of root"
            )
        }
        _ => question.to_owned(),
    }
}

/// Queries the aggregators of this user on this host (for root, of all users) and prints their
/// answers.
fn ask_all(format: Format) -> Result<(), Failure> {
    let (mut answered, mut silent, mut dead) = (false, Vec::new(), Vec::new());
    let unasked = ask_each(in_turns(sockets()?), PATIENCE, 2 * PATIENCE, |socket, answer| {
        match answer {
            Ok(status) => {
                answered = true;
                print(&status, format)?;
            }
            Err(error) if error.is_absence() => dead.push(socket.to_owned()),
            // A file that is not a socket belongs to no aggregator.
            Err(CallError::NoSocket) => {}
            Err(error) => silent.push(format!("cannot query {}: {error}", socket.display())),
        }
        Ok(())
    })?;
    if unasked > 0 {
        silent.push(format!(
            "{} had to be skipped, because the others took {} s; pass the path of a socket to \
             query it alone",
            counted(unasked, "socket"),
            2 * PATIENCE.as_secs()
        ));
    }
    // Remove the sockets of killed aggregators from this user's folder. Root leaves the folders of
    // other users alone.
    let folder = folder();
    dead.retain(|socket| socket.starts_with(&folder));
    remove_dead(&folder, dead);
    match (answered, &silent[..]) {
        (true, []) => Ok(()),
        (false, []) => Err(Failure::unavailable(format!(
            "no aggregator of this user has a status socket in {}; start an aggregator, or pass \
             the HOST:PORT or the --status-socket path of a running aggregator",
            folder.display()
        ))),
        (_, silent) => Err(Failure::unavailable(silent.join("; "))),
    }
}

/// Sorts sockets so that the many sockets of one user do not delay the queries of other users'
/// sockets.
fn in_turns(sockets: Vec<(PathBuf, u32)>) -> Vec<(PathBuf, u32)> {
    let mut of_owners = BTreeMap::<u32, usize>::new();
    let turn = |socket: (PathBuf, u32)| {
        let turn = of_owners.entry(socket.1).or_default();
        *turn += 1;
        (*turn, socket)
    };
    let mut sockets: Vec<_> = sockets.into_iter().map(turn).collect();
    sockets.sort_by_key(|(turn, _)| *turn);
    sockets.into_iter().map(|(_, socket)| socket).collect()
}

/// Queries the server at each socket and passes each answer to `on_answer`. Waits at most
/// `patience` for one socket and at most `total` for all. Returns the number of sockets that were
/// skipped for lack of time.
fn ask_each(
    sockets: Vec<(PathBuf, u32)>,
    patience: Duration,
    total: Duration,
    mut on_answer: impl FnMut(&Path, Result<AggregatorStatus, CallError>) -> Result<(), Failure>,
) -> Result<usize, Failure> {
    let (clock, mut unasked) = (Clock::start(), 0);
    let started = clock.now();
    for sockets in sockets.chunks(AT_A_TIME) {
        let waited = Duration::from_nanos(clock.now().since(started).0);
        let patience = patience.min(total.saturating_sub(waited));
        if patience.is_zero() {
            unasked += sockets.len();
            continue;
        }
        let answers = std::thread::scope(|scope| {
            let ask = |(socket, owner): &'_ (PathBuf, u32)| {
                let (socket, owner) = (socket.clone(), *owner);
                Builder::new().spawn_scoped(scope, move || ask(&socket, owner, patience))
            };
            // Query all at the same time, because the query of a silent socket ends only at the
            // timeout.
            let asked: Vec<_> = sockets.iter().map(ask).collect();
            let answer = |asked: io::Result<ScopedJoinHandle<'_, _>>| match asked?.join() {
                Ok(answer) => answer,
                Err(_) => Err(io::Error::other("the query panicked").into()),
            };
            asked.into_iter().map(answer).collect::<Vec<_>>()
        });
        for ((socket, _), answer) in sockets.iter().zip(answers) {
            on_answer(socket, answer)?;
        }
    }
    Ok(unasked)
}

/// Maximum number of aggregators to query at the same time.
const AT_A_TIME: usize = 64;

/// Returns the default path of an aggregator's status socket, in this user's own folder. Creates
/// the folder, and removes the sockets of dead aggregators from it.
///
/// # Errors
/// A message that names the folder.
pub(crate) fn usual_socket() -> Result<PathBuf, String> {
    let folder = folder();
    own(&folder)?;
    remove_dead(&folder, sockets_in(&folder));
    Ok(folder.join(format!("{}.sock", std::process::id())))
}

/// Creates a folder that only this user may enter. Accepts an existing folder if only this user or
/// root can write to it.
fn own(folder: &Path) -> Result<(), String> {
    let of_folder = |error| format!("cannot use the folder {}: {error}", folder.display());
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(of_folder(error)),
        _ => {}
    }
    check_private(folder, &fs::symlink_metadata(folder).map_err(of_folder)?)
}

/// Checks that nobody but this user and root can write to a folder. In /tmp, any user may have
/// created it.
fn check_private(folder: &Path, found: &Metadata) -> Result<(), String> {
    let others_write = found.mode() & 0o022 != 0;
    if found.is_dir() && is_trusted(found.uid(), own_uid()) && !others_write {
        return Ok(());
    }
    Err(format!(
        "{} is not a folder that only this user or root can write to (owner {}, mode {:o})",
        folder.display(),
        found.uid(),
        found.mode() & 0o7777
    ))
}

fn own_uid() -> u32 {
    fs::metadata("/proc/self").map_or(u32::MAX, |own| own.uid())
}

fn folder() -> PathBuf {
    folder_in(std::env::var_os("XDG_RUNTIME_DIR"), own_uid())
}

/// Returns the socket folder of user `uid` if XDG_RUNTIME_DIR is `runtime`. An empty or relative
/// value counts as unset, because it would name a different folder in each working directory.
fn folder_in(runtime: Option<OsString>, uid: u32) -> PathBuf {
    let runtime = runtime.map(PathBuf::from).filter(|runtime| runtime.is_absolute());
    if let Some(runtime) = runtime {
        return runtime.join("racksum");
    }
    match uid {
        0 => PathBuf::from("/run/racksum"),
        uid => PathBuf::from(format!("/tmp/racksum-{uid}")),
    }
}

/// Returns the sockets in the default folder, each with the user that its server must run as. For
/// root, adds the sockets of other users.
fn sockets() -> Result<Vec<(PathBuf, u32)>, Failure> {
    let mut folders = Vec::new();
    let folder = folder();
    if let Ok(found) = fs::symlink_metadata(&folder) {
        check_private(&folder, &found).map_err(|why| {
            Failure::unavailable(format!(
                "{why}, so its sockets are not trusted; remove the folder, or pass a \
                 --status-socket path"
            ))
        })?;
        folders.push((folder, own_uid()));
    }
    if own_uid() == 0 {
        folders.extend(folders_of_others(Path::new("/run/user"), Path::new("/tmp")));
    }
    let mut sockets = Vec::new();
    for (folder, owner) in folders {
        sockets.extend(sockets_in(&folder).map(|path| (path, owner)));
    }
    sockets.sort();
    Ok(sockets)
}

/// Returns the paths in a folder that end in `.sock`.
fn sockets_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "sock"))
}

/// Returns whether to trust a process or file that belongs to user `uid` and should belong to
/// `owner`. Root is always trusted.
fn is_trusted(uid: u32, owner: u32) -> bool {
    uid == 0 || uid == owner
}

/// Returns the socket folders of users other than root: `racksum` in each user's folder in `each`,
/// and `racksum-UID` in `shared`. A folder counts only if it belongs to the user that its path
/// names.
fn folders_of_others(each: &Path, shared: &Path) -> Vec<(PathBuf, u32)> {
    let list = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let own = list(each).filter_map(|entry| {
        let uid: u32 = entry.file_name().to_str()?.parse().ok()?;
        Some((uid, entry.path().join("racksum")))
    });
    let in_shared = list(shared).filter_map(|entry| {
        let uid: u32 = entry.file_name().to_str()?.strip_prefix("racksum-")?.parse().ok()?;
        Some((uid, entry.path()))
    });
    let is_theirs = |(uid, path): &(u32, PathBuf)| {
        fs::symlink_metadata(path).is_ok_and(|it| it.is_dir() && it.uid() == *uid)
    };
    let swapped = |(uid, path)| (path, uid);
    own.chain(in_shared).filter(is_theirs).map(swapped).collect()
}

/// Returns whether a text is the path of a socket rather than an aggregator's address.
pub(crate) fn is_path(text: &str) -> bool {
    text.contains('/') || check_address(text).is_err() && Path::new(text).exists()
}

/// Parses an aggregator's answer.
fn parse(json: &[u8]) -> Result<AggregatorStatus, String> {
    serde_json::from_slice(json).map_err(|error| {
        let error = PeerText::of(error);
        format!(
            "cannot parse the answer ({error}); check that the aggregator and this program are \
             from the same release"
        )
    })
}

/// Queries the server at a socket. The server must be a process of `owner` or of root.
fn ask(socket: &Path, owner: u32, patience: Duration) -> Result<AggregatorStatus, CallError> {
    let clock = Clock::start();
    let started = clock.now();
    let stream = call_for_stream(socket, patience)?;
    let peer = Peer::of(&stream)?;
    if !is_trusted(peer.uid, owner) {
        let uid = peer.uid;
        let why = format!("a process of user {uid} listens there");
        return Err(CallError::Untrusted(why));
    }
    let waited = Duration::from_nanos(clock.now().since(started).0);
    let json = read(stream, patience.saturating_sub(waited))?;
    Ok(parse(&json).map_err(io::Error::other)?)
}

/// Reads an answer to its end. Fails if the read takes longer than `patience`, or if the answer
/// exceeds [`MAX_ANSWER`] bytes.
fn read(mut stream: UnixStream, patience: Duration) -> io::Result<Vec<u8>> {
    let late = || {
        let waited = patience.as_secs_f64().ceil();
        io::Error::other(format!("no answer within {waited} s; the aggregator may be suspended"))
    };
    let (clock, mut answer, mut piece) = (Clock::start(), Vec::new(), [0; 64 << 10]);
    let started = clock.now();
    loop {
        let waited = Duration::from_nanos(clock.now().since(started).0);
        let left = patience.saturating_sub(waited);
        if left.is_zero() {
            return Err(late());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(answer),
            Ok(len) => answer.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(late()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if answer.len() > MAX_ANSWER {
            return Err(io::Error::other(format!("the answer is longer than {MAX_ANSWER} bytes")));
        }
    }
}

/// Timeout for an aggregator's answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Largest accepted answer in bytes. The status of an aggregator with the maximum numbers of jobs
/// and ranks is many times smaller.
const MAX_ANSWER: usize = 16 << 20;

fn print(status: &AggregatorStatus, format: Format) -> Result<(), Failure> {
    match format {
        Format::Json => {
            let json = serde_json::to_string(status);
            print_line(&json.map_err(|error| Failure::failed(error.to_string()))?)
        }
        Format::Text => print_line(text(status).trim_end()),
    }
}

/// Formats an aggregator's status for people.
fn text(status: &AggregatorStatus) -> String {
    let AggregatorStatus {
        version,
        addr,
        up_ms,
        insecure,
        data_auth,
        max_jobs,
        jobs,
        queued,
        moved,
        shards,
        ..
    } = status;
    let parent = status.parent.as_ref();
    let parent = parent.map_or_else(String::new, |parent| format!(", parent {parent}"));
    let draining = if status.draining { ", draining: it takes no more jobs" } else { "" };
    let insecure =
        if *insecure { ", INSECURE: any host that reaches it may join any job" } else { "" };
    let (up, count) = (up_ms / 1000, jobs.len());
    let mut text = format!(
        "racksum {version} on {addr}, up {up} s, data auth {data_auth}, {count} of {max_jobs} \
         jobs{parent}{draining}{insecure}\n"
    );
    jobs.iter().for_each(|job| text += &job_text(job));
    if !queued.is_empty() {
        let names: Vec<_> = queued.iter().map(|name| format!("{name:?}")).collect();
        text += &format!("waiting for room, in queue order: {}\n", names.join(", "));
    }
    for MovedJob { job, to, ago_ms } in moved {
        text += &format!("moved {} s ago: job {job:?} to {to}\n", ago_ms / 1000);
    }
    shards.iter().for_each(|shard| text += &shard_text(shard));
    text
}

/// Returns the full name of a job, including its group.
fn job_name(job: &str, group: &str) -> JobName {
    JobName::new(job, group)
}

/// Names the ranks that the next window waits for, if any. For a child aggregator, lists all of its
/// ranks, because it sends only their sum.
fn behind(ranks: &[RankStatus]) -> Option<String> {
    let (alone, racks): (Vec<_>, Vec<_>) =
        ranks.iter().filter(|rank| rank.behind).partition(|rank| rank.rack.is_empty());
    let alone: Vec<_> = alone.iter().map(|rank| rank.rank).collect();
    let alone = (!alone.is_empty()).then(|| named(alone));
    let racks = racks.iter().map(|rank| format!("some of the ranks {}", list(&rank.rack)));
    let all: Vec<_> = alone.into_iter().chain(racks).collect();
    (!all.is_empty()).then(|| all.join(" and "))
}

fn job_text(job: &JobStatus) -> String {
    let JobStatus { id, generation, world, state, age_ms, missing, absent, ranks, .. } = job;
    let (name, age) = (job_name(&job.job, &job.group), age_ms / 1000);
    let mut text = format!(
        "job {name:?}, generation {generation}, number {id}: {state}, {}, {age} s old",
        counted(*world, "rank")
    );
    if !missing.is_empty() {
        text += &format!("; missing: {}", list(missing));
    }
    if !absent.is_empty() {
        text += &format!("; continues without: {}", list(absent));
    }
    if let Some(to) = &job.moving_to {
        text += &format!("; moving to {to}");
    }
    if let Some((behind, stalled)) = behind(ranks).zip(job.stalled_ms) {
        text += &format!("; has waited {stalled} ms for {behind}");
    }
    text += "\n  rank  next op     opened  delivered     silent      waited  address, identity\n";
    for rank in ranks {
        let identity = rank.identity.as_deref().map_or_else(String::new, |it| format!(" {it}"));
        let rack = if rank.rack.is_empty() {
            String::new()
        } else {
            format!(", an aggregator with ranks {}", list(&rank.rack))
        };
        text += &format!(
            "  {:>4} {:>8} {:>10} {:>10} {:>7} ms {:>8} ms  {}{identity}{rack}{}\n",
            rank.rank,
            rank.next_op,
            rank.opened,
            rank.delivered,
            rank.silent_ms,
            rank.waited_ms,
            rank.addr,
            if rank.behind { "  BEHIND" } else { "" }
        );
    }
    text
}

fn shard_text(shard: &ShardStatus) -> String {
    let ShardStatus { addr, datagrams, bytes, folds, kernel_drops, send_failures, buffers, .. } =
        shard;
    let mut text = format!(
        "shard {addr}: {} datagrams ({} B) in, {} ({} B) out, {folds} windows folded, {} of {} \
         buffers free",
        datagrams.received, bytes.received, datagrams.sent, bytes.sent, buffers.free, buffers.total
    );
    for (count, what) in [(kernel_drops, "dropped by the kernel"), (send_failures, "not sent")] {
        if *count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    for (why, count) in &shard.rejects {
        text += &format!(", {count} rejected: {why}");
    }
    text + "\n"
}

fn list(ranks: &[u16]) -> String {
    listed(ranks.iter().copied())
}

#[cfg(test)]
mod document;
#[cfg(test)]
mod tests;
