//! Which version of an object was opened, and whether an answer is of that version.

use crate::Problem;
use ::http::HeaderMap;
use ::http::header::{CONTENT_ENCODING, CONTENT_RANGE, ETAG, LAST_MODIFIED};
use std::ops::Range;

/// The version that was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pin {
    pub(crate) len: u64,
    pub(crate) tag: Tag,
    /// The header with the store's own name of the version, and that name.
    version: Option<(&'static str, String)>,
}

/// What tells a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tag {
    /// A strong ETag.
    Strong(String),
    /// None. The date of the last change.
    Date(Option<String>),
}

/// What the head of a `206` says about its body.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) range: Range<u64>,
    pub(crate) pin: Pin,
}

impl Part {
    /// Reads the head of a `206`.
    ///
    /// # Errors
    /// [`Problem::WrongAnswer`] if it does not say which bytes of how many it has.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, Problem> {
        let text = header(headers, CONTENT_RANGE.as_str());
        let wrong = |what: String| Problem::WrongAnswer(what);
        let Some(text) = text else { return Err(wrong("206 without Content-Range".into())) };
        let (range, len) = content_range(text)
            .ok_or_else(|| wrong(format!("206 with Content-Range '{}'", printable(text))))?;
        Ok(Self { range, pin: Pin::of(headers, len)? })
    }

    /// Fails unless it begins as `range` does, and has no more: a server may send a shorter part than was asked for.
    pub(crate) fn begins(&self, range: &Range<u64>) -> Result<(), Problem> {
        let Range { start, end } = self.range;
        if start == range.start && end <= range.end {
            return Ok(());
        }
        let what = format!("206 with bytes {start}..{end} for bytes {}..{}", range.start, range.end);
        Err(Problem::WrongAnswer(what))
    }

    /// Reads the head of a `200` that has all `len` bytes.
    ///
    /// # Errors
    /// [`Problem::WrongAnswer`] if they are encoded.
    pub(crate) fn whole(headers: &HeaderMap, len: u64) -> Result<Self, Problem> {
        Ok(Self { range: 0..len, pin: Pin::of(headers, len)? })
    }
}

/// The generation of an object of Google: it alone tells a version.
const GENERATION: &str = "x-goog-generation";
/// Headers with a store's own name of a version.
const VERSIONS: &[&str] = &["x-amz-version-id", GENERATION, "x-ms-version-id"];

impl Pin {
    fn of(headers: &HeaderMap, len: u64) -> Result<Self, Problem> {
        if let Some(encoding) = header(headers, CONTENT_ENCODING.as_str()).filter(|own| *own != "identity") {
            let what = format!("an answer with Content-Encoding '{}'", printable(encoding));
            return Err(Problem::WrongAnswer(what));
        }
        let etag = header(headers, ETAG.as_str()).filter(|etag| etag.starts_with('"'));
        let date = || header(headers, LAST_MODIFIED.as_str()).map(str::to_owned);
        let tag = etag.map_or_else(|| Tag::Date(date()), |etag| Tag::Strong(etag.to_owned()));
        let version = VERSIONS.iter().find_map(|name| Some((*name, header(headers, name)?.to_owned())));
        Ok(Self { len, tag, version })
    }

    /// The generation of an object of Google.
    pub(crate) fn generation(&self) -> Option<&str> {
        self.version.as_ref().filter(|(name, _)| *name == GENERATION).map(|(_, value)| value.as_str())
    }

    /// Fails if an answer is of another version.
    pub(crate) fn check(&self, found: &Self) -> Result<(), Problem> {
        let changed = |what: String| Err(Problem::Changed(what));
        if self.len != found.len {
            return changed(format!("it had {} bytes and now has {}", self.len, found.len));
        }
        if self.tag != found.tag {
            return changed(format!("its {} is now {}", self.tag, found.tag));
        }
        if let Some((name, _)) = self.version.as_ref().filter(|_| self.version != found.version) {
            return changed(format!("its {name} is another"));
        }
        Ok(())
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Strong(etag) => write!(f, "ETag {}", printable(etag)),
            Self::Date(Some(date)) => write!(f, "date {}", printable(date)),
            Self::Date(None) => f.write_str("version without ETag and date"),
        }
    }
}

/// The value of a header that is text.
pub(crate) fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// What a server says, as far as an error shows it.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|own| own.is_ascii_graphic() || *own == ' ').take(80).collect()
}

/// The bytes that `bytes 5-9/100` stands for, and of how many.
fn content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, len) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, len): (u64, u64, u64) = (number(first)?, number(last)?, number(len)?);
    (first <= last && last < len).then(|| (first..last + 1, len))
}

fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_ranges_are_understood() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5..10, 100)));
        for text in [
            "bytes 5-9/*",
            "bytes */100",
            "bytes 9-5/100",
            "bytes 0-100/100",
            "5-9/100",
            "bytes 5-9",
            "bytes +5-9/100",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 0-18446744073709551616/2",
        ] {
            assert_eq!(content_range(text), None, "{text}");
        }
    }
}
