//! Signals that end this process once it has cleaned up. An aggregator handles signals itself,
//! because SIGHUP makes it reload.

use std::io;

use racksum_net::with_limit;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Formats an error from waiting for signals.
pub(crate) fn cannot_wait(error: &io::Error) -> String {
    format!("cannot wait for signals: {}", with_limit(error))
}

/// A listener for the signals that end this process. It misses no signal after [`Ending::listen`].
pub(crate) struct Ending {
    interrupt: Signal,
    terminate: Signal,
    quit: Signal,
    /// `None` if SIGHUP was ignored at the start of this process, as under nohup(1).
    hangup: Option<Signal>,
}

impl Ending {
    /// Starts listening for the signals.
    ///
    /// # Errors
    /// The error from registering a signal handler.
    ///
    /// # Panics
    /// If called outside of a tokio runtime.
    pub(crate) fn listen() -> io::Result<Self> {
        let hangup = SignalKind::hangup();
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: if is_ignored(hangup) { None } else { Some(signal(hangup)?) },
        })
    }

    /// Waits for the next signal. Returns the exit code that a shell reports for it: 128 plus the
    /// signal's number.
    pub(crate) async fn next(&mut self) -> i32 {
        let Self { interrupt, terminate, quit, hangup } = self;
        let next_hangup = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let kind = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = quit.recv() => SignalKind::quit(),
            _ = next_hangup => SignalKind::hangup(),
        };
        128 + kind.as_raw_value()
    }
}

/// Returns whether a signal was ignored when this process started.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}
