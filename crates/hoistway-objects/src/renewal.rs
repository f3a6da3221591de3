//! Credentials that are kept, and renewed before they expire.

use crate::{
    Problem,
    services::{Asked, PROGRAM_PATIENCE, block_on},
};
use reqsign_core::{Context, ProvideCredential, SigningCredential, time::Timestamp};
use std::{
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::{Duration, Instant},
};

/// How long services are not asked again after no credentials were found: the requests of a load that wait for them would
/// each ask anew, one after the other.
pub(crate) const FAILED_FOR: Duration = Duration::from_secs(5);
/// How long the answer to a renewal is waited for: longer than programs and services may take.
const RENEWAL_PATIENCE: Duration = PROGRAM_PATIENCE.saturating_mul(3);

/// Keeps credentials while they are valid. A while before they expire, new ones are asked for beside the requests, which go on
/// with those that are kept.
#[derive(Debug)]
pub(crate) struct Kept<P: ProvideCredential> {
    provider: Arc<P>,
    known: Mutex<Known<P::Credential>>,
}

#[derive(Debug)]
struct Known<C> {
    last: Option<C>,
    /// When no new ones came.
    failed: Option<Instant>,
    renewal: Option<Renewal<C>>,
}

impl<C: SigningCredential> Known<C> {
    /// Keeps what a renewal brought, unless it has expired or is about to, before what is known. If it expires soon, the next
    /// renewal waits a while, as after a failure.
    fn renewed(&mut self, found: Option<C>) {
        let (now, soon) = (Timestamp::now(), Timestamp::now() + Duration::from_secs(30));
        let lasts = self.last.as_ref().is_some_and(|last| last.is_valid_at(soon));
        let found = found.filter(|own| own.is_valid_at(if lasts { soon } else { now }));
        self.failed = (!found.as_ref().is_some_and(SigningCredential::is_valid)).then(Instant::now);
        if found.is_some() {
            self.last = found;
        }
    }
}

/// A question for new credentials.
#[derive(Debug)]
struct Renewal<C> {
    asked: Asked<Option<C>>,
    begun: Instant,
}

impl<C> Renewal<C> {
    /// The answer, if it is there: nothing also once it was waited for too long.
    fn answer(&self) -> Option<Option<C>> {
        match self.asked.answer() {
            Some(answer) => Some(answer.ok().flatten()),
            None => (self.begun.elapsed() >= RENEWAL_PATIENCE).then_some(None),
        }
    }
}

impl<P: ProvideCredential<Credential: SigningCredential>> Kept<P> {
    pub(crate) fn new(provider: P) -> Self {
        let known = Known { last: None, failed: None, renewal: None };
        Self { provider: Arc::new(provider), known: Mutex::new(known) }
    }

    /// Returns the credentials that are valid now, and starts a renewal if they expire soon.
    pub(crate) fn valid(&self, context: &Context) -> Option<P::Credential> {
        let mut known = self.lock();
        if let Some(found) = known.renewal.as_ref().and_then(Renewal::answer) {
            known.renewal = None;
            known.renewed(found);
        }
        let last = known.last.clone().filter(|last| last.is_valid_at(Timestamp::now()))?;
        let has_failed = known.failed.is_some_and(|failed| failed.elapsed() < FAILED_FOR);
        if !last.is_valid() && !has_failed && known.renewal.is_none() {
            match self.renewal(context) {
                Ok(asked) => known.renewal = Some(Renewal { asked, begun: Instant::now() }),
                Err(_) => known.failed = Some(Instant::now()),
            }
        }
        Some(last)
    }

    /// Asks for new credentials on a thread of its own.
    fn renewal(&self, context: &Context) -> reqsign_core::Result<Asked<Option<P::Credential>>> {
        let (provider, context) = (self.provider.clone(), context.clone());
        Asked::of(move |stop| {
            let found = block_on(provider.provide_credential(&context), stop).ok_or(Problem::Stopped)?;
            // Requests go on without them.
            Ok(found.unwrap_or_default())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Known<P::Credential>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: ProvideCredential<Credential: SigningCredential>> ProvideCredential for Kept<P> {
    type Credential = P::Credential;

    async fn provide_credential(&self, context: &Context) -> reqsign_core::Result<Option<Self::Credential>> {
        if let Some(credential) = self.valid(context) {
            return Ok(Some(credential));
        }
        // They expired before the new ones came. What fails to renew them is not asked again at once.
        let renewal = self.lock().renewal.take();
        if let Some(renewal) = renewal {
            // It is polled each tick.
            let found = poll_fn(|_| renewal.answer().map_or(Poll::Pending, Poll::Ready)).await;
            let valid = {
                let mut known = self.lock();
                known.renewed(found);
                known.last.clone().filter(|last| last.is_valid_at(Timestamp::now()))
            };
            // What has kept a request waiting for long is not asked again at once.
            if valid.is_some() || renewal.begun.elapsed() >= PROGRAM_PATIENCE {
                return Ok(valid);
            }
        }
        let found = self.provider.provide_credential(context).await?;
        if let Some(credential) = &found {
            let mut known = self.lock();
            (known.last, known.failed) = (Some(credential.clone()), None);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqsign_aws_v4 as aws;

    #[test]
    fn credentials_that_have_expired_replace_no_valid_ones() {
        let expires = |id: &str, seconds: i64| {
            let by = Duration::from_secs(seconds.unsigned_abs());
            let now = Timestamp::now();
            aws::Credential {
                access_key_id: id.into(),
                secret_access_key: "s".into(),
                session_token: None,
                expires_in: Some(if seconds < 0 { now - by } else { now + by }),
            }
        };
        let mut known = Known { last: Some(expires("first", 90)), failed: None, renewal: None };
        for (found, kept, has_failed) in [
            (Some(expires("expired", -1)), "first", true),
            (None, "first", true),
            (Some(expires("soon", 100)), "soon", true),
            (Some(expires("good", 3600)), "good", false),
        ] {
            known.renewed(found);
            assert_eq!(known.last.as_ref().map(|own| &*own.access_key_id), Some(kept));
            assert_eq!(known.failed.is_some(), has_failed, "{kept}");
        }
    }

    #[test]
    fn a_renewal_that_never_answers_is_given_up() {
        let (_release, hang) = std::sync::mpsc::channel::<()>();
        let asked = Asked::of(move |_| {
            let _ = hang.recv();
            Ok(Some("new"))
        });
        let asked = asked.unwrap();
        let Some(begun) = Instant::now().checked_sub(RENEWAL_PATIENCE) else { return };
        assert_eq!(Renewal { asked, begun }.answer(), Some(None));
    }
}
