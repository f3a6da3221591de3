//! What a URL says: which object or folder, on which server.

use crate::{Problem, StoreOptions, http::Origin};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// What stands for itself in a path.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// What stands for itself in a value of a query.
const QUERY: &AsciiSet = &PATH.add(b'/');

/// An object, or the folder that is a prefix of keys.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// The URL as it is shown.
    pub(crate) shown: String,
    pub(crate) origin: Origin,
    /// Path and query of requests for it. It may hold secrets.
    pub(crate) target: Target,
    /// Bucket and key, of an object in S3.
    pub(crate) s3: Option<S3>,
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
pub(crate) struct S3 {
    /// The path of the bucket: empty if it is a part of the host's name.
    pub(crate) bucket_path: String,
    pub(crate) bucket: String,
    pub(crate) key: String,
}

/// Returns a URL as errors and reports show it: without user, password, query and fragment. Keys of S3 have neither query nor
/// fragment.
///
/// ```
/// assert_eq!(windlass_objects::shown("https://me:secret@host/a?X-Amz-Signature=5"), "https://host/a");
/// assert_eq!(windlass_objects::shown("s3://bucket/what?"), "s3://bucket/what?");
/// ```
pub fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = if scheme == "s3" { rest.len() } else { rest.find(['?', '#']).unwrap_or(rest.len()) };
    let rest = &rest[..end];
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

impl Location {
    /// Takes a URL apart. `options` are resolved.
    pub(crate) fn parse(url: &str, options: &StoreOptions) -> Result<Self, Problem> {
        match url.split_once("://") {
            Some(("s3", rest)) => Self::in_s3(url, rest, options),
            Some(("http" | "https", _)) => {
                let (origin, target) = web(url)?;
                Ok(Self { shown: shown(url), origin, target: Target(target), s3: None })
            }
            _ => Err(Problem::Invalid("the URL begins with none of s3://, https:// and http://".into())),
        }
    }

    fn in_s3(url: &str, rest: &str, options: &StoreOptions) -> Result<Self, Problem> {
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_named) {
            return Err(Problem::Invalid(
                "the URL names no bucket: it is of the form s3://bucket/key".into(),
            ));
        }
        let region = region(options);
        let endpoint = match &options.endpoint {
            Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
            None => format!("https://s3.{region}.amazonaws.com"),
        };
        let (origin, base) = web(&endpoint)?;
        let base = base.trim_end_matches('/');
        let by_default = options.endpoint.is_some() || bucket.contains('.');
        let (origin, bucket_path) = match options.path_style.unwrap_or(by_default) {
            true => (origin, format!("{base}/{bucket}")),
            false => (Origin { host: format!("{bucket}.{}", origin.host), ..origin }, base.to_owned()),
        };
        let target = Target(format!("{bucket_path}/{}", utf8_percent_encode(key, PATH)));
        let s3 = S3 { bucket_path, bucket: bucket.to_owned(), key: key.to_owned() };
        Ok(Self { shown: shown(url), origin, target, s3: Some(s3) })
    }
}

impl S3 {
    /// Path and query of a request for the keys in the folder, from where an earlier page ended.
    pub(crate) fn listing(&self, token: Option<&str>) -> Target {
        // In the order that signatures have.
        let token = token.map_or(String::new(), |token| {
            format!("continuation-token={}&", utf8_percent_encode(token, QUERY))
        });
        let prefix = utf8_percent_encode(&self.key, QUERY);
        Target(format!("{}/?{token}delimiter=%2F&list-type=2&prefix={prefix}", self.bucket_path))
    }
}

/// The region of a bucket.
pub(crate) fn region(options: &StoreOptions) -> &str {
    options.region.as_deref().unwrap_or("us-east-1")
}

/// Takes an `http` or `https` URL apart into the server, and path and query.
fn web(url: &str) -> Result<(Origin, String), Problem> {
    let invalid = |what: &str| Problem::Invalid(format!("{what} in the URL {}", shown(url)));
    let end = url.find('#').unwrap_or(url.len());
    let uri: ::http::Uri =
        url[..end].parse().map_err(|_| invalid("there is something that does not belong"))?;
    let is_tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(invalid("there is neither https:// nor http://")),
    };
    let authority = uri.authority().ok_or_else(|| invalid("there is no host"))?;
    if authority.as_str().contains('@') {
        return Err(invalid("there are a user and a password, which are not sent,"));
    }
    let port = authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let target = uri.path_and_query().map_or("/", |target| target.as_str());
    Ok((Origin { is_tls, host: authority.host().to_owned(), port }, target.to_owned()))
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

    #[test]
    fn buckets_are_found_where_the_options_say() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
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
        assert_eq!(found("https://host/a?b=c/d#e", |_| ()), pair("https://host", "/a?b=c/d"));
    }

    #[test]
    fn what_is_no_url_of_an_object_is_refused_without_its_secrets() {
        for url in [
            "s3://",
            "s3:///key",
            "s3://canary@bucket/a",
            "https://me:canary@host/a",
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
