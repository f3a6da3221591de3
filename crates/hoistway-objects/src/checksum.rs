//! The checksum that a store has of an object.

use crate::{Problem, pin::header};
use base64::{Engine, engine::general_purpose::STANDARD};
use crc_fast::CrcAlgorithm;
use http::HeaderMap;
use std::fmt;

/// Most parts of an object of S3.
const MAX_PARTS: u64 = 10_000;

/// Most parts whose lengths are asked for.
pub(crate) const MAX_PARTS_ASKED: u64 = 16;

/// A checksum that those of an object's parts combine to, in any order of their arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// That of NVMe, of 64 bits.
    Crc64Nvme,
    /// That of Castagnoli.
    Crc32c,
    /// That of Ethernet.
    Crc32,
}

impl Algorithm {
    /// All of them. Of several that a store has for an object, the first is compared.
    pub(crate) const ALL: [Self; 3] = [Self::Crc64Nvme, Self::Crc32c, Self::Crc32];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "CRC-64/NVME",
            Self::Crc32c => "CRC-32C",
            Self::Crc32 => "CRC-32",
        }
    }

    pub(crate) fn crc(self) -> CrcAlgorithm {
        match self {
            Self::Crc64Nvme => CrcAlgorithm::Crc64Nvme,
            Self::Crc32c => CrcAlgorithm::Crc32Iscsi,
            Self::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
        }
    }

    /// The header with it in answers of S3.
    pub(crate) fn header(self) -> &'static str {
        match self {
            Self::Crc64Nvme => "x-amz-checksum-crc64nvme",
            Self::Crc32c => "x-amz-checksum-crc32c",
            Self::Crc32 => "x-amz-checksum-crc32",
        }
    }

    fn len_bytes(self) -> usize {
        if self == Self::Crc64Nvme { 8 } else { 4 }
    }

    /// The value as stores write it, most significant byte first.
    pub(crate) fn to_bytes(self, value: u64) -> Vec<u8> {
        value.to_be_bytes()[8 - self.len_bytes()..].to_vec()
    }

    /// The value as stores say it.
    pub(crate) fn text(self, value: u64) -> String {
        STANDARD.encode(self.to_bytes(value))
    }

    /// The value of such a text.
    pub(crate) fn parse(self, text: &str) -> Option<u64> {
        let bytes = STANDARD.decode(text.trim()).ok().filter(|bytes| bytes.len() == self.len_bytes())?;
        Some(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }
}

/// The checksum that a store has of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    pub(crate) algorithm: Algorithm,
    pub(crate) value: u64,
    /// The parts that it is of, if it is a checksum of their checksums rather than of the bytes.
    pub(crate) parts: Option<Parts>,
}

/// The parts that an object was uploaded in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) count: u64,
    /// Bytes of each but the last; 0 while they are not known.
    pub(crate) bytes: u64,
}

impl Parts {
    /// Parts of one length.
    pub(crate) fn of_length(self, bytes: u64, object_len: u64) -> Option<Self> {
        (bytes > 0 && object_len.div_ceil(bytes) == self.count).then_some(Self { bytes, ..self })
    }
}

impl Checksum {
    /// Returns what it is computed by.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// That of a whole object in an answer of S3, with its ETag. The lengths of parts are not among what it says.
    ///
    /// # Errors
    /// Why there is none that can be compared.
    pub(crate) fn of_s3(headers: &HeaderMap, etag: Option<&str>) -> Result<Self, &'static str> {
        let found = Algorithm::ALL.iter().find_map(|algorithm| {
            let text = header(headers, algorithm.header())?;
            let (value, count) = match text.split_once('-') {
                Some((value, count)) => (value, Some(count.parse().ok()?)),
                None => (text, None),
            };
            let parts = count.map(|count| Parts { count, bytes: 0 });
            Some(Self { algorithm: *algorithm, value: algorithm.parse(value)?, parts })
        });
        let other = ["x-amz-checksum-sha256", "x-amz-checksum-sha1"];
        let kind = header(headers, CHECKSUM_TYPE);
        let is_full = kind.is_some_and(|own| own.trim().eq_ignore_ascii_case("FULL_OBJECT"));
        match found {
            Some(own) if own.parts.is_some() && is_full => {
                Err("the store says a checksum of parts to be of the whole object")
            }
            // It has no kind of parts.
            Some(own) if own.algorithm == Algorithm::Crc64Nvme && own.parts.is_none() && kind.is_none() => {
                Ok(own)
            }
            Some(own) if own.parts.is_none() && !is_of_whole(headers, etag) => {
                Err("the store says not whether its checksum is of the whole object")
            }
            Some(own) if own.parts.is_some_and(|parts| !(1..=MAX_PARTS).contains(&parts.count)) => {
                Err("the store says an impossible number of parts")
            }
            Some(own) => Ok(own),
            None if other.iter().any(|name| headers.contains_key(*name)) => {
                Err("the store has a checksum that cannot be computed from ranges")
            }
            None => Err("the store has no checksum of it"),
        }
    }

    /// The SHA-256 of a whole object in an answer of S3.
    pub(crate) fn sha256_of_s3(headers: &HeaderMap) -> Option<[u8; 32]> {
        STANDARD.decode(header(headers, "x-amz-checksum-sha256")?.trim()).ok()?.try_into().ok()
    }

    /// That of a whole object in an answer of Google, also one for a range.
    ///
    /// # Errors
    /// Why there is none that can be compared.
    pub(crate) fn of_google(headers: &HeaderMap) -> Result<Self, &'static str> {
        // The checksum is of the bytes that are stored.
        if header(headers, "x-goog-stored-content-encoding").is_some_and(|own| own != "identity") {
            return Err("the store keeps it encoded");
        }
        let texts = headers.get_all("x-goog-hash").iter().filter_map(|own| own.to_str().ok());
        let value = texts
            .flat_map(|text| text.split(','))
            .find_map(|text| Algorithm::Crc32c.parse(text.trim().strip_prefix("crc32c=")?));
        let value = value.ok_or("the store has no checksum of it")?;
        Ok(Self { algorithm: Algorithm::Crc32c, value, parts: None })
    }

    /// The problem of bytes that have another one.
    pub(crate) fn mismatch(&self, found: u64) -> Problem {
        let found = Self { value: found, ..self.clone() };
        Problem::Damaged {
            checksum: self.algorithm.name(),
            expected: self.to_string(),
            found: found.to_string(),
        }
    }
}

/// As stores write it: in base64, and after it the number of parts.
impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.algorithm.to_bytes(self.value)))?;
        self.parts.map_or(Ok(()), |parts| write!(f, "-{}", parts.count))
    }
}

/// The header that says what an object's checksum is of.
const CHECKSUM_TYPE: &str = "x-amz-checksum-type";

/// Whether a checksum without a number of parts is of the whole object: the store says so, or says nothing and the object has not
/// the ETag of one in parts. Some stores leave the number out.
pub(crate) fn is_of_whole(headers: &HeaderMap, etag: Option<&str>) -> bool {
    match header(headers, CHECKSUM_TYPE) {
        Some(kind) => kind.trim().eq_ignore_ascii_case("FULL_OBJECT"),
        None => etag.is_some_and(|etag| !etag.contains('-')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(own: &[(&'static str, &'static str)]) -> HeaderMap {
        let header = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        own.iter().map(header).collect()
    }

    #[test]
    fn checksums_of_s3_are_of_the_object_or_of_its_parts() {
        // Of "123456789".
        let own = Checksum::of_s3(
            &headers(&[
                ("x-amz-checksum-crc32c", "4waSgw=="),
                ("x-amz-checksum-crc64nvme", "rosUhgp5mIg="),
                ("x-amz-checksum-type", "full_object"),
            ]),
            None,
        );
        let own = own.unwrap();
        assert_eq!((own.algorithm, own.value), (Algorithm::Crc64Nvme, 0xAE8B_1486_0A79_9888));
        assert_eq!(own.to_string(), "rosUhgp5mIg=");
        let own = Checksum::of_s3(&headers(&[("x-amz-checksum-crc32", "y/Q5Jg==-3")]), None).unwrap();
        assert_eq!((own.algorithm, own.value), (Algorithm::Crc32, 0xCBF4_3926));
        assert_eq!((own.parts, own.to_string()), (Some(Parts { count: 3, bytes: 0 }), "y/Q5Jg==-3".into()));
        for (wrong, why) in [
            (&[][..], "no checksum"),
            (&[("x-amz-checksum-sha256", "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=")], "from ranges"),
            (&[("x-amz-checksum-crc32", "y/Q5Jg==-0")], "impossible"),
            (&[("x-amz-checksum-crc32", "y/Q5Jg==-99999")], "impossible"),
            (&[("x-amz-checksum-crc32", "y/Q5Jg==-x")], "no checksum"),
            (&[("x-amz-checksum-crc32", "y/Q5Jg==y/Q5")], "no checksum"),
            (
                &[("x-amz-checksum-crc32", "y/Q5Jg=="), ("x-amz-checksum-type", "COMPOSITE")],
                "says not whether",
            ),
            (&[("x-amz-checksum-crc32", "y/Q5Jg==-3"), ("x-amz-checksum-type", "FULL_OBJECT")], "of parts"),
        ] {
            let told = Checksum::of_s3(&headers(wrong), Some("\"a\"")).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        // Without a type, the ETag says whether there are parts.
        let own = headers(&[("x-amz-checksum-crc32", "y/Q5Jg==")]);
        assert!(Checksum::of_s3(&own, Some("\"0a\"")).is_ok());
        for etag in [None, Some("\"0a-3\"")] {
            assert!(Checksum::of_s3(&own, etag).unwrap_err().contains("says not whether"));
        }
    }

    #[test]
    fn checksums_of_google_are_of_bytes_that_are_stored_as_they_are_sent() {
        for hashes in [
            &[("x-goog-hash", "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw==")][..],
            &[("x-goog-hash", "md5=JfnnlDI7RTiF9RgfG2JNCw=="), ("x-goog-hash", "crc32c=4waSgw==")],
        ] {
            let own = Checksum::of_google(&headers(hashes)).unwrap();
            assert_eq!((own.algorithm, own.value, own.parts), (Algorithm::Crc32c, 0xE306_9283, None));
        }
        for wrong in [
            &[("x-goog-hash", "md5=JfnnlDI7RTiF9RgfG2JNCw==")][..],
            &[("x-goog-hash", "crc32c=4waSgw=="), ("x-goog-stored-content-encoding", "gzip")],
        ] {
            assert!(Checksum::of_google(&headers(wrong)).is_err());
        }
    }

    #[test]
    fn parts_have_one_length_or_none_that_is_known() {
        let parts = Parts { count: 3, bytes: 0 };
        assert_eq!(parts.of_length(8, 24), Some(Parts { count: 3, bytes: 8 }));
        assert_eq!(parts.of_length(8, 17), Some(Parts { count: 3, bytes: 8 }));
        assert_eq!(
            (parts.of_length(8, 25), parts.of_length(8, 16), parts.of_length(0, 16)),
            (None, None, None)
        );
    }
}
