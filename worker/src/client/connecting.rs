//! An attempt to connect, which other threads can watch and cancel.

use std::sync::Arc;
use std::thread::Builder;

use tokio::sync::oneshot;

use crate::client::Client;
use crate::control::{Awaited, CancelHandle, Mailbox};
use crate::error::ConnectError;
use crate::options::ConnectOptions;
use crate::sidecar::unix_transport::UnixTransport;
use crate::udp_transport::UdpTransport;

/// An attempt to connect that another thread can cancel.
#[derive(Debug)]
pub struct Connecting {
    mailbox: Mailbox,
}

/// A guard that cancels an attempt to connect when it is dropped, unless the attempt has ended.
struct CancelOnDrop(Option<CancelHandle>);

impl Default for Connecting {
    fn default() -> Self {
        Self::new()
    }
}

impl Connecting {
    /// Creates an attempt to connect. [`run`](Self::run) starts it.
    #[must_use]
    pub fn new() -> Self {
        Self { mailbox: Mailbox::new() }
    }

    /// Returns a handle with which another thread can cancel the attempt.
    #[must_use]
    pub fn cancel_handle(&self) -> CancelHandle {
        self.mailbox.cancel_handle()
    }

    /// Returns a shared text that names what the attempt currently waits for.
    #[must_use]
    pub fn awaited(&self) -> Awaited {
        self.mailbox.awaited.clone()
    }

    /// Joins a job and returns once all its ranks have joined.
    ///
    /// # Errors
    /// Returns the errors of [`Client::connect`], and [`ConnectError::GivenUp`] if the attempt is
    /// cancelled.
    pub fn run(mut self, options: &ConnectOptions) -> Result<Client, ConnectError> {
        Ok(match options.sidecar() {
            Some(path) => {
                Client::over(Arc::new(UnixTransport::join(path, options, &mut self.mailbox)?))
            }
            None => Client::over(Arc::new(UdpTransport::join(options, self.mailbox)?)),
        })
    }

    /// Joins a job like [`run`](Self::run), on a thread of its own. Dropping the future cancels the
    /// attempt.
    ///
    /// # Errors
    /// Returns the errors of [`run`](Self::run).
    pub async fn run_async(self, options: ConnectOptions) -> Result<Client, ConnectError> {
        let mut cancel = CancelOnDrop(Some(self.cancel_handle()));
        let (sender, joined) = oneshot::channel();
        // Ignore a failed send: the future was dropped, so the client is dropped and closed.
        let run = move || drop(sender.send(self.run(&options)));
        Builder::new().name("racksum-connect".into()).spawn(run)?;
        let joined = joined.await;
        // The attempt has ended, so a cancellation would now close the client.
        cancel.0 = None;
        // If the thread panicked, the panic hook has already printed the message.
        joined.unwrap_or(Err(ConnectError::GivenUp))
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(CancelHandle::cancel);
    }
}
