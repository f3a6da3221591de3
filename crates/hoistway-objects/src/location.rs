//! What a URL says: which object or folder, on which server.

use crate::{Problem, StoreOptions, http::Origin, hub::Repository};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// What stands for itself in a path.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// What stands for itself in a value of a query.
const QUERY: &AsciiSet = &PATH.add(b'/');
/// Where Azure's accounts are. Tokens are sent to no other host that a URL names.
const AZURE_SUFFIXES: &[&str] = &["core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn"];

/// Domains of AWS's services by the partition, which the beginning of the names of its regions tells.
const AWS_DOMAINS: &[(&str, &str)] = &[
    ("cn-", "amazonaws.com.cn"),
    ("eusc-", "amazonaws.eu"),
    ("us-gov-", "amazonaws.com"),
    ("us-iso-", "c2s.ic.gov"),
    ("us-isob-", "sc2s.sgov.gov"),
    ("us-isof-", "csp.hci.ic.gov"),
    ("eu-isoe-", "cloud.adc-e.uk"),
    ("", "amazonaws.com"),
];

/// What kind of server answers, as the scheme of a URL says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A web server: one URL, one file.
    Web,
    /// S3, or what speaks it.
    S3,
    /// Google Cloud Storage, by its XML interface.
    Google,
    /// Blobs of Azure.
    Azure,
    /// The hub of Hugging Face.
    Hub,
}

/// An object, or the folder that is a prefix of keys.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    pub(crate) kind: Kind,
    /// The URL as it is shown.
    pub(crate) shown: String,
    pub(crate) origin: Origin,
    /// Path and query of requests for it. It may hold secrets.
    pub(crate) target: Target,
    /// Bucket and key, of an object in a bucket.
    pub(crate) bucket: Option<Bucket>,
    /// The account of Azure that a URL names.
    pub(crate) account: Option<String>,
    /// The commit of a file on the hub: what the URL names never changes.
    pub(crate) commit: Option<String>,
}

/// Path and query of a request.
#[derive(Clone)]
pub(crate) struct Target(pub(crate) String);

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Target(..)")
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// The path of the bucket: empty if it is a part of the host's name.
    path: String,
    pub(crate) name: String,
    pub(crate) key: String,
}

/// Returns a URL as errors and reports show it: without user, password, query and fragment. Keys of S3 and Google have
/// neither query nor fragment.
///
/// ```
/// assert_eq!(hoistway_objects::shown("https://me:secret@host/a?X-Amz-Signature=5"), "https://host/a");
/// assert_eq!(hoistway_objects::shown("s3://bucket/what?"), "s3://bucket/what?");
/// ```
pub fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return without_scheme(url).to_owned() };
    let is_key = matches!(scheme, "s3" | "gs");
    let end = if is_key { rest.len() } else { rest.find(['?', '#']).unwrap_or(rest.len()) };
    let rest = &rest[..end];
    let (authority, _) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (before, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    // What stands where a port does and is none may be the beginning of a password with a '/'.
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit()) || host.ends_with(']');
    // A container of Azure comes before an '@', and a revision of the hub after one.
    let is_container = matches!(scheme, "abfs" | "abfss") && !before.contains(['@', ':']);
    let users_end = match is_port {
        true => authority.rfind('@').filter(|_| !is_container),
        false => rest.rfind('@'),
    };
    format!("{scheme}://{}", &rest[users_end.map_or(0, |end| end + 1)..])
}

/// As [`shown`], of what may be a URL whose scheme was left out, or the path of one.
fn without_scheme(url: &str) -> &str {
    if url.starts_with('/') {
        return url;
    }
    let start = url.rfind('@').map_or(0, |end| end + 1);
    // If an '@' comes later, either may be a part of a secret.
    url.get(start..url.find(['?', '#']).unwrap_or(url.len())).unwrap_or_default()
}

impl Kind {
    /// The kind of server that a URL is about.
    pub(crate) fn of(url: &str) -> Result<Self, Problem> {
        match url.split_once("://").map(|(scheme, _)| scheme) {
            Some("http" | "https") => Ok(Self::Web),
            Some("s3") => Ok(Self::S3),
            Some("gs") => Ok(Self::Google),
            Some("az" | "abfs" | "abfss") => Ok(Self::Azure),
            Some("hf") => Ok(Self::Hub),
            _ => Err(Problem::Invalid(
                "the URL begins with none of s3://, gs://, az://, abfs://, hf://, https:// and http://"
                    .into(),
            )),
        }
    }
}

impl Location {
    /// Takes a URL apart. `options` are those for its kind, with what the environment says.
    pub(crate) fn parse(url: &str, options: &StoreOptions) -> Result<Self, Problem> {
        let kind = Kind::of(url)?;
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        match kind {
            Kind::Web => {
                let (origin, target) = web(url)?;
                if let Some(file) = hub_file_of_page(&origin, &target) {
                    return Err(Problem::Invalid(format!(
                        "the URL is that of a page of the hub; the file is {file}"
                    )));
                }
                Ok(Self::of_file(kind, shown(url), origin, Target(target)))
            }
            Kind::S3 => Self::in_s3(url, rest, options),
            Kind::Google => {
                let (bucket, key) = bucket_and_key(rest, "gs")?;
                let endpoint = options.endpoint.as_deref().unwrap_or("https://storage.googleapis.com");
                let (origin, base) = endpoint_of(endpoint)?;
                Ok(Self::of_bucket(kind, url, origin, format!("{}/{bucket}", trimmed(&base)), bucket, key))
            }
            Kind::Azure => Self::in_azure(url, scheme, rest, options),
            Kind::Hub => {
                let repository = Repository::parse(url)?;
                let (origin, base) =
                    endpoint_of(options.endpoint.as_deref().unwrap_or("https://huggingface.co"))?;
                let target = Target(format!("{}{}", trimmed(&base), repository.file_path()));
                let file = Self::of_file(kind, repository.url(), origin, target);
                Ok(Self { commit: repository.commit().map(str::to_owned), ..file })
            }
        }
    }

    fn of_file(kind: Kind, shown: String, origin: Origin, target: Target) -> Self {
        Self { kind, shown, origin, target, bucket: None, account: None, commit: None }
    }

    fn of_bucket(kind: Kind, url: &str, origin: Origin, path: String, name: &str, key: &str) -> Self {
        let target = Target(format!("{path}/{}", encoded_path(key)));
        let bucket = Bucket { path, name: name.to_owned(), key: key.to_owned() };
        Self { bucket: Some(bucket), ..Self::of_file(kind, shown(url), origin, target) }
    }

    fn in_s3(url: &str, rest: &str, options: &StoreOptions) -> Result<Self, Problem> {
        let (bucket, key) = bucket_and_key(rest, "s3")?;
        let region = region(options);
        let endpoint = match &options.endpoint {
            Some(endpoint) => endpoint.clone(),
            None if !is_label(region) => {
                return Err(Problem::Invalid(format!(
                    "the region {region:?} is none of AWS's: its name has letters, digits and '-' alone"
                )));
            }
            None => format!("https://s3.{region}.{}", aws_domain(region)),
        };
        let (origin, base) = endpoint_of(&endpoint)?;
        let base = trimmed(&base);
        let by_default = options.endpoint.is_some() || bucket.contains('.');
        let (origin, path) = match options.path_style.unwrap_or(by_default) {
            true => (origin, format!("{base}/{bucket}")),
            false => (Origin { host: format!("{bucket}.{}", origin.host), ..origin }, base.to_owned()),
        };
        Ok(Self::of_bucket(Kind::S3, url, origin, path, bucket, key))
    }

    /// `az://container/key`, whose account the options say, or `abfs://container@account.dfs.core.windows.net/key`.
    fn in_azure(url: &str, scheme: &str, rest: &str, options: &StoreOptions) -> Result<Self, Problem> {
        let invalid = |reason: String| Err(Problem::Invalid(reason));
        if rest.contains(['?', '#']) {
            return invalid(
                "the URL has a '?' or '#'; a SAS token is given by the store option sas_token".into(),
            );
        }
        let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
        let (container, host) = match authority.split_once('@') {
            Some((container, host)) if scheme != "az" => (container, Some(host)),
            Some(_) => return invalid("an account after '@' belongs to abfs:// URLs".into()),
            None => (authority, None),
        };
        let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"-$_".contains(&byte);
        if container.is_empty() || !container.bytes().all(is_named) {
            return invalid(format!(
                "the URL names no container: it is of the form {scheme}://container/key"
            ));
        }
        let (account, suffix) = match host.map(azure_host) {
            Some(Some((account, suffix))) => (Some(account), suffix),
            Some(None) => {
                return invalid(format!(
                    "the host in the URL is none of Azure's: it is of the form ACCOUNT.dfs.{}; another one is given by the \
                     store option endpoint",
                    AZURE_SUFFIXES[0]
                ));
            }
            None => (options.account.as_deref(), AZURE_SUFFIXES[0]),
        };
        let has_key = options.account_key.is_some() || options.sas_token.is_some();
        match (account, &options.account) {
            (Some(account), Some(other)) if account != other && has_key => {
                return invalid(format!(
                    "the URL names account {account}, and the key in the options or the environment is for account {other}"
                ));
            }
            // A token does not say which account it is for. An endpoint that is given gets it, whatever the URL says.
            (Some(account), None) if has_key && options.endpoint.is_none() => {
                return invalid(format!(
                    "the URL names account {account}, and nothing says which account the key or token is for: set \
                     AZURE_STORAGE_ACCOUNT_NAME or the store option account"
                ));
            }
            _ => {}
        }
        let endpoint = match (&options.endpoint, account) {
            (Some(endpoint), _) => endpoint.clone(),
            (None, Some(account)) if !is_label(account) => {
                return invalid(format!(
                    "the account {account:?} is none of Azure's: its name has letters, digits and '-' alone"
                ));
            }
            (None, Some(account)) => format!("https://{account}.blob.{suffix}"),
            (None, None) => {
                return invalid(
                    "there is no account: set AZURE_STORAGE_ACCOUNT_NAME or the store option account".into(),
                );
            }
        };
        let (origin, base) = endpoint_of(&endpoint)?;
        let path = format!("{}/{container}", trimmed(&base));
        let account = account.map(str::to_owned);
        Ok(Self { account, ..Self::of_bucket(Kind::Azure, url, origin, path, container, key) })
    }
}

/// The URL of the file that a page of the hub shows: `https://huggingface.co/org/model/blob/main/file`.
fn hub_file_of_page(origin: &Origin, target: &str) -> Option<String> {
    if origin.host != "huggingface.co" {
        return None;
    }
    let mut parts = target.split(['?', '#']).next()?.trim_start_matches('/').splitn(5, '/');
    match [(); 5].map(|()| parts.next()) {
        [Some(org), Some(model), Some("blob"), Some(revision), Some(file)] => {
            Some(format!("hf://{org}/{model}@{revision}/{file}"))
        }
        _ => None,
    }
}

/// The account and the suffix of a host of Azure's.
fn azure_host(host: &str) -> Option<(&str, &'static str)> {
    let (account, rest) = host.split_once('.')?;
    let suffix = rest.strip_prefix("dfs.").or_else(|| rest.strip_prefix("blob."))?;
    let suffix = AZURE_SUFFIXES.iter().find(|own| **own == suffix).filter(|_| is_label(account))?;
    Some((account, suffix))
}

/// Whether a name can be one part of a host's name.
fn is_label(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|own| own.is_ascii_alphanumeric() || own == b'-')
}

/// Whether a host is that of an account of Azure.
pub(crate) fn is_azure_host(host: &str) -> bool {
    azure_host(&host.to_ascii_lowercase()).is_some()
}

fn bucket_and_key<'a>(rest: &'a str, scheme: &str) -> Result<(&'a str, &'a str), Problem> {
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if bucket.is_empty() || !bucket.bytes().all(is_named) {
        let reason = format!("the URL names no bucket: it is of the form {scheme}://bucket/key");
        return Err(Problem::Invalid(reason));
    }
    Ok((bucket, key))
}

impl Bucket {
    /// Path and query of a request for the keys in the folder, from where an earlier page ended.
    pub(crate) fn listing(&self, kind: Kind, token: Option<&str>) -> Target {
        let (path, prefix) = (&self.path, encoded_value(&self.key));
        let token =
            |name: &str| token.map_or(String::new(), |token| format!("{name}={}&", encoded_value(token)));
        // In the order that signatures have.
        Target(match kind {
            Kind::Azure => {
                let marker = token("marker");
                format!("{path}?comp=list&delimiter=%2F&{marker}prefix={prefix}&restype=container")
            }
            _ => {
                let token = token("continuation-token");
                format!("{path}/?{token}delimiter=%2F&list-type=2&prefix={prefix}")
            }
        })
    }
}

/// The domain of AWS's services in a region.
pub(crate) fn aws_domain(region: &str) -> &'static str {
    let found = AWS_DOMAINS.iter().find(|(begin, _)| region.starts_with(begin));
    found.map_or("amazonaws.com", |(_, domain)| domain)
}

/// The beginning of the names of all regions of a region's partition: credentials are valid in all of them, and in no others.
pub(crate) fn aws_partition(region: &str) -> &'static str {
    AWS_DOMAINS.iter().find(|(begin, _)| region.starts_with(begin)).map_or("", |(begin, _)| begin)
}

/// Whether a host is one of AWS's services.
pub(crate) fn is_aws_host(host: &str) -> bool {
    AWS_DOMAINS.iter().any(|(_, domain)| host.strip_suffix(domain).is_some_and(|name| name.ends_with('.')))
}

/// The region of a bucket.
pub(crate) fn region(options: &StoreOptions) -> &str {
    options.region.as_deref().unwrap_or("us-east-1")
}

/// A key as a path has it.
pub(crate) fn encoded_path(key: &str) -> String {
    utf8_percent_encode(key, PATH).to_string()
}

/// A value as a query has it, or one part of a path.
pub(crate) fn encoded_value(value: &str) -> String {
    utf8_percent_encode(value, QUERY).to_string()
}

/// The path of an endpoint, before which others begin.
fn trimmed(base: &str) -> &str {
    base.trim_end_matches('/')
}

/// As [`web`], of a store's endpoint, which the caller's URL does not show.
fn endpoint_of(endpoint: &str) -> Result<(Origin, String), Problem> {
    web(endpoint).map_err(|problem| match problem {
        Problem::Invalid(reason) => Problem::Invalid(format!("the endpoint of the store is wrong: {reason}")),
        other => other,
    })
}

/// Takes an `http` or `https` URL apart into the server, and path and query.
pub(crate) fn web(url: &str) -> Result<(Origin, String), Problem> {
    let invalid = |what: &str| Problem::Invalid(format!("the URL {} {what}", shown(url)));
    let end = url.find('#').unwrap_or(url.len());
    let uri: ::http::Uri =
        url[..end].parse().map_err(|_| invalid("is not valid; write spaces and other characters as %20"))?;
    let is_tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(invalid("begins with neither https:// nor http://")),
    };
    let authority = uri.authority().ok_or_else(|| invalid("names no host"))?;
    if authority.as_str().contains('@') {
        return Err(invalid("has a user or a password, which are not sent; leave them out"));
    }
    let port = match authority.as_str()[authority.host().len()..].strip_prefix(':') {
        None | Some("") => {
            if is_tls {
                443
            } else {
                80
            }
        }
        Some(port) => port.parse().map_err(|_| invalid("has a port that is not a number up to 65535"))?,
    };
    let target = uri.path_and_query().map_or("/", |target| target.as_str());
    // A query may follow the host at once.
    let slash = if target.starts_with('/') { "" } else { "/" };
    Ok((Origin { is_tls, host: authority.host().to_owned(), port }, format!("{slash}{target}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(url: &str, change: impl FnOnce(&mut StoreOptions)) -> (String, String) {
        let mut options = StoreOptions::default();
        change(&mut options);
        let location = Location::parse(url, &options).unwrap();
        (location.origin.url(), location.target.0)
    }

    fn pair(a: &str, b: &str) -> (String, String) {
        (a.to_owned(), b.to_owned())
    }

    #[test]
    fn buckets_are_found_where_the_options_say() {
        let url = "s3://models/llama/a b.gguf";
        assert_eq!(
            found(url, |_| ()),
            pair("https://models.s3.us-east-1.amazonaws.com", "/llama/a%20b.gguf")
        );
        let endpoint = |options: &mut StoreOptions| options.endpoint = Some("http://store:9000/".into());
        assert_eq!(found(url, endpoint), pair("http://store:9000", "/models/llama/a%20b.gguf"));
        let hosted = |options: &mut StoreOptions| {
            endpoint(options);
            options.path_style = Some(false);
        };
        assert_eq!(found(url, hosted), pair("http://models.store:9000", "/llama/a%20b.gguf"));
        let dotted = found("s3://my.models/a", |options| options.region = Some("eu-west-1".into()));
        assert_eq!(dotted, pair("https://s3.eu-west-1.amazonaws.com", "/my.models/a"));
        for (region, host) in [
            ("cn-north-1", "s3.cn-north-1.amazonaws.com.cn"),
            ("eusc-de-east-1", "s3.eusc-de-east-1.amazonaws.eu"),
            ("us-gov-west-1", "s3.us-gov-west-1.amazonaws.com"),
        ] {
            let there = found("s3://models/a", |options| options.region = Some(region.into()));
            assert_eq!(there, pair(&format!("https://models.{host}"), "/a"));
            assert!(is_aws_host(host), "{host}");
        }
        assert!(!is_aws_host("amazonaws.com.example") && !is_aws_host("notamazonaws.com"));
        assert_eq!(found("https://host/a?b=c/d#e", |_| ()), pair("https://host", "/a?b=c/d"));
        assert_eq!(found("https://host?x=1", |_| ()), pair("https://host", "/?x=1"));
        assert_eq!(found("https://host", |_| ()), pair("https://host", "/"));
        let page = "https://huggingface.co/org/model/blob/main/sub/a.gguf";
        let problem = Location::parse(page, &StoreOptions::default()).unwrap_err().to_string();
        assert!(problem.contains("hf://org/model@main/sub/a.gguf"), "{problem}");
        let google = pair("https://storage.googleapis.com", "/models/a%3Fb");
        assert_eq!(found("gs://models/a?b", |_| ()), google);
        assert_eq!(found("gs://models/a", endpoint), pair("http://store:9000", "/models/a"));
    }

    #[test]
    fn containers_of_azure_are_found_by_account_or_endpoint() {
        let mine = |options: &mut StoreOptions| options.account = Some("mine".into());
        let blob = pair("https://mine.blob.core.windows.net", "/models/a%20b");
        for url in ["az://models/a b", "abfs://models/a b", "abfss://models@mine.dfs.core.windows.net/a b"] {
            assert_eq!(found(url, mine), blob, "{url}");
        }
        assert_eq!(found("abfs://models@mine.blob.core.windows.net/a b", |_| ()), blob);
        let emulator = |options: &mut StoreOptions| {
            options.endpoint = Some("http://127.0.0.1:10000/devstoreaccount1".into())
        };
        assert_eq!(
            found("az://models/a", emulator),
            pair("http://127.0.0.1:10000", "/devstoreaccount1/models/a")
        );
        for url in [
            "az://models/a",
            "az://models@mine.dfs.core.windows.net/a",
            "abfs://models@evil.example/a",
            "abfs://models@mine.dfs.core.windows.net.evil.example/a",
            "abfs://models@mine.evil.example?.dfs.core.windows.net/a",
            "abfs://models@mine.dfs.core.windows.net/a?sig=canary",
            "abfs://@mine.dfs.core.windows.net/a",
        ] {
            let problem = Location::parse(url, &StoreOptions::default()).unwrap_err();
            assert!(
                matches!(&problem, Problem::Invalid(text) if !text.contains("canary")),
                "{url}: {problem}"
            );
        }
        let mut other = StoreOptions { account: Some("other".into()), ..StoreOptions::default() };
        let url = "abfs://models@mine.dfs.core.windows.net/a";
        assert!(Location::parse(url, &other).is_ok());
        // The key of one account is not sent to another.
        other.account_key = Some("canary".to_owned().into());
        assert!(Location::parse(url, &other).is_err());
        // Nor is a token that does not say whose it is.
        let mut token =
            StoreOptions { sas_token: Some("canary".to_owned().into()), ..StoreOptions::default() };
        let problem = Location::parse(url, &token).unwrap_err();
        assert!(
            matches!(&problem, Problem::Invalid(text) if text.contains("mine") && !text.contains("canary"))
        );
        token.account = Some("mine".into());
        assert!(Location::parse(url, &token).is_ok());
        token = StoreOptions { account: None, endpoint: Some("https://mine.example".into()), ..token };
        assert!(Location::parse(url, &token).is_ok());
    }

    #[test]
    fn users_and_passwords_are_not_shown() {
        for (url, expected) in [
            ("https://me:canary@host/a@b", "https://host/a@b"),
            ("https://me:can/ary@host/a", "https://host/a"),
            ("s3://me:can/ary@bucket/a", "s3://bucket/a"),
            ("https://host:80/@me/a", "https://host:80/@me/a"),
            ("http://[::1]:80/a", "http://[::1]:80/a"),
            ("http://[::1]/a@b", "http://[::1]/a@b"),
            ("az://models/a?sig=canary", "az://models/a"),
            ("abfs://models@mine/a?sig=canary", "abfs://models@mine/a"),
            ("abfs://models@me:canary@mine/a", "abfs://mine/a"),
            ("abfs://models@me:can/ary@mine/a", "abfs://mine/a"),
            ("abfss://me:canary@mine/a", "abfss://mine/a"),
            ("abfs://models@mine:80/a@b", "abfs://models@mine:80/a@b"),
            ("https://me@you:can/ary@host/a", "https://host/a"),
            ("gs://models/a?b", "gs://models/a?b"),
            ("hf://canary@org/model@main/a", "hf://org/model@main/a"),
            ("hf://me:can/ary@org/model", "hf://org/model"),
            ("hf://org/model@main/a", "hf://org/model@main/a"),
            ("key:canary@host:9000/a", "host:9000/a"),
            ("https:/key:can@ary@host", "host"),
            ("host/a?sig=canary", "host/a"),
            ("host/a#canary", "host/a"),
            ("key:can?ary@host", ""),
            ("host?sig=can@ary", ""),
            ("/a@b/c?d", "/a@b/c?d"),
        ] {
            assert_eq!(shown(url), expected);
        }
    }

    #[test]
    fn a_url_that_cannot_be_used_is_told_with_what_is_wrong() {
        for (url, told) in [
            (
                "https://host/a b",
                "the URL https://host/a b is not valid; write spaces and other characters as %20",
            ),
            (
                "https://me@host/a",
                "the URL https://host/a has a user or a password, which are not sent; leave them out",
            ),
            (
                "https://host:99999/a",
                "the URL https://host:99999/a has a port that is not a number up to 65535",
            ),
            (
                "hf://datasets/org/a",
                "the URL names a data set or a space, and only models can be read; write hf://",
            ),
            (
                "hf://org/model@/a",
                "the URL has a revision or a path that leads out of the model, or is empty; write hf://",
            ),
        ] {
            let problem = Location::parse(url, &StoreOptions::default()).unwrap_err().to_string();
            assert!(problem.starts_with(told), "{problem}");
        }
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_told_from_the_url_of_the_object() {
        let options =
            StoreOptions { endpoint: Some("storage.example:9000".into()), ..StoreOptions::default() };
        for url in ["s3://models/a", "gs://models/a", "az://models/a", "hf://org/model/a"] {
            let problem = Location::parse(url, &options).unwrap_err().to_string();
            assert!(
                problem.starts_with("the endpoint of the store is wrong: the URL storage.example:9000"),
                "{problem}"
            );
        }
    }

    #[test]
    fn an_endpoint_without_a_scheme_is_told_without_its_secrets() {
        for endpoint in ["key:canary@host:9000", "host:9000?sig=canary", "key:can?ary@host", "host#canary"] {
            let options = StoreOptions { endpoint: Some(endpoint.into()), ..StoreOptions::default() };
            assert!(!format!("{options:?}").contains("ary"), "{options:?}");
            for url in ["s3://models/a", "gs://models/a", "az://models/a", "hf://org/model/a"] {
                let problem = Location::parse(url, &options).unwrap_err().to_string();
                assert!(problem.contains("endpoint") && !problem.contains("ary"), "{problem}");
            }
        }
    }

    #[test]
    fn a_region_or_account_that_makes_no_host_is_named_and_no_endpoint() {
        for region in ["eu west", "eu/west", ""] {
            let mut options = StoreOptions { region: Some(region.into()), ..StoreOptions::default() };
            let problem = Location::parse("s3://models/a", &options).unwrap_err().to_string();
            assert!(problem.starts_with(&format!("the region {region:?} ")), "{problem}");
            assert!(!problem.contains("endpoint"), "{problem}");
            // Other stores have names of their own.
            options.endpoint = Some("http://store:9000".into());
            assert!(Location::parse("s3://models/a", &options).is_ok());
        }
        let options = StoreOptions { account: Some("my acct".into()), ..StoreOptions::default() };
        let problem = Location::parse("az://models/a", &options).unwrap_err().to_string();
        assert!(problem.starts_with("the account \"my acct\" "), "{problem}");
        assert!(!problem.contains("endpoint"), "{problem}");
    }

    #[test]
    fn what_is_no_url_of_an_object_is_refused_without_its_secrets() {
        for url in [
            "s3://",
            "s3:///key",
            "s3://canary@bucket/a",
            "gs://canary@bucket/a",
            "https://me:canary@host/a",
            "https://me:can/canary@host/a",
            "ftp://host",
            "https://",
        ] {
            let problem = Location::parse(url, &StoreOptions::default()).unwrap_err();
            assert!(matches!(problem, Problem::Invalid(_)), "{url}");
            assert!(!problem.to_string().contains("canary"), "{problem}");
        }
        assert!(
            !format!("{:?}", Location::parse("https://h/a?s=canary", &StoreOptions::default()))
                .contains("canary")
        );
    }
}
