//! Blocking work that may hang, run on threads of its own.
//!
//! A hung network file system or a silent name server blocks the thread that uses it, and nothing
//! can interrupt that thread. A thread that others depend on therefore hands such work to [`Aside`]
//! and waits for the result for a limited time.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::thread::Builder;
use std::time::Duration;

use tokio::sync::oneshot;

/// Failure of work that was given to [`Aside`].
#[derive(Debug, thiserror::Error)]
pub enum AsideError {
    /// The work exceeded its time limit. Its thread continues, and its result is dropped.
    #[error(
        "{what} takes longer than {} s; check whether a file system or a name server hangs",
        limit.as_secs()
    )]
    Late {
        /// The kind of work, such as `reading the identity`.
        what: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// Too many pieces of work are still running.
    #[error(
        "{what} is blocked by earlier attempts that still hang; check whether a file system or a \
         name server hangs"
    )]
    Busy {
        /// The kind of work, such as `reading the identity`.
        what: &'static str,
    },
    /// No thread could be started, or the work panicked.
    #[error("{what} failed: {why}")]
    Failed {
        /// The kind of work, such as `reading the identity`.
        what: &'static str,
        /// The reason: the system's error or a panic.
        why: String,
    },
}

/// Runner for one kind of blocking work. By default it runs at most [`Aside::MOST`] pieces at a
/// time.
#[derive(Debug)]
pub struct Aside {
    what: &'static str,
    under_way: Arc<AtomicUsize>,
    most: usize,
}

impl Aside {
    /// Default limit on the pieces of work that run at the same time. It bounds the number of
    /// threads that hanging work occupies.
    pub const MOST: usize = 16;

    /// Creates a runner. Its error messages begin with `what`, such as `reading the identity`.
    #[must_use]
    pub fn new(what: &'static str) -> Self {
        Self::one_of(what, Self::MOST)
    }

    /// Creates a runner like [`Aside::new`], but with a limit of `most` pieces of work at a time.
    #[must_use]
    pub fn one_of(what: &'static str, most: usize) -> Self {
        Self { what, under_way: Arc::default(), most }
    }

    /// Runs work on its own thread and waits for it up to `limit`, without blocking the runtime.
    ///
    /// # Errors
    ///
    /// [`AsideError`] if the work is late, cannot start or panics.
    ///
    /// # Panics
    ///
    /// If called outside of a tokio runtime.
    pub async fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AsideError> {
        let (sender, receiver) = oneshot::channel();
        self.spawn(move || drop(sender.send(work())))?;
        match tokio::time::timeout(limit, receiver).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) => Err(self.failed("its thread panicked".into())),
            Err(_) => Err(AsideError::Late { what: self.what, limit }),
        }
    }

    /// Runs work on its own thread and blocks this thread for at most `limit`.
    ///
    /// # Errors
    ///
    /// [`AsideError`] if the work is late, cannot start or panics.
    pub fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AsideError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.spawn(move || drop(sender.send(work())))?;
        receiver.recv_timeout(limit).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => AsideError::Late { what: self.what, limit },
            mpsc::RecvTimeoutError::Disconnected => self.failed("its thread panicked".into()),
        })
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) -> Result<(), AsideError> {
        let take = |count: usize| (count < self.most).then_some(count + 1);
        if self.under_way.fetch_update(Relaxed, Relaxed, take).is_err() {
            return Err(AsideError::Busy { what: self.what });
        }
        let place = Permit(Arc::clone(&self.under_way));
        let done = move || {
            let _place = place;
            work();
        };
        let spawned = Builder::new().name("aside".into()).spawn(done);
        spawned.map(drop).map_err(|error| {
            self.failed(format!(
                "cannot start a thread: {error}; raise the limit on threads (ulimit -u)"
            ))
        })
    }

    fn failed(&self, why: String) -> AsideError {
        AsideError::Failed { what: self.what, why }
    }
}

/// One unit of the limit, which a piece of work holds until it ends.
struct Permit(Arc<AtomicUsize>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn what_hangs_is_not_waited_for_and_takes_no_more_threads_than_may_be() {
        let aside = Aside::one_of("reading a file", 2);
        let (release, hang) = channel::<()>();
        let hang = Arc::new(std::sync::Mutex::new(hang));
        let hangs = || {
            let hang = Arc::clone(&hang);
            move || hang.lock().unwrap().recv().is_ok()
        };
        let late = aside.run(SHORT, hangs()).await.unwrap_err().to_string();
        assert!(late.starts_with("reading a file takes longer than 0 s; "), "{late}");
        let late = aside.wait(SHORT, hangs()).unwrap_err();
        assert!(matches!(late, AsideError::Late { .. }), "{late}");
        for _ in 0..100 {
            let busy = aside.run(LONG, || ()).await.unwrap_err();
            assert!(matches!(busy, AsideError::Busy { .. }), "{busy}");
        }
        // Once earlier work no longer hangs, new work runs again.
        drop(release);
        loop {
            match aside.wait(LONG, || 7) {
                Ok(done) => break assert_eq!(done, 7),
                Err(AsideError::Busy { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error() {
        let aside = Aside::new("reading a file");
        let failed = aside.run(LONG, || panic!("as it should")).await.unwrap_err();
        assert!(matches!(&failed, AsideError::Failed { why, .. } if why == "its thread panicked"));
        assert_eq!(aside.run(LONG, || 7).await.unwrap(), 7);
    }
}
