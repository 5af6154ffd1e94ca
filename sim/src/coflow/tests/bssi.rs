use super::{seeds, shuffled};
use crate::coflow::bssi::{Jobs, Reduction, order, order_reductions};
use crate::random::Random;

/// Jobs that own their numbers.
#[derive(Debug, Clone)]
struct Drawn {
    weights: Vec<u64>,
    demands: Vec<u64>,
    rates: Vec<u64>,
}

impl Drawn {
    fn new(jobs: u64, ports: u64, most: u64, seed: u64) -> Self {
        let mut random = Random::new(seed).child("jobs");
        Self {
            weights: (0..jobs).map(|_| random.within(1..=most)).collect(),
            demands: (0..jobs * ports).map(|_| random.within(0..=most)).collect(),
            rates: (0..ports).map(|_| random.within(1..=3)).collect(),
        }
    }

    fn jobs(&self, d0: u64) -> Jobs<'_> {
        Jobs { weights: &self.weights, demands: &self.demands, rates: &self.rates, d0 }
    }

    fn permuted(&self, places: &[usize]) -> Self {
        let ports = self.rates.len();
        let row = |&job: &usize| self.demands[job * ports..(job + 1) * ports].to_vec();
        Self {
            weights: places.iter().map(|&job| self.weights[job]).collect(),
            demands: places.iter().flat_map(row).collect(),
            rates: self.rates.clone(),
        }
    }
}

#[test]
fn jobs_on_overlapping_workers_are_ordered_as_by_hand() {
    let jobs = [
        Reduction { weight: 1, remaining: 4, workers: &[0, 1] },
        Reduction { weight: 1, remaining: 6, workers: &[1, 2] },
        Reduction { weight: 1, remaining: 2, workers: &[2, 3] },
    ];
    // Worker 1 has 10 to send: the job with 6 is last. Its price of 1/6 leaves 1/3 to the job with
    // 4. Worker 0 or 1 then has that job alone.
    assert_eq!(order_reductions(&jobs, 4, 0), [2, 0, 1]);
    assert_eq!(order_reductions(&jobs, 4, 1), [2, 0, 1]);
}

#[test]
fn d0_lets_a_job_be_last_at_a_port_that_it_does_not_use() {
    let jobs = [
        Reduction { weight: 100, remaining: 10, workers: &[0] },
        Reduction { weight: 1, remaining: 1, workers: &[1] },
    ];
    assert_eq!(order_reductions(&jobs, 2, 0), [1, 0]);
    // Ratios of 100 / 11 and 1 / 1.
    assert_eq!(order_reductions(&jobs, 2, 1), [0, 1]);
}

#[test]
fn a_slow_port_is_selected_before_one_with_more_bytes() {
    let (weights, demands) = ([1, 1], [6, 1, 1, 2]);
    let order_at = |rates: [u64; 2]| {
        order(&Jobs { weights: &weights, demands: &demands, rates: &rates, d0: 0 })
    };
    assert_eq!(order_at([1, 1]), [1, 0]);
    assert_eq!(order_at([10, 1]), [0, 1]);
}

#[test]
fn equal_jobs_are_served_from_the_last_to_the_first() {
    let jobs = Jobs { weights: &[3; 4], demands: &[5; 4], rates: &[1], d0: 0 };
    assert_eq!(order(&jobs), [3, 2, 1, 0]);
}

#[test]
fn one_port_follows_smiths_rule() {
    for seed in seeds(300) {
        let mut drawn = Drawn::new(20, 1, 1_000_000_007, seed);
        drawn.demands.iter_mut().for_each(|demand| *demand += 1);
        let mut smith: Vec<usize> = (0..20).collect();
        // The most weight per demand is first.
        smith.sort_by(|&a, &b| {
            let cross = |it: usize, other: usize| {
                u128::from(drawn.weights[it]) * u128::from(drawn.demands[other])
            };
            cross(b, a).cmp(&cross(a, b))
        });
        assert_eq!(order(&drawn.jobs(0)), smith, "seed {seed}");
    }
}

#[test]
fn the_order_does_not_depend_on_how_jobs_are_numbered() {
    for seed in seeds(300) {
        // Ratios of numbers this large are distinct.
        let drawn = Drawn::new(12, 6, 1 << 40, seed);
        let places = shuffled(12, &mut Random::new(seed).child("places"));
        for d0 in [0, 1] {
            let renumbered = order(&drawn.permuted(&places).jobs(d0));
            let renamed: Vec<usize> = renumbered.into_iter().map(|it| places[it]).collect();
            assert_eq!(renamed, order(&drawn.jobs(d0)), "seed {seed}, d0 {d0}");
        }
    }
}

/// A fraction in lowest terms, for numbers that stay small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Exact(i128, i128);

impl Exact {
    fn new(over: i128, under: i128) -> Self {
        let (mut a, mut b) = (over.abs(), under.abs());
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Self(over / a.max(1), under / a.max(1))
    }

    fn at_most(self, other: Self) -> bool {
        self.0 * other.1 <= other.0 * self.1
    }
}

#[test]
fn every_round_takes_the_least_ratio_in_exact_fractions() {
    for seed in seeds(500) {
        let drawn = Drawn::new(6, 4, 12, seed);
        for d0 in [0, 1] {
            let jobs = drawn.jobs(d0);
            let mut left = order(&jobs);
            let mut residuals: Vec<Exact> =
                drawn.weights.iter().map(|&weight| Exact(weight.into(), 1)).collect();
            let demand = |job: usize, port: usize| i128::from(drawn.demands[job * 4 + port]);
            while let Some(last) = left.pop() {
                let load = |port: usize| {
                    left.iter().chain([&last]).map(|&job| demand(job, port)).sum::<i128>()
                };
                let rate = |port: usize| i128::from(drawn.rates[port]);
                let port = (0..4).fold(0, |most, port| {
                    if load(port) * rate(most) > load(most) * rate(port) { port } else { most }
                });
                let cost = |job: usize| demand(job, port) + i128::from(d0);
                if load(port) == 0 {
                    break;
                }
                assert!(cost(last) > 0, "seed {seed}: job {last} demands nothing at port {port}");
                let Exact(over, under) = residuals[last];
                let price = Exact::new(over, under * cost(last));
                for &job in left.iter().filter(|&&job| cost(job) > 0) {
                    let Exact(over, under) = residuals[job];
                    let ratio = Exact::new(over, under * cost(job));
                    assert!(price.at_most(ratio), "seed {seed}: {job} should be after {last}");
                    let Exact(off, part) = Exact::new(price.0 * cost(job), price.1);
                    residuals[job] = Exact::new(over * part - off * under, under * part);
                }
            }
        }
    }
}

#[test]
fn the_order_does_not_depend_on_the_unit_of_demands() {
    for seed in seeds(500) {
        // Small numbers have ties, which the unit must not decide either.
        let drawn = Drawn::new(12, 6, 9, seed);
        let scale = |by: u64| {
            let demands = drawn.demands.iter().map(|demand| demand * by).collect();
            order(&Drawn { demands, ..drawn.clone() }.jobs(0))
        };
        assert_eq!(scale((1 << 59) - 1), scale(1), "seed {seed}");
    }
}

#[test]
fn extreme_numbers_give_an_order_too() {
    let most = u64::MAX;
    let cases: [(&[u64], &[u64], &[u64]); 6] = [
        (&[], &[], &[]),
        (&[], &[], &[1, 2]),
        (&[5, 0], &[], &[]),
        (&[0, 0, 0], &[0, 0, 0], &[7]),
        (&[most, most, 1], &[most, most, 1, 1, most, most], &[most, 1]),
        (&[0, most, 0], &[most, 1, most], &[1]),
    ];
    for (weights, demands, rates) in cases {
        for d0 in [0, 1, most] {
            let mut order = order(&Jobs { weights, demands, rates, d0 });
            order.sort_unstable();
            assert!(order.into_iter().eq(0..weights.len()), "{weights:?} {demands:?} {rates:?}");
        }
    }
}
