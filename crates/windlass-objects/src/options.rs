//! Where a store is, and who asks.

use crate::{Error, Problem};
use std::fmt;

/// What tells a store and its caller. What is not set comes from the environment, as the tools of AWS have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StoreOptions {
    /// URL of the S3 endpoint, such as `https://storage.example:9000`. Default: `AWS_ENDPOINT_URL_S3`,
    /// `AWS_ENDPOINT_URL`, else AWS.
    pub endpoint: Option<String>,
    /// Region of the bucket. Default: `AWS_REGION`, `AWS_DEFAULT_REGION`, else `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket is a part of the path rather than of the host's name. Default: with an endpoint, or where the
    /// name of the bucket has a dot.
    pub path_style: Option<bool>,
    /// Profile of the shared AWS files that has the credentials. Default: `AWS_PROFILE`, else `default`.
    pub profile: Option<String>,
    /// Credentials. Default: those of the environment, of the profile, or of the machine's role.
    pub access_key: Option<AccessKey>,
    /// Sends requests without credentials.
    pub anonymous: bool,
    /// Takes objects without a strong ETag. Then length and date tell whether an object is another.
    pub unpinned: bool,
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

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessKey").finish_non_exhaustive()
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
        "anonymous",
        "unpinned",
    ];

    /// Sets an option by its name, from text.
    ///
    /// ```
    /// let mut options = windlass_objects::StoreOptions::default();
    /// options.set("endpoint", "http://127.0.0.1:9000")?;
    /// options.set("anonymous", "true")?;
    /// assert!(options.anonymous && options.set("colour", "red").is_err());
    /// # Ok::<(), windlass_objects::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Problem::Invalid`], without the value, which may be a secret.
    pub fn set(&mut self, option: &str, value: &str) -> Result<(), Error> {
        let invalid = |reason: String| Problem::Invalid(reason).of(&format!("store option {option}"), None);
        let boolean = || match value {
            "true" | "True" | "1" => Ok(true),
            "false" | "False" | "0" => Ok(false),
            _ => Err(invalid("it is true or false".into())),
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
            "anonymous" => self.anonymous = boolean()?,
            "unpinned" => self.unpinned = boolean()?,
            _ => {
                return Err(invalid(format!(
                    "there is no such option; it is one of {}",
                    Self::NAMES.join(", ")
                )));
            }
        }
        Ok(())
    }

    /// The options with what the environment says of those that are not set.
    pub(crate) fn resolved(&self, variable: impl Fn(&str) -> Option<String>) -> Self {
        let first =
            |names: &[&str]| names.iter().find_map(|name| variable(name).filter(|text| !text.is_empty()));
        let mut own = self.clone();
        own.endpoint = own.endpoint.or_else(|| first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        own.region = own.region.or_else(|| first(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        if own.access_key.is_none() && own.profile.is_none() {
            let (id, secret) = (first(&["AWS_ACCESS_KEY_ID"]), first(&["AWS_SECRET_ACCESS_KEY"]));
            let token = first(&["AWS_SESSION_TOKEN"]);
            own.access_key = id.zip(secret).map(|(id, secret)| AccessKey { id, secret, token });
        }
        own.profile = own.profile.or_else(|| first(&["AWS_PROFILE"]));
        own
    }
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
        ];
        known.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    #[test]
    fn what_is_set_wins_over_the_environment() {
        let resolved = StoreOptions::default().resolved(environment);
        assert_eq!(resolved.endpoint.as_deref(), Some("http://store:9000"));
        assert_eq!(resolved.access_key.as_ref().map(|key| key.secret.as_str()), Some("canary"));
        let mut own = StoreOptions::default();
        own.set("region", "us-west-2").unwrap();
        own.set("profile", "mine").unwrap();
        let resolved = own.resolved(environment);
        // A profile that is named is not overridden by the keys of the environment.
        assert_eq!((resolved.region.as_deref(), resolved.access_key), (Some("us-west-2"), None));
    }

    #[test]
    fn nothing_secret_is_shown() {
        let mut options = StoreOptions::default();
        for name in ["access_key_id", "secret_access_key", "session_token"] {
            options.set(name, "canary").unwrap();
        }
        let wrong = options.set("anonymous", "canary").unwrap_err();
        assert!(!format!("{options:?} {wrong} {wrong:?}").contains("canary"));
    }
}
