//! Amounts of resources, and the sums that pods request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use racksum_placer::quantity::thousandths;

/// Amounts by resource name, in thousandths of the unit.
pub type Amounts = BTreeMap<String, i128>;

/// Returns amounts of quantities. A text that is not a quantity counts as nothing; the API server
/// accepts none.
#[must_use]
pub fn amounts(quantities: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let all = quantities.into_iter().flatten();
    all.filter_map(|(name, quantity)| Some((name.clone(), thousandths(&quantity.0)?))).collect()
}

/// Returns the amounts that the scheduler reserves for a pod: the greater of the running containers
/// together and of each initialisation step, plus the overhead.
#[must_use]
pub fn requested(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else { return Amounts::new() };
    let of = |container: &Container| requests(container.resources.as_ref());
    let mut running = Amounts::new();
    spec.containers.iter().for_each(|container| add(&mut running, &of(container)));
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        let mut step = sidecars.clone();
        add(&mut step, &of(container));
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars.clone_from(&step);
        }
        raise(&mut peak, &step);
    }
    add(&mut running, &sidecars);
    raise(&mut running, &peak);
    // Amounts of the whole pod replace those of its containers.
    running.extend(requests(spec.resources.as_ref()));
    add(&mut running, &amounts(spec.overhead.as_ref()));
    *running.entry(PODS.into()).or_default() += 1000;
    running
}

/// The resource that counts pods.
pub const PODS: &str = "pods";
/// The resource of CPU cores.
pub const CPU: &str = "cpu";
/// The resource of bytes of memory.
pub const MEMORY: &str = "memory";

/// Returns requests; where only a limit is given, the API server uses it as the request.
fn requests(resources: Option<&ResourceRequirements>) -> Amounts {
    let mut requests = amounts(resources.and_then(|resources| resources.limits.as_ref()));
    requests.extend(amounts(resources.and_then(|resources| resources.requests.as_ref())));
    requests
}

/// Adds amounts to others.
pub fn add(to: &mut Amounts, more: &Amounts) {
    more.iter().for_each(|(name, amount)| *to.entry(name.clone()).or_default() += amount);
}

/// Raises each amount to at least that of another one.
pub fn raise(to: &mut Amounts, least: &Amounts) {
    for (name, amount) in least {
        let entry = to.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

/// Returns how often `each` fits into `room`, considering the resources for which `counts` holds.
#[must_use]
pub fn times(room: &Amounts, each: &Amounts, counts: impl Fn(&str) -> bool) -> u32 {
    let asked = each.iter().filter(|(name, amount)| **amount > 0 && counts(name));
    let fits = asked.map(|(name, amount)| room.get(name).map_or(0, |room| room.max(&0) / amount));
    fits.min().map_or(u32::MAX, |fits| u32::try_from(fits).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_requests_what_the_scheduler_reserves() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "containers": [
                {"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"x/gpu": 2}}},
                {"name": "b", "resources": {"limits": {"cpu": "500m"}}},
            ],
            "initContainers": [
                {"name": "i", "resources": {"requests": {"cpu": "2"}}},
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
                {"name": "j", "resources": {"requests": {"cpu": "1"}}},
            ],
            "overhead": {"cpu": "100m"},
        }}))
        .unwrap();
        let requested = requested(&pod);
        assert_eq!(requested["cpu"], 2600);
        assert_eq!(requested["x/gpu"], 2000);
        assert_eq!(requested["pods"], 1000);
        let room = Amounts::from([("cpu".into(), 5300), ("x/gpu".into(), 9000)]);
        assert_eq!(times(&room, &requested, |name| name != PODS), 2);
        assert_eq!(times(&room, &requested, |_| true), 0);
    }
}
