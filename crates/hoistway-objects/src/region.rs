//! The region of a bucket, where the caller names none: the default one, or the one that the server says.

use crate::{
    Problem, StoreOptions,
    location::{Kind, Location},
    per_process::PerProcess,
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Buckets whose region is remembered.
const MAX_KNOWN: usize = 1024;
/// Longest name of a region.
const MAX_REGION_BYTES: usize = 32;

/// Endpoint and bucket, and the region that a server said.
type Known = Mutex<HashMap<(Option<String>, String), String>>;

static KNOWN: PerProcess<Known> = PerProcess::new();

/// Does something with the location of a URL. If its bucket is in another region than the default one, and the options, which are
/// resolved, name none, does it once more with that region. Hands out the region that the server said.
///
/// # Errors
/// Those of `work`.
pub(crate) fn in_its_region<T>(
    url: &str,
    options: &StoreOptions,
    mut work: impl FnMut(Location, &StoreOptions) -> Result<T, Problem>,
) -> Result<(T, Option<String>), Problem> {
    let location = Location::parse(url, options)?;
    let bucket = location.bucket.as_ref().map(|bucket| bucket.name.clone()).unwrap_or_default();
    if options.region.is_some() || location.kind != Kind::S3 {
        return Ok((work(location, options)?, None));
    }
    let key = (options.endpoint.clone(), bucket);
    let there = |region: &str| {
        let options = StoreOptions { region: Some(region.to_owned()), ..options.clone() };
        Location::parse(url, &options).map(|location| (location, options))
    };
    let known = lock().get(&key).cloned();
    let result = match &known {
        Some(region) => {
            let (location, options) = there(region)?;
            work(location, &options)
        }
        None => work(location, options),
    };
    match result {
        Err(Problem::OtherRegion { region, .. }) if known.as_ref() != Some(&region) => {
            tracing::info!("bucket {} is in region {region}, as its server says", key.1);
            let (location, options) = there(&region)?;
            let done = work(location, &options)?;
            let mut known = lock();
            if known.len() >= MAX_KNOWN {
                known.clear();
            }
            known.insert(key, region.clone());
            Ok((done, Some(region)))
        }
        result => Ok((result?, known)),
    }
}

/// The region of a bucket that a server's refusal says: in a header, or as the text of the error does. It becomes a part of a
/// host's name.
pub(crate) fn said_by(header: Option<&str>, code: Option<&str>, body: &[u8]) -> Option<String> {
    let in_body = || {
        let text = std::str::from_utf8(body).ok().filter(|_| code == Some("AuthorizationHeaderMalformed"))?;
        Some(text.split_once("<Region>")?.1.split_once("</Region>")?.0)
    };
    let region = header.or_else(in_body)?;
    let is_region = (1..=MAX_REGION_BYTES).contains(&region.len())
        && region.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    is_region.then(|| region.to_owned())
}

fn lock() -> MutexGuard<'static, HashMap<(Option<String>, String), String>> {
    KNOWN.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elsewhere(region: &str) -> Problem {
        Problem::OtherRegion { region: region.into(), said: "status 301".into() }
    }

    #[test]
    fn a_bucket_of_aws_is_asked_for_where_it_is() {
        let mut hosts = Vec::new();
        let mut work = |location: Location, options: &StoreOptions| {
            hosts.push(location.origin.host);
            match options.region.as_deref() {
                Some("eu-west-1") => Ok(()),
                _ => Err(elsewhere("eu-west-1")),
            }
        };
        let options = StoreOptions::default();
        for _ in 0..2 {
            let (_, region) = in_its_region("s3://of-tests/a", &options, &mut work).unwrap();
            assert_eq!(region.as_deref(), Some("eu-west-1"));
        }
        let there = "of-tests.s3.eu-west-1.amazonaws.com";
        assert_eq!(hosts, ["of-tests.s3.us-east-1.amazonaws.com", there, there]);
    }

    #[test]
    fn a_region_that_was_named_or_does_not_help_is_asked_once() {
        let mut asked = 0;
        let mut work = |_: Location, _: &StoreOptions| {
            asked += 1;
            Err::<(), _>(elsewhere("eu-west-1"))
        };
        let named = StoreOptions { region: Some("us-west-2".into()), ..StoreOptions::default() };
        for options in [named, StoreOptions::default()] {
            let problem = in_its_region("s3://of-other-tests/a", &options, &mut work).unwrap_err();
            assert!(problem.to_string().contains("region=eu-west-1"), "{problem}");
        }
        assert_eq!(asked, 1 + 2);
    }

    #[test]
    fn what_is_no_region_is_none() {
        let malformed = Some("AuthorizationHeaderMalformed");
        let body = b"<Error><Region>eu-west-1</Region></Error>";
        assert_eq!(said_by(Some("eu-west-1"), None, b"").as_deref(), Some("eu-west-1"));
        assert_eq!(said_by(None, malformed, body).as_deref(), Some("eu-west-1"));
        assert_eq!(said_by(None, Some("AccessDenied"), body), None);
        let long = "a".repeat(40);
        for header in ["", "elsewhere.example/", "a.b", "EU", &long] {
            assert_eq!(said_by(Some(header), None, b""), None, "{header}");
        }
    }
}
