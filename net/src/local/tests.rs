//! Tests of lines and shared memory between two ends in this process.

#![expect(unsafe_code, reason = "shared memory is read and written")]

use std::fs::{File, Permissions};
use std::io::ErrorKind::{self, InvalidInput};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use racksum_test_report::skip;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("racksum-{name}-{}", std::process::id()))
}

#[test]
fn messages_arrive_whole_and_with_their_descriptors() {
    let path = path("line");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let caller = Line::connect(&path).unwrap();
    let answerer = listener.accept().unwrap().unwrap();
    let (memory, own) = SharedMemory::new(5000).unwrap();
    caller.send(&"first", None).unwrap();
    caller.send(&"second", Some(own.as_fd())).unwrap();
    let (text, none) = answerer.recv::<String>().unwrap().unwrap();
    assert_eq!((text.as_str(), none.is_none()), ("first", true));
    let (text, descriptor) = answerer.recv::<String>().unwrap().unwrap();
    assert_eq!(text, "second");
    let descriptor = descriptor.unwrap();
    let same = SharedMemory::of(&descriptor).unwrap();
    // Each side keeps its mapping after its descriptor is closed.
    drop((descriptor, own));
    assert_eq!(same.len(), 5000);
    // SAFETY: the byte lies within the mapping, and no reference to it exists.
    unsafe { memory.start().add(4999).write_volatile(7) };
    // SAFETY: the byte lies within the other mapping, and no reference to it exists.
    assert_eq!(unsafe { same.start().add(4999).read_volatile() }, 7);
    // SAFETY: `getuid` takes no arguments and cannot fail.
    assert_eq!(answerer.peer().unwrap().uid, unsafe { libc::getuid() });
    caller.hang_up();
    assert!(answerer.recv::<String>().unwrap().is_none());
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn nobody_listens_where_somebody_does_but_where_somebody_was_killed() {
    let path = path("taken");
    let first = Listener::bind(&path, 0o600).unwrap();
    assert_eq!(Listener::bind(&path, 0o600).unwrap_err().kind(), ErrorKind::AddrInUse);
    // A killed process leaves its name behind.
    let left = path.with_extension("left");
    std::fs::rename(&path, &left).unwrap();
    drop(first);
    std::fs::rename(&left, &path).unwrap();
    drop(Listener::bind(&path, 0o600).unwrap());
    assert!(!path.exists());
}

#[test]
fn what_is_no_socket_is_left_as_it_is() {
    let path = path("no-socket");
    std::fs::write(&path, "precious").unwrap();
    let refused = Listener::bind(&path, 0o600).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn who_calls_what_is_no_socket_hears_so_and_not_that_nobody_is_there_yet() {
    let path = path("no-socket");
    assert!(Line::connect(&path).unwrap_err().is_absence());
    std::fs::write(&path, "precious").unwrap();
    for at in [&*path, &*std::env::temp_dir()] {
        for error in [
            Line::connect(at).unwrap_err(),
            call_for_stream(at, Duration::from_secs(1)).unwrap_err(),
        ] {
            assert!(matches!(error, CallError::NoSocket) && !error.is_absence(), "{error:?}");
        }
    }
    std::fs::remove_file(&path).unwrap();
    // A killed process leaves its socket behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    for error in [
        Line::connect(&path).unwrap_err(),
        call_for_stream(&path, Duration::from_secs(1)).unwrap_err(),
    ] {
        assert!(error.is_absence(), "{error:?}");
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_listener_takes_no_name_with_it_but_its_own() {
    let path = path("own");
    let first = Listener::bind(&path, 0o600).unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Listener::bind(&path, 0o600).unwrap();
    drop(first);
    Line::connect(&path).unwrap();
    drop(second);
    assert!(!path.exists());
}

#[test]
fn of_many_that_start_at_once_one_serves() {
    let path = path("at-once");
    for _ in 0..20 {
        // A killed process leaves its name behind.
        let left = path.with_extension("left");
        let killed = Listener::bind(&path, 0o600).unwrap();
        std::fs::rename(&path, &left).unwrap();
        drop(killed);
        std::fs::rename(&left, &path).unwrap();
        let start = || Listener::bind(&path, 0o600).ok();
        let started: Vec<_> = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
            starters.into_iter().filter_map(|starter| starter.join().unwrap()).collect()
        });
        assert_eq!(started.len(), 1);
        Line::connect(&path).unwrap();
    }
}

#[test]
fn a_listener_listens_until_its_name_is_gone() {
    let folder = path("order");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("socket");
    let listener = Listener::bind(&path, 0o600).unwrap();
    // The name stays while the folder is locked.
    let locked = File::open(&folder).unwrap();
    locked.lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(listener));
        let mut calls = 0;
        loop {
            match Line::connect(&path) {
                Ok(_) => {}
                Err(CallError::Io(error)) if error.kind() == ErrorKind::NotFound => break,
                Err(error) => panic!("a successor would take the name for a dead one: {error}"),
            }
            calls += 1;
            if calls == 20 {
                locked.unlock().unwrap();
            }
            // Unanswered calls fill the queue of 128.
            let pause = if calls < 20 { 1 } else { 50 };
            std::thread::sleep(Duration::from_millis(pause));
        }
    });
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn who_is_stopped_with_a_full_queue_is_there_and_is_not_waited_for() {
    let folder = path("full");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("socket");
    let (stopped, name) = listen_for_streams(&path, 0o600).unwrap();
    // A second `listen` resizes the queue, so that only one caller may wait.
    rustix::net::listen(&stopped, 0).unwrap();
    let _waits = call_for_stream(&path, Duration::from_secs(1)).unwrap();
    let error = call_for_stream(&path, Duration::from_millis(10)).unwrap_err();
    assert!(matches!(&error, CallError::Io(why) if why.kind() == ErrorKind::WouldBlock), "{error}");
    assert!(!error.is_absence());
    remove_dead(&folder, [path.clone()]);
    assert!(path.exists());
    assert_eq!(listen_for_streams(&path, 0o600).unwrap_err().kind(), ErrorKind::AddrInUse);
    drop((name, stopped));
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn a_socket_is_not_taken_for_dead_while_others_start() {
    let folder = path("starting");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("socket");
    // A starting process has bound its socket but does not listen yet.
    let starting = File::open(&folder).unwrap();
    starting.lock().unwrap();
    let socket = line::new_socket().unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    remove_dead(&folder, [path.clone()]);
    assert!(path.exists());
    starting.unlock().unwrap();
    remove_dead(&folder, [path.clone()]);
    assert!(!path.exists());
    std::fs::remove_dir(folder).unwrap();
}

#[test]
fn a_socket_that_was_passed_serves_the_next_life_as_well() {
    let path = path("passed");
    let socket = line::new_socket().unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 1).unwrap();
    for life in 0..2 {
        let listener = Listener::of_socket(socket.try_clone().unwrap()).unwrap();
        Line::connect(&path).unwrap().send(&life, None).unwrap();
        let line = listener.accept().unwrap().unwrap();
        assert_eq!(line.recv::<i32>().unwrap().unwrap().0, life);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| listener.accept().unwrap().is_none());
            listener.stop();
            assert!(waits.join().unwrap());
        });
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn memory_of_which_some_could_go_is_refused() {
    let refused = |descriptor: OwnedFd| {
        assert_eq!(SharedMemory::of(&descriptor).unwrap_err().kind(), InvalidInput);
    };
    let file = path("file");
    refused(File::create(&file).unwrap().into());
    std::fs::remove_file(&file).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    refused(memfd_create("open", flags).unwrap());
    // Skip this check if the kernel has no huge pages.
    if let Ok(huge) = memfd_create("huge", flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) {
        fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        refused(huge);
    }
    assert_eq!(SharedMemory::new(0).unwrap_err().kind(), InvalidInput);
    let (_memory, descriptor) = SharedMemory::new(1).unwrap();
    assert!(rustix::fs::ftruncate(&descriptor, 0).is_err());
}

#[test]
fn what_is_sealed_is_read_by_others_and_written_by_nobody() {
    let sealed = Sealed::new().unwrap();
    sealed.write_at(b"later", 5).unwrap();
    sealed.write_at(b"first", 0).unwrap();
    sealed.seal().unwrap();
    let other = Sealed::of(sealed.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = [0; 10];
    other.read_at(&mut bytes, 0).unwrap();
    assert_eq!((&bytes, other.len().unwrap()), (b"firstlater", 10));
    assert_eq!(other.read_at(&mut bytes, 1).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert!(other.write_at(b"x", 0).is_err() && sealed.write_at(b"x", 10).is_err());
}

#[test]
fn who_says_nothing_is_not_waited_for_for_ever() {
    let path = path("mute");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let _silent = Line::connect(&path).unwrap();
    let answerer = listener.accept().unwrap().unwrap();
    answerer.set_patience(Some(Duration::from_millis(10))).unwrap();
    let error = answerer.recv::<String>().unwrap_err();
    assert!(matches!(error, LineError::Io(error) if error.kind() == ErrorKind::WouldBlock));
}

#[test]
fn what_there_is_no_room_for_is_not_sent_and_the_line_goes_on() {
    let path = path("offers");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let one = Line::connect(&path).unwrap();
    let other = listener.accept().unwrap().unwrap();
    let sent = (0..).take_while(|number: &u32| one.offer(number).unwrap()).count();
    assert!(sent > 0);
    assert!(!one.offer(&0).unwrap());
    for number in 0..sent {
        assert_eq!(other.recv::<usize>().unwrap().unwrap().0, number);
    }
    assert!(one.offer(&7).unwrap());
    assert_eq!(other.recv::<usize>().unwrap().unwrap().0, 7);
    other.hang_up();
    one.offer(&8).unwrap_err();
}

#[test]
fn a_process_of_another_user_is_not_called_where_all_may_put_sockets() {
    if own_user() != 0 {
        return skip("only root can act as two users");
    }
    let folder = path("squatted");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o1777)).unwrap();
    let at = folder.join("socket");
    let listen = || {
        // SAFETY: the arguments are numbers. The C library's function would change the user of all
        // threads; this call affects only the current thread, which is about to end.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 1234, -1) }, 0);
        Listener::bind(&at, 0o777).unwrap()
    };
    let squatter = std::thread::scope(|scope| scope.spawn(listen).join().unwrap());
    let refused = Line::connect(&at).unwrap_err();
    assert!(matches!(refused, CallError::Untrusted(_)), "{refused:?}");
    assert!(refused.to_string().starts_with("a process of user 1234 listens there"), "{refused}");
    // In a folder that root gave to that user, no other user can listen.
    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    Line::connect(&at).unwrap();
    drop(squatter);
    std::fs::remove_dir(folder).unwrap();
}
