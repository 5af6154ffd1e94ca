//! What the kernel lets this process have, and whom it can tell apart.

#![expect(unsafe_code, reason = "limits are read and written by pointers")]

use std::io;

/// Lets this process open as many files as its user may have it open.
///
/// # Errors
/// The kernel's.
pub fn raise_open_files() -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one limit to `limit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one limit from `limit`.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ignores SIGXFSZ, so that a write beyond the file size limit returns an error.
pub fn fail_at_file_limit() {
    // SAFETY: it installs no handler, and the signal can be ignored.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Returns the user of this process, as other processes see it.
#[must_use]
pub fn own_user() -> u32 {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether a user is one, as far as can be told: in a user namespace all users that have no number
/// there look like the one of the overflow.
#[must_use]
pub fn is_known_user(uid: u32) -> bool {
    let read = |name| std::fs::read_to_string(name).unwrap_or_default();
    let overflow = read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(OVERFLOW);
    uid != overflow || maps(&read("/proc/self/uid_map"), uid)
}

/// Whether a namespace has a number, by what the kernel says of it: ranges of a first number, one
/// outside and how many.
fn maps(ranges: &str, uid: u32) -> bool {
    ranges.lines().any(|range| {
        let mut numbers = range.split_whitespace().map_while(|number| number.parse::<u32>().ok());
        let (first, count) = (numbers.next(), numbers.nth(1));
        first.zip(count).is_some_and(|(first, count)| uid >= first && uid - first < count)
    })
}

/// The number of users that have none, unless the kernel says otherwise.
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
