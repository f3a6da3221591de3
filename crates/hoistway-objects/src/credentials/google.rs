//! Credentials of Google: of a file, a user or a machine.

use super::{Scheme, Signing, chain::Chain};
use crate::{StoreOptions, renewal::Kept, services::Services};
use reqsign_core::{Context, ProvideCredential};
use reqsign_google as google;
use std::sync::Arc;

/// What a token may do: for loads, and for saves.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_only";
const WRITE_SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// What signs requests, and what to say where there are no credentials.
pub(super) fn scheme(context: Context, services: &Services, options: &StoreOptions) -> (Scheme, String) {
    let scope = if options.writes { WRITE_SCOPE } else { SCOPE };
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
pub(super) struct Tokens {
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

#[cfg(test)]
mod tests {
    use super::{
        super::{Identity, testing::*},
        *,
    };
    use crate::{Problem, location::Kind, services::Files};
    use bytes::Bytes;
    use http::{Request, Response};
    use reqsign_core::{HttpSend, StaticEnv};
    use rsa::{
        RsaPrivateKey,
        pkcs8::{EncodePrivateKey, LineEnding},
        rand_core::OsRng,
    };
    use std::sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    };

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
}
