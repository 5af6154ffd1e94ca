//! Places for callers that have no rank yet.
//!
//! Each such caller occupies a thread until it has sent its first message, or until the wait for
//! that message times out. All users share the places. When all places are taken, a new caller is
//! still admitted immediately: to make room, the user with the most callers loses its oldest
//! caller.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use racksum_net::local::Line;

/// The places for callers that have no rank yet.
#[derive(Debug)]
pub(super) struct CallerLimit {
    most: usize,
    /// The user and line of each caller, oldest first.
    callers: Mutex<Vec<(u32, Arc<Line>)>>,
}

impl CallerLimit {
    pub(super) fn new(most: usize) -> Self {
        Self { most, callers: Mutex::default() }
    }

    /// Admits a caller of user `uid`. If all places are taken, disconnects the oldest caller of the
    /// user that has the most callers, and returns that user.
    pub(super) fn enter(&self, uid: u32, line: &Arc<Line>) -> Option<u32> {
        let mut callers = self.callers();
        callers.push((uid, Arc::clone(line)));
        if callers.len() <= self.most {
            return None;
        }
        let mut counts = BTreeMap::<u32, usize>::new();
        for (uid, _) in &*callers {
            *counts.entry(*uid).or_default() += 1;
        }
        let (giver, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let oldest = callers.iter().position(|(uid, _)| *uid == giver)?;
        callers.remove(oldest).1.hang_up();
        Some(giver)
    }

    /// Frees the place of a caller that has disconnected or joined as a rank, if the caller still
    /// holds a place.
    pub(super) fn leave(&self, line: &Arc<Line>) {
        self.callers().retain(|(_, other)| !Arc::ptr_eq(other, line));
    }

    fn callers(&self) -> MutexGuard<'_, Vec<(u32, Arc<Line>)>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use racksum_net::local::Listener;

    use super::*;

    /// Admits, in order, one caller for each entry of `users`. There are `most` places. Returns the
    /// indices of the callers that were disconnected.
    fn evicted(most: usize, users: &[u32]) -> Vec<usize> {
        let path = std::env::temp_dir().join(format!("racksum-door-{}", std::process::id()));
        let listener = Listener::bind(&path, 0o600).unwrap();
        let door = CallerLimit::new(most);
        let called = users.iter().map(|uid| {
            let caller = Line::connect(&path).unwrap();
            let line = Arc::new(listener.accept().unwrap().unwrap());
            door.enter(*uid, &line);
            (caller, line)
        });
        let called: Vec<_> = called.collect();
        let is_evicted = |(caller, _): &(Line, Arc<Line>)| {
            caller.set_patience(Some(Duration::from_millis(1))).unwrap();
            caller.recv::<u32>().is_ok()
        };
        assert!(door.callers().len() <= most);
        called.iter().for_each(|(_, line)| door.leave(line));
        assert!(door.callers().is_empty());
        called.iter().enumerate().filter(|(_, it)| is_evicted(it)).map(|(at, _)| at).collect()
    }

    #[test]
    fn whoever_has_most_places_gives_up_its_oldest_and_others_are_let_in() {
        assert_eq!(evicted(4, &[7, 7, 7, 7]), Vec::<usize>::new());
        assert_eq!(evicted(4, &[7, 7, 7, 7, 7, 7]), [0, 1]);
        assert_eq!(evicted(4, &[7, 7, 7, 7, 8]), [0]);
        assert_eq!(evicted(4, &[8, 7, 7, 7, 7, 7, 7]), [1, 2, 3]);
        assert_eq!(evicted(4, &[7, 8, 7, 7, 9, 7]), [0, 2]);
    }
}
