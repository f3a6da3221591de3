//! Credentials of S3: of the options, the environment, the shared files, a pod or a machine.

use super::{Identity, Scheme, Signing, Turns, chain::Chain, of_machine, profiles::AwsProfiles};
use crate::{
    Problem, StoreOptions,
    aws_files::FilesState,
    location::{aws_partition, region},
    object::variable,
    per_process::PerProcess,
    renewal::Kept,
    services::Services,
};
use reqsign_aws_v4 as aws;
use reqsign_core::Context;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Callers that are kept.
const MAX_CALLERS: usize = 64;
const DEFAULT_PROFILE: &str = "default";
pub(super) const OF_CONTAINER: &str = "the role of the container (AWS_CONTAINER_CREDENTIALS_*)";
pub(super) const OF_MACHINE: &str = "the role of the machine (metadata service of EC2)";

/// Credentials of S3, shared by all regions of a partition: what gives them is asked once for all.
#[derive(Debug)]
pub(super) struct Caller {
    provider: Arc<Kept<Chain<aws::Credential>>>,
    missing: String,
    pub(super) services: Services,
    turns: Arc<Turns>,
}

/// Callers, each with the state of the files that it was found in.
type Callers = Mutex<HashMap<StoreOptions, (FilesState, Arc<Caller>)>>;

impl Caller {
    pub(super) fn new(
        context: &Context,
        services: Services,
        options: &StoreOptions,
    ) -> Result<Self, Problem> {
        let (chain, missing) = chain_of(context, &services, options)?;
        let provider = Arc::new(Kept::new(chain));
        Ok(Self { provider, missing, services, turns: Arc::default() })
    }

    /// Returns the caller of this process for the options, and makes it if there is none.
    pub(super) fn shared(options: &StoreOptions) -> Result<Arc<Self>, Problem> {
        static CALLERS: PerProcess<Callers> = PerProcess::new();
        let services = Services::default();
        let context = of_machine(&services);
        let key = Self::key(&context, &services, options);
        let callers = || CALLERS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let known = |callers: &HashMap<_, (FilesState, Arc<Self>)>, files: &FilesState| {
            let known = callers.get(&key).filter(|(found_in, _)| found_in == files);
            known.map(|(_, caller)| caller.clone())
        };
        // The files are looked at while no other waits: they may lie on a slow file system.
        let files = FilesState::now(variable);
        if let Some(caller) = known(&callers(), &files) {
            return Ok(caller);
        }
        let caller = Arc::new(Self::new(&context, services, options)?);
        let mut callers = callers();
        // Another thread may have made it in the meantime.
        if let Some(caller) = known(&callers, &files) {
            return Ok(caller);
        }
        if callers.len() >= MAX_CALLERS {
            callers.clear();
        }
        callers.insert(key, (files, caller.clone()));
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
    pub(super) fn identity(&self, context: Context, options: &StoreOptions) -> Identity {
        let signer = aws::RequestSigner::new("s3", region(options));
        let signer = Signing::new(context, self.provider.clone(), signer);
        Identity::of(Scheme::S3(signer), self.missing.clone(), self.services.clone(), self.turns.clone())
    }
}

/// What gives the credentials that the options say, and what to say where there are none.
fn chain_of(
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

#[cfg(test)]
mod tests {
    use super::{
        super::{FAILED_FOR, testing::*},
        *,
    };
    use reqsign_core::StaticEnv;
    use std::{thread, time::Instant};

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
            Caller::key(&context, &Services::default(), &options)
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
            let caller = Caller::new(&context, Services::default(), &options("us-east-1")).unwrap();
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
}
