//! A part of a tensor, and the runs of bytes that it is made of in the file.
#![forbid(unsafe_code)]

use crate::{ByteRange, Dtype};
use std::ops::Range;

/// A part of a tensor: a range along each of its leading dimensions, every element of the rest. Step 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorSlice {
    ranges: Vec<Range<u64>>,
}

impl TensorSlice {
    /// The part that lies in `ranges`, given for the first dimensions, slowest first.
    ///
    /// ```
    /// use hoistway::plan::TensorSlice;
    /// // Rows 2 and 3, columns 0 to 7 of a matrix.
    /// let slice = TensorSlice::new(vec![2..4, 0..8]);
    /// assert_eq!(slice.shape(&[16, 8]), Ok(vec![2, 8]));
    /// ```
    pub fn new(ranges: Vec<Range<u64>>) -> Self {
        Self { ranges }
    }

    /// The shape of the part of a tensor of `shape`.
    ///
    /// # Errors
    /// More ranges than dimensions, or a range that leaves its dimension.
    pub fn shape(&self, shape: &[u64]) -> Result<Vec<u64>, SliceError> {
        if self.ranges.len() > shape.len() {
            return Err(SliceError::TooManyDimensions { given: self.ranges.len(), rank: shape.len() });
        }
        for (dimension, (range, &size)) in self.ranges.iter().zip(shape).enumerate() {
            if range.start > range.end || range.end > size {
                return Err(SliceError::OutOfBounds { dimension, start: range.start, end: range.end, size });
            }
        }
        let mut sliced = shape.to_vec();
        for (size, range) in sliced.iter_mut().zip(&self.ranges) {
            *size = range.end - range.start;
        }
        Ok(sliced)
    }
}

/// Why a slice does not fit its tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SliceError {
    /// More ranges than the tensor has dimensions.
    #[error("{given} ranges were given for {rank} dimensions")]
    TooManyDimensions {
        /// Ranges given.
        given: usize,
        /// Dimensions that there are.
        rank: usize,
    },
    /// A range is reversed or leaves its dimension.
    #[error("{start}..{end} is outside dimension {dimension}, which has size {size}")]
    OutOfBounds {
        /// Position of the dimension.
        dimension: usize,
        /// First element asked for.
        start: u64,
        /// Element after the last asked for.
        end: u64,
        /// Elements that there are.
        size: u64,
    },
    /// Elements of less than a byte, cut inside a byte.
    #[error("the part does not begin and end on whole bytes, as a slice of packed elements must")]
    PartialByte,
    /// Quantised elements, cut inside a block.
    #[error(
        "the part does not begin and end on whole blocks of {block_len} along the last dimension, as a slice of \
         quantised elements must"
    )]
    PartialBlock {
        /// Elements of a block.
        block_len: u64,
    },
    /// The tensor's own size does not fit 64 bits.
    #[error("the tensor is larger than any address space")]
    Overflow,
}

/// The bytes of a part of a tensor: equally long runs at regular places of the file, in ascending order.
///
/// The part itself is the runs, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Runs {
    start: u64,
    run_len: u64,
    /// Count and stride in bytes, slowest first.
    dimensions: Box<[(u64, u64)]>,
    count: u64,
}

impl Runs {
    /// The runs of `slice` of a tensor whose bytes begin at `start` of its file.
    ///
    /// The tensor itself must have a size ([`Dtype::size_of`]).
    pub(crate) fn new(
        start: u64,
        dtype: Dtype,
        shape: &[u64],
        slice: &TensorSlice,
    ) -> Result<Self, SliceError> {
        if slice.shape(shape)?.contains(&0) {
            return Ok(Self { start, run_len: 0, dimensions: Box::default(), count: 0 });
        }
        let (shape, slice) = &in_blocks(shape, slice, dtype.block_len())?;
        let sliced = slice.shape(shape)?;
        // No dimension is 0, so every product below divides the tensor's own size and cannot overflow.
        let mut strides = vec![0; shape.len()];
        let mut stride_bits = dtype.block_bits();
        for (stride, &size) in strides.iter_mut().zip(shape).rev() {
            *stride = stride_bits;
            stride_bits = stride_bits.checked_mul(size).ok_or(SliceError::Overflow)?;
        }
        let start_bits: u64 =
            slice.ranges.iter().zip(&strides).map(|(range, stride)| range.start * stride).sum();

        // Behind the last dimension that is cut, everything is contiguous.
        let cut = (0..shape.len()).rev().find(|&d| sliced[d] != shape[d]);
        let (run_bits, outer) = match cut {
            None => (stride_bits, 0),
            Some(d) => (sliced[d] * strides[d], d),
        };
        let mut dimensions: Vec<(u64, u64)> = Vec::with_capacity(outer);
        for d in 0..outer {
            match dimensions.last_mut() {
                _ if sliced[d] == 1 => {}
                // A whole dimension continues the pattern of the one around it.
                Some((count, stride)) if *stride == strides[d] * sliced[d] => {
                    *count *= sliced[d];
                    *stride = strides[d];
                }
                _ => dimensions.push((sliced[d], strides[d])),
            }
        }
        let whole_bytes = |bits: u64| bits.is_multiple_of(8);
        let strides_whole = dimensions.iter().all(|(_, stride)| whole_bytes(*stride));
        if !(whole_bytes(start_bits) && whole_bytes(run_bits) && strides_whole) {
            return Err(SliceError::PartialByte);
        }
        for (_, stride) in &mut dimensions {
            *stride /= 8;
        }
        Ok(Self {
            start: start.checked_add(start_bits / 8).ok_or(SliceError::Overflow)?,
            run_len: run_bits / 8,
            count: dimensions.iter().map(|(count, _)| count).product(),
            dimensions: dimensions.into(),
        })
    }

    /// Number of runs.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Bytes of all runs together.
    pub(crate) fn total_len(&self) -> u64 {
        self.run_len * self.count
    }

    /// Where run `i` lies in the file.
    pub(crate) fn get(&self, i: u64) -> ByteRange {
        debug_assert!(i < self.count);
        let mut rest = i;
        let mut start = self.start;
        for &(count, stride) in self.dimensions.iter().rev() {
            start += (rest % count) * stride;
            rest /= count;
        }
        // The run lies inside the tensor, whose end fits 64 bits.
        ByteRange::at(start, self.run_len).unwrap_or_else(|| unreachable!("run {i} of {self:?} wraps"))
    }

    /// From the first byte of the first run to the last byte of the last.
    pub(crate) fn span(&self) -> Option<ByteRange> {
        let last = self.count.checked_sub(1)?;
        ByteRange::new(self.start, self.get(last).end())
    }

    /// The widest gap between two neighbouring runs, in bytes.
    pub(crate) fn widest_gap(&self) -> u64 {
        // Where the slowest index steps, all faster ones fall back from their last place to their first.
        let mut widest = 0;
        let mut inner_span = self.run_len;
        for &(count, stride) in self.dimensions.iter().rev() {
            widest = widest.max(stride - inner_span);
            inner_span += (count - 1) * stride;
        }
        widest
    }

    /// How many bytes of the runs lie before `offset` of the file.
    fn before(&self, offset: u64) -> u64 {
        let first = partition_point(self.count, |i| self.get(i).end() <= offset);
        let part = if first < self.count { offset.saturating_sub(self.get(first).start()) } else { 0 };
        first * self.run_len + part
    }

    /// The part of all runs together that lies in `window` of the file, counted from the first byte of the first.
    pub(crate) fn packed(&self, window: ByteRange) -> ByteRange {
        ByteRange::new(self.before(window.start()), self.before(window.end())).unwrap_or_default()
    }

    /// The bytes of the runs that lie in `window`, in ascending order: where in the file, and how many bytes of
    /// the part come before them.
    pub(crate) fn within(&self, window: ByteRange) -> impl Iterator<Item = (ByteRange, u64)> + '_ {
        let first = partition_point(self.count, |i| self.get(i).end() <= window.start());
        (first..self.count).map_while(move |i| {
            let run = self.get(i);
            let part = run.intersection(window)?;
            Some((part, i * self.run_len + (part.start() - run.start())))
        })
    }
}

/// A shape and a slice of it whose last dimension counts blocks rather than elements.
fn in_blocks(
    shape: &[u64],
    slice: &TensorSlice,
    block_len: u64,
) -> Result<(Vec<u64>, TensorSlice), SliceError> {
    let (mut shape, mut slice) = (shape.to_vec(), slice.clone());
    let rank = shape.len();
    let partial = || SliceError::PartialBlock { block_len };
    let blocks = |elements: u64| {
        if elements.is_multiple_of(block_len) { Ok(elements / block_len) } else { Err(partial()) }
    };
    if let Some(last) = shape.last_mut() {
        *last = blocks(*last)?;
    }
    if let Some(range) = rank.checked_sub(1).and_then(|last| slice.ranges.get_mut(last)) {
        *range = blocks(range.start)?..blocks(range.end)?;
    }
    Ok((shape, slice))
}

/// The first of `0..count` for which `before` is false; it must be true for all smaller ones.
fn partition_point(count: u64, before: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The positions, in elements, of a part of a tensor: by counting, not by arithmetic.
    fn positions(shape: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
        let total: u64 = shape.iter().product();
        (0..total)
            .filter(|&position| {
                let mut rest = position;
                let mut index = vec![0; shape.len()];
                for d in (0..shape.len()).rev() {
                    index[d] = rest % shape[d];
                    rest /= shape[d];
                }
                ranges.iter().zip(&index).all(|(range, i)| range.contains(i))
            })
            .collect()
    }

    fn shape_and_ranges() -> impl Strategy<Value = (Vec<u64>, Vec<Range<u64>>)> {
        prop::collection::vec(0..6u64, 0..5).prop_flat_map(|shape| {
            let ranges: Vec<_> = shape
                .iter()
                .map(|&size| (0..=size).prop_flat_map(move |start| (Just(start), start..=size)))
                .collect();
            (Just(shape), ranges, 0..5usize).prop_map(|(shape, ranges, given)| {
                let ranges = ranges.into_iter().map(|(start, end)| start..end).take(given).collect();
                (shape, ranges)
            })
        })
    }

    proptest! {
        #[test]
        fn runs_are_the_bytes_of_the_slice((shape, ranges) in shape_and_ranges(), start in 0..1000u64) {
            let runs = Runs::new(start, Dtype::U8, &shape, &TensorSlice::new(ranges.clone())).unwrap();
            let bytes: Vec<u64> = (0..runs.count()).flat_map(|i| runs.get(i).start()..runs.get(i).end()).collect();
            let expected: Vec<u64> = positions(&shape, &ranges).into_iter().map(|p| start + p).collect();
            prop_assert_eq!(runs.total_len(), expected.len() as u64);
            let gap = expected.windows(2).map(|pair| pair[1] - pair[0] - 1).max().unwrap_or(0);
            prop_assert_eq!(runs.widest_gap(), if runs.count() > 0 { gap } else { 0 });
            prop_assert_eq!(bytes, expected);
        }

        #[test]
        fn a_window_cuts_the_runs(
            (shape, ranges) in shape_and_ranges(),
            window_start in 0..700u64,
            window_len in 0..700u64,
        ) {
            let runs = Runs::new(0, Dtype::U8, &shape, &TensorSlice::new(ranges.clone())).unwrap();
            let window = ByteRange::at(window_start, window_len).unwrap();
            let mut expected = Vec::new();
            for (before, position) in positions(&shape, &ranges).into_iter().enumerate() {
                if window.start() <= position && position < window.end() {
                    expected.push((position, before as u64));
                }
            }
            let found: Vec<(u64, u64)> = runs
                .within(window)
                .flat_map(|(part, before)| (0..part.len()).map(move |i| (part.start() + i, before + i)))
                .collect();
            let packed = runs.packed(window);
            prop_assert_eq!(packed.len(), expected.len() as u64);
            prop_assert!(expected.first().is_none_or(|(_, before)| packed.start() == *before));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn packed_elements_are_cut_at_bytes_or_refused((shape, ranges) in shape_and_ranges()) {
            prop_assume!(Dtype::F4.size_of(&shape).is_ok());
            let wanted: Vec<u64> = positions(&shape, &ranges).into_iter().flat_map(|p| [2 * p, 2 * p + 1]).collect();
            // A quarter of a byte each: two to an element.
            match Runs::new(0, Dtype::F4, &shape, &TensorSlice::new(ranges)) {
                Ok(runs) => {
                    let quarters: Vec<u64> = (0..runs.count())
                        .flat_map(|i| runs.get(i).start() * 4..runs.get(i).end() * 4)
                        .collect();
                    prop_assert_eq!(quarters, wanted);
                }
                Err(error) => prop_assert_eq!(error, SliceError::PartialByte),
            }
        }
    }

    #[test]
    fn quantised_elements_are_cut_between_blocks_or_refused() {
        let q8_0 = Dtype::Quantized(crate::GgmlType::Q8_0);
        let runs = |ranges| Runs::new(1000, q8_0, &[3, 96], &TensorSlice::new(ranges));
        let rows = runs(vec![1..3]).unwrap();
        assert_eq!((rows.count(), rows.get(0)), (1, ByteRange::at(1000 + 3 * 34, 2 * 3 * 34).unwrap()));
        let columns = runs(vec![0..3, 32..96]).unwrap();
        assert_eq!((columns.count(), columns.total_len()), (3, 3 * 2 * 34));
        assert_eq!(columns.get(1), ByteRange::at(1000 + 4 * 34, 2 * 34).unwrap());
        assert_eq!(runs(vec![0..3, 16..48]), Err(SliceError::PartialBlock { block_len: 32 }));
        assert_eq!(runs(vec![0..3, 0..33]), Err(SliceError::PartialBlock { block_len: 32 }));
        assert_eq!(runs(vec![0..3, 7..7]).unwrap().count(), 0);
    }

    #[test]
    fn slices_that_do_not_fit_are_refused() {
        let shape = |ranges: Vec<Range<u64>>| TensorSlice::new(ranges).shape(&[4, 2]);
        assert_eq!(
            shape(vec![0..5]),
            Err(SliceError::OutOfBounds { dimension: 0, start: 0, end: 5, size: 4 })
        );
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = shape(vec![3..2]);
        assert!(matches!(reversed, Err(SliceError::OutOfBounds { .. })));
        assert!(matches!(shape(vec![0..1, 0..1, 0..1]), Err(SliceError::TooManyDimensions { .. })));
        assert_eq!(shape(vec![]), Ok(vec![4, 2]));
    }
}
