//! What answers say of the checksums of objects.

use crate::{Dialect, Object, Request};
use base64::{Engine, engine::general_purpose::STANDARD};
use crc_fast::{
    CrcAlgorithm::{Crc32Iscsi, Crc32IsoHdlc, Crc64Nvme},
    checksum,
};
use md5::Md5;
use sha2::{Digest, Sha256};
use std::sync::OnceLock;

/// The checksums that a server has of its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// Those of whole objects: CRC-64/NVME in S3, CRC-32C in Google, MD5 in Azure.
    #[default]
    Whole,
    /// In S3 CRC-32 of parts of this many bytes, and of these checksums.
    Parts(usize),
    /// In S3 the same of parts that differ in their lengths: the first has so many bytes, the others two more each.
    UnevenParts(usize),
    /// In S3 that of [`Checksums::Parts`], said without the number of parts.
    UncountedParts(usize),
    /// In S3 SHA-256 of whole objects.
    Sha256,
    /// In Azure MD5 of blobs, and none of ranges.
    BlobMd5,
    /// Digests of RFC 9530, of objects and of the bytes of each answer.
    Digests,
    /// The same of objects alone.
    ObjectDigests,
    /// None.
    None,
}

/// Digests of a whole object, in Base64. Each answer says them, and they are computed once: that of a large object takes a
/// server of a test longer than all the rest.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    md5: OnceLock<String>,
    sha256: OnceLock<String>,
    crc32c: OnceLock<String>,
    crc64: OnceLock<String>,
}

impl Object {
    fn md5(&self) -> &str {
        self.digests.md5.get_or_init(|| STANDARD.encode(Md5::digest(&self.bytes)))
    }

    fn sha256(&self) -> &str {
        self.digests.sha256.get_or_init(|| STANDARD.encode(Sha256::digest(&self.bytes)))
    }

    fn crc32c(&self) -> &str {
        let compute = || STANDARD.encode((checksum(Crc32Iscsi, &self.bytes) as u32).to_be_bytes());
        self.digests.crc32c.get_or_init(compute)
    }

    fn crc64(&self) -> &str {
        self.digests.crc64.get_or_init(|| STANDARD.encode(checksum(Crc64Nvme, &self.bytes).to_be_bytes()))
    }
}

impl Checksums {
    fn parts(self, bytes: &[u8]) -> Vec<&[u8]> {
        match self {
            Self::Parts(len) | Self::UncountedParts(len) => bytes.chunks(len.max(1)).collect(),
            Self::UnevenParts(len) => {
                let (mut parts, mut rest, mut len) = (Vec::new(), bytes, len.max(1));
                while !rest.is_empty() {
                    let (part, left) = rest.split_at(len.min(rest.len()));
                    parts.push(part);
                    (rest, len) = (left, len + 2);
                }
                parts
            }
            _ => vec![bytes],
        }
    }

    /// The range of a part that a request asks for by its number.
    pub(crate) fn range(self, number: usize, bytes: &[u8]) -> Option<(usize, usize)> {
        let parts = self.parts(bytes);
        let part = parts.get(number.checked_sub(1)?)?;
        let start: usize = parts[..number - 1].iter().map(|part| part.len()).sum();
        Some((start, start + part.len() - 1))
    }

    /// The headers about the bytes of an answer alone.
    pub(crate) fn of_content(self, request: &Request, bytes: &[u8]) -> String {
        match self {
            Self::Digests => {
                format!("Content-Digest: sha-256=:{}:\r\n", STANDARD.encode(Sha256::digest(bytes)))
            }
            _ if request.wants_range_crc => {
                let sum = STANDARD.encode(checksum(Crc64Nvme, bytes).to_le_bytes());
                format!("x-ms-content-crc64: {sum}\r\n")
            }
            _ => String::new(),
        }
    }

    /// The headers of an answer. S3 says checksums to those who ask, and not in answers with ranges.
    pub(crate) fn headers(self, dialect: Dialect, request: &Request, object: &Object) -> String {
        let crc32 = |bytes: &[u8]| (checksum(Crc32IsoHdlc, bytes) as u32).to_be_bytes();
        match (dialect, self) {
            (Dialect::Google, Self::Whole) => {
                // The order in which it sends them is not fixed.
                format!("x-goog-hash: md5=AAAAAAAAAAAAAAAAAAAAAA==,crc32c={}\r\n", object.crc32c())
            }
            (_, Self::Digests | Self::ObjectDigests) => {
                format!("Repr-Digest: sha-256=:{}:\r\n", object.sha256())
            }
            (Dialect::Azure, Self::Whole | Self::BlobMd5) if !object.is_of_blocks => {
                let name = if request.range.is_none() { "Content-MD5" } else { "x-ms-blob-content-md5" };
                format!("{name}: {}\r\nx-ms-blob-type: BlockBlob\r\n", object.md5())
            }
            (Dialect::S3, Self::Whole) if request.wants_checksum && request.range.is_none() => {
                let sum = object.crc64();
                format!("x-amz-checksum-crc64nvme: {sum}\r\nx-amz-checksum-type: FULL_OBJECT\r\n")
            }
            (Dialect::S3, Self::Sha256) if request.wants_checksum && request.range.is_none() => {
                let sum = object.sha256();
                format!("x-amz-checksum-sha256: {sum}\r\nx-amz-checksum-type: FULL_OBJECT\r\n")
            }
            (Dialect::S3, Self::Parts(_) | Self::UncountedParts(_) | Self::UnevenParts(_))
                if request.wants_checksum && request.range.is_none() =>
            {
                let parts = self.parts(&object.bytes);
                let sums: Vec<u8> = parts.iter().flat_map(|part| crc32(part)).collect();
                let sum = STANDARD.encode(crc32(&sums));
                if let Self::UncountedParts(_) = self {
                    return format!("x-amz-checksum-crc32: {sum}\r\nx-amz-checksum-type: COMPOSITE\r\n");
                }
                format!("x-amz-checksum-crc32: {sum}-{}\r\nx-amz-checksum-type: COMPOSITE\r\n", parts.len())
            }
            _ => String::new(),
        }
    }
}
