//! The bytes of an object that come in pieces, in any order, and their comparison with the store's checksum once all are there.

use crate::{
    Problem,
    checksum::{Algorithm, Checksum},
    combine::Combiner,
};
use crc_fast::{Digest, checksum};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The checksum of no bytes, by each algorithm.
const EMPTY: u64 = 0;

/// The checksums of an object's first bytes, by each algorithm: these bytes come before it is known which of them the store has.
#[derive(Clone, Debug)]
pub struct HeadSums {
    digests: [Digest; Algorithm::ALL.len()],
    len: u64,
}

impl Default for HeadSums {
    fn default() -> Self {
        Self { digests: Algorithm::ALL.map(|algorithm| Digest::new(algorithm.crc())), len: 0 }
    }
}

impl HeadSums {
    /// Adds the bytes that follow those so far.
    pub fn add(&mut self, bytes: &[u8]) {
        self.digests.iter_mut().for_each(|digest| digest.update(bytes));
        self.len += bytes.len() as u64;
    }

    fn of(&self, algorithm: Algorithm) -> u64 {
        let found = Algorithm::ALL.iter().zip(&self.digests).find(|(own, _)| **own == algorithm);
        found.map_or(0, |(_, digest)| digest.finalize())
    }
}

/// What has come of one object in one load.
#[derive(Debug)]
pub struct Comparison {
    checksum: Checksum,
    head: HeadSums,
    len: u64,
    /// Where pieces are cut: the bytes of two reads that overlap are compared.
    cuts: Vec<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The ends and checksums of pieces, by their starts.
    pieces: BTreeMap<u64, (u64, u64)>,
    covered_bytes: u64,
    outcome: Outcome,
    /// Two checksums that should be equal.
    difference: Option<(Checksum, u64)>,
}

/// What a comparison has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Not all bytes have come.
    #[default]
    Pending,
    /// The checksums are equal.
    Equal(Algorithm),
    /// They differ.
    Different,
    /// They cannot be compared.
    Unknown(&'static str),
}

/// Bytes of one read, in their order.
#[derive(Debug)]
pub struct Piece<'a> {
    whole: &'a Comparison,
    start: u64,
    at: u64,
    /// The checksum of what has come before the bytes of `digest`.
    known: u64,
    digest: Digest,
    digest_bytes: u64,
    combiner: Combiner,
    failed: Option<Problem>,
}

impl Comparison {
    /// Whether the first bytes of an object of `len`, and reads of these ranges, are all of it.
    pub fn is_whole(len: u64, head: &HeadSums, ranges: &[Range<u64>]) -> bool {
        let mut sorted: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).collect();
        sorted.sort_by_key(|range| (range.start, range.end));
        let mut reached = head.len;
        for range in sorted {
            if range.start > reached {
                return false;
            }
            reached = reached.max(range.end);
        }
        reached == len
    }

    /// Begins one with `checksum` for an object of `len` bytes whose first have come, and the rest by reads of these ranges. `None`
    /// if they are not all of it.
    pub fn new(len: u64, head: HeadSums, ranges: &[Range<u64>], checksum: Checksum) -> Option<Self> {
        if !Self::is_whole(len, &head, ranges) {
            return None;
        }
        let read = ranges.iter().filter(|range| !range.is_empty());
        let mut cuts: Vec<_> = read.flat_map(|range| [range.start, range.end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        Some(Self { checksum, head, len, cuts, state: Mutex::default() })
    }

    /// Returns what it has come to.
    pub fn outcome(&self) -> Outcome {
        self.lock().outcome
    }

    /// How the checksums differ, if they do. A read that found it out may have been made again by another route.
    pub fn difference(&self) -> Option<Problem> {
        let state = self.lock();
        state.difference.as_ref().map(|(expected, found)| expected.mismatch(*found))
    }

    /// Begins a piece at `offset`.
    pub fn piece(&self, offset: u64) -> Piece<'_> {
        let algorithm = self.checksum.algorithm;
        let (digest, combiner) = (Digest::new(algorithm.crc()), Combiner::new(algorithm));
        let (start, at) = (offset, offset);
        Piece { whole: self, start, at, known: EMPTY, digest, digest_bytes: 0, combiner, failed: None }
    }

    /// Adds a piece whose bytes have come already.
    ///
    /// # Errors
    /// Those of [`Piece::end`].
    pub fn add(&self, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        let mut piece = self.piece(offset);
        piece.add(bytes);
        piece.end()
    }

    /// Where a piece ends that has got to `at`.
    fn next_cut(&self, at: u64) -> u64 {
        let cut = self.cuts.get(self.cuts.partition_point(|cut| *cut <= at)).copied().unwrap_or(u64::MAX);
        let part = self.checksum.parts.map_or(u64::MAX, |parts| {
            let bytes = parts.bytes.max(1);
            (at / bytes + 1).saturating_mul(bytes)
        });
        cut.min(part)
    }

    fn put(&self, range: Range<u64>, sum: u64) -> Result<(), Problem> {
        let checksum = &self.checksum;
        let mut state = self.lock();
        if let Some(&(end, other)) = state.pieces.get(&range.start)
            && end == range.end
        {
            if other == sum {
                return Ok(());
            }
            let first = Checksum { value: other, parts: None, ..checksum.clone() };
            let problem = first.mismatch(sum);
            state.outcome = Outcome::Different;
            state.difference = Some((first, sum));
            return Err(problem);
        }
        // Bytes that are read again are those that count.
        let old = |state: &State| {
            let last = state.pieces.range(..range.end).next_back()?;
            (last.1.0 > range.start).then_some((*last.0, last.1.0))
        };
        while let Some((start, end)) = old(&state) {
            state.pieces.remove(&start);
            state.covered_bytes -= end - start;
        }
        state.covered_bytes += range.end - range.start;
        state.pieces.insert(range.start, (range.end, sum));
        if state.covered_bytes < self.len - self.head.len || state.outcome != Outcome::Pending {
            return Ok(());
        }
        // Other reads go on meanwhile.
        let pieces: Vec<_> =
            state.pieces.iter().map(|(start, (end, sum))| (*start, end - start, *sum)).collect();
        drop(state);
        let combined = self.combined(&pieces);
        let mut state = self.lock();
        let outcome = match combined {
            None => Outcome::Unknown("its header is longer than the first of its parts"),
            Some(found) if found == checksum.value => Outcome::Equal(checksum.algorithm),
            Some(found) => {
                state.outcome = Outcome::Different;
                state.difference = Some((checksum.clone(), found));
                return Err(checksum.mismatch(found));
            }
        };
        if state.outcome == Outcome::Pending {
            state.outcome = outcome;
        }
        Ok(())
    }

    /// The checksum of all pieces: their starts, lengths and checksums. `None` if a part ends within the bytes that came first.
    fn combined(&self, pieces: &[(u64, u64, u64)]) -> Option<u64> {
        let algorithm = self.checksum.algorithm;
        let mut combiner = Combiner::new(algorithm);
        let mut sum = self.head.of(algorithm);
        let Some(parts) = self.checksum.parts else {
            return Some(pieces.iter().fold(sum, |sum, (_, len, own)| combiner.combine(sum, *own, *len)));
        };
        if self.head.len > parts.bytes {
            return None;
        }
        let mut sums = Vec::new();
        for part in pieces.chunk_by(|one, next| one.0 / parts.bytes == next.0 / parts.bytes) {
            // The header has all of the first part.
            if sums.is_empty() && part.first().is_some_and(|first| first.0 >= parts.bytes) {
                sums.extend(algorithm.to_bytes(sum));
                sum = EMPTY;
            }
            sum = part.iter().fold(sum, |sum, (_, len, own)| combiner.combine(sum, *own, *len));
            sums.extend(algorithm.to_bytes(sum));
            sum = EMPTY;
        }
        if pieces.is_empty() {
            sums.extend(algorithm.to_bytes(sum));
        }
        Some(checksum(algorithm.crc(), &sums))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Piece<'_> {
    /// Adds the bytes that follow those so far.
    pub fn add(&mut self, mut bytes: &[u8]) {
        // The first bytes of the object have come before.
        let known = self.whole.head.len.saturating_sub(self.at).min(bytes.len() as u64);
        if known > 0 {
            self.at += known;
            self.start = self.at;
            bytes = &bytes[known as usize..];
        }
        while !bytes.is_empty() {
            let left = self.whole.next_cut(self.at) - self.at;
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            self.digest.update(&bytes[..count]);
            self.digest_bytes += count as u64;
            self.at += count as u64;
            bytes = &bytes[count..];
            if count as u64 == left {
                self.flush();
            }
        }
    }

    /// Adds bytes that follow those so far, and whose CRC-64/NVME was computed already: where the store's checksum is one, too, it
    /// is not computed again.
    pub fn add_checked(&mut self, bytes: &[u8], crc64: u64) {
        let (len, left) = (bytes.len() as u64, self.whole.next_cut(self.at) - self.at);
        let is_known = self.whole.checksum.algorithm == Algorithm::Crc64Nvme;
        if !is_known || len > left || self.at < self.whole.head.len {
            return self.add(bytes);
        }
        let before = self.sum();
        self.known = self.combiner.combine(before, crc64, len);
        self.at += len;
        if len == left {
            self.flush();
        }
    }

    /// The checksum of what has come since the start.
    fn sum(&mut self) -> u64 {
        if self.digest_bytes > 0 {
            self.known = self.combiner.combine(self.known, self.digest.finalize(), self.digest_bytes);
            self.digest.reset();
            self.digest_bytes = 0;
        }
        self.known
    }

    /// Ends it: there is no more.
    ///
    /// # Errors
    /// [`Problem::Damaged`] if all bytes of the object have come now, and are not those of the store, or if some came twice and
    /// are others.
    pub fn end(mut self) -> Result<(), Problem> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn flush(&mut self) {
        let range = self.start..self.at;
        if !range.is_empty() && self.failed.is_none() {
            let sum = self.sum();
            self.failed = self.whole.put(range, sum).err();
        }
        self.digest.reset();
        (self.known, self.digest_bytes) = (EMPTY, 0);
        self.start = self.at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Parts;
    use proptest::prelude::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 31 % 251) as u8).collect()
    }

    fn whole(algorithm: Algorithm, bytes: &[u8]) -> Checksum {
        Checksum { algorithm, value: checksum(algorithm.crc(), bytes), parts: None }
    }

    fn of_parts(algorithm: Algorithm, bytes: &[u8], part_bytes: usize) -> Checksum {
        let parts = bytes.chunks(part_bytes);
        let parts_count = parts.len() as u64;
        let sums: Vec<u8> =
            parts.flat_map(|part| algorithm.to_bytes(checksum(algorithm.crc(), part))).collect();
        let parts = Some(Parts { count: parts_count, bytes: part_bytes as u64 });
        Checksum { algorithm, value: checksum(algorithm.crc(), &sums), parts }
    }

    fn head(bytes: &[u8]) -> HeadSums {
        let mut head = HeadSums::default();
        bytes.chunks(7).for_each(|part| head.add(part));
        head
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_combine_to_the_checksum_of_the_whole(
            len in 200usize..2000,
            head_len in 1usize..100,
            read_bytes in 20usize..500,
            part_bytes in 100usize..700,
            order in any::<u64>(),
            step in 1usize..300,
            number in 0usize..6,
            checked in 1usize..6,
            flip in any::<Option<prop::sample::Index>>(),
        ) {
            let (mut came, algorithm) = (bytes(len), Algorithm::ALL[number % 3]);
            let expected =
                if number < 3 { whole(algorithm, &came) } else { of_parts(algorithm, &came, part_bytes) };
            if let Some(at) = flip {
                came[at.index(len)] ^= 1;
            }
            // Reads begin on a grid, and so within the header.
            let first = head_len / 16 * 16;
            let mut ranges: Vec<_> =
                (first..len).step_by(read_bytes).map(|at| at as u64..len.min(at + read_bytes) as u64).collect();
            let own = Comparison::new(len as u64, head(&came[..head_len]), &ranges, expected).unwrap();
            fastrand::Rng::with_seed(order).shuffle(&mut ranges);
            let mut results = Vec::new();
            for range in &ranges {
                prop_assert_eq!(own.outcome(), Outcome::Pending);
                let mut piece = own.piece(range.start);
                let parts = came[range.start as usize..range.end as usize].chunks(step);
                parts.zip((0..5).cycle()).for_each(|(part, number)| match number % checked {
                    0 => piece.add_checked(part, checksum(Algorithm::Crc64Nvme.crc(), part)),
                    _ => piece.add(part),
                });
                results.push(piece.end());
            }
            let (last, others) = results.split_last().unwrap();
            prop_assert!(others.iter().all(Result::is_ok));
            match flip {
                None => prop_assert_eq!(own.outcome(), Outcome::Equal(algorithm)),
                Some(_) => prop_assert_eq!(own.outcome(), Outcome::Different),
            }
            prop_assert_eq!(last.is_ok(), flip.is_none());
        }
    }

    #[test]
    fn a_checksum_that_was_computed_already_is_not_computed_again() {
        let came = bytes(100);
        let expected = whole(Algorithm::Crc64Nvme, &came);
        let own = Comparison::new(100, head(&came[..10]), &[10..100], expected).unwrap();
        let mut piece = own.piece(10);
        piece.add(&came[10..30]);
        // Other bytes, with the checksum of the right ones.
        piece.add_checked(&[7; 70], checksum(Algorithm::Crc64Nvme.crc(), &came[30..]));
        piece.end().unwrap();
        assert_eq!(own.outcome(), Outcome::Equal(Algorithm::Crc64Nvme));
    }

    #[test]
    fn an_object_that_is_read_in_part_is_not_compared() {
        let head_of = || head(&bytes(10));
        assert!(Comparison::is_whole(100, &head_of(), &[8..50, 50..100]));
        for ranges in [&[8..50, 51..100][..], &[8..50, 50..99], &[11..100], &[]] {
            assert!(!Comparison::is_whole(100, &head_of(), ranges), "{ranges:?}");
        }
    }

    #[test]
    fn bytes_that_two_reads_have_are_the_same_or_damaged() {
        let came = bytes(100);
        let expected = whole(Algorithm::Crc32c, &came);
        let own = Comparison::new(100, head(&came[..10]), &[8..60, 40..100], expected.clone()).unwrap();
        own.add(8, &came[8..60]).unwrap();
        own.add(40, &came[40..100]).unwrap();
        assert_eq!(own.outcome(), Outcome::Equal(Algorithm::Crc32c));
        let own = Comparison::new(100, head(&came[..10]), &[8..60, 40..100], expected.clone()).unwrap();
        let mut other = came.clone();
        other[50] ^= 1;
        own.add(8, &other[8..60]).unwrap();
        let problem = own.add(40, &came[40..100]).unwrap_err();
        assert!(matches!(problem, Problem::Damaged { checksum: "CRC-32C", .. }), "{problem:?}");
        assert_eq!(own.outcome(), Outcome::Different);
    }

    #[test]
    fn bytes_that_are_read_again_in_another_way_are_those_that_count() {
        let came = bytes(100);
        let expected = whole(Algorithm::Crc64Nvme, &came);
        let own = Comparison::new(100, head(&came[..10]), &[8..100], expected.clone()).unwrap();
        own.add(8, &[7; 40]).unwrap();
        own.add(8, &came[8..60]).unwrap();
        own.add(60, &came[60..]).unwrap();
        assert_eq!(own.outcome(), Outcome::Equal(Algorithm::Crc64Nvme));
    }

    #[test]
    fn a_part_that_ends_within_the_header_is_not_compared() {
        let came = bytes(100);
        let expected = of_parts(Algorithm::Crc32, &came, 30);
        let own = Comparison::new(100, head(&came[..40]), &[32..100], expected.clone()).unwrap();
        own.add(32, &came[32..]).unwrap();
        assert!(matches!(own.outcome(), Outcome::Unknown(_)));
    }

    /// Prints how long the last piece of 80 GB takes.
    #[test]
    fn many_pieces_combine_at_the_end() {
        const PIECE: u64 = 8 << 20;
        for algorithm in Algorithm::ALL {
            let expected = Checksum { algorithm, value: 1, parts: None };
            let ranges: Vec<_> = (0..10_000).map(|at| at * PIECE..(at + 1) * PIECE).collect();
            let own = Comparison::new(10_000 * PIECE, HeadSums::default(), &ranges, expected).unwrap();
            let (last, others) = ranges.split_last().unwrap();
            for range in others {
                own.put(range.clone(), range.start).unwrap();
            }
            let begun = std::time::Instant::now();
            own.put(last.clone(), 5).unwrap_err();
            eprintln!("{}: 10,000 pieces combined in {:?}", algorithm.name(), begun.elapsed());
            assert_eq!(own.outcome(), Outcome::Different);
        }
    }
}
