//! What a job is called.

use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::peer_text::PeerText;

/// Most bytes of a job's name, and of a group's.
pub const MAX_NAME: usize = 128;

/// The name of a job, and of one of its groups of ranks: each group sums by itself. Rules and
/// limits are about jobs, with all their groups.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobName {
    /// The job, as its user calls it.
    #[serde(deserialize_with = "PeerText::string")]
    pub name: String,
    /// The group; empty for a job that has none.
    #[serde(deserialize_with = "PeerText::string")]
    pub group: String,
}

impl JobName {
    /// Checks the lengths of both names, and that others show them as they are.
    ///
    /// # Errors
    /// A sentence that says which is too long, missing, or not to be printed.
    pub fn check(&self) -> Result<(), String> {
        let (name, group) = (self.name.len(), self.group.len());
        if name == 0 || name > MAX_NAME {
            return Err(alloc::format!("a job's name has 1 to {MAX_NAME} bytes, not {name}"));
        }
        if group > MAX_NAME {
            return Err(alloc::format!("a group's name has at most {MAX_NAME} bytes, not {group}"));
        }
        for (what, name) in [("job", &self.name), ("group", &self.group)] {
            if !PeerText::is_plain(name) {
                return Err(alloc::format!(
                    "the {what}'s name \"{}\" has characters that cannot be printed; choose \
                     another",
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
    /// As a string, in quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string(), f)
    }
}

impl From<&str> for JobName {
    /// A job without groups.
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), group: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_others_would_not_read_as_it_is_is_refused_and_escaped_once() {
        let check = |name: &str, group: &str| {
            JobName { name: name.to_owned(), group: group.to_owned() }.check()
        };
        for name in ["train", "a b", "..", "vision/\"big\"", &"x".repeat(MAX_NAME)] {
            assert_eq!(check(name, name), Ok(()));
        }
        let told = |what: &str| {
            let name = r#""a\nb""#;
            Err(alloc::format!(
                "the {what}'s name {name} has characters that cannot be printed; choose another"
            ))
        };
        assert_eq!(check("a\nb", ""), told("job"));
        assert_eq!(check("a", "a\nb"), told("group"));
        assert!(check("", "").is_err() && check(&"x".repeat(MAX_NAME + 1), "").is_err());
    }
}
