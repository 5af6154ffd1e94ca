//! Quantities of Kubernetes, such as `64`, `63500m`, `1.5Gi` or `1e3`.

/// Returns a quantity in thousandths, rounded up, or `None` if the text is not a quantity. A number
/// beyond 2^63 - 1 counts as that, as in Kubernetes, so that sums of quantities fit.
#[must_use]
pub fn thousandths(quantity: &str) -> Option<i128> {
    let (numerator, denominator) = fraction(quantity)?;
    let scaled = numerator.checked_mul(1000)?;
    let up = scaled.div_euclid(denominator) + i128::from(scaled.rem_euclid(denominator) > 0);
    Some(up.clamp(-MOST, MOST))
}

/// Returns the whole units of a quantity, rounded down, or `None` if the text is not a quantity or
/// the number is negative or too large.
#[must_use]
pub fn whole(quantity: &str) -> Option<u32> {
    let (numerator, denominator) = fraction(quantity)?;
    u32::try_from(numerator.div_euclid(denominator)).ok()
}

/// Returns a quantity as a fraction whose denominator is positive.
fn fraction(quantity: &str) -> Option<(i128, i128)> {
    let text = quantity.trim();
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
    Some((numerator, denominator))
}

/// The greatest quantity in thousandths.
const MOST: i128 = 1000 * i64::MAX as i128;

/// Returns a decimal number as a fraction.
fn decimal(number: &str) -> Option<(i128, i128)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    Some((digits, 10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_of_all_forms_are_read() {
        for (text, expected) in [
            ("2", 2000),
            ("500m", 500),
            ("0.5", 500),
            (".5", 500),
            ("1.", 1000),
            ("1.5Gi", 1_610_612_736_000),
            ("1e3", 1_000_000),
            ("9E", 9_000_000_000_000_000_000_000),
            ("12E", 9_223_372_036_854_775_807_000),
            ("-1e35", -9_223_372_036_854_775_807_000),
            ("1E2", 100_000),
            ("1k", 1_000_000),
            ("100n", 1),
            ("-1", -1000),
            ("+1", 1000),
            ("5e-1", 500),
        ] {
            assert_eq!(thousandths(text), Some(expected), "{text}");
        }
        for wrong in ["", ".", "m", "x", "1.2.3", "1KiB", "--1", ".+5", "1e", "9e99"] {
            assert_eq!(thousandths(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn whole_units_are_rounded_down() {
        for (text, units) in [
            ("64", 64),
            ("1999m", 1),
            ("0.9999", 0),
            ("7999999u", 7),
            ("0.5", 0),
            ("7.9", 7),
            ("0", 0),
            ("1k", 1000),
            ("6e4", 60_000),
        ] {
            assert_eq!(whole(text), Some(units), "{text}");
        }
        for text in ["", "-1", "-500m", "99999999999"] {
            assert_eq!(whole(text), None, "{text}");
        }
    }
}
