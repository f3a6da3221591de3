//! Byte ranges and alignments, the two numbers that must never be mixed up, and numbers in words.
#![forbid(unsafe_code)]

use serde::Serialize;
use std::fmt;

/// Writes a number of things: `one` after 1, `many` after any other.
///
/// ```
/// use hoistway_io::counted;
/// assert_eq!(counted(1u64, "tensor", "tensors"), "1 tensor");
/// assert_eq!(counted(0u64, "copy", "copies"), "0 copies");
/// ```
pub fn counted<N: fmt::Display + PartialEq + From<u8>>(count: N, one: &str, many: &str) -> String {
    let noun = if count == N::from(1) { one } else { many };
    format!("{count} {noun}")
}

/// A half-open range of bytes `start..end` inside one file or one allocation.
///
/// `start <= end` always holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// The range `start..end`, or `None` if `end < start`.
    ///
    /// ```
    /// use hoistway_io::ByteRange;
    /// assert_eq!(ByteRange::new(8, 24).map(|r| r.len()), Some(16));
    /// assert_eq!(ByteRange::new(24, 8), None);
    /// ```
    pub const fn new(start: u64, end: u64) -> Option<Self> {
        if start <= end { Some(Self { start, end }) } else { None }
    }

    /// The `len` bytes that begin at `start`, or `None` if their end does not fit 64 bits.
    pub const fn at(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// Offset of the first byte.
    pub const fn start(self) -> u64 {
        self.start
    }

    /// Offset just past the last byte.
    pub const fn end(self) -> u64 {
        self.end
    }

    /// Number of bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether the range holds no byte.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether every byte of `other` lies in this range.
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// The bytes that both ranges hold, or `None` if there are none.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }

    /// The smallest range with both ends on multiples of `alignment` that holds this one.
    ///
    /// `None` if the end would not fit 64 bits.
    pub fn aligned_hull(self, alignment: Alignment) -> Option<Self> {
        Some(Self { start: alignment.down(self.start), end: alignment.up(self.end)? })
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// A power of two that offsets, lengths or addresses must be multiples of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alignment(u64);

impl Alignment {
    /// No constraint at all.
    pub const BYTE: Self = Self(1);
    /// The block that every arena and every direct read is laid out for: 4 KiB.
    ///
    /// Devices report 512 or 4096 through `statx(STATX_DIOALIGN)`; 4096 satisfies both.
    pub const BLOCK: Self = Self(4096);

    /// `Some` if `bytes` is a power of two.
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes)) } else { None }
    }

    /// The alignment in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The largest multiple not above `offset`.
    pub const fn down(self, offset: u64) -> u64 {
        offset & !(self.0 - 1)
    }

    /// The smallest multiple not below `offset`, or `None` if it does not fit 64 bits.
    pub const fn up(self, offset: u64) -> Option<u64> {
        match offset.checked_add(self.0 - 1) {
            Some(sum) => Some(self.down(sum)),
            None => None,
        }
    }

    /// Whether `offset` is a multiple.
    pub const fn divides(self, offset: u64) -> bool {
        offset & (self.0 - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hull_is_the_smallest_aligned_cover(start in 0..1u64 << 48, len in 0..1u64 << 40, shift in 0..16u32) {
            let alignment = Alignment::new(1 << shift).unwrap();
            let range = ByteRange::at(start, len).unwrap();
            let hull = range.aligned_hull(alignment).unwrap();
            prop_assert!(hull.contains(range));
            prop_assert!(alignment.divides(hull.start()) && alignment.divides(hull.end()));
            prop_assert!(range.start() - hull.start() < alignment.bytes());
            prop_assert!(hull.end() - range.end() < alignment.bytes());
        }
    }

    #[test]
    fn alignment_at_the_end_of_the_number_line_is_refused_not_wrapped() {
        assert_eq!(Alignment::BLOCK.up(u64::MAX), None);
        assert_eq!(Alignment::BLOCK.up(u64::MAX - 4095), Some(u64::MAX - 4095));
        assert_eq!(ByteRange::at(u64::MAX, 1), None);
    }
}
