//! Amounts of resources: quantities of the API as integers, and the sums that pods request.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Amounts by resource name, in thousandths of the unit.
pub type Amounts = BTreeMap<String, i128>;

/// Returns a quantity in thousandths, rounded up, or `None` if the text is not a quantity.
#[must_use]
pub fn thousandths(quantity: &Quantity) -> Option<i128> {
    let text = quantity.0.trim();
    let end = text.find(|c: char| !matches!(c, '0'..='9' | '.' | '+' | '-')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (mut numerator, mut denominator) = decimal(number)?;
    match suffix {
        "" => {}
        "n" => denominator = denominator.checked_mul(1_000_000_000)?,
        "u" => denominator = denominator.checked_mul(1_000_000)?,
        "m" => denominator = denominator.checked_mul(1000)?,
        "k" => numerator = numerator.checked_mul(1000)?,
        "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" => {
            let exponent = 1 + u32::try_from("KMGTPE".find(&suffix[..1])?).ok()?;
            numerator = numerator.checked_mul(1024i128.pow(exponent))?;
        }
        "M" | "G" | "T" | "P" | "E" => {
            let exponent = 2 + u32::try_from("MGTPE".find(suffix)?).ok()?;
            numerator = numerator.checked_mul(1000i128.pow(exponent))?;
        }
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10i128.checked_pow(exponent.unsigned_abs())?;
            let side = if exponent < 0 { &mut denominator } else { &mut numerator };
            *side = side.checked_mul(power)?;
        }
    }
    let scaled = numerator.checked_mul(1000)?;
    Some(scaled.div_euclid(denominator) + i128::from(scaled.rem_euclid(denominator) > 0))
}

/// Returns a decimal number as a fraction.
fn decimal(number: &str) -> Option<(i128, i128)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    Some((digits, 10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?))
}

/// Returns amounts of quantities. A text that is not a quantity counts as nothing; the API server
/// accepts none.
#[must_use]
pub fn amounts(quantities: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let all = quantities.into_iter().flatten();
    all.filter_map(|(name, quantity)| Some((name.clone(), thousandths(quantity)?))).collect()
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
    fn quantities_of_all_forms_are_read() {
        let read = |text: &str| thousandths(&Quantity(text.into()));
        for (text, expected) in [
            ("2", 2000),
            ("500m", 500),
            ("0.5", 500),
            ("1.5Gi", 1_610_612_736_000),
            ("1e3", 1_000_000),
            ("12E", 12_000_000_000_000_000_000_000),
            ("1E2", 100_000),
            ("1k", 1_000_000),
            ("100n", 1),
            ("-1", -1000),
            ("5e-1", 500),
        ] {
            assert_eq!(read(text), Some(expected), "{text}");
        }
        for wrong in ["", "x", "1.2.3", "1KiB", "--1", "1e", "9e99"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

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
