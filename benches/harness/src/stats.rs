//! Statistics of a race, and the format of times.

use serde::Serialize;

/// Median, minimum and maximum of some times, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Summary {
    /// Summarises `times`; returns `None` if `times` is empty.
    pub(crate) fn of(times: &[f64]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let half = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[half]
        } else {
            f64::midpoint(sorted[half - 1], sorted[half])
        };
        Some(Self { median, min, max })
    }
}

/// Formats a time, given in microseconds, in milliseconds with about three digits.
pub(crate) fn ms(us: f64) -> String {
    let ms = us / 1e3;
    match ms {
        _ if ms >= 100.0 => format!("{ms:.0} ms"),
        _ if ms >= 10.0 => format!("{ms:.1} ms"),
        _ if ms >= 1.0 => format!("{ms:.2} ms"),
        _ => format!("{ms:.3} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(Summary::of(&[]), None);
        let odd = Summary::of(&[9.0, 1.0, 5.0]).unwrap();
        assert_eq!(odd, Summary { median: 5.0, min: 1.0, max: 9.0 });
        let even = Summary::of(&[4.0, 1.0, 2.0, 100.0]).unwrap();
        assert_eq!(even, Summary { median: 3.0, min: 1.0, max: 100.0 });
    }

    #[test]
    fn times_have_three_digits_or_so() {
        let shown = [123_456.0, 12_345.0, 1_234.0, 123.4].map(ms);
        assert_eq!(shown, ["123 ms", "12.3 ms", "1.23 ms", "0.123 ms"]);
    }
}
