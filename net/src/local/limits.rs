//! Limits that the kernel sets for this process, and checks of user ids.

#![expect(unsafe_code, reason = "limits are read and written through pointers")]

use std::io;

/// Raises the limit on open files to the hard limit of this process.
///
/// # Errors
/// Returns the kernel's error.
pub fn raise_open_files() -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the write of one limit.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is valid for the read of one limit.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ignores SIGXFSZ, so that a write beyond the file size limit returns an error.
pub fn fail_at_file_limit() {
    // SAFETY: the call installs no handler, and the signal can be ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Returns the effective user id of this process, which is the id that other processes see.
#[must_use]
pub fn own_user() -> u32 {
    // SAFETY: `geteuid` takes no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

/// Returns whether an id identifies one user. In a user namespace, all users without an id of their
/// own share the overflow id.
#[must_use]
pub fn is_known_user(uid: u32) -> bool {
    let read = |name| std::fs::read_to_string(name).unwrap_or_default();
    let overflow = read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(OVERFLOW);
    uid != overflow || maps(&read("/proc/self/uid_map"), uid)
}

/// Returns whether a user namespace maps an id. Each line of `ranges` holds a first id, the id that
/// it maps to outside, and a count.
fn maps(ranges: &str, uid: u32) -> bool {
    ranges.lines().any(|range| {
        let mut numbers = range.split_whitespace().map_while(|number| number.parse::<u32>().ok());
        let (first, count) = (numbers.next(), numbers.nth(1));
        first.zip(count).is_some_and(|(first, count)| uid >= first && uid - first < count)
    })
}

/// Default overflow id, for a kernel that reports none.
const OVERFLOW: u32 = 65534;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_a_number_of_its_own_is_none() {
        assert!(is_known_user(0) && is_known_user(1000));
        assert!(maps("         0          0 4294967295\n", OVERFLOW));
        assert!(!maps("0 1000 1\n1 100000 65533\n", OVERFLOW));
        assert!(!maps("", OVERFLOW));
    }
}
