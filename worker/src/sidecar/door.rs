//! Callers that have no rank: how many there may be, and which of them gives way.
//!
//! Each has a thread until it has said what it wants, and may say nothing. So callers of all users
//! share the places, and when all are taken, the user that has most of them gives up its oldest:
//! whoever calls is let in at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use racksum_net::local::Line;

/// The places of callers that have no rank.
#[derive(Debug)]
pub(super) struct Door {
    most: usize,
    /// Which user each is of, the oldest first.
    callers: Mutex<Vec<(u32, Arc<Line>)>>,
}

impl Door {
    pub(super) fn new(most: usize) -> Self {
        Self { most, callers: Mutex::default() }
    }

    /// Lets in a caller of a user. Returns the user whose oldest caller was hung up for it, if all
    /// places were taken.
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

    /// A caller is gone, or has a rank now. It may have given way before.
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

    /// Which callers are hung up when those of these users come one after the other.
    fn hung_up(most: usize, users: &[u32]) -> Vec<usize> {
        let path = std::env::temp_dir().join(format!("racksum-door-{}", std::process::id()));
        let listener = Listener::bind(&path, 0o600).unwrap();
        let door = Door::new(most);
        let called = users.iter().map(|uid| {
            let caller = Line::connect(&path).unwrap();
            let line = Arc::new(listener.accept().unwrap().unwrap());
            door.enter(*uid, &line);
            (caller, line)
        });
        let called: Vec<_> = called.collect();
        let is_hung_up = |(caller, _): &(Line, Arc<Line>)| {
            caller.set_patience(Some(Duration::from_millis(1))).unwrap();
            caller.recv::<u32>().is_ok()
        };
        assert!(door.callers().len() <= most);
        called.iter().for_each(|(_, line)| door.leave(line));
        assert!(door.callers().is_empty());
        called.iter().enumerate().filter(|(_, it)| is_hung_up(it)).map(|(at, _)| at).collect()
    }

    #[test]
    fn whoever_has_most_places_gives_up_its_oldest_and_others_are_let_in() {
        assert_eq!(hung_up(4, &[7, 7, 7, 7]), Vec::<usize>::new());
        assert_eq!(hung_up(4, &[7, 7, 7, 7, 7, 7]), [0, 1]);
        assert_eq!(hung_up(4, &[7, 7, 7, 7, 8]), [0]);
        assert_eq!(hung_up(4, &[8, 7, 7, 7, 7, 7, 7]), [1, 2, 3]);
        assert_eq!(hung_up(4, &[7, 8, 7, 7, 9, 7]), [0, 2]);
    }
}
