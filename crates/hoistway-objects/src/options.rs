//! Where a store is, and who asks.

use crate::{Error, Problem, aws_files::Profile, http::Roots, hub, location::Kind, object::variable, shown};
use std::fmt;

/// What tells a store and its caller. What is not set comes from the environment, as the stores' own tools have it.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StoreOptions {
    /// URL of the server, such as `https://storage.example:9000`. Default: for S3 `AWS_ENDPOINT_URL_S3`,
    /// `AWS_ENDPOINT_URL`, that of the profile in the shared AWS files, else AWS; for the hub `HF_ENDPOINT`; else the
    /// store's own. For Azure it includes the account, if
    /// that is a part of the path.
    pub endpoint: Option<String>,
    /// Region of the bucket. Default: `AWS_REGION`, `AWS_DEFAULT_REGION`, that of the profile, else `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket is a part of the path rather than of the host's name. Default: with an endpoint, or where the
    /// name of the bucket has a dot.
    pub path_style: Option<bool>,
    /// Profile of the shared AWS files that has the credentials. Default: `AWS_PROFILE`, `AWS_DEFAULT_PROFILE`, else
    /// `default`.
    pub profile: Option<String>,
    /// Credentials of S3. Default: those of the environment, of the profile, or of the machine's role.
    pub access_key: Option<AccessKey>,
    /// File with the credentials of Google: of a service account, a user or a workload. Default:
    /// `GOOGLE_APPLICATION_CREDENTIALS`, else the file of `gcloud`, else the machine's service account.
    pub credentials_file: Option<String>,
    /// Storage account of Azure. Default: that of the URL, `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT`.
    pub account: Option<String>,
    /// Key of the account. Default: `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_KEY`.
    pub account_key: Option<Secret>,
    /// Shared access signature. Default: `AZURE_STORAGE_SAS_TOKEN`.
    pub sas_token: Option<Secret>,
    /// Token of the hub. Default: `HF_TOKEN`, else the file of `hf auth login`.
    pub token: Option<Secret>,
    /// Sends requests without credentials.
    pub anonymous: bool,
    /// Takes objects without a strong ETag. Then length and date tell whether an object is another.
    pub unpinned: bool,
    /// Sends tokens to `http://` servers that are not this machine, where everyone on the way can read them.
    pub allow_http: bool,
    /// Has the caller pay for requests and transfer, as the owner of a bucket of S3 may demand.
    pub requester_pays: bool,
    /// Whether objects are compared with the checksums that their stores have, and uploads are sent with checksums.
    pub checksums: Checksums,
    /// Whether tokens are asked for that may write.
    pub(crate) writes: bool,
}

/// Whether objects are compared with the checksums that their stores have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Checksums {
    /// If they are read whole, and the store says one.
    #[default]
    Auto,
    /// No: stores are not asked, and what they say is not compared.
    Off,
}

/// A key that signs requests. Its `Debug` shows no secret.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct AccessKey {
    /// Name of the key.
    pub id: String,
    /// The secret.
    pub secret: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
}

impl AccessKey {
    /// Without white space around it, which secrets that were read from files often have.
    fn trimmed(&self) -> Self {
        let trim = |text: &String| text.trim().to_owned();
        Self { id: trim(&self.id), secret: trim(&self.secret), token: self.token.as_ref().map(trim) }
    }
}

/// A text that `Debug` does not show.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Secret(String);

impl Secret {
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessKey").finish_non_exhaustive()
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An endpoint is refused that has a password: what it was is not shown either.
        let endpoint = self.endpoint.as_deref().map(shown);
        f.debug_struct("StoreOptions")
            .field("endpoint", &endpoint)
            .field("region", &self.region)
            .field("path_style", &self.path_style)
            .field("profile", &self.profile)
            .field("access_key", &self.access_key)
            .field("credentials_file", &self.credentials_file)
            .field("account", &self.account)
            .field("account_key", &self.account_key)
            .field("sas_token", &self.sas_token)
            .field("token", &self.token)
            .field("anonymous", &self.anonymous)
            .field("unpinned", &self.unpinned)
            .field("allow_http", &self.allow_http)
            .field("requester_pays", &self.requester_pays)
            .field("checksums", &self.checksums)
            .finish()
    }
}

impl StoreOptions {
    /// Names of the options.
    pub const NAMES: &[&str] = &[
        "endpoint",
        "region",
        "path_style",
        "profile",
        "access_key_id",
        "secret_access_key",
        "session_token",
        "credentials_file",
        "account",
        "account_key",
        "sas_token",
        "token",
        "anonymous",
        "unpinned",
        "allow_http",
        "requester_pays",
        "checksums",
    ];

    /// Names of the options whose values are secrets.
    pub const SECRETS: &[&str] =
        &["access_key_id", "secret_access_key", "session_token", "account_key", "sas_token", "token"];

    /// Sets an option by its name, from text.
    ///
    /// ```
    /// let mut options = hoistway_objects::StoreOptions::default();
    /// options.set("endpoint", "http://127.0.0.1:9000")?;
    /// options.set("anonymous", "true")?;
    /// assert!(options.anonymous && options.set("colour", "red").is_err());
    /// # Ok::<(), hoistway_objects::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Problem::Invalid`], without the value, which may be a secret.
    pub fn set(&mut self, option: &str, value: &str) -> Result<(), Error> {
        let invalid = |reason: String| Problem::Invalid(reason).of(&format!("store option {option}"), None);
        let boolean = || match value {
            "true" | "True" | "1" => Ok(true),
            "false" | "False" | "0" => Ok(false),
            _ => Err(invalid("it must be true or false".into())),
        };
        let text = || value.to_owned();
        match option {
            "endpoint" => self.endpoint = Some(text()),
            "region" => self.region = Some(text()),
            "path_style" => self.path_style = Some(boolean()?),
            "profile" => self.profile = Some(text()),
            "access_key_id" => self.access_key.get_or_insert_default().id = text(),
            "secret_access_key" => self.access_key.get_or_insert_default().secret = text(),
            "session_token" => self.access_key.get_or_insert_default().token = Some(text()),
            "credentials_file" => self.credentials_file = Some(text()),
            "account" => self.account = Some(text()),
            "account_key" => self.account_key = Some(Secret(text())),
            // As the portal shows it.
            "sas_token" => self.sas_token = Some(Secret(value.trim_start_matches('?').to_owned())),
            "token" => self.token = Some(Secret(text())),
            "anonymous" => self.anonymous = boolean()?,
            "unpinned" => self.unpinned = boolean()?,
            "allow_http" => self.allow_http = boolean()?,
            "requester_pays" => self.requester_pays = boolean()?,
            "checksums" => {
                self.checksums = match value {
                    "auto" => Checksums::Auto,
                    "off" => Checksums::Off,
                    _ => return Err(invalid("it must be auto or off".into())),
                };
            }
            _ => {
                let distance = |name: &&str| strsim::osa_distance(option, name);
                let nearest =
                    Self::NAMES.iter().copied().min_by_key(distance).filter(|name| distance(name) <= 2);
                // As other tools call it: `endpoint_url`, `aws_session_token`.
                let within = || Self::NAMES.iter().copied().filter(|name| option.contains(name));
                let nearest = nearest.or_else(|| within().max_by_key(|name| name.len()));
                return Err(invalid(format!(
                    "there is no such option{}; it must be one of {}",
                    nearest.map_or(String::new(), |name| format!(" (did you mean '{name}'?)")),
                    Self::NAMES.join(", ")
                )));
            }
        }
        Ok(())
    }

    /// The options that a kind of server has, with what the environment says of those that are not set.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if a half of a key is missing, two credentials are given, or one that `anonymous` does not use.
    pub(crate) fn resolved(
        &self,
        kind: Kind,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Problem> {
        let first =
            |names: &[&str]| names.iter().find_map(|name| variable(name).filter(|text| !text.is_empty()));
        let own = self.clone();
        let Self { anonymous, unpinned, allow_http, checksums, writes, endpoint, .. } = own;
        let base = Self { anonymous, unpinned, allow_http, checksums, writes, ..Self::default() };
        let resolved = match kind {
            Kind::Web => base,
            Kind::S3 => {
                let profile = own.profile.or_else(|| first(&["AWS_PROFILE", "AWS_DEFAULT_PROFILE"]));
                let found = Profile::find(profile.as_deref().unwrap_or("default"), &variable);
                let is_ignored = first(&["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"])
                    .is_some_and(|text| text.eq_ignore_ascii_case("true"));
                let configured = || first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]).or(found.endpoint);
                Self {
                    endpoint: endpoint.or_else(|| configured().filter(|_| !is_ignored)),
                    region: own
                        .region
                        .or_else(|| first(&["AWS_REGION", "AWS_DEFAULT_REGION"]))
                        .or(found.region),
                    path_style: own.path_style,
                    access_key: self.s3_key(first)?,
                    requester_pays: own.requester_pays,
                    profile,
                    ..base
                }
            }
            Kind::Google => {
                let named = || first(&["GOOGLE_APPLICATION_CREDENTIALS"]);
                Self { endpoint, credentials_file: own.credentials_file.or_else(named), ..base }
            }
            Kind::Azure => {
                let names = ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"];
                let account = own.account.or_else(|| first(&names));
                let base = Self { endpoint, account, ..base };
                match (own.account_key, own.sas_token) {
                    (Some(_), Some(_)) => {
                        return invalid("the store options account_key and sas_token exclude each other");
                    }
                    (None, None) if !anonymous => {
                        let key = first(&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"]).map(Secret);
                        let sas = first(&["AZURE_STORAGE_SAS_TOKEN"]).filter(|_| key.is_none());
                        let sas_token = sas.map(|sas| Secret(sas.trim_start_matches('?').to_owned()));
                        Self { account_key: key, sas_token, ..base }
                    }
                    (account_key, sas_token) => Self { account_key, sas_token, ..base },
                }
            }
            Kind::Hub => {
                let found = || (!anonymous).then(|| hub::token(&variable)).flatten().map(Secret);
                Self {
                    endpoint: endpoint.or_else(|| first(&["HF_ENDPOINT"])),
                    token: own.token.or_else(found),
                    ..base
                }
            }
        };
        let Self { access_key, account_key, sas_token, token, .. } = &resolved;
        let has_secret =
            access_key.is_some() || account_key.is_some() || sas_token.is_some() || token.is_some();
        if anonymous && (has_secret || self.credentials_file.is_some() && kind == Kind::Google) {
            return invalid(
                "the store option anonymous=true sends no credentials: leave out either it or them",
            );
        }
        Ok(resolved)
    }

    /// Returns who asks the store of a URL: the kind of the credentials and where they come from, and nothing of what they are.
    ///
    /// # Errors
    /// [`Problem::Invalid`] if options or the environment contradict each other, or it is no URL of a store.
    pub fn caller(&self, url: &str) -> Result<String, Error> {
        let failed = |problem: Problem| problem.of(&shown(url), None);
        let kind = Kind::of(url).map_err(failed)?;
        let resolved = self.resolved(kind, variable).map_err(failed)?;
        if kind == Kind::Web {
            return Ok("no credentials: URLs of web servers carry none".into());
        }
        if resolved.anonymous {
            return Ok("no credentials, as the store option anonymous says".into());
        }
        let from = |is_option: bool| if is_option { "the store options" } else { "the environment" };
        Ok(match (kind, &resolved.profile, &resolved.credentials_file) {
            (Kind::S3, ..) if resolved.access_key.is_some() => {
                format!("an access key of {}", from(self.access_key.is_some()))
            }
            (Kind::S3, Some(profile), _) => format!("profile '{profile}' of the shared AWS files"),
            (Kind::S3, ..) => {
                "the default profile, SSO, a web identity, or the role of the container or machine".into()
            }
            (Kind::Google, _, Some(path)) => format!("the file {path}"),
            (Kind::Google, ..) => "the file of gcloud, or the machine's service account".into(),
            (Kind::Azure, ..) if resolved.account_key.is_some() => {
                format!("an account's key of {}", from(self.account_key.is_some()))
            }
            (Kind::Azure, ..) if resolved.sas_token.is_some() => {
                format!("a SAS token of {}", from(self.sas_token.is_some()))
            }
            (Kind::Azure, ..) => "a client, a workload identity, or the machine's managed identity".into(),
            _ if self.token.is_some() => "a token of the store options".into(),
            _ if resolved.token.is_some() => "a token of the environment or of 'hf auth login'".into(),
            _ => "no token".into(),
        })
    }

    fn s3_key(&self, first: impl Fn(&[&str]) -> Option<String>) -> Result<Option<AccessKey>, Problem> {
        match &self.access_key {
            Some(key) if key.id.is_empty() || key.secret.is_empty() => {
                invalid("the store options access_key_id and secret_access_key are given together")
            }
            Some(key) => Ok(Some(key.trimmed())),
            None if self.anonymous || self.profile.is_some() => Ok(None),
            None => match (first(&["AWS_ACCESS_KEY_ID"]), first(&["AWS_SECRET_ACCESS_KEY"])) {
                (Some(id), Some(secret)) => {
                    Ok(Some(AccessKey { id, secret, token: first(&["AWS_SESSION_TOKEN"]) }.trimmed()))
                }
                (None, None) => Ok(None),
                _ => invalid("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set"),
            },
        }
    }
}

/// The roots that servers of S3 have: those of `AWS_CA_BUNDLE`, if that is set.
pub(crate) fn aws_roots() -> Roots {
    let bundle = variable("AWS_CA_BUNDLE").filter(|path| !path.is_empty());
    bundle.map_or_else(Roots::of_machine, |path| match (path.strip_prefix("~/"), variable("HOME")) {
        (Some(below), Some(home)) => Roots::of_file(format!("{home}/{below}")),
        _ => Roots::of_file(path),
    })
}

fn invalid<T>(reason: &str) -> Result<T, Problem> {
    Err(Problem::Invalid(reason.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(name: &str) -> Option<String> {
        let known = [
            ("AWS_ENDPOINT_URL", "http://store:9000"),
            ("AWS_REGION", "eu-west-1"),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "canary"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/google.json"),
            ("AZURE_STORAGE_ACCOUNT", "account"),
            ("AZURE_STORAGE_SAS_TOKEN", "?canary"),
            ("HF_TOKEN", "canary"),
            ("HF_ENDPOINT", "http://hub"),
        ];
        known.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    fn with(pairs: &[(&str, &str)]) -> StoreOptions {
        let mut options = StoreOptions::default();
        pairs.iter().for_each(|(name, value)| options.set(name, value).unwrap());
        options
    }

    #[test]
    fn white_space_around_keys_is_no_part_of_them() {
        let of_files = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => Some("id\n".to_owned()),
            "AWS_SECRET_ACCESS_KEY" => Some(" secret\r\n".to_owned()),
            "AWS_SESSION_TOKEN" => Some("token\n".to_owned()),
            _ => None,
        };
        let key = AccessKey { id: "id".into(), secret: "secret".into(), token: Some("token".into()) };
        let given = AccessKey { id: "id\n".into(), token: Some(" token".into()), ..key.clone() };
        for options in
            [StoreOptions::default(), StoreOptions { access_key: Some(given), ..StoreOptions::default() }]
        {
            assert!(options.resolved(Kind::S3, of_files).unwrap().access_key == Some(key.clone()));
        }
    }

    #[test]
    fn what_is_set_wins_over_the_environment() {
        let resolved = StoreOptions::default().resolved(Kind::S3, environment).unwrap();
        assert_eq!(resolved.endpoint.as_deref(), Some("http://store:9000"));
        assert_eq!(resolved.access_key.as_ref().map(|key| key.secret.as_str()), Some("canary"));
        let own = with(&[("region", "us-west-2"), ("profile", "mine")]);
        let resolved = own.resolved(Kind::S3, environment).unwrap();
        // A profile that is named is not overridden by the keys of the environment.
        assert_eq!((resolved.region.as_deref(), resolved.access_key), (Some("us-west-2"), None));
        let own = with(&[("account", "mine"), ("account_key", "canary")]);
        let resolved = own.resolved(Kind::Azure, environment).unwrap();
        assert_eq!((resolved.account.as_deref(), resolved.sas_token), (Some("mine"), None));
    }

    #[test]
    fn region_and_endpoint_come_from_the_profile_last() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        std::fs::write(&path, "[profile mine]\nregion = eu-west-3\nendpoint_url = http://mine:9000\n")
            .unwrap();
        let with = |more: &'static [(&'static str, &'static str)]| {
            let path = path.to_string_lossy().into_owned();
            move |name: &str| match name {
                "AWS_CONFIG_FILE" => Some(path.clone()),
                _ => more.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned()),
            }
        };
        let profile = &[("AWS_DEFAULT_PROFILE", "mine")];
        let found = StoreOptions::default().resolved(Kind::S3, with(profile)).unwrap();
        assert_eq!(found.endpoint.as_deref(), Some("http://mine:9000"));
        assert_eq!((found.region.as_deref(), found.profile.as_deref()), (Some("eu-west-3"), Some("mine")));
        let more = &[("AWS_PROFILE", "mine"), ("AWS_ENDPOINT_URL", "http://b"), ("AWS_REGION", "r")];
        let found = StoreOptions::default().resolved(Kind::S3, with(more)).unwrap();
        assert_eq!((found.endpoint.as_deref(), found.region.as_deref()), (Some("http://b"), Some("r")));
        let ignored = &[("AWS_PROFILE", "mine"), ("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")];
        assert_eq!(StoreOptions::default().resolved(Kind::S3, with(ignored)).unwrap().endpoint, None);
    }

    #[test]
    fn each_store_has_its_own_part_of_the_environment() {
        let resolved = |kind| StoreOptions::default().resolved(kind, environment).unwrap();
        assert_eq!(resolved(Kind::Web), StoreOptions::default());
        let google = resolved(Kind::Google);
        assert_eq!((google.endpoint, google.credentials_file.as_deref()), (None, Some("/google.json")));
        let azure = resolved(Kind::Azure);
        assert_eq!(azure.account.as_deref(), Some("account"));
        assert_eq!(azure.sas_token, Some(Secret("canary".into())));
        let hub = resolved(Kind::Hub);
        assert_eq!((hub.endpoint.as_deref(), hub.access_key), (Some("http://hub"), None));
        assert_eq!(hub.token, Some(Secret("canary".into())));
    }

    #[test]
    fn a_caller_is_told_by_kind_and_source_alone() {
        for (url, options, told) in [
            (
                "s3://a/b",
                with(&[("access_key_id", "canary"), ("secret_access_key", "canary")]),
                "of the store options",
            ),
            ("s3://a/b", with(&[("profile", "mine")]), "profile 'mine'"),
            ("s3://a/b", with(&[("anonymous", "true")]), "no credentials"),
            ("gs://a/b", with(&[("credentials_file", "/a.json")]), "the file /a.json"),
            ("az://a/b", with(&[("sas_token", "canary")]), "a SAS token of the store options"),
            ("hf://a/b", with(&[("token", "canary")]), "a token of the store options"),
            ("https://a/b", with(&[]), "carry none"),
        ] {
            let caller = options.caller(url).unwrap();
            assert!(caller.contains(told) && !caller.contains("canary"), "{url}: {caller}");
        }
        assert!(with(&[]).caller("ftp://a").is_err());
    }

    #[test]
    fn a_wrong_name_gets_the_one_that_is_meant() {
        for (wrong, meant) in [
            ("endpont", Some("endpoint")),
            ("endpoint_url", Some("endpoint")),
            ("aws_session_token", Some("session_token")),
            ("aws_region", Some("region")),
            ("colour", None),
        ] {
            let told = StoreOptions::default().set(wrong, "canary").unwrap_err().to_string();
            let hint = meant.map(|name| format!("did you mean '{name}'?"));
            assert_eq!(told.contains("did you mean"), hint.is_some(), "{told}");
            assert!(told.contains(&hint.unwrap_or_default()), "{told}");
        }
    }

    #[test]
    fn nothing_secret_is_shown() {
        let mut options = StoreOptions::default();
        for name in StoreOptions::SECRETS {
            options.set(name, "canary").unwrap();
        }
        options.set("endpoint", "https://me:canary@host?s=canary").unwrap();
        let wrong = options.set("anonymous", "canary").unwrap_err();
        assert!(!format!("{options:?} {wrong} {wrong:?}").contains("canary"));
    }

    #[test]
    fn half_a_key_two_keys_and_a_key_that_is_not_sent_are_refused() {
        let key = [("access_key_id", "a"), ("secret_access_key", "canary")];
        for (kind, options) in [
            (Kind::S3, with(&key[..1])),
            (Kind::S3, with(&key[1..])),
            (Kind::S3, with(&[("session_token", "canary")])),
            (Kind::S3, with(&[&key[..], &[("anonymous", "true")]].concat())),
            (Kind::Azure, with(&[("account_key", "canary"), ("sas_token", "canary")])),
            (Kind::Azure, with(&[("sas_token", "canary"), ("anonymous", "true")])),
            (Kind::Google, with(&[("credentials_file", "a"), ("anonymous", "true")])),
            (Kind::Hub, with(&[("token", "canary"), ("anonymous", "true")])),
        ] {
            let problem = options.resolved(kind, |_| None).unwrap_err();
            assert!(
                matches!(&problem, Problem::Invalid(reason) if !reason.contains("canary")),
                "{problem:?}"
            );
        }
        let half = |name: &str| (name == "AWS_ACCESS_KEY_ID").then(|| "a".to_owned());
        assert!(StoreOptions::default().resolved(Kind::S3, half).is_err());
        assert!(with(&[("anonymous", "true")]).resolved(Kind::S3, half).is_ok());
        assert!(with(&[("profile", "mine")]).resolved(Kind::S3, half).is_ok());
        for kind in [Kind::Web, Kind::Google, Kind::Azure, Kind::Hub] {
            assert!(with(&[("anonymous", "true")]).resolved(kind, environment).is_ok(), "{kind:?}");
        }
    }
}
