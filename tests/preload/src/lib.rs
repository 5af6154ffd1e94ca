//! A faulty host for processes that load this library before the C library (`LD_PRELOAD`): a test
//! can set their wall clock while they run, and limit their receive buffers.
//!
//! A fault is active only if its environment variable is set. The functions replace those of the C
//! library by name; other code must not call them.
#![expect(
    unsafe_code,
    reason = "the functions replace C functions, so they use C names and pointers"
)]

use std::env;
use std::fs;

use libc::{c_int, c_void, clockid_t, socklen_t, timespec};

/// Environment variable with the path of a file that holds the wall clock's offset in seconds. The
/// file may change at any time.
const WALL_CLOCK: &str = "RACKSUM_PRELOAD_WALL_CLOCK";

/// Environment variable with the limit of a receive buffer in bytes, like `net.core.rmem_max` for
/// users other than root.
const RMEM_MAX: &str = "RACKSUM_PRELOAD_RMEM_MAX";

/// Replaces `clock_gettime` and adds the offset to the wall clock.
///
/// # Safety
/// The arguments must be valid for `clock_gettime(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: the caller guarantees that the arguments are valid for this system call.
    let rc = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if rc == 0 && clock == libc::CLOCK_REALTIME {
        // SAFETY: the system call succeeded, so `time` is valid and the kernel has written to it.
        unsafe { (*time).tv_sec += wall_clock() };
    }
    if rc == 0 { 0 } else { -1 }
}

/// Replaces `setsockopt` and limits receive buffers.
///
/// # Safety
/// The arguments must be valid for `setsockopt(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let rc = match (level, option, rmem_max()) {
        (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, Some(_)) => {
            // SAFETY: `__errno_location` returns a valid pointer to this thread's own errno.
            unsafe { *libc::__errno_location() = libc::EPERM };
            -1
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF, Some(limit)) => {
            // SAFETY: the caller guarantees that `value` points to the option's value, an int.
            let cut = limit.min(unsafe { value.cast::<c_int>().read_unaligned() });
            // SAFETY: the caller guarantees that the other arguments are valid, and `cut`, an int,
            // outlives the system call.
            unsafe {
                libc::syscall(libc::SYS_setsockopt, socket, level, option, &raw const cut, len)
            }
        }
        // SAFETY: the caller guarantees that the arguments are valid for this system call.
        _ => unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, option, value, len) },
    };
    if rc == 0 { 0 } else { -1 }
}

/// Returns the wall clock's offset in seconds, or 0 if none is set or the file is being written.
fn wall_clock() -> i64 {
    let read = env::var_os(WALL_CLOCK).and_then(|file| fs::read_to_string(file).ok());
    read.and_then(|seconds| seconds.trim().parse().ok()).unwrap_or(0)
}

fn rmem_max() -> Option<c_int> {
    env::var(RMEM_MAX).ok()?.parse().ok()
}
