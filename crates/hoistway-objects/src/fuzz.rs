//! All that parses what users write and servers say, for the fuzz target `objects`.

use crate::{
    StoreOptions,
    hub::Repository,
    list,
    location::{Kind, Location, shown},
    pin::Part,
    redirect::redirect_target,
};
use http::{HeaderMap, HeaderValue};

/// Parses bytes as everything that they might be. Nothing panics, and no secret is shown.
pub(crate) fn parse_everything(bytes: &[u8]) {
    let _ = crate::http::head(bytes);
    for kind in [Kind::S3, Kind::Google, Kind::Azure] {
        let _ = list::page(kind, bytes);
    }
    if let Ok(value) = HeaderValue::from_bytes(bytes) {
        let mut headers = HeaderMap::new();
        for name in ["content-range", "etag", "last-modified", "x-goog-generation"] {
            headers.insert(name, value.clone());
        }
        if let Ok(part) = Part::of(&headers) {
            assert!(part.range.start < part.range.end && part.range.end <= part.pin.len);
        }
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = redirect_target(text);
    for scheme in ["s3", "gs", "az", "abfs", "hf", "https"] {
        let url = format!("{scheme}://{text}");
        let _ = shown(&url);
        let _ = Location::parse(&url, &StoreOptions::default());
        if let Ok(found) = Repository::parse(&url) {
            assert_eq!(Repository::parse(&found.url()).ok().as_ref(), Some(&found), "{url}");
        }
    }
    // Passwords and queries of web servers stay hidden: what is shown is the same whatever they are.
    let name = text.replace(['/', '?', '#', '@', ':'], "");
    let with = |secret: &str| {
        [
            format!("https://{name}:{secret}@host/{text}"),
            format!("https://host/{name}?{text}={secret}"),
            format!("https://host/{name}#{secret}{text}"),
        ]
    };
    let told = |url: &str| Location::parse(url, &StoreOptions::default()).err().map(|own| own.to_string());
    for (one, other) in with("canary5").iter().zip(&with("sparrow")) {
        assert_eq!(shown(one), shown(other), "{one}");
        assert_eq!(redirect_target(one), redirect_target(other), "{one}");
        assert_eq!(told(one), told(other), "{one}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_that_is_parsed_panics_or_shows_a_secret(text in ".{0,80}", bytes: Vec<u8>) {
            super::parse_everything(text.as_bytes());
            super::parse_everything(&bytes);
        }

        #[test]
        fn nor_does_what_looks_like_a_url(
            text in "[a-z@:/?#%.\\[\\]=-]{0,40}",
            answer in "(HTTP/1.1 2|bytes |<ListBucketResult>|<EnumerationResults>|<Contents><Key>|</|[0-9 /<>:\r\n-]){0,12}",
        ) {
            super::parse_everything(text.as_bytes());
            super::parse_everything(answer.as_bytes());
        }
    }
}
