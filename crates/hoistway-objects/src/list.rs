//! What a folder holds: of a bucket, or of a model on the hub.

use crate::{
    Problem, Result, StoreOptions,
    client::Client,
    hub,
    location::{Kind, Location},
    object::variable,
    region::in_its_region,
};
use serde::Deserialize;
use std::sync::atomic::AtomicBool;

/// Longest page of a listing.
const MAX_PAGE_BYTES: usize = 16 << 20;
/// Most pages, and most bytes of names: a folder of a checkpoint has one page.
const MAX_PAGES: usize = 100;
const MAX_NAME_BYTES: usize = 16 << 20;

/// Keys, and where the next page begins if there is one.
pub(crate) struct Page {
    keys: Vec<String>,
    is_last: bool,
    next: Option<String>,
}

/// A page of S3 and of Google.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BucketPage {
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

/// A page of Azure.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerPage {
    next_marker: Option<String>,
    blobs: Blobs,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Blobs {
    #[serde(default)]
    blob: Vec<Blob>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Blob {
    name: String,
}

/// Returns the URLs of the objects in a folder, such as `s3://bucket/llama/` or `hf://org/model`, without those in folders
/// below it. Those of a model on the hub have its commit in place of the revision. Ends soon after `stop` is set.
///
/// # Errors
/// [`Problem::Invalid`] if the URL is no folder, or that of a web server, which has no listing; and those of
/// [`Object::open`](crate::Object::open).
pub fn list(url: &str, options: &StoreOptions, stop: &AtomicBool) -> Result<Vec<String>> {
    let failed = |problem: Problem| problem.of(&crate::shown(url), None);
    let kind = Kind::of(url).map_err(failed)?;
    if kind == Kind::Hub {
        return hub::list(url, options, stop).map_err(failed);
    }
    let options = options.resolved(kind, variable).map_err(failed)?;
    let listed = in_its_region(url, &options, |location, options| list_at(&location, options, stop));
    listed.map(|(urls, _)| urls).map_err(failed)
}

fn list_at(location: &Location, options: &StoreOptions, stop: &AtomicBool) -> Result<Vec<String>, Problem> {
    let kind = location.kind;
    let Some(bucket) = location.bucket.as_ref().filter(|own| own.key.is_empty() || own.key.ends_with('/'))
    else {
        return Err(Problem::Invalid(
            "only folders of stores are listed, and their URL ends with '/'".into(),
        ));
    };
    let client = Client::of(location, options);
    let (mut urls, mut name_bytes, mut next) = (Vec::new(), 0, None);
    for _ in 0..MAX_PAGES {
        let target = bucket.listing(kind, next.as_deref());
        let body = client.pace().persist(stop, |waiting| {
            let answer = client.get(&target, &[], waiting)?;
            client.body(answer, MAX_PAGE_BYTES, waiting)
        });
        let page = page(kind, &body?)?;
        let names = page.keys.iter().filter_map(|key| {
            let name = key.strip_prefix(&bucket.key)?;
            // Some servers know no delimiter, and list what lies in folders below as well.
            (!name.is_empty() && !name.contains('/')).then_some(name)
        });
        for name in names {
            name_bytes += name.len();
            if name_bytes > MAX_NAME_BYTES {
                return Err(Problem::WrongAnswer(format!("the listing of {} is too long", bucket.name)));
            }
            let folder = location.shown.strip_suffix('/').unwrap_or(&location.shown);
            urls.push(format!("{folder}/{name}"));
        }
        next = page.next;
        match (page.is_last, &next) {
            (true, _) => return Ok(urls),
            (false, Some(_)) => {}
            (false, None) => break,
        }
    }
    Err(Problem::WrongAnswer(format!("the listing of {} does not end", bucket.name)))
}

pub(crate) fn page(kind: Kind, body: &[u8]) -> Result<Page, Problem> {
    let wrong = || Problem::WrongAnswer("it is not the listing of a folder".into());
    // Azure begins with a byte order mark.
    let text = std::str::from_utf8(body).map_err(|_| wrong())?.trim_start_matches('\u{feff}');
    if kind == Kind::Azure {
        if !text.contains("<EnumerationResults") {
            return Err(wrong());
        }
        let page: ContainerPage = quick_xml::de::from_str(text).map_err(|_| wrong())?;
        let keys = page.blobs.blob.into_iter().map(|own| own.name).collect();
        let next = page.next_marker.filter(|marker| !marker.is_empty());
        return Ok(Page { keys, is_last: next.is_none(), next });
    }
    if !text.contains("<ListBucketResult") {
        return Err(wrong());
    }
    let page: BucketPage = quick_xml::de::from_str(text).map_err(|_| wrong())?;
    let keys = page.contents.into_iter().map(|own| own.key).collect();
    Ok(Page { keys, is_last: !page.is_truncated, next: page.next_continuation_token })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_apart_and_nothing_else() {
        let text = "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\"><Name>b</Name><IsTruncated>true</IsTruncated>\
                    <NextContinuationToken>next</NextContinuationToken><Contents><Key>a/b &amp; c</Key><Size>5</Size></Contents>\
                    <CommonPrefixes><Prefix>a/d/</Prefix></CommonPrefixes><Contents><Key>a/e</Key></Contents></ListBucketResult>";
        let bucket = page(Kind::S3, text.as_bytes()).unwrap();
        assert_eq!((bucket.keys, bucket.is_last), (vec!["a/b & c".to_owned(), "a/e".into()], false));
        let text = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"http://x/\" \
                    ContainerName=\"c\"><Prefix>a/</Prefix><Delimiter>/</Delimiter><Blobs><Blob><Name>a/b &amp; c</Name>\
                    <Properties><Etag>0x5</Etag></Properties></Blob><BlobPrefix><Name>a/d/</Name></BlobPrefix>\
                    <Blob><Name>a/e</Name></Blob></Blobs><NextMarker>next</NextMarker></EnumerationResults>";
        let container = page(Kind::Azure, text.as_bytes()).unwrap();
        assert_eq!((container.keys, container.is_last), (vec!["a/b & c".to_owned(), "a/e".into()], false));
        let last = text.replace("<NextMarker>next</NextMarker>", "<NextMarker />");
        assert!(page(Kind::Azure, last.as_bytes()).unwrap().is_last);
        for text in ["", "<html></html>", "<ListBucketResult><Contents>", "<EnumerationResults><Blobs>"] {
            for kind in [Kind::S3, Kind::Google, Kind::Azure] {
                assert!(page(kind, text.as_bytes()).is_err(), "{text}");
            }
        }
    }
}
