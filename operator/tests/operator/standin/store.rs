//! The objects of the stand-in, their versions, and the history that watches read.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::apply::apply;
use super::http::Answer;
use super::pods::check_update;

/// The kinds that the stand-in serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Pod,
    Node,
    Service,
    ConfigMap,
    Event,
    Lease,
    Group,
}

impl Kind {
    pub(crate) const ALL: [Self; 7] = [
        Self::Pod,
        Self::Node,
        Self::Service,
        Self::ConfigMap,
        Self::Event,
        Self::Lease,
        Self::Group,
    ];

    /// Returns the API version, the plural name and the kind.
    pub(crate) const fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Pod => ("v1", "pods", "Pod"),
            Self::Node => ("v1", "nodes", "Node"),
            Self::Service => ("v1", "services", "Service"),
            Self::ConfigMap => ("v1", "configmaps", "ConfigMap"),
            Self::Event => ("events.k8s.io/v1", "events", "Event"),
            Self::Lease => ("coordination.k8s.io/v1", "leases", "Lease"),
            Self::Group => ("racksum.dev/v1alpha1", "aggregatorgroups", "AggregatorGroup"),
        }
    }

    /// Returns whether writes to `status` and to the rest of an object are separate.
    const fn has_status(self) -> bool {
        matches!(self, Self::Pod | Self::Node | Self::Service | Self::Group)
    }
}

/// The name of an object: its kind, namespace and name.
pub(crate) type Key = (Kind, String, String);

/// A change that watches report.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) event: &'static str,
    pub(crate) kind: Kind,
    pub(crate) namespace: String,
    pub(crate) object: Value,
    /// The object before, by which a selector may have matched.
    pub(crate) before: Option<Value>,
}

/// All objects.
#[derive(Debug, Default)]
pub(crate) struct Store {
    pub(crate) objects: BTreeMap<Key, Value>,
    pub(crate) version: u64,
    pub(crate) history: Vec<Change>,
    /// Versions up to this one can no longer be watched from.
    pub(crate) compacted: u64,
    /// The objects that clients sent and, after patches, what became of them.
    pub(crate) writes: Vec<Value>,
    /// The fields that each manager applied.
    pub(crate) applied: BTreeMap<(Key, String), Value>,
    uids: u64,
}

/// How an object is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Everything but the status.
    Main,
    /// The status.
    Status,
}

impl Store {
    pub(crate) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<&Value> {
        self.objects.get(&(kind, namespace.into(), name.into()))
    }

    pub(crate) fn list(&self, kind: Kind) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |(key, _)| key.0 == kind).map(|(_, object)| object)
    }

    /// Forgets the history, so that watches from an old version get 410.
    pub(crate) fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
    }

    pub(crate) fn create(
        &mut self,
        kind: Kind,
        namespace: &str,
        mut object: Value,
    ) -> Result<Value, Answer> {
        let (api, plural, name_of_kind) = kind.names();
        let meta = &mut object["metadata"];
        let name = meta["name"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() || name.len() > 253 {
            return Err(Answer::invalid(name_of_kind, &name, "metadata.name: Required value"));
        }
        check_names(kind, &name, &object["spec"])
            .and_then(|()| check_note(kind, &object))
            .map_err(|why| Answer::invalid(name_of_kind, &name, &why))?;
        let meta = &mut object["metadata"];
        let key = (kind, namespace.to_owned(), name.clone());
        if self.objects.contains_key(&key) {
            let text = format!("{plural} {name:?} already exists");
            return Err(Answer::status(409, "AlreadyExists", &text));
        }
        if meta["resourceVersion"].is_string() {
            return Err(Answer::status(
                400,
                "BadRequest",
                "resourceVersion should not be set on objects to be created",
            ));
        }
        self.uids += 1;
        meta["uid"] = json!(format!("00000000-0000-0000-0000-{:012}", self.uids));
        meta["creationTimestamp"] = json!("2026-11-29T00:00:00Z");
        meta["generation"] = json!(1);
        if !matches!(kind, Kind::Node) {
            meta["namespace"] = json!(namespace);
        }
        object["apiVersion"] = json!(api);
        object["kind"] = json!(name_of_kind);
        if kind == Kind::Group {
            object.as_object_mut().unwrap().remove("status");
        }
        if kind == Kind::Pod && object["status"]["phase"].is_null() {
            object["status"]["phase"] = json!("Pending");
        }
        Ok(self.put("ADDED", key, object))
    }

    /// Replaces the part of an object that a request may change.
    pub(crate) fn update(
        &mut self,
        key: &Key,
        part: Part,
        mut next: Value,
    ) -> Result<Value, Answer> {
        let Some(old) = self.objects.get(key).cloned() else { return Err(self.not_found(key)) };
        let version = &next["metadata"]["resourceVersion"];
        if !version.is_null() && *version != old["metadata"]["resourceVersion"] {
            let (_, plural, _) = key.0.names();
            let text = format!(
                "Operation cannot be fulfilled on {plural} {:?}: the object has been modified; \
                 please apply your changes to the latest version and try again",
                key.2
            );
            return Err(Answer::status(409, "Conflict", &text));
        }
        if key.0 == Kind::Lease && version.is_null() {
            return Err(Answer::invalid(
                "Lease",
                &key.2,
                "metadata.resourceVersion: Invalid value: \"\": must be specified for an update",
            ));
        }
        if key.0.has_status() {
            match part {
                Part::Status => {
                    let status = next["status"].take();
                    next = old.clone();
                    next["status"] = status;
                }
                Part::Main => next["status"] = old["status"].clone(),
            }
        }
        for field in ["uid", "creationTimestamp", "deletionTimestamp", "namespace", "name"] {
            next["metadata"][field] = old["metadata"][field].clone();
        }
        next["metadata"].as_object_mut().unwrap().retain(|_, value| !value.is_null());
        if key.0 == Kind::Pod && part == Part::Main {
            check_update(&old, &next).map_err(|why| Answer::invalid("Pod", &key.2, &why))?;
        }
        if old["spec"] != next["spec"] {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(0);
            next["metadata"]["generation"] = json!(generation + 1);
        } else {
            next["metadata"]["generation"] = old["metadata"]["generation"].clone();
        }
        next["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
        if next == old {
            return Ok(old);
        }
        let is_gone = !next["metadata"]["deletionTimestamp"].is_null() && !has_finalizers(&next);
        if is_gone {
            return Ok(self.remove(key));
        }
        Ok(self.put("MODIFIED", key.clone(), next))
    }

    /// Applies the configuration of a manager (server-side apply).
    pub(crate) fn apply(
        &mut self,
        key: &Key,
        manager: &str,
        is_forced: bool,
        wanted: &Value,
    ) -> Result<Value, Answer> {
        let others = self.applied.iter().filter(|((one, other), _)| one == key && other != manager);
        let others: Vec<_> =
            others.map(|((_, other), fields)| (other.clone(), fields.clone())).collect();
        let last = self.applied.get(&(key.clone(), manager.to_owned())).cloned();
        let old = self.objects.get(key).cloned();
        let base = old.clone().unwrap_or_else(|| json!({"metadata": {"name": key.2}}));
        let next = apply(&base, last.as_ref(), wanted, &others, is_forced)
            .map_err(|text| Answer::status(409, "Conflict", &text))?;
        let done = match old {
            Some(_) => self.update(key, Part::Main, next)?,
            None => self.create(key.0, &key.1, next)?,
        };
        self.applied.insert((key.clone(), manager.to_owned()), wanted.clone());
        Ok(done)
    }

    /// Deletes an object, or marks it if it has finalizers or, for a pod, runs.
    pub(crate) fn delete(&mut self, key: &Key, uid: Option<&str>) -> Result<Value, Answer> {
        let Some(mut object) = self.objects.get(key).cloned() else {
            return Err(self.not_found(key));
        };
        if let Some(uid) = uid.filter(|uid| object["metadata"]["uid"] != **uid) {
            let text = format!(
                "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                object["metadata"]["uid"].as_str().unwrap_or_default()
            );
            return Err(Answer::status(409, "Conflict", &text));
        }
        let runs = key.0 == Kind::Pod && object["spec"]["nodeName"].is_string();
        if has_finalizers(&object) || runs {
            if object["metadata"]["deletionTimestamp"].is_null() {
                object["metadata"]["deletionTimestamp"] = json!("2026-11-29T00:01:00Z");
                let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
                object["metadata"]["generation"] = json!(generation + 1);
                object = self.put("MODIFIED", key.clone(), object);
            }
            return Ok(object);
        }
        Ok(self.remove(key))
    }

    /// Removes an object, and those that it controls.
    pub(crate) fn remove(&mut self, key: &Key) -> Value {
        let object = self.objects.remove(key).unwrap_or_default();
        self.version += 1;
        let mut last = object.clone();
        last["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.note("DELETED", key, last.clone(), Some(object.clone()));
        self.applied.retain(|(one, _), _| one != key);
        let is_owned = |one: &Value| {
            let owners = one["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            owners.into_iter().any(|owner| owner["uid"] == object["metadata"]["uid"])
        };
        let owned: Vec<_> = self
            .objects
            .iter()
            .filter(|(_, one)| is_owned(one))
            .map(|(key, _)| key.clone())
            .collect();
        for key in owned {
            drop(self.delete(&key, None));
        }
        last
    }

    fn put(&mut self, event: &'static str, key: Key, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let before = self.objects.insert(key.clone(), object.clone());
        self.note(event, &key, object.clone(), before);
        object
    }

    fn note(&mut self, event: &'static str, key: &Key, object: Value, before: Option<Value>) {
        let change = Change {
            version: self.version,
            event,
            kind: key.0,
            namespace: key.1.clone(),
            object,
            before,
        };
        self.history.push(change);
    }

    pub(crate) fn not_found(&self, key: &Key) -> Answer {
        let (_, plural, _) = key.0.names();
        Answer::status(404, "NotFound", &format!("{plural} {:?} not found", key.2))
    }

    /// Changes an object as a component of Kubernetes, without checks.
    pub(crate) fn edit(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) {
        let key = (kind, namespace.to_owned(), name.to_owned());
        let mut object = self.objects[&key].clone();
        change(&mut object);
        if object != self.objects[&key] {
            self.put("MODIFIED", key, object);
        }
    }
}

/// Checks the names that must be labels of DNS.
fn check_names(kind: Kind, name: &str, spec: &Value) -> Result<(), String> {
    let is_label = |name: &str| {
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        name.len() <= 63
            && name.bytes().all(|byte| is_inner(byte) || byte == b'-')
            && [name.bytes().next(), name.bytes().last()]
                .iter()
                .all(|end| end.is_some_and(is_inner))
    };
    let begins_with_letter = name.starts_with(|first: char| first.is_ascii_lowercase());
    if kind == Kind::Service && !(is_label(name) && begins_with_letter) {
        return Err(format!(
            "metadata.name: Invalid value: {name:?}: a DNS-1035 label must consist of lower case \
             alphanumeric characters or '-', start with an alphabetic character, and end with an \
             alphanumeric character"
        ));
    }
    for field in ["hostname", "subdomain"].iter().filter(|_| kind == Kind::Pod) {
        if let Some(label) = spec[field].as_str().filter(|label| !is_label(label)) {
            return Err(format!(
                "spec.{field}: Invalid value: {label:?}: a lowercase RFC 1123 label must consist \
                 of lower case alphanumeric characters or '-'"
            ));
        }
    }
    Ok(())
}

/// Checks the size of an event's note.
fn check_note(kind: Kind, object: &Value) -> Result<(), String> {
    let length = object["note"].as_str().map_or(0, str::len);
    if kind == Kind::Event && length > 1024 {
        return Err("note: Invalid value: can have at most 1024 characters".into());
    }
    Ok(())
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty())
}
