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
    /// Who asks.
    pub authorization: Option<String>,
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
            authorization: find("authorization"),
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
