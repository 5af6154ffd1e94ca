use std::num::NonZeroU64;

use crate::results::{self, Line, RunLine};
use crate::scenario::Scenario;
use crate::workload::duration::{SECOND, to_units};
use crate::workload::profile::reference::{Device, Rate, Reference};
use crate::workload::shared_data;

/// A model of three tensors that computes for 9 ms and sends 6 MB.
const PROFILE: &str = r#"
name = "small"
device = "none"
times = "estimated"
tensors = [
    { name = "front", elements = 1_000_000, forward_us = 1000, backward_us = 2000, update_us = 10 },
    { name = "middle", elements = 400_000, forward_us = 1000, backward_us = 2000, update_us = 10 },
    { name = "head", elements = 100_000, forward_us = 1000, backward_us = 2000, update_us = 10 },
]
"#;

fn scenario(text: &str) -> Scenario {
    let text = format!("name = 'test'\nprofiles = ['small.toml']\n{text}");
    Scenario::parse(&text, &|_| Ok(PROFILE.into())).unwrap()
}

fn run(scenario: &Scenario, seed: u64) -> (Vec<f64>, RunLine) {
    let mut inflations = vec![];
    let end = results::run(
        scenario,
        seed,
        || 0.0,
        |line| {
            if let Line::Job(job) = line {
                inflations.push(job.inflation);
            }
        },
    );
    (inflations, end.unwrap())
}

/// Eight equal jobs on two workers at a rate at which they mostly send.
fn eight_jobs(schedule: &str) -> Scenario {
    scenario(&format!(
        "[fabric]\nlayout = 'two-layers'\nracks = 2\nworkers_per_rack = 1\ngpus_per_worker = 8\n\
         gbit = 2\n[transport]\nkind = 'reference'\nmtu = 9000\nslots = 16\n{schedule}\n[[jobs]]\n\
         model = 'small'\niterations = 4\nworkers = [0, 1]\ncount = 8"
    ))
}

#[test]
fn jobs_alone_take_as_long_as_in_the_study() {
    let Some(json) = shared_data::text("coinnetflow_reference.json") else { return };
    let reference = Reference::parse(&json).unwrap();
    let mut errors = vec![];
    for (gbit, slots, rate) in [(10, 128, Rate::Gbit10), (100, 512, Rate::Gbit100)] {
        let text = format!(
            "name = 'baseline'\nreference = {{ file = 'x', device = 'a100-match-v100-bs' }}\n\
             fabric = {{ layout = 'two-layers', racks = 2, workers_per_rack = 1, gbit = {gbit} }}\n\
             transport = {{ kind = 'reference', mtu = 9000, slots = {slots} }}\n\
             jobs = [{{ model = 'alexnet', iterations = 1, workers = [0, 1] }}]"
        );
        let scenario = Scenario::parse(&text, &|_| Ok(json.clone())).unwrap();
        for model in reference.profiles(Device::A100MatchV100) {
            let model = model.name();
            let expected = reference.baseline(model, rate).unwrap();
            for (iterations, expected) in (0..).zip(expected).skip(1).take(2) {
                let times = (0..3).map(|seed| {
                    let iterations = NonZeroU64::new(iterations).unwrap();
                    let alone = scenario.alone(model, iterations, seed).unwrap();
                    to_units(alone, SECOND)
                });
                let mean = times.sum::<f64>() / 3.0;
                errors.push((mean / to_units(*expected, SECOND) - 1.0).abs());
            }
        }
    }
    errors.sort_unstable_by(f64::total_cmp);
    // The study's figures are of one run each, whose computing times have a deviation of 2 %.
    assert!(errors[errors.len() / 2] < 0.004, "{errors:?}");
    assert!(errors[errors.len() - 1] < 0.03, "{errors:?}");
}

#[test]
fn jobs_without_a_schedule_share_links_equally() {
    for schedule in ["", "[schedule]\nkind = 'byte-scheduler'\nchunk = 50_000"] {
        let (inflations, end) = run(&eight_jobs(schedule), 1);
        let mean = inflations.iter().sum::<f64>() / 8.0;
        assert!(mean > 5.0, "{inflations:?}");
        assert!(inflations.iter().all(|it| (it / mean - 1.0).abs() < 0.02), "{inflations:?}");
        // Each of eight jobs sends its tensors four times from two workers.
        let chunks = if schedule.is_empty() {
            vec![1_000_000, 400_000, 100_000]
        } else {
            vec![50_000_u64; 30]
        };
        let packets: u64 = chunks.iter().map(|elements| elements.div_ceil(2229)).sum();
        assert_eq!(end.sent_bytes, 8 * 4 * 2 * packets * 9000);
    }
}

#[test]
fn an_order_among_jobs_shortens_the_mean_and_delays_none() {
    let (none, _) = run(&eight_jobs(""), 1);
    let (ordered, end) =
        run(&eight_jobs("[schedule]\nkind = 'sincronia'\nchunk = 50_000\nd0 = 1"), 1);
    let mean = |all: &[f64]| all.iter().sum::<f64>() / 8.0;
    // Of n jobs that only send, the order leaves (n + 1) / 2n of the mean.
    let left = mean(&ordered) / mean(&none);
    assert!((0.5..0.75).contains(&left), "{left} {ordered:?}");
    let last = |all: &[f64]| all.iter().copied().fold(0.0, f64::max);
    assert!(last(&ordered) < last(&none) * 1.03, "{ordered:?} {none:?}");
    assert!(end.dropped == 0 && end.sent_again == 0);
}

#[test]
fn turns_that_exclude_each_other_use_the_link_one_after_the_other() {
    for kind in ["fifo-exclusive", "deficit-round-robin", "ready-and-go"] {
        let (inflations, _) = run(&eight_jobs(&format!("[schedule]\nkind = '{kind}'")), 1);
        assert!(inflations.iter().all(|it| *it > 1.0 && *it < 9.0), "{kind}: {inflations:?}");
    }
}

#[test]
fn compressed_chunks_are_a_quarter_as_large() {
    let all = run(&eight_jobs("[schedule]\nkind = 'byte-scheduler'"), 1).1.sent_bytes;
    let schedule = "[schedule]\nkind = 'byte-scheduler'\ncompress = 'two-in-five'\nsticky = ";
    let [clean, sticky] = ["false", "true"].map(|is_sticky| {
        run(&eight_jobs(&format!("{schedule}{is_sticky}")), 1).1.sent_bytes as f64 / all as f64
    });
    assert!((clean - 0.7).abs() < 0.06, "{clean}");
    assert!(sticky < 0.55, "{sticky}");
    let priority = "[schedule]\nkind = 'sincronia'\ncompress = 'low-priority'\nsticky = true";
    let low = run(&eight_jobs(priority), 1).1.sent_bytes as f64 / all as f64;
    assert!(low < 0.6, "{low}");
}

#[test]
fn a_run_depends_only_on_its_seed() {
    let lines = |seed| {
        let mut lines = vec![];
        let scenario = eight_jobs("[schedule]\nkind = 'sincronia'\nweight = 'idle'");
        results::run(&scenario, seed, || 0.0, |line| lines.push(line)).unwrap();
        lines
    };
    assert_eq!(lines(7), lines(7));
    assert_ne!(lines(7), lines(8));
}

#[test]
fn jobs_wait_for_gpus_in_the_order_of_their_submission() {
    let scenario = scenario(
        "[fabric]\nlayout = 'two-layers'\nracks = 2\nworkers_per_rack = 2\ngbit = 10\n\
         [placement]\npolicy = 'multi-rack'\nfallback = true\n\
         [[jobs]]\nmodel = 'small'\niterations = 2\ngpus = 3\n\
         [[jobs]]\nmodel = 'small'\niterations = 1\ngpus = 4\nsubmitted_s = 0.001\n\
         [[jobs]]\nmodel = 'small'\niterations = 1\ngpus = 1\nsubmitted_s = 0.002",
    );
    let mut jobs = vec![];
    results::run(
        &scenario,
        3,
        || 0.0,
        |line| {
            if let Line::Job(job) = line {
                jobs.push(job);
            }
        },
    )
    .unwrap();
    let [first, second, third] = &jobs[..] else { panic!("{jobs:?}") };
    assert_eq!((first.job, second.job, third.job), (0, 1, 2));
    assert_eq!(second.workers, [0, 1, 2, 3]);
    // The third would fit beside the first, but does not overtake the second.
    assert_eq!((second.started_s, third.started_s), (first.finished_s, second.finished_s));
    // One worker neither sends nor waits.
    assert!((third.jct_s / 0.00903 - 1.0).abs() < 0.05, "{third:?}");
}

#[test]
fn a_job_that_is_too_large_is_an_error() {
    let scenario = scenario(
        "[fabric]\nlayout = 'two-layers'\nracks = 1\nworkers_per_rack = 2\ngbit = 10\n\
         [placement]\npolicy = 'random'\n[[jobs]]\nmodel = 'small'\niterations = 1\ngpus = 3",
    );
    let error = results::run(&scenario, 0, || 0.0, |_| {}).unwrap_err();
    assert_eq!(
        error.to_string(),
        "job 0 asks for 3 GPUs, for which the empty cluster has no placement"
    );
}

#[test]
fn smaller_elements_are_fewer_bytes() {
    let sent = |element_bytes: u32| {
        let profile = PROFILE
            .replace("elements = ", &format!("element_bytes = {element_bytes}, elements = "));
        let text = "name = 'test'\nprofiles = ['x']\n[fabric]\nlayout = 'two-layers'\nracks = 2\n\
                    workers_per_rack = 1\ngbit = 10\n[[jobs]]\nmodel = 'small'\niterations = 1\n\
                    workers = [0, 1]";
        run(&Scenario::parse(text, &|_| Ok(profile.clone())).unwrap(), 0).1.sent_bytes
    };
    let packets = |elements: u64| 2 * 9000 * elements.div_ceil(2229);
    assert_eq!(sent(4), packets(1_000_000) + packets(400_000) + packets(100_000));
    assert_eq!(sent(2), packets(500_000) + packets(200_000) + packets(50_000));
}
