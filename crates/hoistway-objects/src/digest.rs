//! Digests that servers say: of the bytes of one answer, compared as they come, and of whole objects, which no parts combine to.

use crate::{
    location::Kind,
    pace::{Again, Fault},
    pin::header,
    policy::Failure,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use crc_fast::{CrcAlgorithm::Crc64Nvme, checksum};
use http::{HeaderMap, HeaderName};
use md5::Md5;
use sha2::{Digest, Sha256, Sha512};

/// The header by which requests to Azure ask for the CRC of a range, and the longest range that has one.
/// <https://learn.microsoft.com/rest/api/storageservices/get-blob>
pub(crate) const ASKS_RANGE_CRC: HeaderName = HeaderName::from_static("x-ms-range-get-content-crc64");
pub(crate) const MAX_CRC_RANGE_BYTES: u64 = 4 << 20;

/// What an answer says of the bytes of its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContentDigest {
    /// The CRC of NVMe, of Azure.
    Crc64(u64),
    /// A digest of RFC 9530.
    Sha(WholeDigest),
}

impl ContentDigest {
    /// The one in an answer, if it has one that is known.
    pub(crate) fn of(kind: Kind, headers: &HeaderMap) -> Option<Self> {
        if kind == Kind::Azure {
            let text = header(headers, "x-ms-content-crc64")?;
            let bytes = STANDARD.decode(text.trim()).ok()?.try_into().ok()?;
            return Some(Self::Crc64(u64::from_le_bytes(bytes)));
        }
        WholeDigest::in_dictionary(headers, "content-digest").map(Self::Sha)
    }

    /// Has the bytes asked for again if they are others.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), Fault> {
        let (name, is_same) = match self {
            Self::Crc64(sum) => ("CRC-64/NVME", checksum(Crc64Nvme, bytes) == *sum),
            Self::Sha(digest) => {
                let mut hasher = digest.hasher();
                hasher.update(bytes);
                (digest.name(), hasher.finish() == digest.text())
            }
        };
        if is_same {
            return Ok(());
        }
        let why = format!(
            "the bytes that came have another {name} than the server says of them (if the server is wrong, set the store option \
             checksums=off)"
        );
        Err(Fault::Again(Again::of(Failure::Refused, why)))
    }
}

/// A digest that a server has of a whole object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeDigest(Value);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Sha256([u8; 32]),
    Sha512([u8; 64]),
    /// Of Azure.
    Md5([u8; 16]),
}

/// Computes a digest of the kind that a server has.
#[derive(Clone, Debug)]
pub struct Hasher(Hashing);

#[derive(Clone, Debug)]
enum Hashing {
    Sha256(Sha256),
    Sha512(Sha512),
    Md5(Md5),
}

impl WholeDigest {
    pub(crate) fn sha256(value: [u8; 32]) -> Self {
        Self(Value::Sha256(value))
    }

    /// That of an object in an answer, also one for a range: the MD5 of Azure's blobs, and `Repr-Digest` of RFC 9530.
    pub(crate) fn of_object(kind: Kind, status: u16, headers: &HeaderMap) -> Option<Self> {
        if kind == Kind::Azure {
            // That of other blobs is what a client once said, and stays as bytes are added.
            header(headers, "x-ms-blob-type").filter(|kind| *kind == "BlockBlob")?;
            let name = if status == 206 { "x-ms-blob-content-md5" } else { "content-md5" };
            let bytes = STANDARD.decode(header(headers, name)?.trim()).ok()?;
            return Some(Self(Value::Md5(bytes.try_into().ok()?)));
        }
        Self::in_dictionary(headers, "repr-digest")
    }

    /// The strongest that is known in a dictionary such as `sha-256=:RK/0...:, sha-512=:Jb1...:`.
    fn in_dictionary(headers: &HeaderMap, name: &str) -> Option<Self> {
        let texts = headers.get_all(name).iter().filter_map(|own| own.to_str().ok());
        let members: Vec<_> =
            texts.flat_map(|text| text.split(',')).filter_map(|text| text.trim().split_once('=')).collect();
        let bytes = |name: &str| {
            let (_, text) = members.iter().rev().find(|(own, _)| *own == name)?;
            // Parameters may follow (RFC 8941, 3.2).
            let text = text.split(';').next()?.trim_end();
            STANDARD.decode(text.strip_prefix(':')?.strip_suffix(':')?).ok()
        };
        let sha512 = || Some(Value::Sha512(bytes("sha-512")?.try_into().ok()?));
        let sha256 = || Some(Value::Sha256(bytes("sha-256")?.try_into().ok()?));
        sha512().or_else(sha256).map(Self)
    }

    /// Returns its name.
    pub fn name(&self) -> &'static str {
        match self.0 {
            Value::Sha256(_) => "SHA-256",
            Value::Sha512(_) => "SHA-512",
            Value::Md5(_) => "MD5",
        }
    }

    /// Returns it in hex.
    pub fn text(&self) -> String {
        match &self.0 {
            Value::Sha256(value) => hex(value),
            Value::Sha512(value) => hex(value),
            Value::Md5(value) => hex(value),
        }
    }

    /// Begins to compute one of the same kind.
    pub fn hasher(&self) -> Hasher {
        Hasher(match self.0 {
            Value::Sha256(_) => Hashing::Sha256(Sha256::new()),
            Value::Sha512(_) => Hashing::Sha512(Sha512::new()),
            Value::Md5(_) => Hashing::Md5(Md5::new()),
        })
    }
}

impl Hasher {
    /// Adds the bytes that follow those so far.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Hashing::Sha256(own) => own.update(bytes),
            Hashing::Sha512(own) => own.update(bytes),
            Hashing::Md5(own) => own.update(bytes),
        }
    }

    /// Returns the digest of all bytes in hex, as [`WholeDigest::text`] does.
    pub fn finish(self) -> String {
        match self.0 {
            Hashing::Sha256(own) => hex(&own.finalize()),
            Hashing::Sha512(own) => hex(&own.finalize()),
            Hashing::Md5(own) => hex(&own.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(own: &[(&'static str, &str)]) -> HeaderMap {
        own.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn digests_of_rfc_9530_are_read_as_its_examples_have_them() {
        // RFC 9530, B.1: of the text with its line end.
        let text = b"{\"hello\": \"world\"}\n";
        let sha256 = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";
        let found = ContentDigest::of(Kind::Web, &headers(&[("content-digest", sha256)])).unwrap();
        found.check(text).unwrap();
        assert!(matches!(found.check(b"{\"hello\": \"world\"}\r"), Err(Fault::Again(_))));
        for wrong in ["sha-256=RK/0", "sha-256=:RK/0:", "md5=:AAAA:", "sha-256", "unixsum=:AAA=:"] {
            assert_eq!(ContentDigest::of(Kind::Web, &headers(&[("content-digest", wrong)])), None, "{wrong}");
        }
        let with_parameters = format!("{sha256};a=1; b, sha-512=?0");
        let found_again = ContentDigest::of(Kind::Web, &headers(&[("content-digest", &with_parameters)]));
        assert_eq!(found_again, Some(found));
        let both = format!("unixsum=:AAA=:, {sha256}");
        let found = WholeDigest::of_object(Kind::Web, 206, &headers(&[("repr-digest", &both)])).unwrap();
        let mut hasher = found.hasher();
        hasher.update(text);
        assert_eq!((found.name(), found.text()), ("SHA-256", hasher.finish()));
    }

    #[test]
    fn azure_says_digests_of_ranges_and_of_blobs_apart() {
        let crc = STANDARD.encode(checksum(Crc64Nvme, b"abc").to_le_bytes());
        let found = ContentDigest::of(Kind::Azure, &headers(&[("x-ms-content-crc64", &crc)])).unwrap();
        found.check(b"abc").unwrap();
        assert!(found.check(b"abd").is_err());
        let md5 = "kAFQmDzST7DWlj99KOF/cg==";
        let of_blob = |kind| {
            let other = ("content-md5", "AAAAAAAAAAAAAAAAAAAAAA==");
            let blob = headers(&[("x-ms-blob-type", kind), ("x-ms-blob-content-md5", md5), other]);
            WholeDigest::of_object(Kind::Azure, 206, &blob)
        };
        assert_eq!(of_blob("AppendBlob"), None);
        let found = of_blob("BlockBlob").unwrap();
        assert_eq!((found.name(), &*found.text()), ("MD5", "900150983cd24fb0d6963f7d28e17f72"));
        assert_eq!(WholeDigest::of_object(Kind::Azure, 206, &headers(&[("content-md5", md5)])), None);
    }
}
