//! The writes of the operator: how each action becomes a request, and what its failure means.

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Status;
use kube::{Api, Client, Config, Error, Resource, ResourceExt};
use serde_json::json;

use crate::crd::{AggregatorGroup, AggregatorGroupStatus};
use crate::decide::Action;
use crate::objects::{FINALIZER, MANAGER, config_map_name};

/// Returns a client that leaves all retries to the operator.
///
/// The default of kube 5.0 repeats a request for minutes that is answered with 429, 503 or 504. No
/// group would be served meanwhile, and nobody told the reason: the API server answers 429 to each
/// eviction that a disruption budget forbids.
///
/// # Errors
/// If the configuration is wrong.
pub fn client(mut config: Config) -> Result<Client, Error> {
    config.default_retry = false;
    Client::try_from(config)
}

/// Writes a group's status, if it differs from the one that the group has.
///
/// The write names the resource version, so it fails if the group has changed since it was read.
/// Afterwards the group has the version of the written one.
///
/// # Errors
/// The failure of the request.
pub async fn write_status(
    client: &Client,
    group: &mut AggregatorGroup,
    status: &AggregatorGroupStatus,
) -> Result<(), Error> {
    if group.status.as_ref() == Some(status) {
        return Ok(());
    }
    let mut next = group.clone();
    next.status = Some(status.clone());
    let name = group.name_any();
    let written = groups(client, group).replace_status(&name, &written_by(), &next).await?;
    *group = written;
    Ok(())
}

/// Takes one action.
///
/// # Errors
/// The failure of the request. Requests whose effect is there already do not fail.
pub async fn take(client: &Client, group: &AggregatorGroup, action: &Action) -> Result<(), Error> {
    let namespace = group.namespace().unwrap_or_default();
    let pods = || Api::<Pod>::namespaced(client.clone(), &namespace);
    let maps = || Api::<ConfigMap>::namespaced(client.clone(), &namespace);
    // Without force: an object of the same name that belongs to others is a conflict.
    let apply = PatchParams::apply(MANAGER);
    match action {
        Action::AddFinalizer => set_finalizer(client, group, true).await,
        Action::RemoveFinalizer => set_finalizer(client, group, false).await,
        Action::ApplyService(service) => {
            let services = Api::<Service>::namespaced(client.clone(), &namespace);
            services.patch(&service.name_any(), &apply, &Patch::Apply(service)).await.map(drop)
        }
        Action::ApplyConfigMap(map) => {
            maps().patch(&map.name_any(), &apply, &Patch::Apply(map)).await.map(drop)
        }
        Action::DeleteConfigMap => {
            let deleted = maps().delete(&config_map_name(group), &DeleteParams::default()).await;
            unless(deleted.map(drop), &[NOT_FOUND])
        }
        // A pod is created, not applied: a repeated application of a pod that has been placed in
        // the meantime would add its gate again, which the API server refuses.
        Action::CreatePod(pod) => {
            unless(pods().create(&written_by(), pod).await.map(drop), &[CONFLICT])
        }
        Action::PatchPod { name, patch } => {
            let params = PatchParams { field_manager: Some(MANAGER.into()), ..<_>::default() };
            let patch = Patch::Json::<()>(patch.clone());
            unless(pods().patch(name, &params, &patch).await.map(drop), &[NOT_FOUND])
        }
        Action::DeletePod { name, uid } => {
            let deleted = pods().delete(name, &only(uid)).await.map(drop);
            unless(deleted, &[NOT_FOUND, CONFLICT])
        }
        Action::EvictPod { name, uid } => {
            unless(evict(&pods(), name, uid).await, &[NOT_FOUND, CONFLICT])
        }
    }
}

/// Returns an action in words, for messages about its failure.
#[must_use]
pub fn text(action: &Action) -> String {
    match action {
        Action::AddFinalizer => "adding the finalizer".into(),
        Action::RemoveFinalizer => "removing the finalizer".into(),
        Action::ApplyService(service) => format!("applying Service {}", service.name_any()),
        Action::ApplyConfigMap(map) => format!("applying ConfigMap {}", map.name_any()),
        Action::DeleteConfigMap => "deleting the ConfigMap".into(),
        Action::CreatePod(pod) => format!("creating pod {}", pod.name_any()),
        Action::PatchPod { name, .. } => format!("placing pod {name}"),
        Action::DeletePod { name, .. } => format!("deleting pod {name}"),
        Action::EvictPod { name, .. } => format!("evicting pod {name}"),
    }
}

/// Returns whether a request failed because the object has changed since it was read.
#[must_use]
pub fn is_conflict(error: &Error) -> bool {
    match error {
        // A failed `test` of a JSON Patch has a message of its own, unlike an invalid object.
        Error::Api(status) => {
            status.code == CONFLICT
                || (status.code == UNPROCESSABLE && !status.message.contains(" is invalid: "))
        }
        _ => false,
    }
}

/// Returns whether the API server answered a request that failed.
#[must_use]
pub const fn is_answer(error: &Error) -> bool {
    matches!(error, Error::Api(_))
}

/// Evicts one pod and not a successor of the same name.
///
/// [`Api::evict`] of kube 5.0 misspells the field of the options, so the API server would ignore
/// the UID.
async fn evict(pods: &Api<Pod>, name: &str, uid: &str) -> Result<(), Error> {
    let preconditions = meta::v1::Preconditions { uid: Some(uid.into()), resource_version: None };
    let options = meta::v1::DeleteOptions { preconditions: Some(preconditions), ..<_>::default() };
    let eviction = Eviction {
        metadata: ObjectMeta { name: Some(name.into()), ..<_>::default() },
        delete_options: Some(options),
    };
    let by = written_by();
    pods.create_subresource::<_, Status>("eviction", name, &by, &eviction).await.map(drop)
}

async fn set_finalizer(
    client: &Client,
    group: &AggregatorGroup,
    is_set: bool,
) -> Result<(), Error> {
    let others = group.finalizers().iter().filter(|one| *one != FINALIZER).cloned();
    let finalizers: Vec<_> = others.chain(is_set.then(|| FINALIZER.into())).collect();
    let version = group.meta().resource_version.as_ref();
    let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": version}});
    let params = PatchParams { field_manager: Some(MANAGER.into()), ..<_>::default() };
    let patched =
        groups(client, group).patch(&group.name_any(), &params, &Patch::Merge(patch)).await;
    unless(patched.map(drop), &[NOT_FOUND])
}

/// Returns the API of the groups in the namespace of this one.
#[must_use]
pub fn groups(client: &Client, group: &AggregatorGroup) -> Api<AggregatorGroup> {
    Api::namespaced(client.clone(), &group.namespace().unwrap_or_default())
}

fn written_by() -> PostParams {
    PostParams { field_manager: Some(MANAGER.into()), ..<_>::default() }
}

/// Returns the parameters to delete one object and not a successor of the same name.
fn only(uid: &str) -> DeleteParams {
    let preconditions = Preconditions { uid: Some(uid.into()), resource_version: None };
    DeleteParams { preconditions: Some(preconditions), ..<_>::default() }
}

/// Returns success instead of an answer with one of these codes.
fn unless(done: Result<(), Error>, codes: &[u16]) -> Result<(), Error> {
    match done {
        Err(Error::Api(status)) if codes.contains(&status.code) => Ok(()),
        done => done,
    }
}

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
const UNPROCESSABLE: u16 = 422;
