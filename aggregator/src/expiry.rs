//! Warnings about the expiry of the aggregator's identity.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use racksum_net::quic::{Certificate, Credentials};

/// Checks the current identity every hour for as long as the future is polled. Warns if the
/// identity is about to expire or is not valid, and repeats the warning once a day.
pub(crate) async fn watch(credentials: Arc<Mutex<Credentials>>) {
    let current = || {
        let credentials = credentials.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // The certificate was parsed at the start or at the last reload, so parsing it again
        // succeeds.
        credentials.certificate().ok()
    };
    // The start-up checks have already reported any concern that exists now.
    let mut reminder = Reminder { logged: current().as_ref().and_then(Concern::of), hours: 0 };
    loop {
        tokio::time::sleep(HOUR).await;
        let Some(certificate) = current() else { continue };
        match reminder.next(Concern::of(&certificate)) {
            Some(Concern::EndsSoon) => tracing::warn!(
                name = certificate.name,
                until = certificate.not_after,
                "this aggregator's identity expires soon; replace its file and send SIGHUP"
            ),
            Some(Concern::NotValid) => tracing::error!(
                name = certificate.name,
                from = certificate.not_before,
                until = certificate.not_after,
                "this aggregator's identity is not valid now, so no rank can join; replace its \
                 file and send SIGHUP, or correct this host's clock"
            ),
            None => {}
        }
    }
}

/// A reason to replace an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Concern {
    EndsSoon,
    NotValid,
}

impl Concern {
    fn of(certificate: &Certificate) -> Option<Self> {
        match certificate {
            Certificate { valid: false, .. } => Some(Self::NotValid),
            Certificate { ends_soon: true, .. } => Some(Self::EndsSoon),
            _ => None,
        }
    }
}

/// The most recently logged concern.
struct Reminder {
    logged: Option<Concern>,
    /// The number of hours since the concern was logged.
    hours: u32,
}

impl Reminder {
    /// Returns the concern to log this hour: a new one, or one that was logged a day ago.
    fn next(&mut self, concern: Option<Concern>) -> Option<Concern> {
        self.hours += 1;
        if concern == self.logged && self.hours < HOURS_OF_A_DAY {
            return None;
        }
        *self = Self { logged: concern, hours: 0 };
        concern
    }
}

const HOUR: Duration = Duration::from_secs(3600);
const HOURS_OF_A_DAY: u32 = 24;

#[cfg(test)]
mod tests {
    use racksum_net::quic::Role;

    use super::*;

    #[test]
    fn what_is_new_is_said_at_once_and_then_once_a_day() {
        let mut reminder = Reminder { logged: None, hours: 0 };
        let mut hours = |concern, count: u32| -> Vec<u32> {
            (1..=count).filter(|_| reminder.next(concern).is_some()).collect()
        };
        assert_eq!(hours(None, 100), [0; 0]);
        assert_eq!(hours(Some(Concern::EndsSoon), 50), [1, 25, 49]);
        assert_eq!(hours(Some(Concern::NotValid), 30), [1, 25]);
        assert_eq!(hours(None, 1), [0; 0]);
        assert_eq!(hours(Some(Concern::EndsSoon), 2), [1]);
    }

    #[test]
    fn an_identity_that_has_expired_is_not_one_that_does_so_soon() {
        let fine = Certificate {
            name: "agg-1".into(),
            role: Role::Aggregator,
            issuer: "racksum".into(),
            not_before: String::new(),
            not_after: String::new(),
            valid: true,
            ends_soon: false,
            fingerprint: String::new(),
        };
        assert_eq!(Concern::of(&fine), None);
        let soon = Certificate { ends_soon: true, ..fine };
        assert_eq!(Concern::of(&soon), Some(Concern::EndsSoon));
        let late = Certificate { valid: false, ..soon };
        assert_eq!(Concern::of(&late), Some(Concern::NotValid));
    }
}
