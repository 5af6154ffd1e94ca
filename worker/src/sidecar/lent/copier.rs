//! Copies between a rank's own memory and the memory that it lends.

#![expect(
    unsafe_code,
    reason = "the helper thread may pick up a copy after the borrow of its memory has ended, so a \
              copy holds raw pointers"
)]

use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use racksum_kernels::shared::SharedBytes;
use racksum_proto::schedule::Turn;

use crate::sidecar::chunks::Chunks;

/// The number of bytes that a thread copies at a time.
const CHUNK: usize = 256 << 10;

/// The size in bytes of the smallest copy in which the helper thread takes part. A smaller copy
/// would end before that thread wakes up.
const LARGE: usize = 4 << 20;

/// A copier with a helper thread, because one thread alone does not saturate the memory bandwidth.
/// All copies share the helper, because a new thread for each copy would often start on the same
/// core as its parent.
#[derive(Debug)]
pub(in crate::sidecar) struct Copier {
    sender: Option<Sender<Arc<Copying>>>,
    thread: Option<JoinHandle<()>>,
}

/// A copy in progress between lent memory and the rank's own memory.
#[derive(Debug)]
struct Copying {
    lent: NonNull<u8>,
    own: Own,
    len: usize,
    chunks: Chunks,
    done: Mutex<bool>,
    changed: Condvar,
}

/// The rank's own memory, which is the source or the target of a copy.
#[derive(Debug, Clone, Copy)]
enum Own {
    Source(*const u8),
    Target(*mut u8),
}

// SAFETY: threads access the bytes only until all chunks are done. `Copier::copy` returns only
// then, and its caller guarantees that the bytes stay borrowed during the call.
unsafe impl Send for Copying {}
// SAFETY: as for `Send`, and only one thread accesses each chunk.
unsafe impl Sync for Copying {}

impl Copier {
    pub(in crate::sidecar) fn start() -> io::Result<Self> {
        let (sender, receiver) = channel();
        let help = |receiver: Receiver<Arc<Copying>>| receiver.iter().for_each(|copy| copy.work());
        let thread = Builder::new().name("racksum-copy".into()).spawn(move || help(receiver))?;
        Ok(Self { sender: Some(sender), thread: Some(thread) })
    }

    /// Copies `own` to lent memory of the same length.
    pub(in crate::sidecar) fn write(&self, own: &[u8], lent: SharedBytes<'_>) {
        assert_eq!(own.len(), lent.len(), "a copy needs a source and a target of equal length");
        // SAFETY: the source is as long as `lent`, and stays borrowed during the call.
        unsafe { self.copy(lent, Own::Source(own.as_ptr())) };
    }

    /// Copies lent memory to `own`, which has the same length.
    pub(in crate::sidecar) fn read(&self, lent: SharedBytes<'_>, own: &mut [u8]) {
        assert_eq!(own.len(), lent.len(), "a copy needs a source and a target of equal length");
        // SAFETY: the target is as long as `lent`, and stays borrowed during the call.
        unsafe { self.copy(lent, Own::Target(own.as_mut_ptr())) };
    }

    /// Copies between lent memory and `own`, in the direction that the variant of `own` implies.
    ///
    /// # Safety
    /// `own` must point to as many bytes as `lent` holds, and they must stay borrowed during the
    /// call.
    unsafe fn copy(&self, lent: SharedBytes<'_>, own: Own) {
        let len = lent.len();
        let Some(helper) = self.sender.as_ref().filter(|_| len >= LARGE) else {
            // SAFETY: the caller guarantees what `Own::copy` requires.
            return unsafe { own.copy(0, lent) };
        };
        let copy = Arc::new(Copying {
            lent: lent.start(),
            own,
            len,
            chunks: Chunks::new(len.div_ceil(CHUNK)),
            done: Mutex::new(false),
            changed: Condvar::new(),
        });
        // If the helper has ended, this thread copies everything.
        drop(helper.send(Arc::clone(&copy)));
        copy.work();
        copy.await_end();
    }
}

impl Own {
    /// Copies between `lent` and the bytes of this memory that start at offset `at`, in the
    /// direction that the variant implies.
    ///
    /// # Safety
    /// This memory must hold `lent.len()` bytes from offset `at` on. They must be borrowed, and no
    /// other thread may access them.
    unsafe fn copy(self, at: usize, lent: SharedBytes<'_>) {
        // SAFETY: the caller guarantees that these bytes are borrowed and that only this thread
        // uses them.
        unsafe {
            match self {
                Self::Source(own) => lent.write(slice::from_raw_parts(own.add(at), lent.len())),
                Self::Target(own) => lent.read(slice::from_raw_parts_mut(own.add(at), lent.len())),
            }
        }
    }
}

impl Copying {
    /// Copies chunks until every chunk is taken. A thread that starts late finds no chunk left.
    fn work(&self) {
        let is_last = self.chunks.work(&mut Turn::new((), usize::MAX), |chunk| {
            let at = chunk * CHUNK;
            let len = CHUNK.min(self.len - at);
            // SAFETY: the chunk is within both ranges, which stay borrowed until all chunks are
            // done. In this process, only this thread accesses the chunk.
            unsafe { self.own.copy(at, SharedBytes::new(self.lent.add(at), len)) };
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
        drop(self.sender.take());
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic hook has already printed the message.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use racksum_net::local::SharedMemory;

    use super::*;
    use crate::tensor::shared_bytes;
    use crate::tensor::tests::Scribbler;

    fn memory(len: usize) -> Arc<SharedMemory> {
        Arc::new(SharedMemory::new(len.max(1)).unwrap().0)
    }

    #[test]
    fn copies_are_whole_whoever_does_them() {
        let copier = Copier::start().unwrap();
        for len in [0, 1, 4096, LARGE - 1, LARGE, LARGE + 1, 20 * LARGE + CHUNK / 2] {
            let from: Vec<u8> = (0..=250).cycle().take(len).collect();
            let (lent, mut to) = (memory(len), vec![0xff; len]);
            let lent = shared_bytes(&lent).part(0..len);
            copier.write(&from, lent);
            copier.read(lent, &mut to);
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
                    let mut to = vec![0; LARGE + usize::from(value)];
                    let lent = memory(to.len());
                    for value in [value, value + 100].into_iter().cycle().take(10) {
                        copier.write(&vec![value; to.len()], shared_bytes(&lent));
                        copier.read(shared_bytes(&lent), &mut to);
                        assert!(to.iter().all(|byte| *byte == value));
                    }
                });
            }
        });
    }

    #[test]
    fn copies_of_memory_that_changes_stay_within_it() {
        let copier = Copier::start().unwrap();
        let (len, margin) = (LARGE + CHUNK / 2, 4096);
        let lent = memory(len + 2 * margin);
        let range = margin..margin + len;
        let _scribbler = Scribbler::start(&lent, range.clone());
        let (from, mut to) = (vec![7; len], vec![0xa5; len + 2]);
        for _ in 0..20 {
            copier.write(&from, shared_bytes(&lent).part(range.clone()));
            copier.read(shared_bytes(&lent).part(range.clone()), &mut to[1..=len]);
        }
        assert_eq!((to[0], to[len + 1]), (0xa5, 0xa5));
        for around in [0..margin, margin + len..len + 2 * margin] {
            assert!(shared_bytes(&lent).part(around).equals(&vec![0; margin]));
        }
    }
}
