//! What was asked.

use std::io::{self, Read};

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Its method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// First and last byte of the range.
    pub range: Option<(usize, usize)>,
    /// The ETag that the object must have.
    pub if_match: Option<String>,
    /// The generation that the object must have.
    pub if_generation_match: Option<String>,
    /// Who pays, if that is not the owner of the bucket.
    pub payer: Option<String>,
    /// Whether the checksum of S3 is asked for.
    pub wants_checksum: bool,
    /// Whether Azure is asked for the checksum of the range.
    pub wants_range_crc: bool,
    /// Who asks.
    pub authorization: Option<String>,
    /// Bytes of its body.
    pub body_len: usize,
    /// The checksum of its body that it says: `x-amz-checksum-crc64nvme`, `x-ms-content-crc64`, or `crc32c` of `x-goog-hash`.
    pub checksum: Option<String>,
    /// By which checksum the parts of an upload are compared that it begins.
    pub checksum_algorithm: Option<String>,
    /// What kind of blob of Azure it writes.
    pub blob_type: Option<String>,
}

impl Request {
    /// The next one of a connection. `None` at its end. `buffer` holds what was read.
    pub(crate) fn read(socket: &mut impl Read, buffer: &mut Vec<u8>) -> io::Result<Option<Self>> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut request = httparse::Request::new(&mut headers);
            if let Ok(httparse::Status::Complete(end)) = request.parse(buffer) {
                let parsed = Self::of(&request);
                buffer.drain(..end);
                return Ok(Some(parsed));
            }
            let mut part = [0; 4096];
            let count = socket.read(&mut part)?;
            if count == 0 {
                return Ok(None);
            }
            buffer.extend_from_slice(&part[..count]);
        }
    }

    /// Reads so many bytes of a body, of which `buffer` holds the first ones.
    pub(crate) fn read_body(socket: &mut impl Read, buffer: &mut Vec<u8>, len: usize) -> io::Result<Vec<u8>> {
        let rest = buffer.split_off(len.min(buffer.len()));
        let mut body = std::mem::replace(buffer, rest);
        let came = body.len();
        body.resize(len, 0);
        socket.read_exact(&mut body[came..])?;
        Ok(body)
    }

    fn of(request: &httparse::Request<'_, '_>) -> Self {
        let find = |name: &str| {
            let found = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
            found.map(|header| String::from_utf8_lossy(header.value).into_owned())
        };
        let range = find("range").and_then(|text| {
            let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse().ok()?, last.parse().ok()?))
        });
        Self {
            method: request.method.unwrap_or_default().to_owned(),
            target: origin_form(request.path.unwrap_or_default()),
            range,
            if_match: find("if-match"),
            if_generation_match: find("x-goog-if-generation-match"),
            payer: find("x-amz-request-payer"),
            wants_checksum: find("x-amz-checksum-mode").is_some_and(|own| own == "ENABLED"),
            wants_range_crc: find("x-ms-range-get-content-crc64").is_some(),
            authorization: find("authorization"),
            body_len: find("content-length").and_then(|len| len.parse().ok()).unwrap_or(0),
            checksum: find("x-amz-checksum-crc64nvme")
                .or_else(|| find("x-ms-content-crc64"))
                .or_else(|| Some(find("x-goog-hash")?.strip_prefix("crc32c=")?.to_owned())),
            checksum_algorithm: find("x-amz-checksum-algorithm"),
            blob_type: find("x-ms-blob-type"),
        }
    }
}

/// Path and query of a request target, also of one in absolute form, as clients send to proxies and servers have to take (RFC
/// 9112, 3.2.2).
fn origin_form(target: &str) -> String {
    let Some((scheme, rest)) = target.split_once("://") else { return target.to_owned() };
    if !matches!(scheme, "http" | "https") || target.starts_with('/') {
        return target.to_owned();
    }
    match rest.find(['/', '?']) {
        Some(at) if rest[at..].starts_with('/') => rest[at..].to_owned(),
        Some(at) => format!("/{}", &rest[at..]),
        None => "/".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_in_absolute_form_names_the_same_object() {
        for (target, expected) in [
            ("/a?b=http://c/d", "/a?b=http://c/d"),
            ("http://host:80/a/b?c", "/a/b?c"),
            ("https://host", "/"),
            ("http://host?a=1", "/?a=1"),
        ] {
            assert_eq!(origin_form(target), expected);
        }
    }
}
