//! Lines and shared memory, between two ends in this process.

#![expect(unsafe_code, reason = "shared memory is read and written")]

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use super::*;

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("racksum-{name}-{}", std::process::id()))
}

#[test]
fn messages_arrive_whole_and_with_their_descriptors() {
    let path = path("line");
    let listener = Listener::bind(&path, 0o600).unwrap();
    let caller = Line::connect(&path).unwrap();
    let answerer = listener.accept().unwrap();
    let memory = SharedMemory::new(5000).unwrap();
    caller.send(&"first", None).unwrap();
    caller.send(&"second", Some(memory.as_fd())).unwrap();
    let (text, none) = answerer.recv::<String>().unwrap().unwrap();
    assert_eq!((text.as_str(), none.is_none()), ("first", true));
    let (text, descriptor) = answerer.recv::<String>().unwrap().unwrap();
    assert_eq!(text, "second");
    let same = SharedMemory::of(descriptor.unwrap()).unwrap();
    assert_eq!(same.len(), 5000);
    // SAFETY: nobody else looks.
    unsafe { memory.bytes_mut(10..12).copy_from_slice(b"hi") };
    // SAFETY: nobody writes any more.
    assert_eq!(unsafe { same.bytes(9..13) }, b"\0hi\0");
    // SAFETY: it takes nothing and cannot fail.
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
    // A process that is killed leaves the name behind.
    let left = path.with_extension("left");
    std::fs::rename(&path, &left).unwrap();
    drop(first);
    std::fs::rename(&left, &path).unwrap();
    drop(Listener::bind(&path, 0o600).unwrap());
    assert!(!path.exists());
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let file = path("file");
    let plain = OwnedFd::from(File::create(&file).unwrap());
    std::fs::remove_file(&file).unwrap();
    assert_eq!(SharedMemory::of(plain).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(SharedMemory::new(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    let memory = SharedMemory::new(1).unwrap();
    assert!(rustix::fs::ftruncate(memory.as_fd(), 0).is_err());
}
