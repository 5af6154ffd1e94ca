//! Slurm's hostlist expressions, such as `n[001-004,7],gpu[1-2]-ib[0-3]`.
//!
//! Each pair of brackets stands for one of its numbers. A range keeps the leading zeros of its
//! first number. Expansion is bounded in the number and in the length of names, because a few
//! characters can stand for billions of hosts.

/// The greatest number of names that one file or variable may list.
pub const MOST_NAMES: usize = 1 << 16;

/// The greatest length of a name in bytes: that of a DNS name.
pub const MOST_BYTES: usize = 255;

/// The error for an expression that is no list of names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostlistError {
    /// The list or name is empty.
    #[error("the name or host list is empty; give at least one name")]
    Nothing,
    /// An item of the list is empty.
    #[error("a name in the host list is empty; put one name between two commas")]
    Empty,
    /// The brackets of an item do not match, or are nested.
    #[error("{0:?} has brackets that do not match")]
    Brackets(String),
    /// A range is not a number or two numbers with a dash between them.
    #[error("{item:?}: {range:?} is not a range; write a number or LOW-HIGH, such as 01-16")]
    Range {
        /// The item of the list.
        item: String,
        /// The range.
        range: String,
    },
    /// The first number of a range is greater than the last.
    #[error("{item:?}: the range {range} counts down; write the lower number first")]
    Descending {
        /// The item of the list.
        item: String,
        /// The range.
        range: String,
    },
    /// A name has a character that no host name has.
    #[error("{name:?} contains {character:?}, which names of hosts and switches cannot contain")]
    Character {
        /// The item of the list.
        name: String,
        /// The character.
        character: char,
    },
    /// A name would be too long.
    #[error("{0:?} stands for names of more than {MOST_BYTES} bytes")]
    Long(String),
    /// The list stands for too many names.
    #[error("more than {MOST_NAMES} names are listed, the last of them by {0:?}")]
    Many(String),
}

/// Returns the names that an expression stands for, in its order, and subtracts their number from
/// `left`, the number of names that may still be listed.
///
/// # Errors
/// If the expression is malformed, or stands for more than `left` names.
pub fn expand(text: &str, left: &mut usize) -> Result<Vec<String>, HostlistError> {
    let mut names = vec![];
    for item in items(text)? {
        let parts = parts(item)?;
        let most_bytes: usize = parts.iter().map(Part::most_bytes).sum();
        if most_bytes > MOST_BYTES {
            return Err(HostlistError::Long(shown(item)));
        }
        let count = parts.iter().map(Part::count).fold(1_u64, u64::saturating_mul);
        let fits = usize::try_from(count).ok().and_then(|count| left.checked_sub(count));
        *left = fits.ok_or_else(|| HostlistError::Many(shown(item)))?;
        let mut of_item = vec![String::new()];
        for part in &parts {
            of_item = of_item.iter().flat_map(|name| part.after(name)).collect();
        }
        names.append(&mut of_item);
    }
    Ok(names)
}

/// Returns an expression for names. Expanding it gives the same names in the same order.
///
/// Consecutive names that differ only in the number at their end share brackets.
#[must_use]
pub fn compress(names: &[String]) -> String {
    let mut items: Vec<String> = vec![];
    let mut names = names.iter().map(|name| numbered(name)).peekable();
    while let Some((prefix, number)) = names.next() {
        let Some(mut low) = number else {
            items.push(prefix.to_owned());
            continue;
        };
        let mut ranges = vec![];
        let mut high = low;
        while let Some(next) = names.next_if(|(other, next)| *other == prefix && next.is_some()) {
            let next = next.1.unwrap_or_default();
            if high.value.checked_add(1).map(|value| low.format(value)) != Some(next.text.into()) {
                ranges.push(low.to(high));
                low = next;
            }
            high = next;
        }
        ranges.push(low.to(high));
        let is_one = ranges.len() == 1 && low.text == high.text;
        let ranges = ranges.join(",");
        items.push(if is_one {
            format!("{prefix}{ranges}")
        } else {
            format!("{prefix}[{ranges}]")
        });
    }
    items.join(",")
}

/// A part of an item.
enum Part<'a> {
    Text(&'a str),
    Ranges(Vec<Range>),
}

/// Numbers with at least `width` digits.
struct Range {
    low: u64,
    high: u64,
    width: usize,
}

impl Part<'_> {
    fn count(&self) -> u64 {
        match self {
            Self::Text(_) => 1,
            Self::Ranges(ranges) => ranges.iter().map(Range::count).fold(0, u64::saturating_add),
        }
    }

    fn most_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ranges(ranges) => ranges.iter().map(Range::most_bytes).max().unwrap_or(0),
        }
    }

    /// Returns a name with each text of this part after it.
    fn after(&self, name: &str) -> Vec<String> {
        match self {
            Self::Text(text) => vec![format!("{name}{text}")],
            Self::Ranges(ranges) => {
                let numbers = ranges
                    .iter()
                    .flat_map(|range| (range.low..=range.high).map(|number| (number, range.width)));
                numbers.map(|(number, width)| format!("{name}{number:0width$}")).collect()
            }
        }
    }
}

impl Range {
    fn count(&self) -> u64 {
        (self.high - self.low).saturating_add(1)
    }

    fn most_bytes(&self) -> usize {
        self.width.max(self.high.to_string().len())
    }
}

/// Splits a list at the commas outside of brackets.
fn items(text: &str) -> Result<Vec<&str>, HostlistError> {
    if text.trim().is_empty() {
        return Err(HostlistError::Nothing);
    }
    let mut items = vec![];
    let (mut start, mut is_inside) = (0, false);
    for (at, character) in text.char_indices() {
        match character {
            '[' => is_inside = true,
            ']' => is_inside = false,
            ',' if !is_inside => {
                items.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(text[start..].trim());
    if items.contains(&"") { Err(HostlistError::Empty) } else { Ok(items) }
}

/// Splits an item into texts and brackets.
fn parts(item: &str) -> Result<Vec<Part<'_>>, HostlistError> {
    let unmatched = || HostlistError::Brackets(shown(item));
    let mut parts = vec![];
    let mut rest = item;
    while !rest.is_empty() {
        let (text, tail) = rest.split_at(rest.find('[').unwrap_or(rest.len()));
        if text.contains(']') {
            return Err(unmatched());
        }
        check_text(item, text)?;
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
        let Some(tail) = tail.strip_prefix('[') else { break };
        let (inside, tail) = tail.split_once(']').ok_or_else(unmatched)?;
        if inside.contains('[') {
            return Err(unmatched());
        }
        let ranges = inside.split(',').map(|range| parsed(item, range.trim()));
        parts.push(Part::Ranges(ranges.collect::<Result<_, _>>()?));
        rest = tail;
    }
    Ok(parts)
}

/// Checks a part of a name. The slash separates domains in the paths of this crate.
fn check_text(item: &str, text: &str) -> Result<(), HostlistError> {
    let is_wrong =
        |c: &char| c.is_control() || c.is_whitespace() || "/\"'\\$`;&|<>(){}*?!#=~".contains(*c);
    let wrong = text.chars().find(is_wrong);
    wrong.map_or(Ok(()), |character| Err(HostlistError::Character { name: shown(item), character }))
}

/// Checks a name that is not a list.
///
/// # Errors
/// If it is empty or too long, or has a character that names cannot contain.
pub(super) fn check_name(name: &str) -> Result<(), HostlistError> {
    if name.is_empty() {
        return Err(HostlistError::Nothing);
    }
    if name.len() > MOST_BYTES {
        return Err(HostlistError::Long(shown(name)));
    }
    // These are the characters of lists.
    if let Some(character) = name.chars().find(|c| "[],".contains(*c)) {
        return Err(HostlistError::Character { name: shown(name), character });
    }
    check_text(name, name)
}

fn parsed(item: &str, range: &str) -> Result<Range, HostlistError> {
    let wrong = || HostlistError::Range { item: shown(item), range: shown(range) };
    let (low, high) = range.split_once('-').unwrap_or((range, range));
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| is_number).ok_or_else(wrong)
    };
    let parsed = Range { low: number(low)?, high: number(high)?, width: low.len() };
    if parsed.low > parsed.high {
        return Err(HostlistError::Descending { item: shown(item), range: shown(range) });
    }
    Ok(parsed)
}

/// The number at the end of a name.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Number<'a> {
    text: &'a str,
    value: u64,
}

impl Number<'_> {
    /// Returns a number as text in a range that begins with this number.
    fn format(self, value: u64) -> String {
        format!("{value:0width$}", width = self.text.len())
    }

    fn to(self, high: Number<'_>) -> String {
        if self.text == high.text {
            self.text.into()
        } else {
            format!("{}-{}", self.text, high.text)
        }
    }
}

/// Splits a name before the number at its end.
fn numbered(name: &str) -> (&str, Option<Number<'_>>) {
    let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let text = &name[prefix.len()..];
    match text.parse() {
        Ok(value) => (prefix, Some(Number { text, value })),
        Err(_) => (name, None),
    }
}

/// Returns the beginning of a text, for an error.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(MOST_SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// The greatest number of characters of a text that an error quotes.
const MOST_SHOWN: usize = 60;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expanded(text: &str) -> Result<Vec<String>, HostlistError> {
        expand(text, &mut MOST_NAMES.clone())
    }

    #[test]
    fn brackets_stand_for_numbers_in_order() {
        for (text, names) in [
            ("n1", "n1"),
            ("n[001-003,7]", "n001 n002 n003 n7"),
            ("n[9-11],login", "n9 n10 n11 login"),
            ("gpu[1-2]-ib[0-1]", "gpu1-ib0 gpu1-ib1 gpu2-ib0 gpu2-ib1"),
            ("[08-10].rack", "08.rack 09.rack 10.rack"),
            ("n[2,1], n[3-3]", "n2 n1 n3"),
        ] {
            assert_eq!(expanded(text).unwrap().join(" "), names, "{text}");
        }
    }

    #[test]
    fn malformed_lists_are_refused_with_the_reason() {
        for (text, why) in [
            ("", "the name or host list is empty; give at least one name"),
            (" ", "the name or host list is empty; give at least one name"),
            ("n1,,n2", "a name in the host list is empty; put one name between two commas"),
            ("n[1-2", "\"n[1-2\" has brackets that do not match"),
            ("n1]", "\"n1]\" has brackets that do not match"),
            ("n[1-[2]]", "\"n[1-[2]]\" has brackets that do not match"),
            (
                "n[a-b]",
                "\"n[a-b]\": \"a-b\" is not a range; write a number or LOW-HIGH, such as 01-16",
            ),
            ("n[]", "\"n[]\": \"\" is not a range; write a number or LOW-HIGH, such as 01-16"),
            (
                "n[+1]",
                "\"n[+1]\": \"+1\" is not a range; write a number or LOW-HIGH, such as 01-16",
            ),
            ("n[3-1]", "\"n[3-1]\": the range 3-1 counts down; write the lower number first"),
            ("a b", "\"a b\" contains ' ', which names of hosts and switches cannot contain"),
            ("n$(id)", "\"n$(id)\" contains '$', which names of hosts and switches cannot contain"),
        ] {
            assert_eq!(expanded(text).unwrap_err().to_string(), why, "{text}");
        }
    }

    #[test]
    fn expansion_is_bounded_in_number_and_length() {
        for text in ["n[0-65536]", "n[0-18446744073709551615]", "n[0-999]x[0-999]"] {
            assert_eq!(expanded(text), Err(HostlistError::Many(text.into())));
        }
        let powers = "[0-9]".repeat(30);
        assert!(matches!(expanded(&powers), Err(HostlistError::Many(_))));
        let long = "x".repeat(250);
        assert!(matches!(expanded(&format!("{long}[1-999999]")), Err(HostlistError::Long(_))));
        // Lists share a limit.
        let mut left = 3;
        assert_eq!(expand("n[1-2]", &mut left).map(|names| names.len()), Ok(2));
        assert_eq!(left, 1);
        assert_eq!(expand("n[3-4]", &mut left), Err(HostlistError::Many("n[3-4]".into())));
    }

    #[test]
    fn neighbours_share_brackets() {
        for (names, text) in [
            ("n1 n2 n3", "n[1-3]"),
            ("n3 n2 n1", "n[3,2,1]"),
            ("n9 n10 n12 login gpu01 gpu02 gpu1", "n[9-10,12],login,gpu[01-02,1]"),
            ("n099 n100", "n[099-100]"),
            ("n7", "n7"),
        ] {
            let names: Vec<_> = names.split(' ').map(str::to_owned).collect();
            assert_eq!(compress(&names), text);
            assert_eq!(expanded(text), Ok(names));
        }
    }

    proptest! {
        #[test]
        fn expansion_reverses_compression(
            names in proptest::collection::vec("[a-c]{0,2}-?0{0,2}[0-9]{0,2}[a-z.]?1?", 1..40),
        ) {
            prop_assume!(!names.iter().any(String::is_empty));
            let text = compress(&names);
            prop_assert_eq!(expanded(&text), Ok(names), "{}", text);
        }

        #[test]
        fn numbers_of_any_length_survive(names in proptest::collection::vec("n[0-9]{1,25}", 1..9)) {
            prop_assert_eq!(expanded(&compress(&names)), Ok(names));
        }

        /// Random lists of the characters that matter never panic or exceed the limit.
        #[test]
        fn random_lists_never_panic(text in r"[n0-9\[\],\- é]{0,40}", most in 0..200_usize) {
            let mut left = most;
            if let Ok(names) = expand(&text, &mut left) {
                prop_assert_eq!(names.len() + left, most);
                prop_assert_eq!(expanded(&compress(&names)), Ok(names));
            }
        }
    }
}
