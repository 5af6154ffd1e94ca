//! The loop of the leading operator: observes, decides, writes.
//!
//! Caches of pods, nodes, and own objects trigger decisions. The group itself is read afresh for
//! each decision, since a plan must not be decided on an old status.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Node, ObjectReference, Pod, Service};
use kube::api::ListParams;
use kube::runtime::controller::{self, Action as Next, Controller};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client, Error, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use crate::api::{groups, is_conflict, take, text, write_status};
use crate::crd::AggregatorGroup;
use crate::decide::{Decision, Observed, Trouble, decide, would_release};
use crate::objects::{MANAGED_BY, MANAGER, config_map_name, service_name};
use crate::status::Note;

/// How the operator works.
#[derive(Debug, Clone)]
pub struct Options {
    /// The only namespace whose groups to serve; all of them if `None`.
    pub namespace: Option<String>,
    /// The name of this replica, for events.
    pub identity: String,
    /// The time to gather changes before the next decision.
    pub gather: Duration,
    /// The time after the first failure until a retry. It doubles with each failure.
    pub first_retry: Duration,
    /// The greatest time until a retry.
    pub longest_retry: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: None,
            identity: MANAGER.into(),
            gather: Duration::from_millis(200),
            first_retry: Duration::from_secs(1),
            longest_retry: Duration::from_secs(60),
        }
    }
}

/// The state that all decisions share.
struct Context {
    client: Client,
    options: Options,
    pods: Store<Pod>,
    nodes: Store<Node>,
    services: Store<Service>,
    maps: Store<ConfigMap>,
    groups: Store<AggregatorGroup>,
    /// The groups as this operator last wrote them, which the cache may not show yet.
    written: Mutex<BTreeMap<String, Arc<AggregatorGroup>>>,
    recorder: Recorder,
    /// The last failures by group.
    troubles: Mutex<BTreeMap<String, Trouble>>,
    /// The time without an API server before this run.
    outage: Option<Trouble>,
    /// The groups that have been told of the outage.
    told: Mutex<BTreeSet<String>>,
}

impl Context {
    /// Returns the failures of a group that it has not recovered from.
    fn trouble(&self, key: &str) -> Option<Trouble> {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let is_told = self.told.lock().unwrap_or_else(PoisonError::into_inner).contains(key);
        let outage = self.outage.as_ref().filter(|_| !is_told);
        troubles.get(key).or(outage).cloned()
    }

    /// Returns all groups, each as the cache or this operator's own writes show it, whichever is
    /// newer.
    fn latest_groups(&self) -> Vec<Arc<AggregatorGroup>> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let cached = self.groups.state();
        written.retain(|uid, _| cached.iter().any(|group| group.meta().uid.as_ref() == Some(uid)));
        let latest = cached.into_iter().map(|group| {
            let own = group.meta().uid.as_ref().and_then(|uid| written.get(uid));
            own.filter(|own| version(own) > version(&group)).cloned().unwrap_or(group)
        });
        latest.collect()
    }
}

/// Returns the version of a group: a number that counts up, which Kubernetes 1.35 guarantees.
fn version(group: &AggregatorGroup) -> u128 {
    group.meta().resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// A request of the operator that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {cause}")]
struct Failed {
    what: String,
    cause: Error,
}

/// Serves groups for as long as this future is polled.
///
/// `outage` is the reason why this replica stopped serving them before, which groups are told.
pub async fn run(client: Client, options: Options, outage: Option<Trouble>) {
    let changed = Arc::new(Notify::new());
    let own = watcher::Config::default().labels(&format!("{MANAGED_BY}={MANAGER}"));
    let all = watcher::Config::default();
    // Pods of all namespaces use the nodes, whichever namespace is served.
    let (pods, pod_stream) = cached(Api::<Pod>::all(client.clone()), all.clone(), &changed);
    let (nodes, node_stream) = cached(Api::<Node>::all(client.clone()), all.clone(), &changed);
    let (services, service_stream) = cached(api(&client, &options), own.clone(), &changed);
    let (maps, map_stream) = cached(api(&client, &options), own, &changed);
    let reporter =
        Reporter { controller: MANAGER.into(), instance: Some(options.identity.clone()) };
    let controller = Controller::new(api::<AggregatorGroup>(&client, &options), all)
        // One after the other, so that no two groups plan with the same room.
        .with_config(controller::Config::default().concurrency(1))
        .reconcile_all_on(gathered(changed, options.gather));
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        client,
        options,
        pods,
        nodes,
        services,
        maps,
        groups: controller.store(),
        written: Mutex::default(),
        troubles: Mutex::default(),
        outage,
        told: Mutex::default(),
    });
    let reconciling = controller.run(reconcile, retry, context).for_each(async |result| {
        if let Err(error) = result {
            tracing::debug!("{error}");
        }
    });
    tokio::join!(reconciling, pod_stream, node_stream, service_stream, map_stream);
}

fn api<K>(client: &Client, options: &Options) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    match &options.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Returns a cache of objects, and the future that keeps it up to date.
fn cached<K>(
    api: Api<K>,
    config: watcher::Config,
    changed: &Arc<Notify>,
) -> (Store<K>, impl Future<Output = ()> + use<K>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone,
{
    let (reader, writer) = store();
    let changed = changed.clone();
    let stream = reflector(writer, watcher(api, config).modify(slim).default_backoff());
    let kept = stream.for_each(move |event| {
        match event {
            Ok(_) => changed.notify_one(),
            Err(error) => tracing::warn!("watching {}: {error}", kind::<K>()),
        }
        std::future::ready(())
    });
    (reader, kept)
}

fn kind<K: Resource>() -> String
where
    K::DynamicType: Default,
{
    K::plural(&K::DynamicType::default()).into_owned()
}

/// Removes the greatest part of an object that no decision reads.
fn slim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// Returns a stream with one item for all changes within a time, the first at once.
fn gathered(changed: Arc<Notify>, gather: Duration) -> impl Stream<Item = ()> {
    futures::stream::unfold(changed, move |changed| async move {
        changed.notified().await;
        tokio::time::sleep(gather).await;
        Some(((), changed))
    })
}

async fn reconcile(known: Arc<AggregatorGroup>, context: Arc<Context>) -> Result<Next, Failed> {
    let key = ObjectRef::from_obj(&*known).to_string();
    let done = reconcile_once(&known, &context, &key).await;
    let mut troubles = context.troubles.lock().unwrap_or_else(PoisonError::into_inner);
    match &done {
        Ok(_) => {
            troubles.remove(&key);
            context.told.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        }
        Err(failed) => {
            let trouble = troubles.entry(key.clone()).or_insert_with(|| Trouble {
                is_conflict: true,
                is_answered: true,
                message: String::new(),
                since: Timestamp::now(),
                failures: 0,
            });
            trouble.is_conflict = is_conflict(&failed.cause);
            trouble.is_answered = matches!(failed.cause, Error::Api(_));
            trouble.message = failed.to_string();
            trouble.failures = trouble.failures.saturating_add(1);
            if trouble.is_reported() {
                tracing::warn!("{key}: {failed}");
            }
        }
    }
    done
}

async fn reconcile_once(
    known: &AggregatorGroup,
    context: &Arc<Context>,
    key: &str,
) -> Result<Next, Failed> {
    let trouble = context.trouble(key);
    for ready in [
        context.pods.wait_until_ready().await,
        context.nodes.wait_until_ready().await,
        context.services.wait_until_ready().await,
        context.maps.wait_until_ready().await,
    ] {
        if ready.is_err() {
            return Ok(Next::await_change());
        }
    }
    let read = groups(&context.client, known).get_opt(&known.name_any()).await;
    let read = read.map_err(|cause| Failed { what: format!("reading {key}"), cause })?;
    let Some(mut group) = read else { return Ok(Next::await_change()) };
    let network = network_text(&group, context).await?;
    let decision = decided(&group, context, network.clone(), trouble.clone()).await?;
    if would_release(&group, &decision) && has_workers(&group, context).await? {
        // The cache does not show them yet; the change will trigger the next decision.
        return Ok(Next::requeue(context.options.first_retry));
    }
    write(&mut group, context, &decision).await?;
    // Actions start in order; none depends on the end of an earlier one.
    let acted = Arc::new(group.clone());
    let actions = decision.actions.clone().into_iter().map(|action| {
        let (client, group) = (context.client.clone(), acted.clone());
        async move {
            let taken = take(&client, &group, &action).await;
            taken.map_err(|cause| Failed { what: text(&action), cause })
        }
    });
    let mut taken = futures::stream::iter(actions).buffered(AT_ONCE);
    let mut refused = None;
    while let Some(done) = taken.next().await {
        match done {
            // A write that stays refused, such as an eviction, must not hold up the others.
            Err(failed) if matches!(failed.cause, Error::Api(_)) => {
                _ = refused.get_or_insert(failed)
            }
            done => done?,
        }
    }
    if let Some(failed) = refused {
        return Err(failed);
    }
    if trouble.is_some_and(|trouble| trouble.is_reported()) && decision.is_ongoing() {
        let decision = decided(&group, context, network, None).await?;
        write(&mut group, context, &decision).await?;
    }
    Ok(Next::requeue(decision.recheck))
}

/// The greatest number of requests of a decision at once.
const AT_ONCE: usize = 16;

/// Decides on another thread, since a plan for thousands of nodes takes a while.
async fn decided(
    group: &AggregatorGroup,
    context: &Arc<Context>,
    network: Result<String, String>,
    trouble: Option<Trouble>,
) -> Result<Decision, Failed> {
    let (group, context) = (group.clone(), context.clone());
    let deciding = tokio::task::spawn_blocking(move || {
        let own =
            |name: String| ObjectRef::new(&name).within(&group.namespace().unwrap_or_default());
        let service = context.services.get(&service_ref(&group));
        let map = context.maps.get(&own(config_map_name(&group)));
        decide(Observed {
            group: &group,
            pods: &context.pods.state(),
            nodes: &context.nodes.state(),
            groups: &context.latest_groups(),
            service: service.as_deref(),
            config_map: map.as_deref(),
            network: network.as_ref().map(String::as_str).map_err(String::as_str),
            trouble: trouble.as_ref().filter(|trouble| trouble.is_reported()),
            now: Timestamp::now(),
        })
    });
    deciding
        .await
        .map_err(|error| Failed { what: "deciding".into(), cause: Error::Service(Box::new(error)) })
}

fn service_ref(group: &AggregatorGroup) -> ObjectRef<Service> {
    ObjectRef::new(&service_name(group)).within(&group.namespace().unwrap_or_default())
}

/// Writes the status and publishes the events of a decision.
async fn write(
    group: &mut AggregatorGroup,
    context: &Context,
    decision: &Decision,
) -> Result<(), Failed> {
    let written = write_status(&context.client, group, &decision.status).await;
    written.map_err(|cause| Failed { what: "writing the status".into(), cause })?;
    if let Some(uid) = group.uid() {
        let mut written = context.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.insert(uid, Arc::new(group.clone()));
    }
    for note in &decision.notes {
        let published = context.recorder.publish(&event(note, group), &group.object_ref(&())).await;
        // Events are for people; a missing one stops nothing.
        if let Err(error) = published {
            tracing::warn!("publishing event {}: {error}", note.reason);
        }
    }
    Ok(())
}

fn event(note: &Note, group: &AggregatorGroup) -> Event {
    let related = note.pod.as_ref().map(|name| ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(name.clone()),
        namespace: group.namespace(),
        ..ObjectReference::default()
    });
    Event {
        type_: if note.is_warning { EventType::Warning } else { EventType::Normal },
        reason: note.reason.clone(),
        note: Some(note.note.clone()),
        action: "Place".into(),
        secondary: related,
    }
}

/// Reads the network file that a group names. The inner error is for the group's condition.
async fn network_text(
    group: &AggregatorGroup,
    context: &Context,
) -> Result<Result<String, String>, Failed> {
    let Some(file) = &group.spec.topology.network else { return Ok(Ok(String::new())) };
    let namespace = group.namespace().unwrap_or_default();
    let maps = Api::<ConfigMap>::namespaced(context.client.clone(), &namespace);
    let read = maps.get_opt(&file.name).await;
    let what = || format!("reading ConfigMap {}", file.name);
    let Some(map) = read.map_err(|cause| Failed { what: what(), cause })? else {
        return Ok(Err(format!(
            "ConfigMap {} does not exist; create it with `racksum probe`'s network file",
            file.name
        )));
    };
    let text = map.data.and_then(|mut data| data.remove(&file.key));
    Ok(text.ok_or_else(|| format!("ConfigMap {} has no key {}; add it", file.name, file.key)))
}

/// Asks the API server itself whether a group has workers.
async fn has_workers(group: &AggregatorGroup, context: &Context) -> Result<bool, Failed> {
    let labels = group.spec.workers.match_labels.iter();
    let selector: Vec<_> = labels.map(|(key, value)| format!("{key}={value}")).collect();
    let namespace = group.namespace().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
    let found = pods.list(&ListParams::default().labels(&selector.join(","))).await;
    let found = found.map_err(|cause| Failed { what: "listing workers".into(), cause })?;
    Ok(found.items.iter().any(|pod| crate::members::Member::of(pod).is_some()))
}

/// Returns the time until the next try after a failure.
fn retry(group: Arc<AggregatorGroup>, _: &Failed, context: Arc<Context>) -> Next {
    let key = ObjectRef::from_obj(&*group).to_string();
    let troubles = context.troubles.lock().unwrap_or_else(PoisonError::into_inner);
    let failures = troubles.get(&key).map_or(1, |trouble| trouble.failures);
    Next::requeue(pause(failures, &context.options))
}

/// Returns the time until the next try after a number of failures in a row.
fn pause(failures: u32, options: &Options) -> Duration {
    let doubled = 2u32.saturating_pow(failures.saturating_sub(1).min(16));
    options.first_retry.saturating_mul(doubled).min(options.longest_retry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_failures_double_up_to_a_bound() {
        let pauses = [1, 2, 3, 6, 7, 8, u32::MAX]
            .map(|failures| pause(failures, &Options::default()).as_secs());
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60, 60]);
    }
}
