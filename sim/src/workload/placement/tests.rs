//! Tests of placements.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Returns racks whose workers have these numbers of free GPUs, numbered from 0.
fn racks(free: &[&[u32]]) -> Vec<Rack> {
    let mut ids = (0..).map(WorkerId);
    let racks = free.iter().map(|rack| Rack {
        workers: rack
            .iter()
            .map(|&free_gpus| Worker { id: ids.next().unwrap(), free_gpus })
            .collect(),
    });
    racks.collect()
}

fn place(
    spread: Spread,
    fallback: bool,
    gpus: u32,
    racks: &[Rack],
    seed: u64,
) -> Option<Placement> {
    let policy = Policy::Random { spread, fallback };
    let gpus = NonZeroU32::new(gpus).unwrap();
    policy.place(JobNumber(0), gpus, racks, &mut Random::new(seed)).unwrap()
}

fn racks_of(placement: &[Share], racks: &[Rack]) -> usize {
    let has = |rack: &&Rack| {
        rack.workers.iter().any(|worker| placement.iter().any(|it| it.worker == worker.id))
    };
    racks.iter().filter(has).count()
}

const SPREADS: [Spread; 4] =
    [Spread::Any, Spread::Distributed, Spread::SingleRack, Spread::MultiRack];

#[test]
fn a_job_waits_if_there_are_too_few_gpus() {
    let racks = racks(&[&[2, 1], &[0, 1]]);
    for spread in SPREADS {
        for fallback in [false, true] {
            assert_eq!(place(spread, fallback, 5, &racks, 1), None, "{spread:?}");
        }
    }
    assert_eq!(place(Spread::Any, false, 1, &[], 1), None);
}

#[test]
fn a_spread_that_is_impossible_waits_or_falls_back() {
    let one_worker = racks(&[&[4, 0], &[0]]);
    let one_rack = racks(&[&[2, 2], &[0]]);
    let two_racks = racks(&[&[2], &[2]]);
    let all_of_one = Some(vec![Share { worker: WorkerId(0), gpus: 2 }]);
    for spread in [Spread::Distributed, Spread::SingleRack, Spread::MultiRack] {
        assert_eq!(place(spread, false, 2, &one_worker, 1), None, "{spread:?}");
        assert_eq!(place(spread, true, 2, &one_worker, 1), all_of_one, "{spread:?}");
    }
    for seed in 0..50 {
        // From several racks to one rack.
        assert_eq!(place(Spread::MultiRack, false, 2, &one_rack, seed), None);
        let placement = place(Spread::MultiRack, true, 2, &one_rack, seed).unwrap();
        assert_eq!(placement.len(), 2);
        // From one rack to several workers.
        assert_eq!(place(Spread::SingleRack, false, 2, &two_racks, seed), None);
        let placement = place(Spread::SingleRack, true, 2, &two_racks, seed).unwrap();
        assert_eq!(placement.len(), 2);
    }
}

#[test]
fn a_single_rack_has_a_spare_gpu() {
    // The first rack has exactly the GPUs that the job needs, the second has one more.
    let racks = racks(&[&[2, 2], &[3, 2]]);
    for seed in 0..50 {
        let placement = place(Spread::SingleRack, false, 4, &racks, seed).unwrap();
        assert!(placement.iter().all(|share| share.worker.0 >= 2), "seed {seed}: {placement:?}");
        assert_eq!(place(Spread::SingleRack, false, 5, &racks, seed), None);
    }
}

#[test]
fn a_rack_with_one_free_worker_is_no_single_rack() {
    let racks = racks(&[&[9, 0], &[2, 2]]);
    for seed in 0..50 {
        let placement = place(Spread::SingleRack, false, 2, &racks, seed).unwrap();
        assert!(placement.iter().all(|share| share.worker.0 >= 2), "seed {seed}: {placement:?}");
    }
}

#[test]
fn a_job_with_one_gpu_goes_anywhere() {
    let racks = racks(&[&[1], &[3]]);
    let draws = (0..4000).filter(|seed| {
        let placement = place(Spread::MultiRack, false, 1, &racks, *seed).unwrap();
        placement == [Share { worker: WorkerId(1), gpus: 1 }]
    });
    // Three of four GPUs; six standard deviations are 164.
    assert!(draws.count().abs_diff(3000) < 164);
}

#[test]
fn each_allowed_choice_is_equally_likely() {
    // Two GPUs of four, of which the pairs on one worker are not allowed: 5 of 6 pairs are left,
    // and 4 of them have a GPU of the worker with two.
    let racks = racks(&[&[2, 1], &[1]]);
    let mut counts: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
    for seed in 0..10_000 {
        let placement = place(Spread::Distributed, false, 2, &racks, seed).unwrap();
        *counts.entry(placement.iter().map(|it| it.worker.0).collect()).or_default() += 1;
    }
    let expected = [(vec![0, 1], 4000_u32), (vec![0, 2], 4000), (vec![1, 2], 2000)];
    assert_eq!(counts.len(), expected.len());
    for (workers, count) in expected {
        // Six standard deviations are 294.
        assert!(counts[&workers].abs_diff(count) < 294, "{workers:?}: {counts:?}");
    }
}

#[test]
fn a_rack_is_drawn_in_proportion_to_its_free_gpus() {
    let racks = racks(&[&[2, 2], &[6, 6]]);
    let draws = (0..4000).filter(|seed| {
        let placement = place(Spread::SingleRack, false, 2, &racks, *seed).unwrap();
        placement[0].worker.0 >= 2
    });
    assert!(draws.count().abs_diff(3000) < 164);
}

proptest! {
    #[test]
    fn random_placements_use_free_gpus_and_keep_their_spread(
        free in prop::collection::vec(prop::collection::vec(0..5_u32, 0..5), 0..5),
        gpus in 1..12_u32,
        spread in prop::sample::select(SPREADS.to_vec()),
        fallback in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let free: Vec<_> = free.iter().map(Vec::as_slice).collect();
        let racks = racks(&free);
        let workers: Vec<_> = racks.iter().flat_map(|rack| &rack.workers).collect();
        let total: u32 = workers.iter().map(|worker| worker.free_gpus).sum();
        let placement = place(spread, fallback, gpus, &racks, seed);
        prop_assert_eq!(&place(spread, fallback, gpus, &racks, seed), &placement);
        if gpus <= total && (fallback || gpus == 1 || spread == Spread::Any) {
            prop_assert!(placement.is_some());
        }
        let Some(placement) = placement else { return Ok(()) };
        prop_assert_eq!(placement.iter().map(|share| share.gpus).sum::<u32>(), gpus);
        prop_assert!(placement.is_sorted_by(|a, b| a.worker < b.worker));
        for share in &placement {
            let worker = workers.iter().find(|worker| worker.id == share.worker).unwrap();
            prop_assert!((1..=worker.free_gpus).contains(&share.gpus));
        }
        if gpus > 1 && !fallback {
            match spread {
                Spread::Any => {}
                Spread::Distributed => prop_assert!(placement.len() > 1),
                Spread::SingleRack => {
                    prop_assert!(placement.len() > 1);
                    prop_assert_eq!(racks_of(&placement, &racks), 1);
                }
                Spread::MultiRack => prop_assert!(racks_of(&placement, &racks) > 1),
            }
        }
    }

    #[test]
    fn any_custom_string_is_read_or_refused(text in "[0-9,&:+x-]{0,30}") {
        let read = text.parse::<Assignments>();
        prop_assert!(read.is_ok() || read.unwrap_err().entry > 0);
    }
}

/// Places a job by a list.
fn assigned(
    assignments: &Assignments,
    job: u64,
    gpus: u32,
    racks: &[Rack],
) -> Result<Option<Vec<(u32, u32)>>, PlacementError> {
    let policy = Policy::Assigned(assignments.clone());
    let gpus = NonZeroU32::new(gpus).unwrap();
    let placement = policy.place(JobNumber(job), gpus, racks, &mut Random::new(1))?;
    Ok(placement.map(|it| it.iter().map(|share| (share.worker.0, share.gpus)).collect()))
}

#[test]
fn a_custom_string_places_jobs() {
    let racks = racks(&[&[2, 4], &[1, 2]]);
    let assignments: Assignments = "5-0&2,4-1:4&3:2,7-3&3,8-2:2".parse().unwrap();
    assert_eq!(assigned(&assignments, 5, 2, &racks), Ok(Some(vec![(0, 1), (2, 1)])));
    assert_eq!(assigned(&assignments, 4, 6, &racks), Ok(Some(vec![(1, 4), (3, 2)])));
    assert_eq!(assigned(&assignments, 7, 2, &racks), Ok(Some(vec![(3, 2)])));
    // Worker 2 has one free GPU, so the job waits.
    assert_eq!(assigned(&assignments, 8, 2, &racks), Ok(None));
}

#[test]
fn a_list_that_cannot_be_followed_is_an_error() {
    let racks = racks(&[&[2, 4]]);
    let assignments: Assignments = "5-0&1,6-0&9".parse().unwrap();
    let error = |job, gpus| assigned(&assignments, job, gpus, &racks).unwrap_err().to_string();
    assert_eq!(error(4, 2), "job 4 has no placement; add it to the list");
    assert_eq!(error(5, 3), "job 5 asks for 3 GPUs, but its placement has 2");
    assert_eq!(error(6, 2), "the placement of job 6 has worker 9, which does not exist");
}

#[test]
fn a_plan_keeps_the_order_of_its_workers() {
    let racks = racks(&[&[2, 2], &[2, 2]]);
    let plan = [(JobNumber(3), [2, 0, 2].map(WorkerId).to_vec())];
    let assignments = Assignments::from_plan(plan);
    assert_eq!(assigned(&assignments, 3, 3, &racks), Ok(Some(vec![(2, 2), (0, 1)])));
    assert!(assigned(&assignments, 1, 1, &racks).is_err());
}

#[test]
fn a_malformed_custom_string_is_refused_with_its_entry() {
    for (text, reason) in [
        ("", "entry 1 \"\": write a job, a dash and its workers"),
        ("5-0,4", "entry 2 \"4\": write a job, a dash and its workers"),
        ("5-0,", "entry 2 \"\": write a job"),
        ("x-0", "entry 1 \"x-0\": \"x\" is not a number"),
        ("5-", "entry 1 \"5-\": \"\" is not a number"),
        ("5-0&", "entry 1 \"5-0&\": \"\" is not a number"),
        ("5-+1", "entry 1 \"5-+1\": \"+1\" is not a number"),
        ("5-0:", "entry 1 \"5-0:\": \"\" is not a number"),
        ("5-0-1", "entry 1 \"5-0-1\": \"0-1\" is not a number"),
        ("5-4294967296", "entry 1 \"5-4294967296\": \"4294967296\" is not a number"),
        ("5-0:0", "entry 1 \"5-0:0\": worker 0 has 0 GPUs; remove it"),
        ("5-0&0:2", "entry 1 \"5-0&0:2\": worker 0 is there twice"),
        ("5-0:2&0", "entry 1 \"5-0:2&0\": worker 0 is there twice"),
        ("5-0,5-1", "entry 2 \"5-1\": job 5 is there twice; merge the entries"),
    ] {
        let error = text.parse::<Assignments>().unwrap_err().to_string();
        assert!(error.starts_with(reason), "{text}: {error}");
    }
}
