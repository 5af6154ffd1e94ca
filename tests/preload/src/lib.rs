//! A host that is not as it should be, for processes that load this library before the C library
//! (`LD_PRELOAD`): its wall clock is set while they run, and its receive buffers are small.
//!
//! What the environment does not name is as the kernel has it. Nothing here is for other code to
//! call: the functions stand in for those of the C library, by name.
#![expect(unsafe_code, reason = "they are called by the C library's names and conventions")]

use std::env;
use std::fs;

use libc::{c_int, c_void, clockid_t, socklen_t, timespec};

/// Names a file of the seconds that the wall clock is off by; it may change at any time.
const WALL_CLOCK: &str = "RACKSUM_PRELOAD_WALL_CLOCK";

/// The most bytes of a receive buffer, as `net.core.rmem_max` is for users other than root.
const RMEM_MAX: &str = "RACKSUM_PRELOAD_RMEM_MAX";

/// # Safety
/// As of clock_gettime(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let rc = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if rc == 0 && clock == libc::CLOCK_REALTIME {
        // SAFETY: the kernel has just written to it.
        unsafe { (*time).tv_sec += wall_clock() };
    }
    if rc == 0 { 0 } else { -1 }
}

/// # Safety
/// As of setsockopt(2).
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
            // SAFETY: this thread's own errno.
            unsafe { *libc::__errno_location() = libc::EPERM };
            -1
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF, Some(limit)) => {
            // SAFETY: the option is an int, which the caller says is there.
            let cut = limit.min(unsafe { value.cast::<c_int>().read_unaligned() });
            // SAFETY: the caller's arguments, but for an int of ours.
            unsafe {
                libc::syscall(libc::SYS_setsockopt, socket, level, option, &raw const cut, len)
            }
        }
        // SAFETY: the caller's arguments, as they are.
        _ => unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, option, value, len) },
    };
    if rc == 0 { 0 } else { -1 }
}

/// Seconds; as the kernel has it while there is no such file, or while it is being written.
fn wall_clock() -> i64 {
    let read = env::var_os(WALL_CLOCK).and_then(|file| fs::read_to_string(file).ok());
    read.and_then(|seconds| seconds.trim().parse().ok()).unwrap_or(0)
}

fn rmem_max() -> Option<c_int> {
    env::var(RMEM_MAX).ok()?.parse().ok()
}
