//! Credentials of the profiles in the shared files of AWS's tools: keys, SSO, programs, roles.

use super::{
    chain::Chain,
    s3::{OF_CONTAINER, OF_MACHINE},
};
use crate::{
    Problem, StoreOptions,
    aws_files::{Profile, Role, words},
    location::region,
    services::Services,
};
use reqsign_aws_v4 as aws;
use reqsign_core::{Context, ProvideCredential, Signer};
use serde::Deserialize;

/// Who the profiles of the shared files of AWS's tools say.
pub(super) struct AwsProfiles<'a> {
    pub(super) context: &'a Context,
    pub(super) services: &'a Services,
    pub(super) options: &'a StoreOptions,
}

impl AwsProfiles<'_> {
    pub(super) fn find(&self, name: &str) -> Profile {
        // Services may have no HOME. Keys are looked for in the same place.
        let home = |variable: &str| {
            let home = self.context.home_dir().filter(|_| variable == "HOME")?;
            home.into_os_string().into_string().ok()
        };
        Profile::find(name, |variable| self.context.env_var(variable).or_else(|| home(variable)))
    }

    /// The providers of a profile. It is the source of those `above` it.
    pub(super) fn chain(&self, name: &str, above: &[&str]) -> Result<Chain<aws::Credential>, Problem> {
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

#[cfg(test)]
mod tests {
    use super::{
        super::{Identity, testing::*},
        *,
    };
    use crate::{http::TICK, location::Kind};
    use http::Request;
    use reqsign_core::{StaticEnv, time::Timestamp};
    use std::{
        collections::HashMap,
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::{Duration, Instant},
    };

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
}
