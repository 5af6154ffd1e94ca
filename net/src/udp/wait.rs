//! Waiting for sockets, and waking a waiting thread.
//!
//! The waits call `ppoll` and not `poll`, because `poll` counts in milliseconds and racksum's
//! retransmission timers are much shorter.
#![expect(unsafe_code, reason = "ppoll and eventfd are not in std")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use libc::{c_short, nfds_t, pollfd, time_t, timespec};
use racksum_proto::time::Span;

/// Waits until one of up to 64 `fds` is readable or `timeout` passes; `None` waits forever. Returns
/// a mask in which bit i is set if `fds[i]` is ready; the mask is 0 after the timeout or a signal.
///
/// # Errors
///
/// Returns the kernel's error, and `InvalidInput` for more than 64 descriptors.
pub fn wait(fds: &[BorrowedFd<'_>], timeout: Option<Span>) -> io::Result<u64> {
    poll(fds.iter().map(|fd| entry(*fd, libc::POLLIN)), timeout)
}

/// Waits until `fd` is writable; returns false after the timeout or a signal.
///
/// # Errors
///
/// Returns the kernel's error.
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Option<Span>) -> io::Result<bool> {
    Ok(poll(std::iter::once(entry(fd, libc::POLLOUT)), timeout)? != 0)
}

/// Handle that ends another thread's [`wait`]. That thread must include the waker in its
/// descriptors, and drain the waker once it is ready.
///
/// Clones wake the same thread. A wake-up that precedes the wait ends it as well, and several
/// wake-ups count as one.
#[derive(Debug, Clone)]
pub struct Waker {
    event: Arc<File>,
}

impl Waker {
    /// Creates a waker that is not ready.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error if too many files are open.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` is open, and no other code owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { event: Arc::new(File::from(fd)) })
    }

    /// Makes the waker ready.
    pub fn wake(&self) {
        let written = (&*self.event).write(&1u64.to_ne_bytes());
        // The write fails only if the counter is full, and then the waker is ready anyway.
        debug_assert!(written.map_or_else(|e| e.kind() == io::ErrorKind::WouldBlock, |n| n == 8));
    }

    /// Makes the waker unready; returns whether it was ready.
    pub fn drain(&self) -> bool {
        // One read resets the whole counter.
        (&*self.event).read(&mut [0; 8]).is_ok()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

fn entry(fd: BorrowedFd<'_>, events: c_short) -> pollfd {
    pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

fn poll(entries: impl Iterator<Item = pollfd>, timeout: Option<Span>) -> io::Result<u64> {
    let mut fds = [pollfd { fd: -1, events: 0, revents: 0 }; MAX_FDS];
    let mut count: nfds_t = 0;
    let mut places = fds.iter_mut();
    for entry in entries {
        *places.next().ok_or(io::ErrorKind::InvalidInput)? = entry;
        count += 1;
    }
    let limit = timeout.map(to_timespec);
    let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `count` entries of `fds` are initialized, `limit` is null or a timespec of this
    // frame, and a null mask keeps the signal mask unchanged.
    let rc = unsafe { libc::ppoll(fds.as_mut_ptr(), count, limit, ptr::null()) };
    if rc < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(0) } else { Err(error) };
    }
    let ready = fds.iter().enumerate().filter(|(_, entry)| is_ready(entry.revents));
    Ok(ready.fold(0, |mask, (index, _)| mask | 1 << index))
}

/// Returns whether a descriptor is ready. Errors count as ready, because the next call on the
/// descriptor reports and clears them.
const fn is_ready(revents: c_short) -> bool {
    revents & (libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
}

fn to_timespec(span: Span) -> timespec {
    const SECOND: u64 = 1_000_000_000;
    timespec {
        tv_sec: time_t::try_from(span.0 / SECOND).unwrap_or(time_t::MAX),
        tv_nsec: i32::try_from(span.0 % SECOND).unwrap_or(0).into(),
    }
}

/// Limit on the descriptors of one wait: the result has one bit for each.
pub const MAX_FDS: usize = 64;
