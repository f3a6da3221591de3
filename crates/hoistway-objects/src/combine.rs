//! The CRC of two pieces from those of each: the first one is multiplied by a power of x that the length of the second one tells.

use crate::checksum::Algorithm;
use std::collections::HashMap;

/// Combines checksums of one algorithm, and remembers the powers of x for lengths that come again.
#[derive(Debug)]
pub(crate) struct Combiner {
    /// Its polynomial, with the bits in the reverse order.
    polynomial: u64,
    /// The polynomial 1: the most significant bit.
    one: u64,
    powers: HashMap<u64, u64>,
}

impl Combiner {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        let (polynomial, one) = match algorithm {
            Algorithm::Crc64Nvme => (0x9A6C_9329_AC4B_C9B5, 1 << 63),
            Algorithm::Crc32c => (0x82F6_3B78, 1 << 31),
            Algorithm::Crc32 => (0xEDB8_8320, 1 << 31),
        };
        Self { polynomial, one, powers: HashMap::new() }
    }

    /// The checksum of a piece with `first` and of one of `len` bytes with `second` after it.
    pub(crate) fn combine(&mut self, first: u64, second: u64, len: u64) -> u64 {
        let power = match self.powers.get(&len) {
            Some(power) => *power,
            None => {
                let power = self.power_of(len);
                self.powers.insert(len, power);
                power
            }
        };
        self.product(power, first) ^ second
    }

    /// x to the power of the bits of so many bytes.
    fn power_of(&self, mut bytes: u64) -> u64 {
        let (mut power, mut square) = (self.one, self.one >> 8);
        while bytes > 0 {
            if bytes & 1 == 1 {
                power = self.product(power, square);
            }
            square = self.product(square, square);
            bytes >>= 1;
        }
        power
    }

    fn product(&self, first: u64, mut second: u64) -> u64 {
        let (mut product, mut bit) = (0, self.one);
        while bit > 0 {
            // Masks: which bits are set is chance, and a branch would be guessed wrongly.
            product ^= second & u64::from(first & bit != 0).wrapping_neg();
            second = (second >> 1) ^ (self.polynomial & (second & 1).wrapping_neg());
            bit >>= 1;
        }
        product
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::checksum;

    #[test]
    fn pieces_of_any_length_combine_to_the_checksum_of_both() {
        let bytes: Vec<u8> = (0..5000).map(|at| (at * 31 % 251) as u8).collect();
        for algorithm in Algorithm::ALL {
            let mut combiner = Combiner::new(algorithm);
            for at in [0, 1, 7, 8, 255, 256, 1000, 4096, 4999, 5000] {
                let [first, second] =
                    [&bytes[..at], &bytes[at..]].map(|part| checksum(algorithm.crc(), part));
                let found = combiner.combine(first, second, (bytes.len() - at) as u64);
                assert_eq!(found, checksum(algorithm.crc(), &bytes), "{algorithm:?} {at}");
            }
        }
    }
}
