//! The name of a job.

use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::peer_text::{PeerText, Unshown};

/// The maximum length of a job's name and of a group's name, in bytes.
pub const MAX_NAME: usize = 128;

/// The name of a job, and of one of its groups of ranks if it has groups. Each group sums
/// separately. A rule or limit for a job covers the job and all its groups together.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "RawNames")]
pub struct JobName {
    /// The job's name, as its user writes it.
    pub name: String,
    /// The group's name; empty for a job without groups.
    pub group: String,
    /// The reason why the names from a peer are invalid; `None` if they are valid. Invalid names
    /// are escaped in `name` and `group`, which may then differ from the peer's names.
    #[serde(skip)]
    unfit: Option<String>,
}

/// The names as a peer sent them.
#[derive(Deserialize)]
struct RawNames {
    name: Unshown,
    group: Unshown,
}

impl From<RawNames> for JobName {
    /// Checks the names before they are escaped. An escaped name would pass the check and could be
    /// the name of another job.
    fn from(raw: RawNames) -> Self {
        let raw = Self::new(raw.name.0, raw.group.0);
        let plain = |name| PeerText::of(name).as_str().to_owned();
        Self { name: plain(&raw.name), group: plain(&raw.group), unfit: raw.check().err() }
    }
}

impl JobName {
    /// Creates a name from the job's name and the group's name.
    pub fn new(name: impl Into<String>, group: impl Into<String>) -> Self {
        Self { name: name.into(), group: group.into(), unfit: None }
    }

    /// Checks that both names have valid lengths and can be shown unchanged.
    ///
    /// # Errors
    /// Returns a sentence that says which name is too long, missing or not printable.
    pub fn check(&self) -> Result<(), String> {
        if let Some(why) = &self.unfit {
            return Err(why.clone());
        }
        let (name, group) = (self.name.len(), self.group.len());
        if name == 0 || name > MAX_NAME {
            return Err(alloc::format!("a job's name must have 1 to {MAX_NAME} bytes, not {name}"));
        }
        if group > MAX_NAME {
            return Err(alloc::format!(
                "a group's name must have at most {MAX_NAME} bytes, not {group}"
            ));
        }
        for (what, name) in [("job", &self.name), ("group", &self.group)] {
            if !PeerText::is_plain(name) {
                return Err(alloc::format!(
                    "the {what}'s name \"{}\" has unprintable characters; choose another",
                    PeerText::of(name)
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.group.is_empty() { Ok(()) } else { write!(f, "/{}", self.group) }
    }
}

impl fmt::Debug for JobName {
    /// Writes the name as a quoted string.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string(), f)
    }
}

impl From<&str> for JobName {
    /// Creates the name of a job without groups.
    fn from(name: &str) -> Self {
        Self::new(name, "")
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, MapDeserializer};

    use super::*;

    #[test]
    fn a_name_that_others_would_not_read_as_it_is_is_refused_and_escaped_once() {
        let check = |name: &str, group: &str| JobName::new(name, group).check();
        for name in ["train", "a b", "..", "vision/\"big\"", &"x".repeat(MAX_NAME)] {
            assert_eq!(check(name, name), Ok(()));
        }
        let expected = |what: &str| {
            let name = r#""a\nb""#;
            Err(alloc::format!(
                "the {what}'s name {name} has unprintable characters; choose another"
            ))
        };
        assert_eq!(check("a\nb", ""), expected("job"));
        assert_eq!(check("a", "a\nb"), expected("group"));
        assert!(check("", "").is_err() && check(&"x".repeat(MAX_NAME + 1), "").is_err());
    }

    #[test]
    fn what_a_peer_says_is_checked_as_it_says_it_and_is_never_another_name() {
        let read = |name: &str, group: &str| {
            let fields = [("name", name), ("group", group)].into_iter();
            JobName::deserialize(MapDeserializer::<_, Error>::new(fields)).unwrap()
        };
        assert_eq!(read("a\\nb", "0"), JobName::new("a\\nb", "0"));
        assert_eq!(read("a\\nb", "0").check(), Ok(()));
        let long = "x".repeat(PeerText::MAX + 1);
        for (name, group) in [("a\nb", ""), ("a", "a\u{202e}b"), (&long, ""), ("a", &long)] {
            let held = read(name, group);
            assert_eq!(held.check(), JobName::new(name, group).check());
            assert!(held.check().is_err() && PeerText::is_plain(&held.to_string()), "{held:?}");
            assert_ne!(held, JobName::new(&*held.name, &*held.group));
        }
    }
}
