//! The rules for the lives of a job: which ranks may join a life, and which may end it by starting
//! the next.
//!
//! Aggregators and sidecars share these rules. In addition to the caller's secret, each of them
//! uses its own evidence about the caller ([`Known`]).

use crate::auth::Key;

/// The evidence that connects a caller to a life of a job, apart from the job's secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The caller is unknown.
    Not,
    /// A rank of the life has called from the same network address or host. Ranks of other jobs may
    /// share that address or host.
    ByPlace,
    /// The caller has the identity of a rank of the life.
    ByIdentity,
}

/// Returns whether a rank that shows the secret `shown` may join the life that began with the
/// secret `own`.
#[must_use]
pub fn may_join(own: Option<Key>, shown: Option<Key>) -> bool {
    own.is_none() || own == shown
}

/// Returns whether a rank that shows the secret `shown` may end the life that began with the secret
/// `own`. [`Known::ByPlace`] is enough only if both `own` and `shown` are `None`.
#[must_use]
pub fn may_end(own: Option<Key>, shown: Option<Key>, known: Known) -> bool {
    match (own, shown) {
        (Some(own), Some(shown)) if own == shown => true,
        (None, None) => known != Known::Not,
        _ => known == Known::ByIdentity,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Option<Key> = None;
    const OWN: Option<Key> = Some(Key([1; Key::LEN]));
    const OTHER: Option<Key> = Some(Key([2; Key::LEN]));

    #[test]
    fn a_life_with_a_secret_is_joined_by_those_that_show_it() {
        for (own, shown, joins) in [
            (NONE, NONE, true),
            (NONE, OWN, true),
            (OWN, OWN, true),
            (OWN, OTHER, false),
            (OWN, NONE, false),
        ] {
            assert_eq!(may_join(own, shown), joins, "{own:?} {shown:?}");
        }
    }

    #[test]
    fn a_life_is_ended_by_its_secret_or_an_identity_or_its_place_where_there_is_no_secret() {
        let by = |own, shown| {
            [Known::Not, Known::ByPlace, Known::ByIdentity].map(|it| may_end(own, shown, it))
        };
        assert_eq!(by(OWN, OWN), [true, true, true]);
        assert_eq!(by(NONE, NONE), [false, true, true]);
        for (own, shown) in [(OWN, OTHER), (OWN, NONE), (NONE, OWN)] {
            assert_eq!(by(own, shown), [false, false, true], "{own:?} {shown:?}");
        }
    }
}
