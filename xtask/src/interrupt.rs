//! Ctrl-C: noted, so that a wait ends with an error and everything that was set up is taken down.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Notes the signals that ask this process to end, from now on.
pub(crate) fn listen() -> Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register(signal, Arc::clone(interrupted)).context("cannot listen to signals")?;
    }
    Ok(())
}

/// Fails once a signal has come.
pub(crate) fn check() -> Result<()> {
    if is_noted() {
        bail!("interrupted");
    }
    Ok(())
}

/// Whether a signal has come.
pub(crate) fn is_noted() -> bool {
    INTERRUPTED.get().is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
}
