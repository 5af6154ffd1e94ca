//! The failures of groups: what the API server refused, and when it is tried again.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Error, Resource};
use tokio::time::Instant;

use super::Options;
use crate::api::{is_answer, is_conflict};
use crate::crd::AggregatorGroup;
use crate::decide::Trouble;

/// A request of the operator that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub(super) struct Failed {
    message: String,
    is_conflict: bool,
    pub(super) is_answered: bool,
    /// The actions that were refused; none if the failure stopped all of them.
    actions: BTreeSet<String>,
}

impl Failed {
    /// Describes a failed request in words.
    pub(super) fn new(what: &str, cause: &Error) -> Self {
        Self {
            message: format!("{what}: {cause}"),
            is_conflict: is_conflict(cause),
            is_answered: is_answer(cause),
            actions: BTreeSet::new(),
        }
    }

    /// Describes an action that the API server refused.
    pub(super) fn refused(action: &str, cause: &Error) -> Self {
        Self { actions: BTreeSet::from([action.to_owned()]), ..Self::new(action, cause) }
    }

    /// Describes lists that have not arrived.
    pub(super) fn unlisted(patience: Duration) -> Self {
        let seconds = patience.as_secs_f64();
        Self {
            message: format!("listing pods, nodes and own objects takes longer than {seconds} s"),
            is_conflict: false,
            is_answered: false,
            actions: BTreeSet::new(),
        }
    }

    /// Describes a decision that panicked.
    pub(super) fn bug(panic: &tokio::task::JoinError) -> Self {
        Self {
            message: format!("deciding: a bug of the operator: {panic}"),
            is_conflict: false,
            // The condition can be written.
            is_answered: true,
            actions: BTreeSet::new(),
        }
    }

    /// Adds another action that was refused in the same decision.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.actions.extend(other.actions);
        self
    }
}

/// The failures of a group since its last success.
#[derive(Debug)]
struct Failing {
    uid: Option<String>,
    generation: Option<i64>,
    trouble: Trouble,
    actions: BTreeSet<String>,
    until: Instant,
}

/// The actions that wait for the end of a pause.
#[derive(Debug, Default)]
pub(super) struct Held {
    actions: BTreeSet<String>,
    /// The rest of the pause, if there is one.
    pub(super) left: Option<Duration>,
}

impl Held {
    /// Returns whether nothing at all may be tried yet.
    pub(super) fn is_all(&self) -> bool {
        self.left.is_some() && self.actions.is_empty()
    }

    /// Returns whether an action must wait.
    pub(super) fn has(&self, action: &str) -> bool {
        self.actions.contains(action)
    }
}

/// The groups whose last writes failed.
#[derive(Debug, Default)]
pub(super) struct Failures(HashMap<ObjectRef<AggregatorGroup>, Failing>);

impl Failures {
    /// Returns the failures of a group that it has not recovered from.
    pub(super) fn trouble(&self, group: &AggregatorGroup) -> Option<&Trouble> {
        self.of(group).map(|failing| &failing.trouble)
    }

    /// Returns what must not be tried again yet, although the cluster changes: a write that stays
    /// refused would otherwise be repeated at each change. A new spec ends the pause.
    pub(super) fn held(&self, group: &AggregatorGroup) -> Held {
        let now = Instant::now();
        let paused = |failing: &&Failing| {
            failing.trouble.is_reported()
                && failing.generation == group.meta().generation
                && now < failing.until
        };
        self.of(group).filter(paused).map_or_else(Held::default, |failing| Held {
            actions: failing.actions.clone(),
            left: Some(failing.until - now),
        })
    }

    /// Returns the time until the next try.
    pub(super) fn pause(&self, group: &AggregatorGroup) -> Option<Duration> {
        let failing = self.of(group)?;
        Some(failing.until.saturating_duration_since(Instant::now()))
    }

    /// Forgets the failures of a group.
    pub(super) fn recovered(&mut self, group: &AggregatorGroup) {
        self.0.remove(&ObjectRef::from_obj(group));
    }

    /// Forgets the groups that are not there any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&ObjectRef<AggregatorGroup>) -> bool) {
        self.0.retain(|group, _| exists(group));
    }

    /// Adds a failure. `held` is what had to wait meanwhile.
    pub(super) fn add(
        &mut self,
        group: &AggregatorGroup,
        failed: &Failed,
        held: Held,
        options: &Options,
    ) -> Trouble {
        let (uid, generation) = (group.meta().uid.clone(), group.meta().generation);
        let before = self.of(group).map(|failing| &failing.trouble);
        // A conflict is the normal course, and does not mean that what is refused is taken now.
        if let Some(before) = before.filter(|_| failed.is_conflict)
            && !before.is_conflict
        {
            return before.clone();
        }
        let failures = before.map_or(1, |trouble| trouble.failures.saturating_add(1));
        let trouble = Trouble {
            is_conflict: failed.is_conflict,
            is_answered: failed.is_answered,
            message: failed.message.clone(),
            since: before.map_or_else(Timestamp::now, |trouble| trouble.since),
            failures,
        };
        let until = Instant::now() + pause(failures, options);
        let mut actions = failed.actions.clone();
        if !actions.is_empty() {
            actions.extend(held.actions);
        }
        let failing = Failing { uid, generation, trouble: trouble.clone(), actions, until };
        self.0.insert(ObjectRef::from_obj(group), failing);
        trouble
    }

    /// A successor of the same name has no failures yet.
    fn of(&self, group: &AggregatorGroup) -> Option<&Failing> {
        let failing = self.0.get(&ObjectRef::from_obj(group))?;
        (failing.uid == group.meta().uid).then_some(failing)
    }
}

/// Returns the time until the next try after a number of failures in a row.
fn pause(failures: u32, options: &Options) -> Duration {
    let doubled = 2u32.saturating_pow(failures.saturating_sub(1).min(16));
    options.first_retry.saturating_mul(doubled).min(options.longest_retry)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group(uid: &str, generation: i64) -> AggregatorGroup {
        let group = json!({
            "apiVersion": "racksum.dev/v1alpha1", "kind": "AggregatorGroup",
            "metadata": {"name": "g", "namespace": "n", "uid": uid, "generation": generation},
            "spec": {
                "mode": "FollowWorkers",
                "workers": {"matchLabels": {"a": "b"}, "count": 1},
                "aggregators": {"image": "i", "resources": {}},
                "traffic": {"bytes": 1},
                "topology": {"levels": []},
            },
        });
        serde_json::from_value(group).unwrap()
    }

    fn refused(action: &str) -> Failed {
        let status = kube::core::Status::failure("no", "Forbidden").with_code(403);
        Failed::refused(action, &Error::Api(status.boxed()))
    }

    #[test]
    fn pauses_after_failures_double_up_to_a_bound() {
        let pauses = [1, 2, 3, 6, 7, 8, u32::MAX]
            .map(|failures| pause(failures, &Options::default()).as_secs());
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60, 60]);
    }

    #[test]
    fn only_refused_actions_wait_and_a_new_spec_or_group_ends_the_pause() {
        let mut failures = Failures::default();
        let options = Options { first_retry: Duration::from_secs(3600), ..Options::default() };
        let options = Options { longest_retry: options.first_retry, ..options };
        let old = group("u1", 1);
        assert!(failures.held(&old).left.is_none());
        let trouble = failures.add(&old, &refused("evicting a"), Held::default(), &options);
        assert_eq!((trouble.failures, trouble.is_conflict), (1, false));
        let held = failures.held(&old);
        assert!(held.has("evicting a") && !held.has("placing b") && !held.is_all());
        // What waits goes on waiting when another action fails.
        let trouble = failures.add(&old, &refused("placing b"), held, &options);
        assert_eq!(trouble.failures, 2);
        let held = failures.held(&old);
        assert!(held.has("evicting a") && held.has("placing b"));
        for other in [group("u1", 2), group("u2", 1)] {
            assert!(failures.held(&other).left.is_none());
        }
        assert!(failures.trouble(&group("u1", 2)).is_some());
        assert!(failures.trouble(&group("u2", 1)).is_none());
        let failed = Failed::new("writing the status", &Error::LinesCodecMaxLineLengthExceeded);
        failures.add(&old, &failed, held, &options);
        assert!(failures.held(&old).is_all());
        let conflict = Failed { is_conflict: true, ..refused("placing c") };
        let trouble = failures.add(&old, &conflict, Held::default(), &options);
        assert!(trouble.message.starts_with("writing the status: "), "{trouble:?}");
        failures.recovered(&old);
        assert!(failures.trouble(&old).is_none() && failures.held(&old).left.is_none());
    }

    #[test]
    fn conflicts_wait_only_after_several() {
        let mut failures = Failures::default();
        let status = kube::core::Status::failure("changed", "Conflict").with_code(409);
        let failed = Failed::refused("placing a", &Error::Api(status.boxed()));
        for number in 1..=6 {
            failures.add(&group("u1", 1), &failed, Held::default(), &Options::default());
            assert_eq!(failures.held(&group("u1", 1)).left.is_some(), number > 5, "{number}");
        }
    }
}
