//! Providers of credentials that are asked one after the other.

use crate::services::Services;
use reqsign_core::{Context, ProvideCredential, ProvideCredentialDyn};
use std::sync::OnceLock;

/// Asks one provider after the other until one has credentials, and from then on that one alone: where it gives no new ones, the
/// next would be another caller.
#[derive(Debug)]
pub(super) struct Chain<C: Send + Sync + Unpin + 'static> {
    providers: Vec<Provider<C>>,
    chosen: OnceLock<usize>,
    services: Services,
}

/// A provider of credentials, and how it is called. One without a name is what the options or the environment hold.
#[derive(Debug)]
struct Provider<C: Send + Sync + Unpin + 'static> {
    name: Option<String>,
    inner: Box<dyn ProvideCredentialDyn<Credential = C>>,
}

impl<C: Send + Sync + Unpin + 'static> Chain<C> {
    pub(super) fn new(services: &Services) -> Self {
        Self { providers: Vec::new(), chosen: OnceLock::new(), services: services.clone() }
    }

    pub(super) fn push(
        mut self,
        name: impl Into<String>,
        provider: impl ProvideCredential<Credential = C>,
    ) -> Self {
        self.providers.push(Provider { name: Some(name.into()), inner: Box::new(provider) });
        self
    }

    /// Adds credentials that are at hand.
    pub(super) fn push_given(mut self, provider: impl ProvideCredential<Credential = C>) -> Self {
        self.providers.push(Provider { name: None, inner: Box::new(provider) });
        self
    }
}

impl<C: std::fmt::Debug + Send + Sync + Unpin + 'static> ProvideCredential for Chain<C> {
    type Credential = C;

    async fn provide_credential(&self, context: &Context) -> reqsign_core::Result<Option<C>> {
        if let Some(provider) = self.chosen.get().and_then(|chosen| self.providers.get(*chosen)) {
            return provider.inner.provide_credential_dyn(context).await;
        }
        for (at, provider) in self.providers.iter().enumerate() {
            // One that fails is none that has credentials.
            if let Ok(Some(credential)) = provider.inner.provide_credential_dyn(context).await {
                let _ = self.chosen.set(at);
                // After a chain within it, whose caller takes on a role.
                self.services.set_giver(provider.name.clone());
                return Ok(Some(credential));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::services::block_on;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Has credentials the first so many times, and then fails.
    #[derive(Debug)]
    struct Times(&'static str, AtomicUsize);

    impl ProvideCredential for Times {
        type Credential = &'static str;

        async fn provide_credential(&self, _: &Context) -> reqsign_core::Result<Option<&'static str>> {
            let left = self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            left.map(|_| Some(self.0)).map_err(|_| reqsign_core::Error::unexpected("none"))
        }
    }

    #[test]
    fn a_provider_that_fails_later_is_not_replaced_by_another_caller() {
        let stop = AtomicBool::new(false);
        let services = Services::default();
        let chain = Chain::new(&services)
            .push("nothing", Times("none", AtomicUsize::new(0)))
            .push("the pod", Times("pod", AtomicUsize::new(1)))
            .push("the machine", Times("machine", AtomicUsize::new(9)));
        let ask = || block_on(chain.provide_credential(&Context::new()), &stop).unwrap();
        assert_eq!(ask().unwrap(), Some("pod"));
        assert_eq!(services.giver().as_deref(), Some("the pod"));
        assert!(ask().is_err(), "the role of the machine is another caller");
    }
}
