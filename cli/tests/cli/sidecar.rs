//! Tests of `racksum worker`, the sidecar of a host, as a process.

use std::fs::{Permissions, set_permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::local::Listener;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_worker::{Client, ConnectOptions};
use serde_json::Value;

use crate::files::Folder;
use crate::ports::own_port;
use crate::process::{Ended, Process, RACKSUM, Serving, run, signal, stop};
use crate::waits::await_that;

/// A sidecar and the socket that ranks connect to.
struct Sidecar {
    process: Process,
    socket: String,
}

impl Sidecar {
    fn start(folder: &Folder, name: &str, flags: &[&str]) -> Self {
        Self::spawn(folder, name, flags, &mut Command::new(RACKSUM))
    }

    fn spawn(folder: &Folder, name: &str, flags: &[&str], command: &mut Command) -> Self {
        let socket = folder.path(name);
        let process = Process::spawn(command.args(["worker", "--socket", &socket]).args(flags));
        await_that("the sidecar serves", || process.out().contains("racksum worker at "));
        Self { process, socket }
    }

    /// Starts connecting a rank of a job that has `local` ranks on this host.
    fn rank(&self, rank: u16, (local, world): (u16, u16)) -> JoinHandle<Client> {
        let socket = format!("unix:{}", self.socket);
        let local_world = Some(local);
        let options =
            ConnectOptions { rank, world, local_world, ..ConnectOptions::new(socket, "job") };
        std::thread::spawn(move || Client::connect(&options).unwrap())
    }

    /// Connects all ranks of a job that runs only on this host.
    fn ranks<const WORLD: usize>(&self) -> [Client; WORLD] {
        let world = u16::try_from(WORLD).unwrap();
        let mut rank = 0..world;
        let start = |()| self.rank(rank.next().unwrap(), (world, world));
        [(); WORLD].map(start).map(|rank| rank.join().unwrap())
    }

    /// Queries the sidecar's status as the given user.
    fn status_as(&self, user: u32) -> Ended {
        let mut command = Command::new(RACKSUM);
        let status = command.args(["status", &format!("unix:{}", self.socket)]).uid(user);
        Process::spawn(status).end(60)
    }

    fn status(&self, flags: &[&str]) -> String {
        run(&[&["status", &format!("unix:{}", self.socket)], flags].concat()).ok().out
    }

    fn status_json(&self) -> Value {
        serde_json::from_str(&self.status(&["--format", "json"])).unwrap()
    }
}

const PATIENCE: Duration = Duration::from_secs(300);

fn one() -> Descriptor {
    Descriptor::sum(1, DType::F32)
}

#[test]
fn a_socket_that_cannot_be_is_a_wrong_command_line() {
    let folder = Folder::new("sidecar-nowhere");
    std::fs::write(folder.path("file"), "").unwrap();
    for (socket, why) in [
        (folder.path("none/socket"), "No such file or directory"),
        (folder.path("file/socket"), "Not a directory"),
        (folder.path(&"n".repeat(200)), "File name too long"),
        (folder.path(""), ""),
        ("unix:socket".to_owned(), "must be a path without unix:"),
    ] {
        let ended = run(&["worker", "--socket", &socket]);
        assert!(ended.failed(2).contains(why), "{ended:?}");
    }
}

#[test]
fn the_status_of_a_sidecar_says_whether_it_knows_its_aggregator() {
    let folder = Folder::new("sidecar-insecure");
    for (name, flags, is_insecure) in [
        ("known", &["--aggregator", "127.0.0.1:9"][..], false),
        ("unknown", &["--aggregator", "127.0.0.1:9", "--insecure"], true),
    ] {
        let sidecar = Sidecar::start(&folder, name, flags);
        assert_eq!(sidecar.status_json()["insecure"], is_insecure);
        assert_eq!(sidecar.status(&[]).contains(", INSECURE: "), is_insecure);
    }
}

#[test]
fn a_rank_that_holds_up_a_job_is_named_and_so_are_those_that_are_awaited() {
    let folder = Folder::new("sidecar-status");
    let sidecar = Sidecar::start(&folder, "socket", &["--memory", "1M", "--max-ranks", "5"]);
    let first = sidecar.rank(0, (2, 2));
    await_that("the first rank has joined", || sidecar.status_json()["jobs"][0]["awaited"] == 1);
    assert!(sidecar.status(&[]).contains("gathering, 2 of 2 ranks here"));
    let second = sidecar.rank(1, (2, 2));
    let [first, second] = [first, second].map(|rank| rank.join().unwrap());
    let lent = first.lend(4096).unwrap();
    let handle = first.submit(vec![0u8; 4], one()).unwrap();
    await_that("an op has waited for more than a second", || {
        sidecar.status_json()["jobs"][0]["stalled_ms"]
            .as_u64()
            .is_some_and(|stalled| stalled > 1000)
    });
    let job = &sidecar.status_json()["jobs"][0];
    assert_eq!((&job["state"], &job["awaited_ops"]), (&"running".into(), &1.into()), "{job}");
    assert_eq!(job["ranks"][1]["behind"], true, "{job}");
    assert_eq!(job["ranks"][0]["lent_bytes"], 4100, "{job}");
    let text = sidecar.status(&[]);
    for expected in [
        "1 of 64 jobs, 2 of 5 ranks, 4100 of 1048576 B of memory",
        "; 1 op called by some ranks; has waited ",
        " ms for rank 1",
        "BEHIND",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    let other = second.submit(vec![0u8; 4], one()).unwrap();
    handle.wait().unwrap();
    other.wait().unwrap();
    drop((first, second, lent));
    await_that("all memory is released", || sidecar.status_json()["memory"]["used"] == 0);
    let none = run(&["status", &format!("unix:{}", folder.path("none"))]);
    assert!(
        none.failed(3).contains("check that the path is the --socket of a racksum worker"),
        "{none:?}"
    );
    stop(sidecar.process.id());
    let stopped = run(&["status", &format!("unix:{}", sidecar.socket)]);
    signal(sidecar.process.id(), "CONT");
    assert!(
        stopped.failed(3).ends_with("no answer from the sidecar; its process may be suspended"),
        "{stopped:?}"
    );
}

#[test]
fn a_sidecar_that_is_told_to_stop_serves_its_jobs_to_their_end() {
    let folder = Folder::new("sidecar-drains");
    let notified = UnixDatagram::bind(folder.path("notify")).unwrap();
    notified.set_read_timeout(Some(PATIENCE)).unwrap();
    let next_state = || {
        let mut state = [0; 64];
        let len = notified.recv(&mut state).unwrap();
        String::from_utf8_lossy(&state[..len]).into_owned()
    };
    let mut command = Command::new(RACKSUM);
    command.env("NOTIFY_SOCKET", folder.path("notify"));
    let sidecar = Sidecar::spawn(&folder, "socket", &[], &mut command);
    assert_eq!(next_state(), "READY=1");
    let [rank] = sidecar.ranks();
    signal(sidecar.process.id(), "TERM");
    assert_eq!(next_state(), "STOPPING=1");
    await_that("the sidecar drains", || sidecar.status_json()["draining"] == true);
    let handle = rank.submit(vec![0u8; 4], one()).unwrap();
    handle.wait().unwrap();
    rank.close();
    let ended = sidecar.process.end(10).ok();
    assert!(
        ended.out.contains("is draining: waiting for 1 job to end; another signal stops it"),
        "{ended:?}"
    );
    assert!(!std::fs::exists(&sidecar.socket).unwrap());
}

#[test]
fn a_sidecar_of_another_user_is_called_in_the_folder_that_root_gave_it() {
    let (sidecar_user, rank_user) = (1234, 1235);
    if Command::new(RACKSUM).arg("--version").uid(sidecar_user).output().is_err() {
        return racksum_test_report::skip(
            "this test needs root, and a racksum binary that all users may run",
        );
    }
    let folder = Folder::new("sidecar-users");
    let at = folder.path("pod");
    std::fs::create_dir(&at).unwrap();
    // The folder has the mode of a pod's `emptyDir`.
    set_permissions(&at, Permissions::from_mode(0o777)).unwrap();
    let mut command = Command::new(RACKSUM);
    command.uid(sidecar_user);
    let sidecar = Sidecar::spawn(&folder, "pod/socket", &["--mode", "666"], &mut command);
    let refused = sidecar.status_as(rank_user);
    let why = refused.failed(3);
    let what_to_do = format!(
        "a process of user 1234 listens there, and other users may create sockets in {at}; run the \
         listening process as the user of this process or as root, or put the socket in a folder \
         that only the listening user may write to",
    );
    assert!(why.contains(&what_to_do), "{why}");
    chown(&at, Some(sidecar_user), None).unwrap();
    set_permissions(&at, Permissions::from_mode(0o755)).unwrap();
    sidecar.status_as(rank_user).ok();
    // The sidecar sums memory of another user's ranks: these ranks run as root.
    let ranks: [_; 2] = sidecar.ranks();
    let handles =
        ranks.each_ref().map(|rank| rank.submit(1f32.to_le_bytes().to_vec(), one()).unwrap());
    for handle in handles {
        assert_eq!(handle.wait().unwrap().tensor, 2f32.to_le_bytes());
    }
}

#[test]
fn a_second_signal_stops_a_sidecar_and_its_ranks_are_told() {
    let folder = Folder::new("sidecar-stops");
    let sidecar = Sidecar::start(&folder, "socket", &[]);
    let ranks: [_; 2] = sidecar.ranks();
    let handle = ranks[0].submit(vec![0u8; 4], one()).unwrap();
    // A terminal sends SIGINT on Ctrl-C, and SIGQUIT on Ctrl-\.
    signal(sidecar.process.id(), "INT");
    await_that("the sidecar drains", || sidecar.process.out().contains("is draining"));
    signal(sidecar.process.id(), "QUIT");
    let why = handle.wait().unwrap_err().to_string();
    assert!(why.contains("no aggregator is left: the sidecar at"), "{why}");
    assert!(why.contains("it was told to stop"), "{why}");
    sidecar.process.end(10).ok();
}

#[test]
fn what_a_sidecar_cannot_do_is_a_wrong_command_line() {
    let folder = Folder::new("sidecar-usage");
    let socket = folder.path("socket");
    let ended = run(&["worker", "--socket", &socket, "--aggregator", "a:1+b:1"]);
    assert!(ended.failed(2).contains("one aggregator at a time, not a:1+b:1"), "{ended:?}");
    let ended = run(&["worker", "--socket", &socket, "--aggregator", "a:1,"]);
    assert!(ended.failed(2).contains("in the list is empty"), "{ended:?}");
    assert!(run(&["worker"]).failed(2).contains("pass --socket PATH"));
    for (flags, why) in [
        (&["--threads", "0"][..], "must be from 1 to 1024"),
        (&["--threads", "99999"], "must be from 1 to 1024"),
        (&["--max-jobs", "0"], "must be from 1 to 262144"),
        (&["--max-ranks", "18446744073709551615"], "must be from 1 to 262144"),
        (&["--memory", "0"], "0 B is too little memory for ranks to share; give 1M or more"),
        (&["--memory", "1K"], "1024 B is too little memory for ranks to share; give 1M or more"),
        (&["--wait"], "--aggregator <HOSTS>"),
        (&["--insecure"], "--aggregator <HOSTS>"),
        (&["--identity", "node.pem"], "--aggregator <HOSTS>"),
        (&["--data-auth", "mac"], "--aggregator <HOSTS>"),
        (&["--interface", "eth0"], "--aggregator <HOSTS>"),
        (&["--mtu", "1500"], "--aggregator <HOSTS>"),
        (&["--aggregator", "127.0.0.1:1", "--mtu", "100"], "must be from 1280 to 65536"),
    ] {
        let ended = run(&[&["worker", "--socket", &socket], flags].concat());
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.err.contains(why) && !ended.err.contains("panicked"), "{ended:?}");
    }
    std::fs::write(&socket, "precious").unwrap();
    let ended = run(&["worker", "--socket", &socket]);
    assert!(ended.failed(2).contains("a file that is not a socket exists there"), "{ended:?}");
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
}

/// Starts a sidecar on a socket that the test opened and keeps open, as systemd would.
fn activate(socket: &Listener, flags: &str) -> Child {
    let start = format!(
        "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec {RACKSUM} worker {flags}"
    );
    let socket = socket.as_fd().try_clone_to_owned().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &start]).stdin(socket).stdout(Stdio::null()).stderr(Stdio::piped());
    shell.spawn().unwrap()
}

#[test]
fn a_socket_of_systemd_serves_one_life_after_the_other_and_is_as_its_unit_says() {
    let folder = Folder::new("sidecar-activated");
    let socket = folder.path("socket");
    let listener = Listener::bind(Path::new(&socket), 0o600).unwrap();
    for _ in 0..2 {
        let mut life = activate(&listener, "");
        let at = format!("unix:{socket}");
        drop(Client::connect(&ConnectOptions::new(at, "job")).unwrap());
        signal(life.id(), "TERM");
        assert!(life.wait().unwrap().success());
    }
    let refused = activate(&listener, "--mode 660").wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("SocketMode="));
}

#[test]
fn aggregators_that_are_killed_cost_a_job_of_two_hosts_no_bit() {
    let folder = Folder::new("sidecar-standby");
    let ports = [own_port(), own_port()];
    let serve = |port: u16| {
        let port = port.to_string();
        Serving::of(Process::start(&["aggregator", "--port", &port, "--pool-mib", "64"]))
    };
    let mut serving = ports.map(serve);
    let both = format!("{},{}", serving[0].addr, serving[1].addr);
    let hosts = ["one", "two"].map(|name| Sidecar::start(&folder, name, &["--aggregator", &both]));
    let ended: [AtomicU64; 4] = Default::default();
    let stop = AtomicU64::new(0);
    let least = || ended.iter().map(|ops| ops.load(SeqCst)).min().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (client, ended, stop) =
                (hosts[usize::from(rank / 2)].rank(rank, (2, 4)), &ended, &stop);
            scope.spawn(move || {
                sum_until(&client.join().unwrap(), rank, &ended[usize::from(rank)], stop);
            });
        }
        for kill in 0..6 {
            let before = least();
            await_that("ops complete", || least() > before);
            std::thread::sleep(Duration::from_millis(kill * 37 % 100));
            let at = usize::try_from(kill % 2).unwrap();
            signal(serving[at].process.id(), "KILL");
            let before = least();
            await_that("ops complete at the other aggregator", || least() > before + 1);
            serving[at] = serve(ports[at]);
        }
        stop.store(1, SeqCst);
    });
}

/// Sums the same tensor until `stop` is set, and checks that the bits of the sum stay the same.
fn sum_until(client: &Client, rank: u16, ended: &AtomicU64, stop: &AtomicU64) {
    const ELEMENTS: u64 = 1 << 20;
    let value = |i: u64| (i % 1013) as f32 * 1.7f32.powi(i32::from(rank)) + 0.1;
    let input: Vec<u8> = (0..ELEMENTS).flat_map(|i| value(i).to_le_bytes()).collect();
    let mut expected = Vec::new();
    loop {
        let handle = client.submit(input.clone(), Descriptor::sum(ELEMENTS, DType::F32)).unwrap();
        let sum = handle.wait().unwrap_or_else(|error| panic!("rank {rank}: {error}")).tensor;
        if expected.is_empty() {
            expected.clone_from(&sum);
        }
        assert!(sum == expected, "rank {rank}: the bits of the sum have changed");
        ended.fetch_add(1, SeqCst);
        // This op distributes `stop`, so that all ranks end after the same op.
        let flag = stop.load(SeqCst).to_le_bytes().to_vec();
        let handle = client.submit(flag, Descriptor::sum(1, DType::I64)).unwrap();
        if handle.wait().unwrap().tensor != [0; 8] {
            return;
        }
    }
}
