//! The conditions of a group, and the events that tell of their changes.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Whether the spec and the network file are valid.
pub const ACCEPTED: &str = "Accepted";
/// Whether all workers are there, and bound (mode A) or free of other gates (mode B).
pub const WORKERS_READY: &str = "WorkersReady";
/// Whether there is a plan, and its workers are where it says.
pub const PLANNED: &str = "Planned";
/// Whether all pods that the operator placed are on nodes.
pub const PLACED: &str = "Placed";
/// Whether all aggregators serve, and the workers' variables are published.
pub const READY: &str = "Ready";
/// Whether the API server took the operator's last writes.
pub const APPLIED: &str = "Applied";

/// The reason of a condition that cannot be met before [`ACCEPTED`] is.
pub const NOT_ACCEPTED: &str = "NotAccepted";

/// An event to publish about a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Whether a person should act.
    pub is_warning: bool,
    /// The reason: a word for programs.
    pub reason: String,
    /// The sentence for people.
    pub note: String,
    /// The pod that the event is about, beside the group. Events of one reason about one pod are
    /// counted as one.
    pub pod: Option<String>,
}

/// The conditions of a group, old and new.
#[derive(Debug)]
pub struct Conditions {
    conditions: Vec<Condition>,
    notes: Vec<Note>,
    generation: Option<i64>,
    now: Timestamp,
}

/// The reasons that need a person.
const WARNINGS: [&str; 14] = [
    "InvalidSpec",
    "InvalidNetwork",
    "InvalidTopology",
    "JobSetExclusiveTopology",
    "GateInFollowWorkers",
    "TooManyWorkers",
    "SharedWorkers",
    "NoRoom",
    "WorkersMoved",
    "PendingTooLong",
    "NameInUse",
    "Refused",
    "Unreachable",
    "AggregatorsNotReady",
];

impl Conditions {
    /// Starts from the conditions that a group has.
    #[must_use]
    pub fn new(conditions: Vec<Condition>, generation: Option<i64>, now: Timestamp) -> Self {
        Self { conditions, notes: vec![], generation, now }
    }

    /// Sets a condition. A change of its status or reason becomes an event.
    pub fn set(&mut self, name: &str, is_true: bool, reason: &str, message: impl Into<String>) {
        let status = if is_true { "True" } else { "False" };
        let message = truncated(message.into());
        let old = self.conditions.iter_mut().find(|condition| condition.type_ == name);
        let is_new = old.as_ref().is_none_or(|old| old.status != status || old.reason != reason);
        let turned = match &old {
            Some(old) if old.status == status => old.last_transition_time.clone(),
            _ => Time(self.now),
        };
        let condition = Condition {
            type_: name.into(),
            status: status.into(),
            reason: reason.into(),
            message: message.clone(),
            observed_generation: self.generation,
            last_transition_time: turned,
        };
        match old {
            Some(old) => *old = condition,
            None => self.conditions.push(condition),
        }
        if is_new {
            self.note(WARNINGS.contains(&reason), reason, message, None);
        }
    }

    /// Adds an event.
    pub fn note(
        &mut self,
        is_warning: bool,
        reason: &str,
        note: impl Into<String>,
        pod: Option<&str>,
    ) {
        let (note, pod) = (truncated(note.into()), pod.map(Into::into));
        self.notes.push(Note { is_warning, reason: reason.into(), note, pod });
    }

    /// Returns whether a condition is true.
    #[must_use]
    pub fn is_true(&self, name: &str) -> bool {
        self.get(name).is_some_and(|condition| condition.status == "True")
    }

    /// Returns a condition.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.type_ == name)
    }

    /// Returns the conditions and the events.
    #[must_use]
    pub fn finish(self) -> (Vec<Condition>, Vec<Note>) {
        (self.conditions, self.notes)
    }
}

/// Shortens a message to the limit of an event's note, which is below that of a condition.
fn truncated(mut message: String) -> String {
    if message.len() > MOST_BYTES {
        let end = (0..=MOST_BYTES).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
        message.truncate(end);
        message.push('…');
    }
    message
}

/// The API server takes at most 1024 bytes of an event's note.
const MOST_BYTES: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn only_a_change_of_status_or_reason_is_an_event() {
        let mut conditions = Conditions::new(vec![], Some(1), at(1));
        conditions.set(READY, false, "NoRoom", "one");
        let (old, notes) = conditions.finish();
        assert_eq!(notes.len(), 1);
        assert!(notes[0].is_warning);
        let mut conditions = Conditions::new(old, Some(2), at(5));
        conditions.set(READY, false, "NoRoom", "two");
        let (old, notes) = conditions.finish();
        assert_eq!(notes, []);
        assert_eq!(old[0].message, "two");
        assert_eq!(old[0].last_transition_time.0, at(1));
        let mut conditions = Conditions::new(old, Some(2), at(9));
        conditions.set(READY, true, "AggregatorsReady", "three");
        assert!(conditions.is_true(READY));
        let (new, notes) = conditions.finish();
        assert_eq!(new[0].last_transition_time.0, at(9));
        assert!(!notes[0].is_warning);
    }

    #[test]
    fn the_document_says_what_to_do_about_each_warning() {
        let document = include_str!("../../docs/kubernetes.md");
        for reason in WARNINGS {
            assert!(document.contains(&format!("`{reason}`")), "{reason}");
        }
    }

    #[test]
    fn long_messages_fit_an_event() {
        let mut conditions = Conditions::new(vec![], None, at(1));
        conditions.note(false, "Long", "ü".repeat(2000), None);
        let (_, notes) = conditions.finish();
        assert!(notes[0].note.len() <= 1024, "{}", notes[0].note.len());
        assert!(notes[0].note.ends_with('…'));
    }
}
