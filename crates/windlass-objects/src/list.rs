//! What a folder of a bucket holds.

use crate::{Problem, Result, StoreOptions, client::Client, location::Location, object::variable};
use serde::Deserialize;
use std::sync::atomic::AtomicBool;

/// Longest page of a listing.
const MAX_PAGE_BYTES: usize = 16 << 20;
/// Most pages: a folder of a checkpoint has one.
const MAX_PAGES: usize = 100;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    #[serde(default)]
    is_truncated: bool,
    next_continuation_token: Option<String>,
    #[serde(default)]
    contents: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    key: String,
}

/// Returns the names of the objects in a folder, such as `s3://bucket/llama/`, without those in folders below it.
///
/// # Errors
/// [`Problem::Invalid`] if the URL is no folder in S3; and those of [`Object::open`](crate::Object::open).
pub fn list(url: &str, options: &StoreOptions) -> Result<Vec<String>> {
    let options = options.resolved(variable);
    let failed = |problem: Problem| problem.of(&crate::shown(url), None);
    let location = Location::parse(url, &options).map_err(failed)?;
    let Some(s3) = location.s3.as_ref().filter(|s3| s3.key.is_empty() || s3.key.ends_with('/')) else {
        return Err(failed(Problem::Invalid(
            "only folders in S3 are listed, and their URL ends with '/'".into(),
        )));
    };
    let client = Client::of(&location, &options);
    let (mut names, mut token) = (Vec::new(), None);
    for _ in 0..MAX_PAGES {
        let target = s3.listing(token.as_deref());
        let stop = AtomicBool::new(false);
        let body = client.pace().persist(&stop, |waiting| {
            let answer = client.get(&target, &[], waiting)?;
            client.body(answer, MAX_PAGE_BYTES, waiting)
        });
        let page = page(&body.map_err(failed)?).map_err(failed)?;
        let own = page.contents.into_iter().filter_map(|entry| {
            let name = entry.key.strip_prefix(&s3.key)?;
            (!name.is_empty()).then(|| name.to_owned())
        });
        names.extend(own);
        token = page.next_continuation_token;
        match (page.is_truncated, &token) {
            (false, _) => return Ok(names),
            (true, Some(_)) => {}
            (true, None) => break,
        }
    }
    let reason = format!("the listing of bucket {} does not end", s3.bucket);
    Err(failed(Problem::WrongAnswer(reason)))
}

fn page(body: &[u8]) -> Result<Page, Problem> {
    let wrong = || Problem::WrongAnswer("it is no listing of S3".into());
    let text = std::str::from_utf8(body).map_err(|_| wrong())?;
    if !text.contains("<ListBucketResult") {
        return Err(wrong());
    }
    quick_xml::de::from_str(text).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_apart_and_nothing_else() {
        let text = "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\"><Name>b</Name><IsTruncated>true</IsTruncated>\
                    <NextContinuationToken>next</NextContinuationToken><Contents><Key>a/b &amp; c</Key><Size>5</Size></Contents>\
                    <CommonPrefixes><Prefix>a/d/</Prefix></CommonPrefixes><Contents><Key>a/e</Key></Contents></ListBucketResult>";
        let page = page(text.as_bytes()).unwrap();
        let keys: Vec<_> = page.contents.iter().map(|entry| entry.key.as_str()).collect();
        assert_eq!((keys, page.is_truncated), (vec!["a/b & c", "a/e"], true));
        for text in ["", "<html></html>", "<ListBucketResult><Contents>"] {
            assert!(super::page(text.as_bytes()).is_err(), "{text}");
        }
    }
}
