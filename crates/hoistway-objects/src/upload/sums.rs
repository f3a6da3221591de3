//! What the bytes for a store are compared by, as each kind of store says it.

use super::Part;
use crate::{
    StoreOptions,
    checksum::{Algorithm, Checksum},
    combine::Combiner,
    location::Kind,
    options::Checksums,
    pin::header,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName};

/// The header that says what a checksum of S3 is of.
pub(super) const CHECKSUM_TYPE: HeaderName = HeaderName::from_static("x-amz-checksum-type");
/// The header with the checksums of Google.
pub(super) const GOOGLE_HASH: HeaderName = HeaderName::from_static("x-goog-hash");
/// The header with the checksum of a body for Azure: the CRC of NVMe, least significant byte first.
const AZURE_CRC: HeaderName = HeaderName::from_static("x-ms-content-crc64");

/// What the bytes for a store are compared by.
pub(super) fn algorithm_of(kind: Kind, options: &StoreOptions) -> Option<Algorithm> {
    match kind {
        _ if options.checksums == Checksums::Off => None,
        Kind::Google => Some(Algorithm::Crc32c),
        Kind::S3 | Kind::Azure => Some(Algorithm::Crc64Nvme),
        Kind::Hub | Kind::Web => None,
    }
}

/// The header by which a request says the checksum of its body.
pub(super) fn checksum_header(kind: Kind, algorithm: Algorithm, sum: u64) -> (HeaderName, String) {
    match kind {
        Kind::Azure => (AZURE_CRC, STANDARD.encode(sum.to_le_bytes())),
        Kind::Google => (GOOGLE_HASH, format!("crc32c={}", algorithm.text(sum))),
        _ => (HeaderName::from_static(algorithm.header()), algorithm.text(sum)),
    }
}

/// The checksum that an answer says.
pub(super) fn said_sum(kind: Kind, algorithm: Algorithm, headers: &HeaderMap) -> Option<u64> {
    match kind {
        Kind::Azure => {
            let bytes = STANDARD.decode(header(headers, AZURE_CRC.as_str())?.trim()).ok()?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        }
        Kind::Google => Checksum::of_google(headers).ok().map(|own| own.value),
        _ => algorithm.parse(header(headers, algorithm.header())?),
    }
}

/// The checksum of the whole object, from those of its parts.
pub(super) fn whole_sum(algorithm: Option<Algorithm>, parts: &[Part]) -> Option<(Algorithm, u64)> {
    let algorithm = algorithm?;
    let mut combiner = Combiner::new(algorithm);
    let mut sums = parts.iter().map(|part| Some((part.sum?, part.len)));
    let (first, _) = sums.next()??;
    let whole = sums.try_fold(first, |sum, part| {
        let (next, len) = part?;
        Some(combiner.combine(sum, next, len))
    });
    Some((algorithm, whole?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Algorithm::Crc64Nvme;
    use crc_fast::checksum;

    #[test]
    fn azure_says_the_same_checksum_in_the_other_order_of_bytes() {
        let sum = checksum(Crc64Nvme.crc(), b"Hello World!");
        // What the client of Azure's makers computes.
        assert_eq!(sum, 208_604_604_655_264_165);
        let (name, text) = checksum_header(Kind::Azure, Crc64Nvme, sum);
        let headers = [(name, text.parse().unwrap())].into_iter().collect();
        assert_eq!(said_sum(Kind::Azure, Crc64Nvme, &headers), Some(sum));
        assert_ne!(text, checksum_header(Kind::S3, Crc64Nvme, sum).1);
    }
}
