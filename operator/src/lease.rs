//! Leader election: of several replicas, only the holder of a Lease writes.
//!
//! The rules are those of Kubernetes' own components. Each write names the version that was read,
//! so of two replicas that write at once, one fails. A replica takes a Lease over only after it
//! has itself seen no renewal for the Lease's whole duration, which needs no common clock. A holder
//! that could not renew in time stops before that duration is over.
//!
//! The crate kube-lease-manager was considered. It clears an expired Lease without naming the
//! version that it read, which can undo another replica's acquisition, and it still reports
//! leadership when renewals fail.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client, Error};
use tokio::time::{Instant, sleep};

/// A Lease, and how this replica competes for it.
#[derive(Debug, Clone)]
pub struct Election {
    /// The Leases of the operator's namespace.
    pub leases: Api<Lease>,
    /// The name of the Lease.
    pub name: String,
    /// The name of this replica, unique among all.
    pub identity: String,
    /// The times of the election.
    pub times: Times,
}

/// The times of an election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The time without a renewal after which another replica may take the Lease over.
    pub duration: Duration,
    /// The time without a successful renewal after which the holder stops. Less than `duration`.
    pub deadline: Duration,
    /// The time between two tries to acquire or to renew.
    pub retry: Duration,
}

impl Default for Times {
    fn default() -> Self {
        let duration = Duration::from_secs(15);
        Self { duration, deadline: Duration::from_secs(10), retry: Duration::from_secs(2) }
    }
}

/// The end of this replica's leadership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Whether another replica took the Lease over.
    pub was_taken: bool,
    /// The reason.
    pub message: String,
}

/// The outcome of a try to acquire or to renew.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// This replica holds the Lease.
    Held,
    /// Another replica holds the Lease.
    Taken,
    /// The Lease changed while this replica wrote it.
    Raced,
}

/// The Lease as this replica last saw it change.
#[derive(Debug, Default)]
struct Seen {
    spec: Option<LeaseSpec>,
    since: Option<Instant>,
}

impl Election {
    /// Competes for the Lease of an operator.
    #[must_use]
    pub fn new(client: &Client, namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            leases: Api::namespaced(client.clone(), namespace),
            name: name.into(),
            identity: identity.into(),
            times: Times::default(),
        }
    }

    /// Waits until this replica holds the Lease.
    pub async fn acquire(&self) {
        let mut seen = Seen::default();
        loop {
            match self.try_once(&mut seen).await {
                Ok(Outcome::Held) => return,
                Ok(Outcome::Taken | Outcome::Raced) => {}
                Err(error) => tracing::warn!("acquiring lease {}: {error}", self.name),
            }
            sleep(self.times.retry).await;
        }
    }

    /// Renews the Lease until this replica loses it, and returns why.
    pub async fn hold(&self) -> Lost {
        let mut seen = Seen::default();
        let mut renewed = Instant::now();
        loop {
            sleep(self.times.retry).await;
            let left = (renewed + self.times.deadline).saturating_duration_since(Instant::now());
            let why = match tokio::time::timeout(left, self.try_once(&mut seen)).await {
                Ok(Ok(Outcome::Held)) => {
                    renewed = Instant::now();
                    continue;
                }
                Ok(Ok(Outcome::Taken)) => {
                    let message = format!("another replica holds lease {}", self.name);
                    return Lost { was_taken: true, message };
                }
                Ok(Ok(Outcome::Raced)) => "it changed meanwhile".into(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the API server did not answer".into(),
            };
            tracing::warn!("renewing lease {}: {why}", self.name);
            if Instant::now() >= renewed + self.times.deadline {
                let limit = self.times.deadline.as_secs_f64();
                let message = format!("lease {} was not renewed for {limit} s: {why}", self.name);
                return Lost { was_taken: false, message };
            }
        }
    }

    /// Gives the Lease up, so that another replica need not wait for its end.
    ///
    /// # Errors
    /// The failure of a request.
    pub async fn release(&self) -> Result<(), Error> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            return Ok(());
        }
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        self.leases.replace(&self.name, &PostParams::default(), &lease).await.map(drop)
    }

    /// Acquires or renews the Lease if the rules allow it.
    async fn try_once(&self, seen: &mut Seen) -> Result<Outcome, Error> {
        let Some(mut lease) = self.leases.get_opt(&self.name).await? else {
            let metadata =
                kube::api::ObjectMeta { name: Some(self.name.clone()), ..<_>::default() };
            let lease = Lease { metadata, spec: Some(self.next(&LeaseSpec::default())) };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if seen.spec.as_ref() != Some(&spec) {
            *seen = Seen { spec: Some(spec.clone()), since: Some(Instant::now()) };
        }
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let has_ended = seen.since.is_some_and(|since| Instant::now() >= since + duration(&spec));
        if !holder.is_empty() && holder != self.identity && !has_ended {
            return Ok(Outcome::Taken);
        }
        lease.spec = Some(self.next(&spec));
        won(self.leases.replace(&self.name, &PostParams::default(), &lease).await)
    }

    /// Returns the Lease's next state, in which this replica holds it.
    fn next(&self, spec: &LeaseSpec) -> LeaseSpec {
        let time = Some(MicroTime(Timestamp::now()));
        let is_held = spec.holder_identity.as_ref() == Some(&self.identity);
        let transitions = spec.lease_transitions.unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.times.duration.as_secs().max(1)).ok(),
            acquire_time: if is_held { spec.acquire_time.clone() } else { time.clone() },
            renew_time: time,
            lease_transitions: Some(if is_held {
                transitions
            } else {
                transitions.saturating_add(1)
            }),
            ..spec.clone()
        }
    }
}

/// Returns the duration of another replica's Lease.
fn duration(spec: &LeaseSpec) -> Duration {
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

/// Returns the outcome of a write.
fn won<T>(written: Result<T, Error>) -> Result<Outcome, Error> {
    match written {
        Ok(_) => Ok(Outcome::Held),
        Err(Error::Api(status)) if status.code == 409 => Ok(Outcome::Raced),
        Err(error) => Err(error),
    }
}
