//! Conversion of the durations in files to picoseconds.

use crate::engine::Picos;

/// One second.
pub const SECOND: Picos = Picos(1_000_000_000_000);
/// One microsecond.
pub const MICROSECOND: Picos = Picos(1_000_000);
/// One nanosecond.
pub const NANOSECOND: Picos = Picos(1_000);

/// The longest duration or latest instant that a file may give: 150 days, enough for the traces of
/// Philly and PAI. A [`Picos`] holds up to 213 days, so a run has time left after the last arrival.
pub const LONGEST: Picos = Picos(150 * 86_400 * SECOND.0);

/// An error in a duration.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum DurationError {
    /// The duration is infinite or not a number.
    #[error("{0} is not a finite number")]
    NotFinite(f64),
    /// The duration is below zero.
    #[error("{0} is negative; durations are zero or more")]
    Negative(f64),
    /// The duration is above [`LONGEST`].
    #[error("the duration is above the limit of {} s", LONGEST.0 / SECOND.0)]
    TooLong,
}

/// Converts `value` units to picoseconds, rounded to the nearest.
///
/// # Errors
/// If the value is not finite, negative or too long.
pub fn from_units(value: f64, unit: Picos) -> Result<Picos, DurationError> {
    if !value.is_finite() {
        return Err(DurationError::NotFinite(value));
    }
    if value < 0.0 {
        return Err(DurationError::Negative(value));
    }
    let picos = (value * as_float(unit)).round();
    if picos > as_float(LONGEST) {
        return Err(DurationError::TooLong);
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked above: between zero and a limit below 2^64"
    )]
    Ok(Picos(picos as u64))
}

/// Converts a whole number of units to picoseconds.
///
/// # Errors
/// If the duration is too long.
pub fn from_whole_units(value: u64, unit: Picos) -> Result<Picos, DurationError> {
    let picos = value.checked_mul(unit.0).map(Picos);
    picos.filter(|picos| *picos <= LONGEST).ok_or(DurationError::TooLong)
}

/// Converts picoseconds to units.
#[must_use]
pub fn to_units(picos: Picos, unit: Picos) -> f64 {
    as_float(picos) / as_float(unit)
}

fn as_float(picos: Picos) -> f64 {
    picos.0 as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_to_the_picosecond() {
        assert_eq!(from_units(1.5, MICROSECOND), Ok(Picos(1_500_000)));
        assert_eq!(from_units(0.000_000_6, MICROSECOND), Ok(Picos(1)));
        assert_eq!(from_units(-0.0, MICROSECOND), Ok(Picos::ZERO));
        assert_eq!(from_whole_units(3, NANOSECOND), Ok(Picos(3_000)));
    }

    #[test]
    fn durations_that_no_run_can_have_are_refused() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(matches!(from_units(value, SECOND), Err(DurationError::NotFinite(_))));
        }
        assert_eq!(from_units(-1e-9, SECOND), Err(DurationError::Negative(-1e-9)));
        let most = LONGEST.0 / SECOND.0;
        assert_eq!(from_whole_units(most, SECOND), Ok(LONGEST));
        assert_eq!(from_whole_units(most + 1, SECOND), Err(DurationError::TooLong));
        assert_eq!(from_whole_units(u64::MAX, SECOND), Err(DurationError::TooLong));
        assert_eq!(from_units(1e300, SECOND), Err(DurationError::TooLong));
    }
}
