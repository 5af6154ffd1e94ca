//! Admission rules: which identities may open and join which jobs.

use serde::Deserialize;
use wildmatch::WildMatch;

/// An admission rule: matching identities may open and join matching jobs.
///
/// In a pattern, `*` stands for any number of characters, and `?` for exactly one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admit {
    /// The pattern that the identity must match.
    pub identity: String,
    /// The patterns for job names; the job's name must match one of them.
    pub jobs: Vec<String>,
    /// The maximum number of concurrent jobs that the rule admits.
    pub max_jobs: Option<u16>,
    /// The maximum number of ranks that the jobs admitted by the rule have together.
    pub max_ranks: Option<u32>,
    /// The maximum number of slots of each stream, for a job that the rule admits.
    pub pool_slots: Option<u32>,
    /// The share of each shard's packet buffers, in per cent, that a job admitted by the rule gets.
    pub share_percent: Option<u8>,
}

/// Checks whether a caller with this identity may join a job. Without rules, any caller may join
/// any job.
///
/// # Errors
/// The caller may not join. The error is a sentence for the caller, and reveals nothing about other
/// jobs or identities.
pub(crate) fn check(rules: &[Admit], identity: Option<&str>, job: &str) -> Result<(), String> {
    if rules.is_empty() {
        return Ok(());
    }
    let Some(identity) = identity else {
        return Err(
            "this aggregator requires an identity that its [[admit]] rules name, but the rank has \
             no identity; set `identity`"
                .into(),
        );
    };
    if rule_of(rules, Some(identity), job).is_some() {
        return Ok(());
    }
    Err(format!(
        "identity {identity:?} may not join job {job:?} here; set `job` to a job that this \
         identity may join, or ask the operator to add the identity to the [[admit]] rules of the \
         aggregator's configuration"
    ))
}

/// Returns the index of the first rule that lets an identity join a job.
pub(crate) fn rule_of(rules: &[Admit], identity: Option<&str>, job: &str) -> Option<usize> {
    let identity = identity?;
    rules.iter().position(|rule| {
        WildMatch::new(&rule.identity).matches(identity)
            && rule.jobs.iter().any(|name| WildMatch::new(name).matches(job))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(identity: &str, jobs: &[&str]) -> Admit {
        let jobs = jobs.iter().map(|&name| name.to_owned()).collect();
        Admit { identity: identity.to_owned(), jobs, ..Admit::default() }
    }

    #[test]
    fn without_rules_everyone_may_join_any_job() {
        assert_eq!(check(&[], Some("node"), "job"), Ok(()));
        assert_eq!(check(&[], None, "job"), Ok(()));
    }

    #[test]
    fn with_rules_only_those_may_that_one_of_them_names() {
        let rules = [rule("vision-*", &["vision/*", "shared"]), rule("speech-?", &["speech*"])];
        let may = |identity, job| check(&rules, Some(identity), job).is_ok();
        for (identity, job) in [
            ("vision-1", "vision/resnet"),
            ("vision-", "shared"),
            ("speech-7", "speech"),
            ("speech-7", "speech/large"),
        ] {
            assert!(may(identity, job), "{identity} {job}");
        }
        for (identity, job) in [
            ("vision-1", "speech"),
            ("speech-77", "speech"),
            ("speech-7", "shared"),
            ("my-vision-1", "shared"),
            ("vision-1", "shared2"),
            ("Vision-1", "shared"),
            ("", ""),
        ] {
            assert!(!may(identity, job), "{identity} {job}");
        }
        assert!(check(&rules, None, "shared").is_err());
    }

    #[test]
    fn a_refusal_names_nobody_else() {
        let rules = [rule("alice", &["secret-project"])];
        let error = check(&rules, Some("bob"), "other").unwrap_err();
        assert!(error.contains("\"bob\"") && error.contains("\"other\""), "{error}");
        assert!(!error.contains("alice") && !error.contains("secret"), "{error}");
    }
}
