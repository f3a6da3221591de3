//! All that parses what is on a disk, for the fuzz target `kv_format`.
#![forbid(unsafe_code)]

use super::{
    checkpoint::CheckpointHead, header::BlockHeader, lease::Lease, record::Record, segment::SegmentHead,
    superblock::Superblock,
};

/// Parses bytes as everything that they might be. What is taken is written as it was read.
pub(crate) fn parse_everything(bytes: &[u8]) {
    if let Ok(record) = Record::parse(bytes) {
        assert_eq!(Record::parse(&record.to_bytes()), Ok(record));
    }
    if let Ok(header) = BlockHeader::parse(bytes) {
        assert_eq!(header.to_bytes().and_then(|bytes| BlockHeader::parse(&bytes)), Ok(header));
    }
    if let Ok(head) = SegmentHead::parse(bytes) {
        assert_eq!(SegmentHead::parse(&head.to_bytes()), Ok(head));
    }
    if let Ok(head) = CheckpointHead::parse(bytes) {
        assert_eq!(CheckpointHead::parse(&head.to_bytes()), Ok(head));
    }
    if let Ok(superblock) = Superblock::parse(bytes) {
        assert_eq!(Superblock::parse(&superblock.to_bytes()), Ok(superblock));
    }
    if let Ok(lease) = Lease::parse(bytes) {
        assert_eq!(Lease::parse(&lease.to_bytes()), Ok(lease));
    }
}

/// As [`parse_everything`], but with whatever checksum the bytes need, so that what they say is looked at.
pub(crate) fn parse_everything_sealed(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    parse_everything(&bytes);
    if let Some((_, rest)) = bytes.split_at_checked(4) {
        let sum = super::checksum(rest);
        let mut record = bytes.clone();
        record[..4].copy_from_slice(&sum.to_le_bytes());
        parse_everything(&record);
    }
    for len in [super::lease::LEASE_LEN, super::PAGE] {
        if let Some((_, rest)) = bytes.get(..len).and_then(|bytes| bytes.split_at_checked(super::PREFIX)) {
            let sum = super::checksum(rest);
            bytes[super::SUM_AT..super::PREFIX].copy_from_slice(&sum.to_le_bytes());
            parse_everything(&bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    proptest! {
        #[test]
        fn nothing_panics(bytes in vec(any::<u8>(), 0..5000), magic in 0..5_usize) {
            parse_everything_sealed(&bytes);
            let magics: [&[u8; 8]; 5] = [b"WLKVSTOR", b"WLKVSEGM", b"WLKVLEAS", b"WLKVBLCK", b"WLKVCKPT"];
            let mut named = bytes;
            if named.len() >= 12 {
                named[..8].copy_from_slice(magics[magic]);
                named[8..12].copy_from_slice(&1_u32.to_le_bytes());
            }
            parse_everything_sealed(&named);
        }
    }
}
