//! Ctrl-C handling. A signal is only noted, so that a wait ends with an error and cleanup runs.

use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::shell::terminate;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Registers handlers that note SIGINT, SIGTERM and SIGHUP.
///
/// # Errors
/// Returns an error if a handler cannot be registered.
pub fn listen() -> Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, Arc::clone(interrupted)).context("cannot listen for signals")?;
    }
    Ok(())
}

/// Checks that no signal has arrived yet.
///
/// # Errors
/// Returns an error if a signal has arrived.
pub fn check() -> Result<()> {
    if is_noted() {
        bail!("interrupted");
    }
    Ok(())
}

/// Returns whether a signal has arrived.
#[must_use]
pub fn is_noted() -> bool {
    INTERRUPTED.get().is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
}

/// Waits for a process, and asks it to end once a signal has arrived.
///
/// # Errors
/// Returns an error if the operating system does not report the process's status.
pub fn wait(child: &mut Child) -> Result<ExitStatus> {
    let mut is_asked = false;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a process")? {
            return Ok(status);
        }
        if is_noted() && !is_asked {
            terminate(child);
            is_asked = true;
        }
        sleep(POLL);
    }
}

/// Interval at which a wait checks for the process and for signals.
const POLL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_wait_ends_with_the_process_and_a_signal_ends_the_process() {
        let mut child = Command::new("sh").args(["-c", "exit 3"]).spawn().unwrap();
        assert_eq!(wait(&mut child).unwrap().code(), Some(3));
        listen().unwrap();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let own = std::process::id().to_string();
        assert!(Command::new("kill").args(["-TERM", &own]).status().unwrap().success());
        assert_eq!(wait(&mut child).unwrap().signal(), Some(SIGTERM));
        check().unwrap_err();
    }
}
