//! CRC-32C of bytes that come in pieces, in any order.
#![forbid(unsafe_code)]

use crc_fast::{CrcAlgorithm, Digest, checksum_combine};

const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// Bytes in a row that have been summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    len: u64,
    sum: u64,
}

/// The checksum of a part, whose steps may end in any order.
#[derive(Clone, Debug, Default)]
pub(super) struct PartSum(Vec<Run>);

impl PartSum {
    /// Adds the bytes that `digest` has seen, which begin at `start`.
    pub(super) fn add(&mut self, start: u64, digest: &RunSum) {
        self.0.push(Run { start, len: digest.0.get_amount(), sum: digest.0.finalize() });
    }

    /// Adds the bytes that another has.
    pub(super) fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The checksum of `len` bytes, if all have been added, each once.
    pub(super) fn finish(mut self, len: u64) -> Option<u32> {
        self.0.sort_unstable_by_key(|run| run.start);
        let whole = self.0.into_iter().try_fold(Run { start: 0, len: 0, sum: 0 }, |whole, run| {
            let sum = match whole.len {
                0 => run.sum,
                _ => checksum_combine(ALGORITHM, whole.sum, run.sum, run.len),
            };
            (run.start == whole.len).then(|| Run { start: 0, len: whole.len + run.len, sum })
        })?;
        (whole.len == len).then_some(whole.sum as u32)
    }
}

/// The checksum of bytes in a row.
#[derive(Clone, Debug)]
pub(super) struct RunSum(Digest);

impl RunSum {
    pub(super) fn new() -> Self {
        Self(Digest::new(ALGORITHM))
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_is_crc32c() {
        let mut digest = RunSum::new();
        digest.update(b"1234");
        digest.update(b"56789");
        let mut sum = PartSum::default();
        sum.add(0, &digest);
        assert_eq!(sum.finish(9), Some(0xE306_9283));
        assert_eq!(PartSum::default().finish(0), Some(0));
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_add_up(bytes in prop::collection::vec(any::<u8>(), 0..5000), mut cuts in prop::collection::vec(0usize..5000, 0..6), turn in 0usize..7) {
            cuts.iter_mut().for_each(|cut| *cut = (*cut).min(bytes.len()));
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            cuts.dedup();
            let mut runs: Vec<_> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
            if !runs.is_empty() {
                let turn = turn % runs.len();
                runs.rotate_left(turn);
            }
            let mut sum = PartSum::default();
            for (start, end) in &runs {
                let mut digest = RunSum::new();
                digest.update(&bytes[*start..*end]);
                sum.add(*start as u64, &digest);
            }
            prop_assert_eq!(sum.clone().finish(bytes.len() as u64), Some(crc_fast::crc32_iscsi(&bytes)));
            prop_assert_eq!(sum.clone().finish(bytes.len() as u64 + 1), None);
            sum.0.pop();
            if !bytes.is_empty() {
                prop_assert_eq!(sum.finish(bytes.len() as u64), None);
            }
        }
    }
}
