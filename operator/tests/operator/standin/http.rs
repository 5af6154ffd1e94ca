//! The HTTP side of the stand-in: paths, methods, patches and watches.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::store::{Key, Kind, Part, Store};
use super::{OPERATOR, Shared, lock};

/// An answer: a code and an object.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) object: Value,
}

impl Answer {
    const fn ok(object: Value) -> Self {
        Self { code: 200, object }
    }

    pub(crate) fn status(code: u16, reason: &str, message: &str) -> Self {
        let status = if code < 300 { "Success" } else { "Failure" };
        Self {
            code,
            object: json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": status,
                "message": message, "reason": reason, "code": code,
            }),
        }
    }

    pub(crate) fn invalid(kind: &str, name: &str, why: &str) -> Self {
        Self::status(422, "Invalid", &format!("{kind} {name:?} is invalid: {why}"))
    }
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let shared = shared.clone();
        let connection = http1::Builder::new().serve_connection(
            TokioIo::new(stream),
            service_fn(move |request| answer(request, shared.clone())),
        );
        tokio::spawn(async move { drop(connection.await) });
    }
}

async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<Body>, std::io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let path = parts.uri.path().trim_end_matches('/').to_owned();
    let query: Vec<(String, String)> = parts.uri.query().map(parse_query).unwrap_or_default();
    let method = parts.method.as_str();
    if let Some(answer) = fault(&shared, method, &path)? {
        return Ok(full(&answer));
    }
    let get =
        |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let Some(target) = Target::of(&path) else {
        return Ok(full(&Answer::status(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )));
    };
    let watches = get("watch").is_some_and(|watch| watch == "true" || watch == "1");
    let bearer = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
    if bearer == Some(&format!("Bearer {OPERATOR}"))
        && let Err(answer) = authorized(&shared, &target, method, watches)
    {
        return Ok(full(&answer));
    }
    if method == "GET" && target.name.is_none() {
        let selector = get("labelSelector").unwrap_or_default();
        if watches {
            return Ok(watch(shared, target, get("resourceVersion"), selector));
        }
        return Ok(full(&list(&lock(&shared.store), &target, &selector)));
    }
    let content =
        parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let answer = {
        let mut store = lock(&shared.store);
        change(&mut store, method, &target, content, &query, &body)
    };
    shared.wake();
    let answer = answer.unwrap_or_else(|refused| refused);
    Ok(full(&answer))
}

/// Checks that the operator may make a request.
fn authorized(shared: &Shared, target: &Target, method: &str, watches: bool) -> Result<(), Answer> {
    let (api, plural, _) = target.kind.names();
    let group = api.rsplit_once('/').map_or("", |(group, _)| group);
    let resource = match &target.subresource {
        Some(subresource) => format!("{plural}/{subresource}"),
        None => plural.to_owned(),
    };
    let verb = match method {
        "GET" if watches => "watch",
        "GET" if target.name.is_none() => "list",
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        _ => "delete",
    };
    // Applying an object that does not exist creates it.
    let is_new = verb == "patch" && !lock(&shared.store).objects.contains_key(&target.key());
    for verb in std::iter::once(verb).chain(is_new.then_some("create")) {
        let right = (group.to_owned(), resource.clone(), verb.to_owned());
        // A right to objects of certain names covers neither lists nor creations.
        let covers = |names: &BTreeSet<String>| {
            let name = target.name.as_ref().filter(|_| verb != "create");
            names.is_empty() || name.is_some_and(|name| names.contains(name))
        };
        if !shared.granted.get(&right).is_some_and(covers) {
            let text = format!(
                "{resource} is forbidden: User \"racksum-operator\" cannot {verb} resource \
                 \"{resource}\" in API group \"{group}\""
            );
            return Err(Answer::status(403, "Forbidden", &text));
        }
        lock(&shared.used).insert(right);
    }
    Ok(())
}

/// Returns the answer that a test wants for a request; an error closes the connection.
fn fault(shared: &Shared, method: &str, path: &str) -> Result<Option<Answer>, std::io::Error> {
    let mut faults = lock(&shared.faults);
    if faults.is_gone {
        faults.unanswered += 1;
        shared.wake();
        return Err(std::io::Error::other("the server is gone"));
    }
    let is_it = |refusal: &&mut super::Refusal| {
        refusal.times > 0 && refusal.method == method && path.contains(&refusal.part)
    };
    Ok(faults.refusals.iter_mut().find(is_it).map(|refusal| {
        refusal.times -= 1;
        let reason = match refusal.code {
            403 => "Forbidden",
            429 => "TooManyRequests",
            _ => "InternalError",
        };
        Answer::status(refusal.code, reason, &refusal.message)
    }))
}

/// The object or the list that a path names.
#[derive(Debug, Clone)]
struct Target {
    kind: Kind,
    namespace: Option<String>,
    name: Option<String>,
    subresource: Option<String>,
}

impl Target {
    fn of(path: &str) -> Option<Self> {
        let mut parts = path.trim_start_matches('/').split('/');
        let api = match parts.next()? {
            "api" => parts.next()?.to_owned(),
            _ => format!("{}/{}", parts.next()?, parts.next()?),
        };
        let mut next = parts.next()?;
        let mut namespace = None;
        if next == "namespaces" {
            namespace = Some(parts.next()?.to_owned());
            next = parts.next()?;
        }
        let kind = Kind::ALL.into_iter().find(|kind| {
            let names = kind.names();
            names.0 == api && names.1 == next
        })?;
        let name = parts.next().map(ToOwned::to_owned);
        Some(Self { kind, namespace, name, subresource: parts.next().map(ToOwned::to_owned) })
    }

    fn key(&self) -> Key {
        let name = self.name.clone().unwrap_or_default();
        (self.kind, self.namespace.clone().unwrap_or_default(), name)
    }

    fn covers(&self, kind: Kind, namespace: &str) -> bool {
        self.kind == kind && self.namespace.as_ref().is_none_or(|one| one == namespace)
    }
}

fn change(
    store: &mut Store,
    method: &str,
    target: &Target,
    content: &str,
    query: &[(String, String)],
    body: &[u8],
) -> Result<Answer, Answer> {
    let key = target.key();
    let parsed = || {
        let parsed = serde_json::from_slice::<Value>(body);
        parsed.map_err(|error| Answer::status(400, "BadRequest", &error.to_string()))
    };
    let get =
        |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let part =
        if target.subresource.as_deref() == Some("status") { Part::Status } else { Part::Main };
    match (method, target.subresource.as_deref()) {
        ("GET", _) => {
            let found = store.objects.get(&key).cloned();
            found.map(Answer::ok).ok_or_else(|| store.not_found(&key))
        }
        ("POST", Some("eviction")) => {
            let eviction = parsed()?;
            store.writes.push(eviction.clone());
            let uid = eviction["deleteOptions"]["preconditions"]["uid"].as_str();
            assert!(uid.is_some(), "the operator names the pod that it evicts: {eviction}");
            store.delete(&key, uid)?;
            Ok(Answer::status(201, "", ""))
        }
        ("POST", None) => {
            let object = parsed()?;
            let created = store.create(target.kind, &key.1, object.clone())?;
            store.writes.push(typed(target.kind, object));
            Ok(Answer { code: 201, object: created })
        }
        ("PUT", _) => {
            let object = parsed()?;
            let updated = store.update(&key, part, object.clone())?;
            store.writes.push(typed(target.kind, object));
            Ok(Answer::ok(updated))
        }
        ("PATCH", _) => {
            let patch = parsed()?;
            let patched = match content {
                "application/apply-patch+yaml" => {
                    let manager = get("fieldManager").unwrap_or_default();
                    if patch["apiVersion"].is_null() || manager.is_empty() {
                        let text = "apply needs apiVersion, kind and a field manager";
                        return Err(Answer::status(400, "BadRequest", text));
                    }
                    store.writes.push(typed(target.kind, patch.clone()));
                    store.apply(&key, manager, get("force") == Some("true"), &patch)?
                }
                "application/json-patch+json" | "application/merge-patch+json" => {
                    let Some(old) = store.objects.get(&key) else {
                        return Err(store.not_found(&key));
                    };
                    let mut next = old.clone();
                    if content.starts_with("application/json-patch") {
                        let operations: json_patch::Patch = serde_json::from_value(patch).unwrap();
                        json_patch::patch(&mut next, &operations).map_err(|_| {
                            let text =
                                "the server rejected our request due to an error in our request";
                            Answer::status(422, "Invalid", text)
                        })?;
                    } else {
                        json_patch::merge(&mut next, &patch);
                    }
                    let updated = store.update(&key, part, next)?;
                    store.writes.push(updated.clone());
                    updated
                }
                other => {
                    let text = format!("the body of the request was in an unknown format: {other}");
                    return Err(Answer::status(415, "UnsupportedMediaType", &text));
                }
            };
            Ok(Answer::ok(patched))
        }
        ("DELETE", None) => {
            let options = if body.is_empty() { Value::Null } else { parsed()? };
            let uid = options["preconditions"]["uid"].as_str();
            store.delete(&key, uid).map(Answer::ok)
        }
        _ => Err(Answer::status(405, "MethodNotAllowed", "the server does not allow this method")),
    }
}

/// Returns an object with its type, which bodies of typed requests may lack.
pub(crate) fn typed(kind: Kind, mut object: Value) -> Value {
    let (api, _, name) = kind.names();
    object["apiVersion"] = json!(api);
    object["kind"] = json!(name);
    object
}

fn list(store: &Store, target: &Target, selector: &str) -> Answer {
    let (api, _, kind) = target.kind.names();
    let items = store.objects.iter().filter(|((kind, namespace, _), object)| {
        target.covers(*kind, namespace) && selects(selector, object)
    });
    let items: Vec<_> = items.map(|(_, object)| object.clone()).collect();
    Answer::ok(json!({
        "apiVersion": api, "kind": format!("{kind}List"),
        "metadata": {"resourceVersion": store.version.to_string()}, "items": items,
    }))
}

fn selects(selector: &str, object: &Value) -> bool {
    let mut wanted = selector.split(',').filter(|one| !one.is_empty());
    wanted.all(|one| {
        let (key, value) = one.split_once('=').unwrap();
        object["metadata"]["labels"][key] == *value
    })
}

/// Returns the stream of changes after a version: bookmarks while nothing changes, an end after a
/// while, and 410 for a version that is gone.
fn watch(
    shared: Arc<Shared>,
    target: Target,
    from: Option<String>,
    selector: String,
) -> Response<Body> {
    let from: u64 = from.and_then(|from| from.parse().ok()).unwrap_or(0);
    let receiver = shared.changed.subscribe();
    let breaks = lock(&shared.faults).breaks;
    let state = (shared, receiver, from, false);
    let frames = stream::unfold(state, move |(shared, mut receiver, mut from, is_over)| {
        let (target, selector) = (target.clone(), selector.clone());
        async move {
            if is_over {
                return None;
            }
            loop {
                let (is_gone, is_broken, is_held) = {
                    let faults = lock(&shared.faults);
                    (faults.is_gone, faults.breaks != breaks, faults.holds_events)
                };
                if is_gone {
                    let error = Err(std::io::Error::other("the connection broke"));
                    return Some((error, (shared, receiver, from, true)));
                }
                if is_broken {
                    return None;
                }
                let (text, is_over) = {
                    let store = lock(&shared.store);
                    if is_held {
                        (String::new(), false)
                    } else if from < store.compacted {
                        (line("ERROR", &gone(from, &store)), true)
                    } else {
                        let text = changes(&store, &target, &selector, from);
                        from = store.version;
                        (text, false)
                    }
                };
                if !text.is_empty() {
                    return Some((
                        Ok(Frame::data(Bytes::from(text))),
                        (shared, receiver, from, is_over),
                    ));
                }
                if tokio::time::timeout(BOOKMARK, receiver.changed()).await.is_err() {
                    let (api, _, kind) = target.kind.names();
                    let version = json!({"resourceVersion": from.to_string()});
                    let bookmark = json!({"apiVersion": api, "kind": kind, "metadata": version});
                    let frame = Frame::data(Bytes::from(line("BOOKMARK", &bookmark)));
                    return Some((Ok(frame), (shared, receiver, from, false)));
                }
            }
        }
    });
    Response::new(BodyExt::boxed_unsync(StreamBody::new(frames.boxed())))
}

/// The time without a change after which a watch gets a bookmark.
const BOOKMARK: Duration = Duration::from_millis(300);

fn gone(from: u64, store: &Store) -> Value {
    let text = format!("too old resource version: {from} ({})", store.compacted);
    Answer::status(410, "Expired", &text).object
}

fn changes(store: &Store, target: &Target, selector: &str, from: u64) -> String {
    let changes = store
        .history
        .iter()
        .filter(|change| change.version > from && target.covers(change.kind, &change.namespace));
    let lines = changes.filter_map(|change| {
        let is_in = selects(selector, &change.object);
        let was_in = change.before.as_ref().is_some_and(|before| selects(selector, before));
        let event = match (change.event, was_in, is_in) {
            (_, false, false) => return None,
            ("DELETED", ..) | (_, true, false) => "DELETED",
            (_, false, true) => "ADDED",
            _ => "MODIFIED",
        };
        Some(line(event, &change.object))
    });
    lines.collect()
}

fn line(event: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": event, "object": object}))
}

fn full(answer: &Answer) -> Response<Body> {
    let body = Full::from(answer.object.to_string());
    let mut response =
        Response::new(BodyExt::boxed_unsync(body.map_err(|never: Infallible| match never {})));
    *response.status_mut() = hyper::StatusCode::from_u16(answer.code).unwrap();
    response.headers_mut().insert("content-type", "application/json".parse().unwrap());
    response
}

/// Splits a query, and decodes its percent signs.
fn parse_query(query: &str) -> Vec<(String, String)> {
    let decode = |text: &str| {
        let mut bytes = vec![];
        let mut rest = text.as_bytes();
        while let Some((&first, tail)) = rest.split_first() {
            let hex = tail
                .get(..2)
                .filter(|_| first == b'%')
                .and_then(|hex| std::str::from_utf8(hex).ok());
            if let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                bytes.push(byte);
                rest = &tail[2..];
            } else {
                bytes.push(if first == b'+' { b' ' } else { first });
                rest = tail;
            }
        }
        String::from_utf8(bytes).unwrap()
    };
    query
        .split('&')
        .filter(|one| !one.is_empty())
        .map(|one| {
            let (key, value) = one.split_once('=').unwrap_or((one, ""));
            (decode(key), decode(value))
        })
        .collect()
}
