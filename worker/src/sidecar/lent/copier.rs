//! Copies between a rank's own memory and the memory that it lends.

#![expect(unsafe_code, reason = "a copy is of two threads, of which one may come late")]

use std::io;
use std::slice;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use racksum_proto::schedule::Turn;

use crate::sidecar::chunks::Chunks;

/// The number of bytes that a thread copies at a time.
const CHUNK: usize = 256 << 10;

/// The size in bytes from which a second thread helps. A smaller copy ends before that thread is
/// awake.
const LARGE: usize = 4 << 20;

/// A copier with a helper thread, because one thread alone does not saturate the memory bandwidth.
/// All copies share the helper: a new thread often starts on the core of its parent.
#[derive(Debug)]
pub(in crate::sidecar) struct Copier {
    tell: Option<Sender<Arc<Copying>>>,
    thread: Option<JoinHandle<()>>,
}

/// A copy in progress between buffers that do not overlap.
#[derive(Debug)]
struct Copying {
    from: *const u8,
    to: *mut u8,
    len: usize,
    chunks: Chunks,
    done: Mutex<bool>,
    changed: Condvar,
}

// SAFETY: threads access the bytes only until all chunks are done, and `Copier::copy` borrows them
// until then.
unsafe impl Send for Copying {}
// SAFETY: as for `Send`, and only one thread accesses each chunk.
unsafe impl Sync for Copying {}

impl Copier {
    pub(in crate::sidecar) fn start() -> io::Result<Self> {
        let (tell, told) = channel();
        let help = |told: Receiver<Arc<Copying>>| told.iter().for_each(|copy| copy.work());
        let thread = Builder::new().name("racksum-copy".into()).spawn(move || help(told))?;
        Ok(Self { tell: Some(tell), thread: Some(thread) })
    }

    /// Copies `from` to `to`, which has the same length.
    pub(in crate::sidecar) fn copy(&self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "as many bytes");
        let helper = self.tell.as_ref().filter(|_| from.len() >= LARGE);
        let Some(helper) = helper else { return to.copy_from_slice(from) };
        let copy = Arc::new(Copying {
            from: from.as_ptr(),
            to: to.as_mut_ptr(),
            len: from.len(),
            chunks: Chunks::new(from.len().div_ceil(CHUNK)),
            done: Mutex::new(false),
            changed: Condvar::new(),
        });
        // If the helper has ended, this thread copies everything.
        drop(helper.send(Arc::clone(&copy)));
        copy.work();
        copy.await_end();
    }
}

impl Copying {
    /// Copies chunks until every chunk is taken. A late thread finds none.
    fn work(&self) {
        let is_last = self.chunks.work(&mut Turn::new((), usize::MAX), |chunk| {
            let at = chunk * CHUNK;
            let len = CHUNK.min(self.len - at);
            // SAFETY: the chunk is within the buffers, which stay borrowed until all chunks are
            // done. Only this thread accesses the chunk.
            unsafe {
                let to = slice::from_raw_parts_mut(self.to.add(at), len);
                to.copy_from_slice(slice::from_raw_parts(self.from.add(at), len));
            }
            len
        });
        if is_last {
            *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
            self.changed.notify_all();
        }
    }

    fn await_end(&self) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(done, |done| !*done).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        drop(self.tell.take());
        if let Some(thread) = self.thread.take() {
            // The panic hook has already printed a panic of the thread.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_whole_whoever_does_them() {
        let copier = Copier::start().unwrap();
        for len in [0, 1, 4096, LARGE - 1, LARGE, LARGE + 1, 20 * LARGE + CHUNK / 2] {
            let from: Vec<u8> = (0..=250).cycle().take(len).collect();
            let mut to = vec![0xff; len];
            copier.copy(&from, &mut to);
            assert!(to == from, "{len} bytes");
        }
    }

    #[test]
    fn copies_of_several_threads_do_not_mix() {
        let copier = Copier::start().unwrap();
        std::thread::scope(|scope| {
            for value in 1..4 {
                let copier = &copier;
                scope.spawn(move || {
                    for _ in 0..10 {
                        let mut to = vec![0; LARGE + usize::from(value)];
                        copier.copy(&vec![value; to.len()], &mut to);
                        assert!(to.iter().all(|byte| *byte == value));
                    }
                });
            }
        });
    }
}
