//! The changes of a pod that the API server accepts.

use serde_json::{Value, json};

/// Checks an update of a pod's main part.
///
/// # Errors
/// The text of the API server's own validation.
pub(crate) fn check_update(old: &Value, new: &Value) -> Result<(), String> {
    let (old, new) = (&old["spec"], &new["spec"]);
    check_gates(old, new)?;
    let mut rest = new.clone();
    rest["schedulingGates"] = old["schedulingGates"].clone();
    if is_gated(old) {
        check_selector(old, new)?;
        check_affinity(&old["affinity"]["nodeAffinity"], &new["affinity"]["nodeAffinity"])?;
        rest["nodeSelector"] = old["nodeSelector"].clone();
        if !new["affinity"]["nodeAffinity"].is_null() {
            let mut affinity = new["affinity"].clone();
            affinity["nodeAffinity"] = old["affinity"]["nodeAffinity"].clone();
            rest["affinity"] = affinity;
        }
    }
    // Tolerations may be added at any time, and images may change.
    rest["tolerations"] = old["tolerations"].clone();
    if without_nulls(&rest) != without_nulls(old) {
        return Err("spec: Forbidden: pod updates may not change fields other than \
             `spec.containers[*].image`,`spec.initContainers[*].image`,\
             `spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
             tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was \
             previously negative)"
            .into());
    }
    Ok(())
}

fn is_gated(spec: &Value) -> bool {
    spec["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty())
}

fn check_gates(old: &Value, new: &Value) -> Result<(), String> {
    let gates = |spec: &Value| spec["schedulingGates"].as_array().cloned().unwrap_or_default();
    let old = gates(old);
    for (index, gate) in gates(new).iter().enumerate() {
        if !old.iter().any(|one| one["name"] == gate["name"]) {
            return Err(format!(
                "spec.schedulingGates[{index}].name: Forbidden: only deletion is allowed, but \
                 found new scheduling gate '{}'",
                gate["name"].as_str().unwrap_or_default()
            ));
        }
    }
    Ok(())
}

fn check_selector(old: &Value, new: &Value) -> Result<(), String> {
    let mut old = old["nodeSelector"].as_object().into_iter().flatten();
    if old.any(|(key, value)| new["nodeSelector"][key] != *value) {
        let text = "only additions to spec.nodeSelector are allowed (no mutations or deletions)";
        return Err(format!("spec.nodeSelector: Invalid value: {}: {text}", new["nodeSelector"]));
    }
    Ok(())
}

fn check_affinity(old: &Value, new: &Value) -> Result<(), String> {
    const PATH: &str = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.\
                        nodeSelectorTerms";
    let terms = |affinity: &Value| {
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
        required["nodeSelectorTerms"].as_array().cloned().unwrap_or_default()
    };
    let (old, new) = (terms(old), terms(new));
    if old.is_empty() {
        return Ok(());
    }
    if old.len() != new.len() {
        return Err(format!(
            "{PATH}: Invalid value: {}: no additions/deletions to non-empty NodeSelectorTerms list \
             are allowed",
            json!(new)
        ));
    }
    for (index, (old, new)) in old.iter().zip(&new).enumerate() {
        let list = |term: &Value, name: &str| term[name].as_array().cloned().unwrap_or_default();
        let is_kept = |name: &str| list(new, name).starts_with(&list(old, name));
        let is_empty = |term: &Value| {
            list(term, "matchExpressions").is_empty() && list(term, "matchFields").is_empty()
        };
        let is_narrower = is_kept("matchExpressions") && is_kept("matchFields");
        if !is_narrower || (is_empty(old) && !is_empty(new)) {
            return Err(format!(
                "{PATH}[{index}]: Invalid value: {new}: only additions are allowed (no mutations \
                 or deletions)"
            ));
        }
    }
    Ok(())
}

/// Returns a value without nulls and without objects and lists that are empty.
fn without_nulls(value: &Value) -> Value {
    let is_something = |value: &Value| match value {
        Value::Null => false,
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    match value {
        Value::Object(map) => {
            let fields = map.iter().map(|(key, value)| (key.clone(), without_nulls(value)));
            fields.filter(|(_, value)| is_something(value)).collect()
        }
        Value::Array(list) => list.iter().map(without_nulls).collect(),
        value => value.clone(),
    }
}
