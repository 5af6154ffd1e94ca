//! The signals that end a process which has something to put in order first. An aggregator has its
//! own: SIGHUP has it reload.

use std::io;

use racksum_net::with_limit;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Why signals cannot be waited for.
pub(crate) fn cannot_wait(error: &io::Error) -> String {
    format!("cannot wait for signals: {}", with_limit(error))
}

/// The signals that end this process, none of which is missed once it listens.
pub(crate) struct Ending {
    interrupt: Signal,
    terminate: Signal,
    quit: Signal,
    /// Not listened to under nohup(1), which has it ignored.
    hangup: Option<Signal>,
}

impl Ending {
    /// Listens.
    ///
    /// # Errors
    /// Why signals cannot be waited for.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub(crate) fn listen() -> io::Result<Self> {
        let hangup = SignalKind::hangup();
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: if is_ignored(hangup) { None } else { Some(signal(hangup)?) },
        })
    }

    /// Waits for the next one. Returns the exit code of a process that it ends, as a shell counts:
    /// 128 and the signal's number.
    pub(crate) async fn next(&mut self) -> i32 {
        let Self { interrupt, terminate, quit, hangup } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let kind = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = quit.recv() => SignalKind::quit(),
            _ = hung_up => SignalKind::hangup(),
        };
        128 + kind.as_raw_value()
    }
}

/// Whether this process was started with a signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}
