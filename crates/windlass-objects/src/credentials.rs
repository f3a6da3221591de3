//! Who asks: credentials of S3, and signatures.

use crate::{
    Problem, StoreOptions,
    http::{Connection, Origin, Waiting, send},
    location::region,
};
use bytes::Bytes;
use http::{Request, Response, request::Parts};
use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider, IMDSv2CredentialProvider,
    ProfileCredentialProvider, RequestSigner, SSOCredentialProvider, StaticCredentialProvider,
};
use reqsign_core::{Context, FileRead, HttpSend, OsEnv, ProvideCredentialChain, Signer};
use std::{sync::atomic::AtomicBool, time::Duration};

/// Longest answer of a service that gives credentials.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// How long such a service is waited for; and one of the machine itself, which is there or not.
const PATIENCE: Duration = Duration::from_secs(10);
const METADATA_PATIENCE: Duration = Duration::from_secs(1);
const METADATA_HOST: &str = "169.254.169.254";

/// Signs requests to S3.
#[derive(Debug)]
pub(crate) struct Identity(Signer<Credential>);

impl Identity {
    /// Who the options say; `options` are resolved.
    pub(crate) fn new(options: &StoreOptions) -> Self {
        let mut chain = ProvideCredentialChain::new();
        if let Some(key) = &options.access_key {
            let own = StaticCredentialProvider::new(&key.id, &key.secret);
            chain = chain.push(match &key.token {
                Some(token) => own.with_session_token(token),
                None => own,
            });
        } else {
            let (profile, sso) = (ProfileCredentialProvider::new(), SSOCredentialProvider::new());
            chain = match &options.profile {
                Some(name) => chain.push(profile.with_profile(name)).push(sso.with_profile(name)),
                None => chain.push(profile).push(sso),
            };
            chain = chain
                .push(AssumeRoleWithWebIdentityCredentialProvider::new())
                .push(ECSCredentialProvider::new());
            if options.endpoint.is_none() {
                chain = chain.push(IMDSv2CredentialProvider::new());
            }
        }
        let context = Context::new().with_env(OsEnv).with_file_read(Files).with_http_send(Services);
        Self(Signer::new(context, chain, RequestSigner::new("s3", region(options))))
    }

    /// Signs a request. May ask a service for credentials, and waits for it.
    pub(crate) fn sign(&self, request: &mut Parts) -> Result<(), Problem> {
        // The error's text may hold answers of services.
        pollster::block_on(self.0.sign(request, None)).map_err(|_| {
            Problem::Credentials(
                "no valid credentials for S3 were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, \
                 or the store option anonymous=true for a public bucket"
                    .into(),
            )
        })
    }
}

/// Reads the shared files of AWS.
#[derive(Debug)]
struct Files;

impl FileRead for Files {
    async fn file_read(&self, path: &str) -> reqsign_core::Result<Vec<u8>> {
        std::fs::read(path).map_err(failed)
    }
}

/// Asks services that give credentials.
#[derive(Debug)]
struct Services;

impl HttpSend for Services {
    async fn http_send(&self, request: Request<Bytes>) -> reqsign_core::Result<Response<Bytes>> {
        let (parts, body) = request.into_parts();
        let host = parts.uri.host().unwrap_or_default().to_owned();
        let is_tls = parts.uri.scheme_str() == Some("https");
        let patience = if host == METADATA_HOST { METADATA_PATIENCE } else { PATIENCE };
        let origin =
            Origin { is_tls, host, port: parts.uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }) };
        let waiting = Waiting { stop: &AtomicBool::new(false), patience };
        let connection = Connection::open(&origin, patience).map_err(failed)?;
        let answer = send(connection, &parts, &body, &waiting).map_err(failed)?;
        let mut response = Response::builder().status(answer.status);
        for (name, value) in &answer.headers {
            response = response.header(name, value);
        }
        let (body, _) = answer.into_body(MAX_ANSWER_BYTES, &waiting).map_err(failed)?;
        response.body(body.into()).map_err(|error| reqsign_core::Error::unexpected(error.to_string()))
    }
}

fn failed(error: std::io::Error) -> reqsign_core::Error {
    reqsign_core::Error::unexpected(error.to_string())
}
