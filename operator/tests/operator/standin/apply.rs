//! Server-side apply, as far as the operator uses it: maps are merged, lists and scalars replaced.

use serde_json::{Map, Value};

/// Returns an object with the fields that a manager applies, and without those that it applied
/// before and now leaves out.
///
/// # Errors
/// The API server's text if another manager applied a field with another value.
pub(crate) fn apply(
    base: &Value,
    last: Option<&Value>,
    wanted: &Value,
    others: &[(String, Value)],
    is_forced: bool,
) -> Result<Value, String> {
    if !is_forced {
        for (manager, fields) in others {
            if let Some(path) = conflict(fields, wanted, "") {
                return Err(format!(
                    "Apply failed with 1 conflict: conflict with {manager:?}: {path}"
                ));
            }
        }
    }
    let mut next = base.clone();
    if let Some(last) = last {
        remove(&mut next, last, wanted, others.iter().map(|(_, fields)| fields).collect());
    }
    merge(&mut next, wanted);
    Ok(next)
}

/// Returns the first field that two managers give different values.
fn conflict(theirs: &Value, wanted: &Value, path: &str) -> Option<String> {
    match (theirs, wanted) {
        (Value::Object(theirs), Value::Object(wanted)) => wanted.iter().find_map(|(key, value)| {
            let known = matches!(key.as_str(), "apiVersion" | "kind" | "name" | "namespace");
            let theirs = theirs.get(key).filter(|_| !known)?;
            conflict(theirs, value, &format!("{path}.{key}"))
        }),
        _ => (theirs != wanted).then(|| path.to_owned()),
    }
}

/// Removes the leaves of `last` that `wanted` lacks and nobody else applied.
fn remove(object: &mut Value, last: &Value, wanted: &Value, others: Vec<&Value>) {
    let (Value::Object(fields), Value::Object(last)) = (object, last) else { return };
    let empty = Value::Object(Map::new());
    for (key, last) in last {
        let others: Vec<_> = others.iter().filter_map(|other| other.get(key)).collect();
        match wanted.get(key) {
            None if others.is_empty() && !last.is_object() => _ = fields.remove(key),
            wanted => {
                if let Some(field) = fields.get_mut(key) {
                    remove(field, last, wanted.unwrap_or(&empty), others);
                }
            }
        }
    }
}

fn merge(object: &mut Value, wanted: &Value) {
    match (object, wanted) {
        (Value::Object(fields), Value::Object(wanted)) => {
            for (key, value) in wanted {
                merge(fields.entry(key).or_insert(Value::Null), value);
            }
        }
        (object, wanted) => *object = wanted.clone(),
    }
}
