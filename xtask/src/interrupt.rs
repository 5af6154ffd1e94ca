//! Ctrl-C handling. A signal is only noted, so that a wait ends with an error and cleanup runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Registers handlers that note SIGINT, SIGTERM and SIGHUP.
pub(crate) fn listen() -> Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, Arc::clone(interrupted)).context("cannot listen to signals")?;
    }
    Ok(())
}

/// Returns an error once a signal has arrived.
pub(crate) fn check() -> Result<()> {
    if is_noted() {
        bail!("interrupted");
    }
    Ok(())
}

/// Returns whether a signal has arrived.
pub(crate) fn is_noted() -> bool {
    INTERRUPTED.get().is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
}
