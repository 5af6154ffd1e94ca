//! The loop of the leading operator: observes, decides, writes.
//!
//! Caches of pods, nodes, and own objects trigger decisions. Most changes in a cluster concern no
//! group: a decision on the caches alone tells that, and asks the API server nothing. Before a
//! write, the group itself is read afresh, since a plan must not be decided on an old status.

mod failures;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Node, ObjectReference, Pod, Service};
use kube::api::ListParams;
use kube::runtime::controller::{self, Action as Next, Controller};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use self::failures::{Failed, Failures, Held};
use crate::api::{groups, is_answer, take, text, write_status};
use crate::crd::{AggregatorGroup, AggregatorGroupStatus};
use crate::decide::{Decision, Observed, Trouble, decide, report, would_release};
use crate::members::Members;
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
    /// The time after which groups are told that the API server does not list pods and nodes.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: None,
            identity: MANAGER.into(),
            gather: Duration::from_millis(200),
            first_retry: Duration::from_secs(1),
            longest_retry: Duration::from_secs(60),
            patience: Duration::from_secs(10),
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
    failures: Mutex<Failures>,
    /// The kinds that the API server last refused to list.
    unlisted: Unlisted,
    /// The time without an API server before this run.
    outage: Option<Trouble>,
    /// The UIDs of the groups that have been told of the outage.
    told: Mutex<BTreeSet<String>>,
}

/// The failures of lists, by kind.
type Unlisted = Arc<Mutex<BTreeMap<String, Failed>>>;

impl Context {
    /// Returns the failures of a group that it has not recovered from.
    fn trouble(&self, group: &AggregatorGroup) -> Option<Trouble> {
        let failures = locked(&self.failures);
        let is_told = group.meta().uid.as_ref().is_some_and(|uid| locked(&self.told).contains(uid));
        let outage = self.outage.as_ref().filter(|_| !is_told);
        failures.trouble(group).or(outage).cloned()
    }

    /// Adds a failure of a group, and forgets those of groups that are gone.
    fn failed(&self, group: &AggregatorGroup, failed: &Failed, held: Held) -> Trouble {
        let mut failures = locked(&self.failures);
        failures.retain(|group| self.groups.get(group).is_some());
        failures.add(group, failed, held, &self.options)
    }

    /// Forgets the failures of a group, all of whose writes were taken.
    fn recovered(&self, group: &AggregatorGroup) {
        locked(&self.failures).recovered(group);
        if self.outage.is_some() {
            locked(&self.told).extend(group.meta().uid.clone());
        }
    }

    /// Waits until all caches are filled.
    async fn filled(&self) -> Result<(), Failed> {
        let all = async {
            // A cache whose writer is gone ends with this future.
            drop(self.pods.wait_until_ready().await);
            drop(self.nodes.wait_until_ready().await);
            drop(self.services.wait_until_ready().await);
            drop(self.maps.wait_until_ready().await);
        };
        let patience = self.options.patience;
        tokio::time::timeout(patience, all).await.map_err(|_| {
            let known = locked(&self.unlisted).values().next().cloned();
            known.unwrap_or_else(|| Failed::unlisted(patience))
        })
    }

    /// Returns a group as the cache or this operator's own writes show it, whichever is newer.
    fn latest(&self, cached: &Arc<AggregatorGroup>) -> Arc<AggregatorGroup> {
        newer(&locked(&self.written), cached)
    }

    /// Returns all groups, each as the cache or this operator's own writes show it, whichever is
    /// newer.
    fn latest_groups(&self) -> Vec<Arc<AggregatorGroup>> {
        let mut written = locked(&self.written);
        let cached = self.groups.state();
        let uids: HashSet<_> =
            cached.iter().filter_map(|group| group.meta().uid.as_ref()).collect();
        written.retain(|uid, _| uids.contains(uid));
        cached.iter().map(|group| newer(&written, group)).collect()
    }
}

/// Returns a group as it was written, if that is newer than the cached one.
fn newer(
    written: &BTreeMap<String, Arc<AggregatorGroup>>,
    cached: &Arc<AggregatorGroup>,
) -> Arc<AggregatorGroup> {
    let own = cached.meta().uid.as_ref().and_then(|uid| written.get(uid));
    own.filter(|own| version(own) > version(cached)).unwrap_or(cached).clone()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the version of a group: a number that counts up, which Kubernetes 1.35 guarantees.
fn version(group: &AggregatorGroup) -> u128 {
    group.meta().resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0)
}

/// Serves groups for as long as this future is polled.
///
/// `outage` is the reason why this replica stopped serving them before, which groups are told.
pub async fn run(client: Client, options: Options, outage: Option<Trouble>) {
    let (changed, unlisted) = (Arc::new(Notify::new()), Unlisted::default());
    let signs = (&changed, &unlisted);
    let own = watcher::Config::default().labels(&format!("{MANAGED_BY}={MANAGER}"));
    let all = watcher::Config::default();
    // Pods of all namespaces use the nodes, whichever namespace is served.
    let (pods, pod_stream) = cached(Api::<Pod>::all(client.clone()), all.clone(), signs);
    let (nodes, node_stream) = cached(Api::<Node>::all(client.clone()), all.clone(), signs);
    let (services, service_stream) = cached(api(&client, &options), own.clone(), signs);
    let (maps, map_stream) = cached(api(&client, &options), own, signs);
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
        failures: Mutex::default(),
        unlisted,
        outage,
        told: Mutex::default(),
    });
    let reconciling = controller.run(reconcile, retry, context).for_each(async |result| {
        match result {
            // Such as a definition of the resource that is missing: no group can be told.
            Err(controller::Error::QueueError(error)) => {
                tracing::warn!("watching aggregatorgroups: {error}");
            }
            Err(error) => tracing::debug!("{error}"),
            Ok(_) => {}
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
    (changed, unlisted): (&Arc<Notify>, &Unlisted),
) -> (Store<K>, impl Future<Output = ()> + use<K>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone,
{
    let (reader, writer) = store();
    let (changed, unlisted) = (changed.clone(), unlisted.clone());
    let stream = reflector(writer, watcher(api, config).modify(slim).default_backoff());
    let kept = stream.for_each(move |event| {
        match event {
            Ok(_) => {
                locked(&unlisted).remove(&kind::<K>());
                changed.notify_one();
            }
            Err(error) => {
                tracing::warn!("watching {}: {error}", kind::<K>());
                if let watcher::Error::InitialListFailed(cause) = error {
                    let failed = Failed::new(&format!("listing {}", kind::<K>()), &cause);
                    locked(&unlisted).insert(kind::<K>(), failed);
                }
            }
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
    let held = locked(&context.failures).held(&known);
    if let Some(left) = held.left.filter(|_| held.is_all()) {
        return Ok(Next::requeue(left));
    }
    let failed = match reconcile_once(&known, &context, &held).await {
        Ok(next) => return Ok(next),
        Err(failed) => failed,
    };
    let trouble = context.failed(&known, &failed, held);
    if trouble.is_reported() {
        let key = ObjectRef::from_obj(&*known);
        tracing::warn!("{key}: {failed}");
        if failed.is_answered
            && let Err(error) = tell(&known, &context, &trouble).await
        {
            tracing::warn!("{key}: {error}");
        }
    }
    Err(failed)
}

/// Tells a group at once of a write that was refused. An API server that does not answer is told
/// of with the first write that succeeds.
async fn tell(known: &AggregatorGroup, context: &Context, trouble: &Trouble) -> Result<(), Failed> {
    let Some(mut group) = read(known, context).await? else { return Ok(()) };
    let (status, notes) = report(&group, trouble, Timestamp::now());
    write(&mut group, context, &status, &notes).await
}

async fn read(
    known: &AggregatorGroup,
    context: &Context,
) -> Result<Option<AggregatorGroup>, Failed> {
    let read = groups(&context.client, known).get_opt(&known.name_any()).await;
    read.map_err(|cause| Failed::new("reading the group", &cause))
}

async fn reconcile_once(
    known: &Arc<AggregatorGroup>,
    context: &Arc<Context>,
    held: &Held,
) -> Result<Next, Failed> {
    context.filled().await?;
    let trouble = context.trouble(known);
    let latest = context.latest(known);
    let unread = Err("the network file is not read before it is needed".to_owned());
    let decision = decided(&latest, context, unread, trouble.clone()).await?;
    let waits = decision.actions.iter().any(|action| held.has(&text(action)));
    let is_idle = decision.actions.iter().all(|action| held.has(&text(action)))
        && latest.status.as_ref() == Some(&decision.status);
    if is_idle && (waits || trouble.is_none()) {
        return Ok(requeue(&decision, held));
    }
    let Some(mut group) = read(known, context).await? else { return Ok(Next::await_change()) };
    let network = network_text(&group, context).await?;
    let decision = decided(&group, context, network.clone(), trouble.clone()).await?;
    if would_release(&group, &decision) && has_workers(&group, context).await? {
        // The cache does not show them yet; the change will trigger the next decision.
        return Ok(Next::requeue(context.options.first_retry));
    }
    write(&mut group, context, &decision.status, &decision.notes).await?;
    let waits = act(&group, context, &decision, held).await?;
    if waits {
        return Ok(requeue(&decision, held));
    }
    context.recovered(&group);
    if trouble.is_some_and(|trouble| trouble.is_reported()) && decision.is_ongoing() {
        let decision = decided(&group, context, network, None).await?;
        write(&mut group, context, &decision.status, &decision.notes).await?;
    }
    Ok(Next::requeue(decision.recheck))
}

/// Returns the time of the next decision: before that, the next try of what waits.
fn requeue(decision: &Decision, held: &Held) -> Next {
    Next::requeue(held.left.map_or(decision.recheck, |left| decision.recheck.min(left)))
}

/// Takes the actions of a decision but those that wait. Returns whether any waits.
async fn act(
    group: &AggregatorGroup,
    context: &Context,
    decision: &Decision,
    held: &Held,
) -> Result<bool, Failed> {
    let (waiting, due): (Vec<_>, Vec<_>) =
        decision.actions.iter().cloned().partition(|action| held.has(&text(action)));
    // Actions start in order; none depends on the end of an earlier one.
    let actions = due.into_iter().map(|action| {
        let (client, group) = (context.client.clone(), group.clone());
        async move {
            let taken = take(&client, &group, &action).await;
            taken.map_err(|cause| (is_answer(&cause), Failed::refused(&text(&action), &cause)))
        }
    });
    let mut taken = futures::stream::iter(actions).buffered(AT_ONCE);
    let mut refused: Option<Failed> = None;
    while let Some(done) = taken.next().await {
        match done {
            // A write that stays refused, such as an eviction, must not hold up the others.
            Err((true, failed)) => {
                refused = Some(match refused {
                    Some(first) => first.and(failed),
                    None => failed,
                });
            }
            Err((false, failed)) => return Err(failed),
            Ok(()) => {}
        }
    }
    refused.map_or(Ok(!waiting.is_empty()), Err)
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
    deciding.await.map_err(|panic| Failed::bug(&panic))
}

fn service_ref(group: &AggregatorGroup) -> ObjectRef<Service> {
    ObjectRef::new(&service_name(group)).within(&group.namespace().unwrap_or_default())
}

/// Writes a group's status and publishes its events.
async fn write(
    group: &mut AggregatorGroup,
    context: &Context,
    status: &AggregatorGroupStatus,
    notes: &[Note],
) -> Result<(), Failed> {
    let written = write_status(&context.client, group, status).await;
    written.map_err(|cause| Failed::new("writing the status", &cause))?;
    if let Some(uid) = group.uid() {
        locked(&context.written).insert(uid, Arc::new(group.clone()));
    }
    for note in notes {
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
    let Some(map) = read.map_err(|cause| Failed::new(&what(), &cause))? else {
        return Ok(Err(format!(
            "ConfigMap {} does not exist; create it with `racksum probe`'s network file",
            file.name
        )));
    };
    let text = map.data.and_then(|mut data| data.remove(&file.key));
    Ok(text.ok_or_else(|| format!("ConfigMap {} has no key {}; add it", file.name, file.key)))
}

/// Asks the API server itself whether a group has workers, by the rules of [`Members`]: the labels
/// of a group may select its own aggregators too.
async fn has_workers(group: &AggregatorGroup, context: &Context) -> Result<bool, Failed> {
    let labels = group.spec.workers.match_labels.iter();
    let selector: Vec<_> = labels.map(|(key, value)| format!("{key}={value}")).collect();
    let namespace = group.namespace().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
    let found = pods.list(&ListParams::default().labels(&selector.join(","))).await;
    let found = found.map_err(|cause| Failed::new("listing workers", &cause))?;
    let pods: Vec<_> = found.items.into_iter().map(Arc::new).collect();
    let members = Members::of(group, &context.latest_groups(), &pods);
    Ok(!members.workers.is_empty() || members.shared.is_some())
}

/// Returns the time until the next try after a failure.
fn retry(group: Arc<AggregatorGroup>, _: &Failed, context: Arc<Context>) -> Next {
    let pause = locked(&context.failures).pause(&group);
    Next::requeue(pause.unwrap_or(context.options.first_retry))
}
