//! Tests of profile files and of the reference file.

use proptest::prelude::*;

use super::reference::{Device, Rate, Reference, ReferenceError};
use super::*;
use crate::workload::shared_data;

const PROFILE: &str = r#"name = "net"
device = "A100"
times = "estimated"

[[tensors]]
name = "front"
elements = 1_000
forward_us = 12.5
backward_us = 25
update_us = 0.000_001

[[tensors]]
name = "head"
elements = 500
element_bytes = 2
forward_us = 0
backward_us = 6.0
update_us = 0.25
"#;

/// Returns the error of the profile with `old` replaced by `new`.
fn error(old: &str, new: &str) -> String {
    assert!(PROFILE.contains(old), "{old}");
    PROFILE.replacen(old, new, 1).parse::<Profile>().unwrap_err().to_string()
}

#[test]
fn a_profile_reads_as_written() {
    let profile: Profile = PROFILE.parse().unwrap();
    assert_eq!((profile.name(), profile.device()), ("net", "A100"));
    assert_eq!(profile.times(), Times::Estimated);
    let front = Tensor {
        name: "front".to_owned(),
        elements: 1_000,
        element_bytes: 4,
        forward: Picos(12_500_000),
        backward: Picos(25_000_000),
        update: Picos(1),
    };
    assert_eq!(profile.tensors()[0], front);
    assert_eq!((profile.tensors()[1].element_bytes, profile.tensors()[1].bytes()), (2, 1_000));
    assert_eq!(profile.bytes(), 5_000);
    assert_eq!(profile.compute(), Picos(43_500_000));
}

#[test]
fn a_value_that_no_tensor_has_is_refused_with_its_line() {
    for (old, new, expected) in [
        ("12.5", "-1.5", "line 8: forward_us of tensor \"front\": -1.5 is negative"),
        ("12.5", "nan", "line 8: forward_us of tensor \"front\": NaN is not a finite number"),
        ("6.0", "inf", "line 17: backward_us of tensor \"head\": inf is not a finite number"),
        ("0.25", "1e30", "line 18: update_us of tensor \"head\": the duration is above"),
        ("= 500", "= 0", "line 12: tensor \"head\" has 0 elements; it needs 1 to 1099511627776"),
        ("= 500", "= 1_099_511_627_777", "line 12: tensor \"head\" has 1099511627777 elements"),
        ("bytes = 2", "bytes = 3", "line 12: tensor \"head\" has element_bytes = 3; it must be"),
        ("\"head\"", "\"front\"", "line 12: two tensors are called \"front\"; give each its own"),
        ("\"head\"", "\"\"", "line 12: a tensor's name is empty"),
        ("\"net\"", "\"\"", "line 1: the profile's name is empty"),
    ] {
        let error = error(old, new);
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_text_of_another_layout_is_refused_with_its_line() {
    for (old, new, line, reason) in [
        ("update_us = 0.25", "update_us = 0.25\nslots = 1", 19, "unknown field `slots`"),
        ("name = \"net\"", "name = \"net\"\nlayers = 2", 2, "unknown field `layers`"),
        ("= 500", "= -500", 14, "invalid value: integer `-500`"),
        ("= 500", "= 1.5", 14, "invalid type: floating point `1.5`"),
        ("\"estimated\"", "\"guessed\"", 3, "unknown variant `guessed`"),
        ("forward_us = 0\n", "", 12, "missing field `forward_us`"),
        ("6.0", "6.0.0", 17, ""),
        ("device = \"A100\"\n", "", 1, "missing field `device`"),
    ] {
        let error = error(old, new);
        assert!(error.starts_with(&format!("line {line}: ")), "{line} {error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_profile_needs_tensors() {
    let text = "device = 'A100'\ntimes = 'measured'\nname = 'net'";
    let error = text.parse::<Profile>().unwrap_err();
    assert_eq!((error.line, error.kind), (3, ProfileErrorKind::NoTensors));
    let profile = Profile::new("net".to_owned(), String::new(), Times::Measured, Vec::new());
    assert_eq!(profile, Err(ProfileErrorKind::NoTensors));
}

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    // Up to 19 minutes.
    let time = || (0..1u64 << 50).prop_map(Picos);
    let bytes = prop::sample::select(ELEMENT_BYTES.to_vec());
    let tensor = (".{1,9}", 1..=MOST_ELEMENTS, bytes, time(), time(), time());
    let tensor = tensor.prop_map(|(name, elements, element_bytes, forward, backward, update)| {
        Tensor { name, elements, element_bytes, forward, backward, update }
    });
    prop::collection::vec(tensor, 1..5).prop_map(|mut tensors| {
        for (index, tensor) in tensors.iter_mut().enumerate() {
            tensor.name.push_str(&index.to_string());
        }
        tensors
    })
}

proptest! {
    #[test]
    fn a_written_profile_reads_back_to_the_picosecond(
        name in ".{1,20}", device in ".{0,20}", tensors in tensors(),
    ) {
        let profile = Profile::new(name, device, Times::Measured, tensors);
        // Names may repeat after an index has been appended, but rarely.
        prop_assume!(profile.is_ok());
        let profile = profile.unwrap();
        prop_assert_eq!(profile.to_toml().parse::<Profile>(), Ok(profile));
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(?s).{0,200}") {
        let read = text.parse::<Profile>();
        prop_assert!(read.is_ok() || read.unwrap_err().line <= text.lines().count() + 1);
    }
}

const REFERENCE: &str = r#"{"units": {"times": "seconds"}, "models": {"net": {
    "sizes": [10, 20],
    "v100": {"fp": [1, 2], "bp": [3, 4], "wu": [5, 6]},
    "a100": {"fp": [0.5, 1e-6], "bp": [2, 3], "wu": [4, 5]},
    "a100_match_v100_bs": {"fp": [7, 7], "bp": [8, 8], "wu": [9, 9]},
    "baseline_10G": [0.0, 1.5], "baseline_100G": [0.0, 0.5]}}}"#;

#[test]
fn the_reference_file_gives_profiles_and_baselines() {
    let reference = Reference::parse(REFERENCE).unwrap();
    let profiles: Vec<_> = reference.profiles(Device::A100).collect();
    assert_eq!((profiles[0].name(), profiles[0].device()), ("net", "a100"));
    let last = &profiles[0].tensors()[1];
    assert_eq!((last.elements, last.element_bytes, last.forward), (20, 4, Picos(1_000_000)));
    let baseline = [Picos::ZERO, Picos::from_millis(500)];
    assert_eq!(reference.baseline("net", Rate::Gbit100), Some(&baseline[..]));
    assert_eq!(reference.baseline("bert", Rate::Gbit100), None);
}

#[test]
fn a_reference_file_whose_lists_disagree_is_refused() {
    let error =
        |old, new| Reference::parse(&REFERENCE.replacen(old, new, 1)).unwrap_err().to_string();
    assert_eq!(error("[3, 4]", "[3]"), "model \"net\": bp has 1 entries for 2 tensors");
    assert_eq!(error("\"seconds\"", "\"ms\""), {
        ReferenceError::Unit("ms".to_owned()).to_string()
    });
    assert!(error("[8, 8]", "[8, -8]").starts_with("model \"net\": bp: -8 is negative"));
    assert!(error("[10, 20]", "[10, 0]").contains("has 0 elements"));
    assert!(error("0.5, 1e-6", "0.5, x").starts_with("line 4: "));
    assert!(error("\"wu\": [5, 6]", "\"up\": [5, 6]").contains("missing field `wu`"));
}

#[test]
fn the_study_has_ten_models_of_known_size() {
    let Some(json) = shared_data::text("coinnetflow_reference.json") else { return };
    let reference = Reference::parse(&json).unwrap();
    let models: Vec<_> = reference
        .profiles(Device::A100MatchV100)
        .map(|profile| (profile.name(), profile.tensors().len(), profile.bytes() / 40_000))
        .collect();
    // Tensors, and parameters in units of 10,000.
    let expected = [
        ("alexnet", 4, 6_110),
        ("bert", 38, 33_515),
        ("googlenet", 2, 662),
        ("inception", 5, 2_383),
        ("resnet101", 8, 4_455),
        ("resnet152", 10, 6_019),
        ("resnet50", 5, 2_556),
        ("vgg11", 5, 13_286),
        ("vgg16", 6, 13_836),
        ("vgg19", 6, 14_367),
    ];
    let near = |(a, b): (&(&str, usize, u64), &(&str, usize, u64))| {
        (a.0, a.1) == (b.0, b.1) && a.2.abs_diff(b.2) <= 1
    };
    assert_eq!(models.len(), expected.len());
    assert!(models.iter().zip(&expected).all(near), "{models:?}");
    for profile in reference.profiles(Device::V100) {
        assert_eq!(profile.to_toml().parse::<Profile>().as_ref(), Ok(profile));
        for rate in [Rate::Gbit10, Rate::Gbit100] {
            assert_eq!(reference.baseline(profile.name(), rate).unwrap().len(), 11);
        }
    }
}
