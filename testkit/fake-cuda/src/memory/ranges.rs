//! Free ranges of an address space, handed out round and round.

use std::collections::BTreeMap;

/// What is free of a space. A range that was given back is found again only after all that lies behind it: so
/// an address rests for as long as possible before it means something new.
pub(crate) struct Ranges {
    /// Length by start. No two touch.
    free: BTreeMap<u64, u64>,
    cursor: u64,
}

impl Ranges {
    pub(crate) fn new(len: u64) -> Ranges {
        Ranges { free: BTreeMap::from([(0, len)]), cursor: 0 }
    }

    /// Takes `len` of the space and returns where.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let (free, start) = self.find(len)?;
        let end = free + self.free.remove(&free)?;
        if free < start {
            self.free.insert(free, start - free);
        }
        if start + len < end {
            self.free.insert(start + len, end - start - len);
        }
        self.cursor = start + len;
        Some(start)
    }

    /// Gives back what was taken.
    pub(crate) fn give(&mut self, mut start: u64, mut len: u64) {
        if let Some(behind) = self.free.remove(&(start + len)) {
            len += behind;
        }
        if let Some((&before, &free)) = self.free.range(..start).next_back()
            && before + free == start
        {
            (start, len) = (before, free + len);
        }
        self.free.insert(start, len);
    }

    /// The start of a free range and where in it `len` fits: from the cursor on, or else from the beginning.
    fn find(&self, len: u64) -> Option<(u64, u64)> {
        let around = self.free.range(..self.cursor).next_back();
        let around = around.filter(|(start, free)| *start + *free >= self.cursor + len);
        let fits = |(start, free): (&u64, &u64)| (*free >= len).then_some((*start, *start));
        around
            .map(|(start, _)| (*start, self.cursor))
            .or_else(|| self.free.range(self.cursor..).find_map(fits))
            .or_else(|| self.free.iter().find_map(fits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_range_rests_until_the_rest_is_used() {
        let mut ranges = Ranges::new(10);
        assert_eq!(ranges.take(4), Some(0));
        ranges.give(0, 4);
        assert_eq!((ranges.take(4), ranges.take(4)), (Some(4), Some(0)));
    }

    #[test]
    fn neighbours_merge() {
        let mut ranges = Ranges::new(12);
        let taken: Vec<_> = (0..3).map(|_| ranges.take(4).unwrap()).collect();
        assert_eq!((taken, ranges.take(1)), (vec![0, 4, 8], None));
        for start in [0, 8, 4] {
            ranges.give(start, 4);
        }
        assert_eq!(ranges.take(12), Some(0));
    }

    #[test]
    fn never_runs_out_while_little_is_in_use() {
        let mut ranges = Ranges::new(100);
        for round in 0..1000 {
            let len = 1 + round % 40;
            let start = ranges.take(len).unwrap();
            assert!(start + len <= 100);
            ranges.give(start, len);
        }
    }
}
