//! Who asks: credentials of S3, Google, Azure and the hub, and the signatures that they make.

mod azure;
mod chain;
mod google;
mod profiles;
mod s3;
#[cfg(test)]
mod testing;

use crate::{
    Problem, StoreOptions,
    http::{Ends, Origin, TICK},
    location::Kind,
    renewal::{FAILED_FOR, Kept},
    services::{Files, Services, block_on},
};
use chain::Chain;
use http::{HeaderValue, Request, header::AUTHORIZATION, request::Parts};
use reqsign_aws_v4 as aws;
use reqsign_azure_storage::Credential as AzureCredential;
use reqsign_core::{Context, OsEnv, ProvideCredential, SignRequest, SignRequestDyn, SigningCredential};
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Signs requests.
#[derive(Debug)]
pub(crate) struct Identity {
    scheme: Scheme,
    /// What to say where there are no credentials.
    missing: String,
    services: Services,
    turns: Arc<Turns>,
}

/// Requests of a caller ask for credentials one after the other: one of them asks a service, and the others find what it got. With
/// credentials that are valid, requests are signed side by side.
#[derive(Debug, Default)]
struct Turns {
    state: Mutex<TurnState>,
    next: Condvar,
}

#[derive(Debug, Default)]
struct TurnState {
    is_taken: bool,
    /// When no credentials were found.
    failed: Option<Instant>,
}

/// One request's turn, until it is dropped.
struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().is_taken = false;
        self.0.next.notify_one();
    }
}

impl Turns {
    /// Waits for the turn of a request.
    fn take(&self, ends: Ends<'_>) -> Result<Turn<'_>, Problem> {
        let mut state = self.lock();
        while state.is_taken {
            if ends.are_over() {
                return Err(Problem::Stopped);
            }
            state = self.next.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_taken = true;
        Ok(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Scheme {
    S3(Signing<Chain<aws::Credential>>),
    Google(Signing<google::Tokens>),
    Azure(Signing<Chain<AzureCredential>>),
    Token(HeaderValue),
}

/// What gives credentials, and signs requests by them.
struct Signing<P: ProvideCredential> {
    context: Context,
    provider: Arc<Kept<P>>,
    signer: Arc<dyn SignRequestDyn<Credential = P::Credential>>,
}

/// Without what the provider has: some of that is secret.
impl<P: ProvideCredential> std::fmt::Debug for Signing<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signing").finish_non_exhaustive()
    }
}

impl<P: ProvideCredential<Credential: SigningCredential>> Signing<P> {
    fn new(
        context: Context,
        provider: Arc<Kept<P>>,
        signer: impl SignRequest<Credential = P::Credential>,
    ) -> Self {
        Self { context, provider, signer: Arc::new(signer) }
    }

    /// Asks for credentials. `None` if there are none that are valid.
    async fn ask(&self) -> Option<P::Credential> {
        let found = self.provider.provide_credential(&self.context).await.ok()??;
        found.is_valid_at(self.signer.required_valid_until_dyn(&found, None)).then_some(found)
    }
}

impl Identity {
    /// Who the options say, which are resolved. `None` if requests need no signature.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if an option is missing.
    pub(crate) fn new(kind: Kind, origin: &Origin, options: &StoreOptions) -> Result<Option<Self>, Problem> {
        if kind == Kind::S3 && !options.anonymous {
            let caller = s3::Caller::shared(options)?;
            return Ok(Some(caller.identity(of_machine(&caller.services), options)));
        }
        let services = Services::default();
        Self::within(of_machine(&services), services, kind, origin, options)
    }

    /// The same, of another environment.
    fn within(
        context: Context,
        services: Services,
        kind: Kind,
        origin: &Origin,
        options: &StoreOptions,
    ) -> Result<Option<Self>, Problem> {
        if options.anonymous {
            return Ok(None);
        }
        let bears_token = match kind {
            Kind::Web | Kind::S3 => false,
            Kind::Azure => options.account_key.is_none(),
            Kind::Google => true,
            Kind::Hub => options.token.is_some(),
        };
        if bears_token && !options.allow_http && !origin.is_tls && !origin.is_this_machine() {
            return Err(Problem::Invalid(format!(
                "a token would go to {}, where everyone on the way can read it: use https://, or the store option \
                 anonymous=true or allow_http=true",
                origin.url()
            )));
        }
        let (scheme, missing) = match kind {
            Kind::Web => return Ok(None),
            Kind::S3 => {
                let caller = s3::Caller::new(&context, services, options)?;
                return Ok(Some(caller.identity(context, options)));
            }
            Kind::Google => google::scheme(context, &services, options),
            Kind::Azure => azure::scheme(context, &services, options)?,
            Kind::Hub => {
                let Some(token) = &options.token else { return Ok(None) };
                let invalid = |_| Problem::Invalid("the hub's token has characters that no token has".into());
                let mut value = HeaderValue::try_from(format!("Bearer {}", token.text())).map_err(invalid)?;
                value.set_sensitive(true);
                (Scheme::Token(value), String::new())
            }
        };
        Ok(Some(Self::of(scheme, missing, services, Arc::default())))
    }

    fn of(scheme: Scheme, missing: String, services: Services, turns: Arc<Turns>) -> Self {
        Self { scheme, missing, services, turns }
    }

    /// Signs a request. May ask a service for credentials, and waits for it, no longer than the caller does.
    pub(crate) fn sign<'a>(&self, request: &mut Parts, ends: impl Into<Ends<'a>>) -> Result<(), Problem> {
        let ends = ends.into();
        match &self.scheme {
            Scheme::S3(signer) => self.sign_by(signer, request, ends),
            Scheme::Google(signer) => self.sign_by(signer, request, ends),
            Scheme::Azure(signer) => self.sign_by(signer, request, ends),
            Scheme::Token(value) => {
                request.headers.insert(AUTHORIZATION, value.clone());
                Ok(())
            }
        }
    }

    /// Asks for credentials as a request does, and returns which provider gave them; `None` if the options or the environment
    /// hold them.
    pub(crate) fn giver<'a>(&self, ends: impl Into<Ends<'a>>) -> Result<Option<String>, Problem> {
        let invalid = |_| Problem::Invalid("no request can be signed".into());
        let mut request = Request::get("https://localhost/").body(()).map_err(invalid)?.into_parts().0;
        self.sign(&mut request, ends)?;
        Ok(self.last_giver())
    }

    /// The same of the credentials that requests had last.
    pub(crate) fn last_giver(&self) -> Option<String> {
        self.services.giver()
    }

    fn sign_by<P: ProvideCredential<Credential: SigningCredential>>(
        &self,
        signing: &Signing<P>,
        request: &mut Parts,
        ends: Ends<'_>,
    ) -> Result<(), Problem> {
        let credential = match signing.provider.valid(&signing.context) {
            Some(credential) => credential,
            None => self.ask(signing, ends)?,
        };
        let signed = signing.signer.sign_request_dyn(&signing.context, request, Some(&credential), None);
        // The error's text may hold answers of services.
        block_on(signed, ends).ok_or(Problem::Stopped)?.map_err(|_| self.no_credentials())
    }

    /// Asks for credentials in turn.
    fn ask<P: ProvideCredential<Credential: SigningCredential>>(
        &self,
        signing: &Signing<P>,
        ends: Ends<'_>,
    ) -> Result<P::Credential, Problem> {
        let _turn = self.turns.take(ends)?;
        if self.turns.lock().failed.is_some_and(|since| since.elapsed() < FAILED_FOR) {
            return Err(self.no_credentials());
        }
        self.services.forget();
        let found = block_on(signing.ask(), ends).ok_or(Problem::Stopped)?;
        self.turns.lock().failed = found.is_none().then(Instant::now);
        found.ok_or_else(|| self.no_credentials())
    }

    fn no_credentials(&self) -> Problem {
        Problem::Credentials(match self.services.refusal() {
            Some(refusal) => format!("{}; {refusal}", self.missing),
            None => self.missing.clone(),
        })
    }
}

/// The environment, the files and the services of this machine.
fn of_machine(services: &Services) -> Context {
    Context::new().with_env(OsEnv).with_file_read(Files).with_http_send(services.clone())
}

#[cfg(test)]
mod tests {
    use super::{s3::OF_CONTAINER, testing::*, *};
    use crate::{AccessKey, http::End};
    use reqsign_core::StaticEnv;
    use std::{
        net::TcpListener,
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    #[test]
    fn tokens_are_not_sent_without_encryption_unless_that_is_asked_for() {
        let plain = Origin { is_tls: false, host: "store.example".into(), port: 80 };
        let token = || Some("canary".to_owned().into());
        let hub = elsewhere(|own| own.token = token());
        let azure = elsewhere(|own| own.sas_token = token());
        let google = elsewhere(|_| ());
        for (kind, options) in [(Kind::Hub, hub), (Kind::Azure, azure), (Kind::Google, google)] {
            let problem = Identity::new(kind, &plain, &options).unwrap_err();
            assert!(
                matches!(&problem, Problem::Invalid(text) if text.contains("allow_http") && !text.contains("canary")),
                "{problem:?}"
            );
            let encrypted = Origin { is_tls: true, ..plain.clone() };
            assert!(Identity::new(kind, &encrypted, &options).is_ok());
            assert!(Identity::new(kind, &local(), &options).is_ok());
            let allowed = StoreOptions { allow_http: true, ..options };
            assert!(Identity::new(kind, &plain, &allowed).is_ok());
        }
        // Signatures of S3 and of a key of Azure's are of one request.
        let key = elsewhere(|own| {
            own.account = Some("mine".into());
            own.account_key = token();
        });
        assert!(Identity::new(Kind::Azure, &plain, &key).is_ok());
        assert!(Identity::new(Kind::S3, &plain, &elsewhere(|_| ())).is_ok());
        assert!(Identity::new(Kind::Hub, &plain, &elsewhere(|_| ())).is_ok(), "without a token");
    }

    #[test]
    fn a_service_without_credentials_is_not_asked_by_each_request() {
        let (problem, asked) = signed(Kind::S3, &elsewhere(|_| ()), ROLE, (403, "canary"));
        let problem = problem.unwrap_err();
        assert!(matches!(&problem, Problem::Credentials(text) if !text.contains("canary")), "{problem:?}");
        assert_eq!(asked, 1);
    }

    #[test]
    fn requests_that_wait_for_a_service_end_when_the_caller_stops_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let role = format!("http://{}/role", listener.local_addr().unwrap());
        let envs = [("AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned(), role)].into();
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(Files)
            .with_http_send(Services::default());
        let identity = Identity::within(context, Services::default(), Kind::S3, &local(), &elsewhere(|_| ()))
            .unwrap()
            .unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let sign = || {
                let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
                identity.sign(&mut parts, &stop)
            };
            let signing = [scope.spawn(sign), scope.spawn(sign)];
            let _socket = listener.accept().unwrap().0;
            thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            stop.store(true, Ordering::Relaxed);
            for own in signing {
                assert!(matches!(own.join().unwrap(), Err(Problem::Stopped)));
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        });
        // What cleans up after a stop has its own end, also while another request asks for credentials.
        let (never, begun) = (AtomicBool::new(false), Instant::now());
        let end = End { at: Some(begun + Duration::from_millis(200)), after: None };
        let sign = || {
            let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
            identity.sign(&mut parts, Ends { stop: &never, end })
        };
        thread::scope(|scope| {
            for own in [scope.spawn(sign), scope.spawn(sign)] {
                assert!(matches!(own.join().unwrap(), Err(Problem::Stopped)));
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }

    #[test]
    fn what_gives_credentials_is_named() {
        let (identity, _) = role_service(&[(200, 3600)]);
        assert_eq!(identity.giver(&AtomicBool::new(false)).unwrap().as_deref(), Some(OF_CONTAINER));
        let directory = tempfile::tempdir().unwrap();
        let config =
            "[profile reader]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = keys\n";
        let keys = "[keys]\naws_access_key_id = k\naws_secret_access_key = s\n";
        let files = aws_files(directory.path(), config, keys);
        let envs = files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect();
        let services = Services::default();
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(Files)
            .with_http_send(Service(Arc::default(), 200, ASSUMED));
        for (profile, expected) in [
            ("keys", "the keys of profile 'keys' of the shared AWS files"),
            ("reader", "the role of profile 'reader', taken on by profile 'keys'"),
        ] {
            let options = elsewhere(|own| own.profile = Some(profile.into()));
            let identity =
                Identity::within(context.clone(), services.clone(), Kind::S3, &local(), &options).unwrap();
            let giver = identity.unwrap().giver(&AtomicBool::new(false)).unwrap();
            assert_eq!(giver.as_deref(), Some(expected));
        }
        let key = elsewhere(|own| {
            own.access_key = Some(AccessKey { id: "k".into(), secret: "s".into(), token: None })
        });
        let identity = Identity::within(context, Services::default(), Kind::S3, &local(), &key).unwrap();
        assert_eq!(identity.unwrap().giver(&AtomicBool::new(false)).unwrap(), None);
    }

    #[test]
    fn requests_are_signed_while_another_asks_for_credentials() {
        let (identity, asked) = role_service(&[(200, 3600)]);
        assert!(sign_once(&identity).unwrap().contains("Credential=key-0/"));
        let _turn = identity.turns.take((&AtomicBool::new(false)).into()).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let signed = scope.spawn(|| {
                let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
                identity.sign(&mut parts, &stop).map(|()| authorization(&parts).to_owned())
            });
            let begun = Instant::now();
            while !signed.is_finished() && begun.elapsed() < Duration::from_secs(60) {
                thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
            assert!(signed.join().unwrap().unwrap().contains("Credential=key-0/"));
        });
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_service_that_fails_once_ends_no_load() {
        // Keys that are renewed before they expire, and the service refuses that: an answer that is not asked for again.
        let (identity, asked) = role_service(&[(200, 100), (403, 0)]);
        let begun = Instant::now();
        while asked.load(Ordering::Relaxed) < 2 {
            assert!(sign_once(&identity).unwrap().contains("Credential=key-0/"));
        }
        for _ in 0..50 {
            assert!(sign_once(&identity).unwrap().contains("Credential=key-0/"));
        }
        let most = 2 + begun.elapsed().as_secs() / FAILED_FOR.as_secs();
        assert!(asked.load(Ordering::Relaxed) as u64 <= most, "it is not asked by each request");
        // New ones are used once they are there.
        let (identity, _) = role_service(&[(200, 100), (200, 3600)]);
        while sign_once(&identity).unwrap().contains("Credential=key-0/") {
            thread::sleep(Duration::from_millis(1));
        }
        // What may pass is tried again at once.
        let (identity, _) = role_service(&[(503, 0), (429, 0), (200, 3600)]);
        assert!(sign_once(&identity).unwrap().contains("Credential=key-2/"));
    }

    #[test]
    fn credentials_that_expire_soon_are_not_renewed_back_to_back() {
        let (identity, asked) = role_service(&[(200, 100)]);
        let begun = Instant::now();
        while asked.load(Ordering::Relaxed) < 2 {
            sign_once(&identity).unwrap();
        }
        for _ in 0..50 {
            sign_once(&identity).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
        let most = 2 + begun.elapsed().as_secs() / FAILED_FOR.as_secs();
        assert!(asked.load(Ordering::Relaxed) as u64 <= most);
    }

    #[test]
    fn a_service_that_refuses_is_named_with_its_status() {
        let (identity, _) = role_service(&[(403, 0)]);
        let problem = sign_once(&identity).unwrap_err();
        assert!(
            matches!(&problem, Problem::Credentials(text) if text.contains("answered with status 403")
                && text.contains("set AWS_ACCESS_KEY_ID")
                && text.contains("http://127.0.0.1:") && !text.contains("canary")),
            "{problem:?}"
        );
    }
}
