use super::{SMALL, Shape, draw, seeds};
use crate::coflow::fluid;
use crate::coflow::order::Order;
use crate::coflow::rates::Rates;
use crate::coflow::workload::Workload;

/// Returns the least weighted total of all orders with greedy rates.
fn least(workload: &Workload) -> u128 {
    let mut orders = vec![vec![]];
    for coflow in 0..workload.coflows().len() {
        orders = orders
            .into_iter()
            .flat_map(|order: Vec<usize>| {
                (0..=order.len()).map(move |place| {
                    let mut longer = order.clone();
                    longer.insert(place, coflow);
                    longer
                })
            })
            .collect();
    }
    orders.iter().map(|order| weighted(workload, order)).min().unwrap()
}

fn weighted(workload: &Workload, order: &[usize]) -> u128 {
    fluid::run(workload, order, Rates::Greedy).unwrap().weighted_ps(workload)
}

/// Returns the mean and the largest ratio of BSSI's weighted total to the least one.
fn ratios(shape: Shape, count: u64) -> (f64, f64) {
    let seeds = seeds(count);
    let mut ratios = Vec::new();
    for seed in seeds {
        let workload = draw(shape, seed);
        let bssi = weighted(&workload, &Order::Bssi.of(&workload));
        ratios.push(bssi as f64 / least(&workload) as f64);
    }
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    println!("{shape:?}: mean {mean:.4}, most {most:.4}");
    (mean, most)
}

#[test]
fn bssi_is_close_to_the_best_of_all_orders() {
    let (mean, most) = ratios(SMALL, 400);
    assert!(mean <= 1.05 && most <= 2.0, "mean {mean}, most {most}");
}

#[test]
fn bssi_is_close_to_the_best_of_all_orders_with_weights_and_rates() {
    let (mean, most) = ratios(Shape { weight: 9, rates: 10, ..SMALL }, 300);
    assert!(mean <= 1.05 && most <= 2.0, "mean {mean}, most {most}");
}

#[test]
fn bssi_beats_every_simple_order_on_average() {
    let mut totals = [0; Order::ALL.len()];
    for seed in seeds(300) {
        let workload = draw(Shape { coflows: 20, flows: 12, ..SMALL }, seed);
        for (total, order) in totals.iter_mut().zip(Order::ALL) {
            *total += weighted(&workload, &order.of(&workload));
        }
    }
    println!("{:?}: {totals:?}", Order::ALL);
    assert!(totals[1..].iter().all(|&total| totals[0] < total), "{totals:?}");
}
