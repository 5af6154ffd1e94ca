//! Work that may block for good, done beside the thread that asks for it.
//!
//! A file on a network file system that hangs, or a name server that does not answer, blocks the
//! thread that reads or asks, and nothing can interrupt that thread. So a thread that others wait
//! for gives such work to a thread of its own, and goes on without it after a while.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::thread::Builder;
use std::time::Duration;

use tokio::sync::oneshot;

/// Why work that was given aside came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum AsideError {
    /// It is not done in time. Its thread goes on, and what it comes to is dropped.
    #[error(
        "{what} takes longer than {} s; a file system or a name server may hang", limit.as_secs()
    )]
    Late {
        /// What the work is.
        what: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// As much work as may be is under way and does not end.
    #[error(
        "{what} has to wait, since earlier tries hang; a file system or a name server may hang"
    )]
    Busy {
        /// What the work is.
        what: &'static str,
    },
    /// No thread could be had, or the work panicked.
    #[error("{what} cannot be done: {why}")]
    Failed {
        /// What the work is.
        what: &'static str,
        /// What the system said.
        why: String,
    },
}

/// Where work of one kind is given aside, at most [`Aside::MOST`] pieces of it at a time.
#[derive(Debug)]
pub struct Aside {
    what: &'static str,
    under_way: Arc<AtomicUsize>,
    most: usize,
}

impl Aside {
    /// How much work may be under way: what hangs must not take threads without end.
    pub const MOST: usize = 16;

    /// A place for work that errors call so: `reading the identity`, say.
    #[must_use]
    pub fn new(what: &'static str) -> Self {
        Self::one_of(what, Self::MOST)
    }

    /// Likewise, for at most so many pieces of work at a time.
    #[must_use]
    pub fn one_of(what: &'static str, most: usize) -> Self {
        Self { what, under_way: Arc::default(), most }
    }

    /// Does some work, and waits so long for it without blocking the runtime.
    ///
    /// # Errors
    ///
    /// [`AsideError`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AsideError> {
        let (tell, told) = oneshot::channel();
        self.spawn(move || drop(tell.send(work())))?;
        match tokio::time::timeout(limit, told).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) => Err(self.failed("it panicked".into())),
            Err(_) => Err(AsideError::Late { what: self.what, limit }),
        }
    }

    /// Does some work, and blocks this thread no longer than so long.
    ///
    /// # Errors
    ///
    /// [`AsideError`].
    pub fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AsideError> {
        let (tell, told) = mpsc::sync_channel(1);
        self.spawn(move || drop(tell.send(work())))?;
        told.recv_timeout(limit).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => AsideError::Late { what: self.what, limit },
            mpsc::RecvTimeoutError::Disconnected => self.failed("it panicked".into()),
        })
    }

    fn spawn(&self, work: impl FnOnce() + Send + 'static) -> Result<(), AsideError> {
        let take = |count: usize| (count < self.most).then_some(count + 1);
        if self.under_way.fetch_update(Relaxed, Relaxed, take).is_err() {
            return Err(AsideError::Busy { what: self.what });
        }
        let place = Place(Arc::clone(&self.under_way));
        let done = move || {
            let _place = place;
            work();
        };
        let spawned = Builder::new().name("aside".into()).spawn(done);
        spawned.map(drop).map_err(|error| {
            self.failed(format!("no thread: {error}; raise the limit on threads (ulimit -u)"))
        })
    }

    fn failed(&self, why: String) -> AsideError {
        AsideError::Failed { what: self.what, why }
    }
}

/// A piece of work among those that are under way, until it is dropped.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
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
        // Once it hangs no more, others have their turn.
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
        assert_eq!(failed.to_string(), "reading a file cannot be done: it panicked");
        assert_eq!(aside.run(LONG, || 7).await.unwrap(), 7);
    }
}
