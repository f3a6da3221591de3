//! Who asks: credentials of S3, Google, Azure and the hub, and the signatures that they make.

use crate::{
    Problem, StoreOptions,
    aws_files::{Profile, Role, words},
    http::{Origin, TICK},
    location::{Kind, aws_partition, region},
    per_process::PerProcess,
    renewal::{FAILED_FOR, Kept},
    services::{Files, Services, block_on},
};
use http::{HeaderValue, Request, header::AUTHORIZATION, request::Parts};
use reqsign_aws_v4 as aws;
use reqsign_azure_storage as azure;
use reqsign_core::{
    Context, OsEnv, ProvideCredential, ProvideCredentialDyn, SignRequest, SignRequestDyn, Signer,
    SigningCredential,
};
use reqsign_google as google;
use serde::Deserialize;
use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// Callers that are kept.
const MAX_CALLERS: usize = 64;
const DEFAULT_PROFILE: &str = "default";
const OF_CONTAINER: &str = "the role of the container (AWS_CONTAINER_CREDENTIALS_*)";
const OF_MACHINE: &str = "the role of the machine (metadata service of EC2)";
/// What a token of Google's may do: for loads, and for saves.
const GOOGLE_SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";
const GOOGLE_WRITE_SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

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
    fn take(&self, stop: &AtomicBool) -> Result<Turn<'_>, Problem> {
        let mut state = self.lock();
        while state.is_taken {
            if stop.load(Ordering::Relaxed) {
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
    Google(Signing<Tokens>),
    Azure(Signing<Chain<azure::Credential>>),
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
            let caller = S3Caller::shared(options)?;
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
                let caller = S3Caller::new(&context, services, options)?;
                return Ok(Some(caller.identity(context, options)));
            }
            Kind::Google => google(context, &services, options),
            Kind::Azure => azure(context, &services, options)?,
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

    /// Signs a request. May ask a service for credentials, and waits for it. Ends soon after `stop` is set.
    pub(crate) fn sign(&self, request: &mut Parts, stop: &AtomicBool) -> Result<(), Problem> {
        match &self.scheme {
            Scheme::S3(signer) => self.sign_by(signer, request, stop),
            Scheme::Google(signer) => self.sign_by(signer, request, stop),
            Scheme::Azure(signer) => self.sign_by(signer, request, stop),
            Scheme::Token(value) => {
                request.headers.insert(AUTHORIZATION, value.clone());
                Ok(())
            }
        }
    }

    /// Asks for credentials as a request does, and returns which provider gave them; `None` if the options or the environment
    /// hold them.
    pub(crate) fn giver(&self, stop: &AtomicBool) -> Result<Option<String>, Problem> {
        let invalid = |_| Problem::Invalid("no request can be signed".into());
        let mut request = Request::get("https://localhost/").body(()).map_err(invalid)?.into_parts().0;
        self.sign(&mut request, stop)?;
        Ok(self.services.giver())
    }

    fn sign_by<P: ProvideCredential<Credential: SigningCredential>>(
        &self,
        signing: &Signing<P>,
        request: &mut Parts,
        stop: &AtomicBool,
    ) -> Result<(), Problem> {
        let credential = match signing.provider.valid(&signing.context) {
            Some(credential) => credential,
            None => self.ask(signing, stop)?,
        };
        let signed = signing.signer.sign_request_dyn(&signing.context, request, Some(&credential), None);
        // The error's text may hold answers of services.
        block_on(signed, stop).ok_or(Problem::Stopped)?.map_err(|_| self.no_credentials())
    }

    /// Asks for credentials in turn.
    fn ask<P: ProvideCredential<Credential: SigningCredential>>(
        &self,
        signing: &Signing<P>,
        stop: &AtomicBool,
    ) -> Result<P::Credential, Problem> {
        let _turn = self.turns.take(stop)?;
        if self.turns.lock().failed.is_some_and(|since| since.elapsed() < FAILED_FOR) {
            return Err(self.no_credentials());
        }
        self.services.forget();
        let found = block_on(signing.ask(), stop).ok_or(Problem::Stopped)?;
        self.turns.lock().failed = found.is_none().then(Instant::now);
        found.ok_or_else(|| self.no_credentials())
    }

    fn no_credentials(&self) -> Problem {
        Problem::Credentials(match self.services.refusal() {
            Some(refusal) => format!("no credentials were given: {refusal}"),
            None => self.missing.clone(),
        })
    }
}

/// The environment, the files and the services of this machine.
fn of_machine(services: &Services) -> Context {
    Context::new().with_env(OsEnv).with_file_read(Files).with_http_send(services.clone())
}

/// Credentials of S3, shared by all regions of a partition: what gives them is asked once for all.
#[derive(Debug)]
struct S3Caller {
    provider: Arc<Kept<Chain<aws::Credential>>>,
    missing: String,
    services: Services,
    turns: Arc<Turns>,
}

impl S3Caller {
    fn new(context: &Context, services: Services, options: &StoreOptions) -> Result<Self, Problem> {
        let (chain, missing) = s3(context, &services, options)?;
        let provider = Arc::new(Kept::new(chain));
        Ok(Self { provider, missing, services, turns: Arc::default() })
    }

    /// Returns the caller of this process for the options, and makes it if there is none.
    fn shared(options: &StoreOptions) -> Result<Arc<Self>, Problem> {
        static CALLERS: PerProcess<Mutex<HashMap<StoreOptions, Arc<S3Caller>>>> = PerProcess::new();
        let services = Services::default();
        let context = of_machine(&services);
        let key = Self::key(&context, &services, options);
        let mut callers = CALLERS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(caller) = callers.get(&key) {
            return Ok(caller.clone());
        }
        if callers.len() >= MAX_CALLERS {
            callers.clear();
        }
        let caller = Arc::new(Self::new(&context, services, options)?);
        callers.insert(key, caller.clone());
        Ok(caller)
    }

    /// What callers have in common that are one: all that says who asks.
    fn key(context: &Context, services: &Services, options: &StoreOptions) -> StoreOptions {
        let profiles = AwsProfiles { context, services, options };
        let name = options.profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        // A role is taken on at the service of the region, which may be a wrong one at first.
        let has_role = options.access_key.is_none() && profiles.find(name).role.is_some();
        let region = region(options);
        StoreOptions {
            region: Some(if has_role { region } else { aws_partition(region) }.to_owned()),
            path_style: None,
            unpinned: false,
            allow_http: false,
            requester_pays: false,
            writes: false,
            ..options.clone()
        }
    }

    /// Signs requests for a region.
    fn identity(&self, context: Context, options: &StoreOptions) -> Identity {
        let signer = aws::RequestSigner::new("s3", region(options));
        let signer = Signing::new(context, self.provider.clone(), signer);
        Identity::of(Scheme::S3(signer), self.missing.clone(), self.services.clone(), self.turns.clone())
    }
}

/// What gives the credentials that the options say, and what to say where there are none.
fn s3(
    context: &Context,
    services: &Services,
    options: &StoreOptions,
) -> Result<(Chain<aws::Credential>, String), Problem> {
    let mut missing =
        "no valid credentials for S3 were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
                       AWS_PROFILE, or the store option anonymous=true for a public bucket"
            .to_owned();
    let chain = match (&options.access_key, &options.profile) {
        (Some(key), _) => {
            let own = aws::StaticCredentialProvider::new(&key.id, &key.secret);
            Chain::new(services).push_given(match &key.token {
                Some(token) => own.with_session_token(token),
                None => own,
            })
        }
        // The role of a pod or a machine would be another caller than the one that is named.
        (None, Some(name)) => {
            missing = format!(
                "profile '{name}' of the shared AWS files gives no valid key, SSO session or role: sign in again, check its source_profile, or name another by \
                  the store option profile or AWS_PROFILE"
            );
            AwsProfiles { context, services, options }.chain(name, &[])?
        }
        (None, None) => {
            let profiles = AwsProfiles { context, services, options };
            let chain = profiles.chain(DEFAULT_PROFILE, &[])?;
            let found = profiles.find(DEFAULT_PROFILE);
            match &options.endpoint {
                // It names who asks.
                _ if found.role.is_some() || found.process.is_some() => chain,
                Some(_) => of_container(chain),
                None => of_container(chain).push(OF_MACHINE, aws::IMDSv2CredentialProvider::new()),
            }
        }
    };
    Ok((chain, missing))
}

fn of_container(chain: Chain<aws::Credential>) -> Chain<aws::Credential> {
    chain
        .push(
            "a web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
            aws::AssumeRoleWithWebIdentityCredentialProvider::new(),
        )
        .push(OF_CONTAINER, aws::ECSCredentialProvider::new())
}

/// Who the profiles of the shared files of AWS's tools say.
struct AwsProfiles<'a> {
    context: &'a Context,
    services: &'a Services,
    options: &'a StoreOptions,
}

impl AwsProfiles<'_> {
    fn find(&self, name: &str) -> Profile {
        // Services may have no HOME. Keys are looked for in the same place.
        let home = |variable: &str| {
            let home = self.context.home_dir().filter(|_| variable == "HOME")?;
            home.into_os_string().into_string().ok()
        };
        Profile::find(name, |variable| self.context.env_var(variable).or_else(|| home(variable)))
    }

    /// The providers of a profile. It is the source of those `above` it.
    fn chain(&self, name: &str, above: &[&str]) -> Result<Chain<aws::Credential>, Problem> {
        let found = self.find(name);
        match &found.role {
            // One that is its own source has keys, too.
            Some(role) if !above.contains(&name) => self.assumed(name, role, above),
            _ => {
                let keys = aws::ProfileCredentialProvider::new().with_profile(name);
                let sso = aws::SSOCredentialProvider::new().with_profile(name);
                let chain = Chain::new(self.services)
                    .push(format!("the keys of profile '{name}' of the shared AWS files"), keys)
                    .push(format!("the SSO session of profile '{name}' of the shared AWS files"), sso);
                let Some(process) = &found.process else { return Ok(chain) };
                let Some(command) = words(process) else {
                    let reason = format!("a quote in credential_process of profile '{name}' is not closed");
                    return Err(Problem::Invalid(reason));
                };
                let whose = format!("credential_process of profile '{name}'");
                let program = Program { whose: whose.clone(), command, services: self.services.clone() };
                Ok(chain.push(whose, program))
            }
        }
    }

    /// The provider of a role that a profile takes on.
    fn assumed(&self, name: &str, role: &Role, above: &[&str]) -> Result<Chain<aws::Credential>, Problem> {
        let invalid = |reason: &str| Err(Problem::Invalid(format!("profile '{name}' {reason}")));
        let session = role.session_name.clone().unwrap_or_else(|| "hoistway".into());
        if role.mfa_serial.is_some() {
            return invalid("needs the code of a device (mfa_serial), which hoistway does not ask for");
        }
        let mut source = Chain::new(self.services);
        source = match (
            &role.web_identity_token_file,
            &role.source_profile,
            role.credential_source.as_deref(),
        ) {
            (Some(file), ..) => {
                let (arn, file) = (role.arn.clone(), file.into());
                let role = aws::AssumeRoleWithWebIdentityCredentialProvider::with_config(arn, file);
                let given = format!("the role of profile '{name}', by its web identity");
                return Ok(source.push(given, role.with_role_session_name(session)));
            }
            (None, Some(profile), None) => self.chain(profile, &[above, &[name]].concat())?,
            (None, None, Some("Environment")) => {
                source.push("an access key of the environment", aws::EnvCredentialProvider::new())
            }
            (None, None, Some("EcsContainer")) => {
                source.push(OF_CONTAINER, aws::ECSCredentialProvider::new())
            }
            (None, None, Some("Ec2InstanceMetadata")) => {
                source.push(OF_MACHINE, aws::IMDSv2CredentialProvider::new())
            }
            _ => {
                return invalid(
                    "has a role_arn, and not one of source_profile and credential_source, which is Environment, \
                     EcsContainer or Ec2InstanceMetadata",
                );
            }
        };
        let signer = aws::RequestSigner::new("sts", region(self.options));
        let signer = Signer::new(self.context.clone(), source, signer);
        let mut provider = aws::AssumeRoleCredentialProvider::new(role.arn.clone(), signer);
        provider = provider.with_role_session_name(session);
        if let Some(id) = &role.external_id {
            provider = provider.with_external_id(id.clone());
        }
        // Sessions that a region gives are valid in all of them; those of the global endpoint are not.
        provider = provider.with_region(region(self.options).to_owned()).with_regional_sts_endpoint();
        let by = match (&role.source_profile, &role.credential_source) {
            (Some(profile), _) => format!("profile '{profile}'"),
            (None, source) => source.clone().unwrap_or_default(),
        };
        Ok(Chain::new(self.services)
            .push(format!("the role of profile '{name}', taken on by {by}"), provider))
    }
}

/// A program that prints credentials: `credential_process` of a profile.
/// <https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html>
#[derive(Debug)]
struct Program {
    whose: String,
    command: Vec<String>,
    services: Services,
}

/// What such a program prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

impl ProvideCredential for Program {
    type Credential = aws::Credential;

    async fn provide_credential(&self, _: &Context) -> reqsign_core::Result<Option<aws::Credential>> {
        let printed = self.services.run(&self.whose, self.command.clone()).await?;
        let refuse = || self.services.refuse(format!("{} printed no credentials of version 1", self.whose));
        let printed: Printed = serde_json::from_slice(&printed).map_err(|_| refuse())?;
        if printed.version != 1 {
            return Err(refuse());
        }
        let expiration = printed.expiration.filter(|text| !text.is_empty());
        Ok(Some(aws::Credential {
            access_key_id: printed.access_key_id,
            secret_access_key: printed.secret_access_key,
            session_token: printed.session_token,
            expires_in: expiration.map(|text| text.parse()).transpose().map_err(|_| refuse())?,
        }))
    }
}

fn google(context: Context, services: &Services, options: &StoreOptions) -> (Scheme, String) {
    let scope = if options.writes { GOOGLE_WRITE_SCOPE } else { GOOGLE_SCOPE };
    let (chain, missing) = match &options.credentials_file {
        Some(path) => {
            let file = google::FileCredentialProvider::new(path).with_scope(scope);
            let missing = format!(
                "no valid credentials for Google are in {path}, which the store option credentials_file or \
                 GOOGLE_APPLICATION_CREDENTIALS names"
            );
            (Chain::new(services).push(format!("the file {path}"), file), missing)
        }
        None => {
            let machine = google::VmMetadataCredentialProvider::new().with_scope(scope);
            let chain = Chain::new(services).push(
                "the file of gcloud auth application-default login",
                google::WellKnownCredentialProvider::new(),
            );
            let chain = match options.endpoint {
                Some(_) => chain,
                None => chain.push("the service account of the machine (metadata server)", machine),
            };
            let missing = "no valid credentials for Google were found: set GOOGLE_APPLICATION_CREDENTIALS, or sign in by \
                           `gcloud auth application-default login`, or set the store option anonymous=true for a public \
                           bucket";
            (chain, missing.into())
        }
    };
    let signer = google::RequestSigner::new("storage").with_scope(scope);
    (Scheme::Google(Signing::new(context, Arc::new(Kept::new(Tokens { chain, scope })), signer)), missing)
}

/// Exchanges the key of a service account for a token that many requests have. The signer itself would ask for one for each
/// request.
#[derive(Debug)]
struct Tokens {
    chain: Chain<google::Credential>,
    /// What the token may do.
    scope: &'static str,
}

impl ProvideCredential for Tokens {
    type Credential = google::Credential;

    async fn provide_credential(&self, context: &Context) -> reqsign_core::Result<Option<Self::Credential>> {
        match self.chain.provide_credential(context).await? {
            Some(google::Credential { service_account: Some(account), token: None, .. }) => {
                let exchange = google::ServiceAccountTokenCredentialProvider::new(account);
                exchange.with_scope(self.scope).provide_credential(context).await
            }
            found => Ok(found),
        }
    }
}

/// Asks one provider after the other until one has credentials, and from then on that one alone: where it gives no new ones, the
/// next would be another caller.
#[derive(Debug)]
struct Chain<C: Send + Sync + Unpin + 'static> {
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
    fn new(services: &Services) -> Self {
        Self { providers: Vec::new(), chosen: OnceLock::new(), services: services.clone() }
    }

    fn push(mut self, name: impl Into<String>, provider: impl ProvideCredential<Credential = C>) -> Self {
        self.providers.push(Provider { name: Some(name.into()), inner: Box::new(provider) });
        self
    }

    /// Adds credentials that are at hand.
    fn push_given(mut self, provider: impl ProvideCredential<Credential = C>) -> Self {
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

fn azure(context: Context, services: &Services, options: &StoreOptions) -> Result<(Scheme, String), Problem> {
    let mut chain = Chain::new(services);
    chain = match (&options.account_key, &options.sas_token) {
        (Some(key), _) => {
            let Some(account) = &options.account else {
                let reason =
                    "a key needs its account: set AZURE_STORAGE_ACCOUNT_NAME or the store option account";
                return Err(Problem::Invalid(reason.into()));
            };
            chain.push_given(azure::StaticCredentialProvider::new_shared_key(account, key.text()))
        }
        (None, Some(token)) => chain.push_given(azure::StaticCredentialProvider::new_sas_token(token.text())),
        (None, None) => {
            let chain = chain
                .push("a client (AZURE_CLIENT_SECRET)", azure::ClientSecretCredentialProvider::new())
                .push(
                    "a workload identity (AZURE_FEDERATED_TOKEN_FILE)",
                    azure::WorkloadIdentityCredentialProvider::new(),
                );
            match options.endpoint {
                Some(_) => chain,
                None => {
                    chain.push("the managed identity of the machine", azure::ImdsCredentialProvider::new())
                }
            }
        }
    };
    let missing = "no valid credentials for Azure were found: set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or \
                   AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET, or the store option anonymous=true for a \
                   public container";
    let provider = Arc::new(Kept::new(chain));
    Ok((Scheme::Azure(Signing::new(context, provider, azure::RequestSigner::new())), missing.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AccessKey;
    use bytes::Bytes;
    use http::Response;
    use reqsign_core::{HttpSend, StaticEnv, time::Timestamp};
    use rsa::{
        RsaPrivateKey,
        pkcs8::{EncodePrivateKey, LineEnding},
        rand_core::OsRng,
    };
    use std::{
        io::{Read, Write},
        net::TcpListener,
        path::Path,
        sync::atomic::AtomicUsize,
        thread,
        time::Duration,
    };

    /// A service that gives the same answer to each request, and counts them.
    #[derive(Clone, Debug, Default)]
    struct Service(Arc<AtomicUsize>, u16, &'static str);

    impl HttpSend for Service {
        async fn http_send(&self, _: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let answer = Response::builder().status(self.1).body(Bytes::from_static(self.2.as_bytes()));
            answer.map_err(|error| reqsign_core::Error::unexpected(error.to_string()))
        }
    }

    /// What comes of signing five requests, the last one's headers, and how often the service was asked.
    fn signed(
        kind: Kind,
        options: &StoreOptions,
        envs: &[(&str, &str)],
        service: (u16, &'static str),
    ) -> (Result<Parts, Problem>, usize) {
        let service = Service(Arc::default(), service.0, service.1);
        let envs: HashMap<String, String> =
            envs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(Files)
            .with_http_send(service.clone());
        let identity =
            Identity::within(context, Services::default(), kind, &local(), options).unwrap().unwrap();
        let sign = || {
            let request = Request::get("http://127.0.0.1/bucket/key").body(()).unwrap();
            let mut parts = request.into_parts().0;
            identity.sign(&mut parts, &AtomicBool::new(false)).map(|()| parts)
        };
        let mut last = sign();
        (1..5).for_each(|_| last = sign());
        (last, service.0.load(Ordering::Relaxed))
    }

    fn elsewhere(change: impl FnOnce(&mut StoreOptions)) -> StoreOptions {
        let mut options =
            StoreOptions { endpoint: Some("http://127.0.0.1".into()), ..StoreOptions::default() };
        change(&mut options);
        options
    }

    fn local() -> Origin {
        Origin { is_tls: false, host: "127.0.0.1".into(), port: 80 }
    }

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

    fn authorization(parts: &Parts) -> &str {
        parts.headers[AUTHORIZATION].to_str().unwrap()
    }

    const ROLE: &[(&str, &str)] = &[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1/role")];

    #[test]
    fn a_role_of_a_profile_is_found_without_the_variable_home() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        let config = "[profile own]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = own\n";
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        let env = StaticEnv { home_dir: Some(home.path().to_owned()), envs: HashMap::new() };
        let context = Context::new().with_env(env);
        let profiles = AwsProfiles {
            context: &context,
            services: &Services::default(),
            options: &StoreOptions::default(),
        };
        assert_eq!(profiles.find("own").role.map(|role| role.arn).as_deref(), Some("arn:aws:iam::1:role/r"));
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
    }

    /// A service of a role that gives these answers in turn, and the last for ever: status and how long its keys are valid.
    fn role_service(answers: &'static [(u16, i64)]) -> (Identity, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let role = format!("http://{}/role", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                let Ok(mut socket) = socket else { return };
                let number = count.fetch_add(1, Ordering::Relaxed);
                let (status, seconds) = answers[number.min(answers.len() - 1)];
                let _ = socket.read(&mut [0; 4096]);
                let until = Timestamp::now() + Duration::from_secs(seconds.unsigned_abs());
                let body = format!(
                    "{{\"AccessKeyId\":\"key-{number}\",\"SecretAccessKey\":\"canary\",\"Token\":\"canary\",\
                     \"Expiration\":\"{}\"}}",
                    until.format_rfc3339_zulu()
                );
                let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
                let _ = socket.write_all((head + &body).as_bytes());
            }
        });
        let envs = [("AWS_CONTAINER_CREDENTIALS_FULL_URI".to_owned(), role)].into();
        let services = Services::default();
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(Files)
            .with_http_send(services.clone());
        let identity =
            Identity::within(context, services, Kind::S3, &local(), &elsewhere(|_| ())).unwrap().unwrap();
        (identity, asked)
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

    fn sign_once(identity: &Identity) -> Result<String, Problem> {
        let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
        identity.sign(&mut parts, &AtomicBool::new(false)).map(|()| authorization(&parts).to_owned())
    }

    #[test]
    fn requests_are_signed_while_another_asks_for_credentials() {
        let (identity, asked) = role_service(&[(200, 3600)]);
        assert!(sign_once(&identity).unwrap().contains("Credential=key-0/"));
        let _turn = identity.turns.take(&AtomicBool::new(false)).unwrap();
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
    fn callers_are_shared_within_a_partition_and_roles_within_a_region() {
        let directory = tempfile::tempdir().unwrap();
        let config = "[profile reader]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = keys\n";
        let files = aws_files(directory.path(), config, "");
        let envs = files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect();
        let context = Context::new().with_env(StaticEnv { home_dir: None, envs });
        let key = |region: &str, profile: &str| {
            let options = elsewhere(|own| {
                (own.region, own.profile) = (Some(region.into()), Some(profile.into()));
            });
            S3Caller::key(&context, &Services::default(), &options)
        };
        assert_eq!(key("us-east-1", "keys"), key("eu-west-1", "keys"));
        for region in ["us-gov-west-1", "cn-north-1", "us-iso-east-1"] {
            assert_ne!(key("us-east-1", "keys"), key(region, "keys"));
        }
        assert_eq!(key("us-gov-east-1", "keys"), key("us-gov-west-1", "keys"));
        assert_ne!(key("us-east-1", "reader"), key("eu-west-1", "reader"));
    }

    #[cfg(unix)]
    #[test]
    fn two_regions_that_ask_at_the_same_time_run_a_program_once() {
        let directory = tempfile::tempdir().unwrap();
        let key = r#"sleep 1; echo '{"Version": 1, "AccessKeyId": "printed", "SecretAccessKey": "s"}'"#;
        let refusal = "sleep 1; exit 3";
        for (prints, is_given) in [(key, true), (refusal, false)] {
            let _ = std::fs::remove_file(directory.path().join("ran"));
            let files = program(directory.path(), prints);
            let envs = files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect();
            let context = Context::new().with_env(StaticEnv { home_dir: None, envs });
            let options = |region: &str| elsewhere(|own| own.region = Some(region.into()));
            let caller = S3Caller::new(&context, Services::default(), &options("us-east-1")).unwrap();
            let identities =
                ["us-east-1", "eu-west-1"].map(|region| caller.identity(context.clone(), &options(region)));
            let begun = Instant::now();
            thread::scope(|scope| {
                let signing: Vec<_> =
                    identities.iter().map(|identity| scope.spawn(|| sign_once(identity))).collect();
                for own in signing {
                    assert_eq!(own.join().unwrap().is_ok(), is_given);
                }
            });
            let ran = std::fs::read_to_string(directory.path().join("ran")).unwrap();
            // A refusal holds for a while.
            let most = if is_given { 1 } else { 1 + begun.elapsed().as_secs() / FAILED_FOR.as_secs() };
            assert!((1..=most).contains(&(ran.lines().count() as u64)), "{prints}: {ran}");
        }
    }

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

    #[test]
    fn a_service_that_refuses_is_named_with_its_status() {
        let (identity, _) = role_service(&[(403, 0)]);
        let problem = sign_once(&identity).unwrap_err();
        assert!(
            matches!(&problem, Problem::Credentials(text) if text.contains("answered with status 403")
                && text.contains("http://127.0.0.1:") && !text.contains("canary")),
            "{problem:?}"
        );
    }

    #[test]
    fn a_profile_that_is_named_is_not_replaced_by_the_role_of_the_machine() {
        let options = elsewhere(|own| own.profile = Some("mine".into()));
        let (problem, asked) = signed(Kind::S3, &options, ROLE, (403, ""));
        let problem = problem.unwrap_err();
        assert!(
            matches!(&problem, Problem::Credentials(text) if text.contains("profile 'mine'")),
            "{problem:?}"
        );
        assert_eq!(asked, 0);
    }

    /// The shared files of AWS's tools, and the variables that name them.
    fn aws_files(directory: &Path, config: &str, credentials: &str) -> [(&'static str, String); 2] {
        let write = |name: &str, text: &str| {
            let path = directory.join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        [
            ("AWS_CONFIG_FILE", write("config", config)),
            ("AWS_SHARED_CREDENTIALS_FILE", write("credentials", credentials)),
        ]
    }

    fn with_role<'a>(files: &'a [(&'static str, String); 2]) -> Vec<(&'static str, &'a str)> {
        files.iter().map(|(name, path)| (*name, path.as_str())).chain(ROLE.iter().copied()).collect()
    }

    #[test]
    fn the_keys_of_a_profile_sign() {
        let directory = tempfile::tempdir().unwrap();
        let keys =
            |name: &str| format!("[{name}]\naws_access_key_id = of-{name}\naws_secret_access_key = s\n");
        let files = aws_files(directory.path(), &keys("profile later"), &(keys("default") + &keys("mine")));
        for (profile, expected) in
            [(None, "default"), (Some("mine"), "mine"), (Some("later"), "profile later")]
        {
            let options = elsewhere(|own| own.profile = profile.map(str::to_owned));
            let (parts, asked) = signed(Kind::S3, &options, &with_role(&files), (403, ""));
            let parts = parts.unwrap();
            let expected = format!("Credential=of-{expected}/");
            assert!(authorization(&parts).contains(&expected), "{}", authorization(&parts));
            assert_eq!(asked, 0, "the container is another caller");
        }
    }

    /// A profile whose keys a program prints; the program notes in a file that it ran.
    #[cfg(unix)]
    fn program(directory: &Path, prints: &str) -> [(&'static str, String); 2] {
        use std::os::unix::fs::PermissionsExt;
        let folder = directory.join("my tools");
        std::fs::create_dir_all(&folder).unwrap();
        let (path, ran) = (folder.join("keys"), directory.join("ran"));
        let number = directory.join("process");
        let notes = format!("echo $$ > '{}'; echo $1 >> '{}'", number.display(), ran.display());
        std::fs::write(&path, format!("#!/bin/sh\n{notes}\n{prints}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let process = format!("credential_process = \"{}\" --once\n", path.display());
        aws_files(directory, &format!("[default]\n{process}[profile mine]\n{process}"), "")
    }

    /// Waits until the program that ran last is gone.
    #[cfg(unix)]
    fn wait_for_its_end(directory: &Path) {
        #[cfg(target_os = "linux")]
        {
            let number = std::fs::read_to_string(directory.join("process")).unwrap();
            while crate::services::tests::runs(number.trim()) {
                thread::sleep(TICK);
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = directory;
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_a_profile_names_gives_its_credentials() {
        let directory = tempfile::tempdir().unwrap();
        let key = r#"echo '{"Version": 1, "AccessKeyId": "printed", "SecretAccessKey": "s", "SessionToken": "t",
            "Expiration": "2099-01-01T00:00:00Z"}'"#;
        let files = program(directory.path(), key);
        for profile in [None, Some("mine".to_owned())] {
            let options = elsewhere(|own| own.profile = profile);
            let (parts, _) = signed(Kind::S3, &options, &with_role(&files), (403, ""));
            assert!(authorization(&parts.unwrap()).contains("Credential=printed/"));
        }
        let ran = std::fs::read_to_string(directory.path().join("ran")).unwrap();
        assert_eq!(ran, "--once\n--once\n", "once for each of the two, and not for each request");
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_fails_is_named_and_not_replaced_by_another_caller() {
        for (prints, told) in [
            ("echo canary; exit 3", "failed: exit status: 3"),
            ("echo canary", "printed no credentials"),
            (r#"echo '{"Version": 2, "AccessKeyId": "canary", "SecretAccessKey": "canary"}'"#, "version 1"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let files = program(directory.path(), prints);
            let (problem, asked) = signed(Kind::S3, &elsewhere(|_| ()), &with_role(&files), (403, ""));
            let problem = problem.unwrap_err();
            assert!(
                matches!(&problem, Problem::Credentials(text) if text.contains("credential_process of profile 'default'")
                    && text.contains(told) && !text.contains("canary")),
                "{problem:?}"
            );
            assert_eq!(asked, 0);
        }
        let directory = tempfile::tempdir().unwrap();
        let files = aws_files(directory.path(), "[default]\ncredential_process = '/nowhere\n", "");
        let context = Context::new().with_env(StaticEnv {
            home_dir: None,
            envs: files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect(),
        });
        let identity = Identity::within(context, Services::default(), Kind::S3, &local(), &elsewhere(|_| ()));
        assert!(
            matches!(&identity, Err(Problem::Invalid(text)) if text.contains("not closed")),
            "{identity:?}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn requests_go_on_while_a_program_renews_what_is_still_valid() {
        let directory = tempfile::tempdir().unwrap();
        let ran = directory.path().join("ran");
        let soon = (Timestamp::now() + Duration::from_secs(100)).format_rfc3339_zulu();
        // The second time it does not end.
        let prints = format!(
            "[ $(wc -l < '{}') = 1 ] || exec sleep 600\n\
             echo '{{\"Version\": 1, \"AccessKeyId\": \"first\", \"SecretAccessKey\": \"s\", \"Expiration\": \"{soon}\"}}'",
            ran.display()
        );
        let files = program(directory.path(), &prints);
        let envs = files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect();
        let context = Context::new().with_env(StaticEnv { home_dir: None, envs });
        let identity = Identity::within(context, Services::default(), Kind::S3, &local(), &elsewhere(|_| ()));
        let identity = identity.unwrap().unwrap();
        let sign = || assert!(sign_once(&identity).unwrap().contains("Credential=first/"));
        while std::fs::read_to_string(&ran).unwrap_or_default().lines().count() < 2 {
            sign();
        }
        let begun = Instant::now();
        (0..50).for_each(|_| sign());
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        drop(identity);
        wait_for_its_end(directory.path());
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_does_not_end_is_killed_when_the_caller_stops() {
        let directory = tempfile::tempdir().unwrap();
        let files = program(directory.path(), "exec sleep 600");
        let context = Context::new().with_env(StaticEnv {
            home_dir: None,
            envs: files.iter().map(|(name, path)| ((*name).to_owned(), path.clone())).collect(),
        });
        let identity = Identity::within(context, Services::default(), Kind::S3, &local(), &elsewhere(|_| ()))
            .unwrap()
            .unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let signing = scope.spawn(|| {
                let mut parts = Request::get("http://127.0.0.1/a").body(()).unwrap().into_parts().0;
                identity.sign(&mut parts, &stop)
            });
            let ran = directory.path().join("ran");
            while !ran.exists() {
                thread::sleep(TICK);
            }
            stop.store(true, Ordering::Relaxed);
            assert!(matches!(signing.join().unwrap(), Err(Problem::Stopped)));
        });
        wait_for_its_end(directory.path());
    }

    const ASSUMED: &str = "<AssumeRoleResponse><AssumeRoleResult><Credentials>\
        <AccessKeyId>ASIAASSUMEDROLE00000</AccessKeyId><SecretAccessKey>s</SecretAccessKey>\
        <SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>\
        </Credentials></AssumeRoleResult></AssumeRoleResponse>";

    #[test]
    fn a_role_of_a_profile_is_taken_on_once_by_its_source() {
        let directory = tempfile::tempdir().unwrap();
        let config = "[profile reader]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = keys\n\
                      [profile own]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = own\n\
                      [profile locked]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = keys\n\
                      mfa_serial = 5\n[profile alone]\nrole_arn = arn:aws:iam::123456789012:role/reader\n";
        let keys = "[keys]\naws_access_key_id = k\naws_secret_access_key = s\n\
                    [own]\naws_access_key_id = k\naws_secret_access_key = s\n";
        let files = aws_files(directory.path(), config, keys);
        for profile in ["reader", "own"] {
            let options = elsewhere(|own| own.profile = Some(profile.into()));
            let (parts, asked) = signed(Kind::S3, &options, &with_role(&files), (200, ASSUMED));
            let parts = parts.unwrap();
            assert!(authorization(&parts).contains("Credential=ASIAASSUMEDROLE00000/"), "{parts:?}");
            assert_eq!(asked, 1, "STS is asked once, and no container");
        }
        let envs = files.iter().map(|(name, path)| ((*name).to_owned(), path.clone()));
        let context = Context::new().with_env(StaticEnv { home_dir: None, envs: envs.collect() });
        for (profile, told) in [("locked", "mfa_serial"), ("alone", "source_profile")] {
            let options = elsewhere(|own| own.profile = Some(profile.into()));
            let identity =
                Identity::within(context.clone(), Services::default(), Kind::S3, &local(), &options);
            assert!(matches!(&identity, Err(Problem::Invalid(text)) if text.contains(told)), "{identity:?}");
        }
    }

    #[test]
    fn the_key_of_a_service_account_is_exchanged_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("account.json");
        let key = RsaPrivateKey::new(&mut OsRng, 1024).unwrap().to_pkcs8_pem(LineEnding::LF).unwrap();
        let account = serde_json::json!({
            "type": "service_account", "client_email": "me@project.iam.gserviceaccount.com", "private_key": key.as_str(),
            "private_key_id": "1", "token_uri": "https://oauth2.googleapis.com/token",
        });
        std::fs::write(&path, account.to_string()).unwrap();
        let options = elsewhere(|own| own.credentials_file = path.to_str().map(str::to_owned));
        let token = r#"{"access_token": "of-the-account", "expires_in": 3600, "token_type": "Bearer"}"#;
        let (parts, asked) = signed(Kind::Google, &options, &[], (200, token));
        assert_eq!((authorization(&parts.unwrap()), asked), ("Bearer of-the-account", 1));
        // A file that is named and has no credentials is not replaced by those of the machine.
        let options = elsewhere(|own| own.credentials_file = Some("/nowhere/account.json".into()));
        let (problem, asked) = signed(Kind::Google, &options, &[], (200, token));
        let problem = problem.unwrap_err();
        assert!(problem.to_string().contains("/nowhere/account.json"), "{problem}");
        assert_eq!(asked, 0);
    }

    /// Exchanges the token of a user once, and has one of the machine at all times.
    #[derive(Clone, Debug, Default)]
    struct UserThenMachine(Arc<AtomicUsize>);

    impl HttpSend for UserThenMachine {
        async fn http_send(&self, request: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
            let is_of_user = request.uri().host() == Some("oauth2.googleapis.com");
            let (status, name) = match is_of_user {
                true if self.0.fetch_add(1, Ordering::Relaxed) > 0 => (403, "none"),
                true => (200, "of-the-user"),
                false => (200, "of-the-machine"),
            };
            let body = format!(r#"{{"access_token": "{name}", "expires_in": 0, "token_type": "Bearer"}}"#);
            let answer = Response::builder().status(status).body(body.into());
            answer.map_err(|error| reqsign_core::Error::unexpected(error.to_string()))
        }
    }

    #[test]
    fn a_user_of_google_is_not_replaced_by_the_machine() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".config/gcloud");
        std::fs::create_dir_all(&folder).unwrap();
        let user =
            r#"{"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}"#;
        std::fs::write(folder.join("application_default_credentials.json"), user).unwrap();
        let envs = [("HOME".to_owned(), home.path().display().to_string())].into();
        let service = UserThenMachine::default();
        let context = Context::new()
            .with_env(StaticEnv { home_dir: None, envs })
            .with_file_read(Files)
            .with_http_send(service.clone());
        let options = StoreOptions::default();
        let identity = Identity::within(context, Services::default(), Kind::Google, &local(), &options)
            .unwrap()
            .unwrap();
        let callers = [sign_once(&identity), sign_once(&identity)];
        assert!(service.0.load(Ordering::Relaxed) > 0, "{callers:?}");
        for caller in callers {
            assert!(!caller.is_ok_and(|own| own == "Bearer of-the-machine"));
        }
    }

    /// Gives a token, and notes where it was asked for.
    #[derive(Clone, Debug, Default)]
    struct Noting(Arc<Mutex<String>>);

    impl HttpSend for Noting {
        async fn http_send(&self, request: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
            *self.0.lock().unwrap() = request.uri().to_string();
            let body = r#"{"access_token": "a", "expires_in": 3600, "token_type": "Bearer"}"#;
            Ok(Response::new(body.into()))
        }
    }

    #[test]
    fn only_saves_ask_google_for_tokens_that_may_write() {
        for (writes, scope) in [(false, "devstorage.read_only"), (true, "devstorage.read_write")] {
            let service = Noting::default();
            let envs = [("HOME".to_owned(), "/nowhere".to_owned())].into();
            let context = Context::new()
                .with_env(StaticEnv { home_dir: None, envs })
                .with_file_read(Files)
                .with_http_send(service.clone());
            let options = StoreOptions { writes, ..StoreOptions::default() };
            let identity = Identity::within(context, Services::default(), Kind::Google, &local(), &options);
            sign_once(&identity.unwrap().unwrap()).unwrap();
            let asked = service.0.lock().unwrap();
            assert!(asked.contains(scope), "{asked}");
        }
    }

    #[test]
    fn a_machine_of_google_gives_its_token() {
        let token = r#"{"access_token": "of-the-machine", "expires_in": 3600, "token_type": "Bearer"}"#;
        let (parts, asked) = signed(Kind::Google, &StoreOptions::default(), &[], (200, token));
        assert_eq!((authorization(&parts.unwrap()), asked), ("Bearer of-the-machine", 1));
        // The service of the machine is not asked where the server is another one.
        let (problem, asked) = signed(Kind::Google, &elsewhere(|_| ()), &[], (200, token));
        assert!(matches!(problem, Err(Problem::Credentials(_))), "{problem:?}");
        assert_eq!(asked, 0);
    }

    #[test]
    fn azure_is_signed_by_key_by_signature_or_by_token() {
        let key = elsewhere(|own| {
            own.account = Some("mine".into());
            own.account_key = Some("Y2FuYXJ5".to_owned().into());
        });
        let (parts, _) = signed(Kind::Azure, &key, &[], (500, ""));
        assert!(authorization(&parts.unwrap()).starts_with("SharedKey mine:"));
        let sas = elsewhere(|own| own.sas_token = Some("sv=1&sig=a%2Bb".to_owned().into()));
        let (parts, _) = signed(Kind::Azure, &sas, &[], (500, ""));
        assert_eq!(parts.unwrap().uri.query(), Some("sv=1&sig=a%2Bb"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "of-the-pod").unwrap();
        let pod = [
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_FEDERATED_TOKEN_FILE", path.to_str().unwrap()),
        ];
        let token = r#"{"access_token": "of-the-workload", "expires_in": 3600, "token_type": "Bearer"}"#;
        let (parts, asked) = signed(Kind::Azure, &elsewhere(|_| ()), &pod, (200, token));
        assert_eq!((authorization(&parts.unwrap()), asked), ("Bearer of-the-workload", 1));
        let without = elsewhere(|own| own.account_key = Some("Y2FuYXJ5".to_owned().into()));
        assert!(matches!(Identity::new(Kind::Azure, &local(), &without), Err(Problem::Invalid(_))));
    }
}
