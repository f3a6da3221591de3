//! Finds the tensors of an arena that are whole: the arithmetic by which only written bytes are handed out.
#![forbid(unsafe_code)]

use crate::{ByteRange, Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The tensors of one arena while it is being written, region by region.
#[derive(Debug)]
pub(super) struct Coverage {
    /// Ascending, disjoint.
    tensors: Vec<Filling>,
}

#[derive(Debug)]
struct Filling {
    tag: usize,
    place: ByteRange,
    /// Regions over it that are not complete.
    pending: AtomicU32,
    /// Whether it became whole and was handed out.
    handed_out: AtomicBool,
}

impl Coverage {
    /// `tensors` are tags and places in an arena of `len` bytes, `writes` the regions that will be written.
    ///
    /// # Errors
    /// [`Error::Internal`] if regions or tensors overlap, leave the arena, or leave a byte of a tensor uncovered.
    pub(super) fn new(
        len: u64,
        tensors: impl IntoIterator<Item = (usize, ByteRange)>,
        writes: &[ByteRange],
    ) -> Result<Self> {
        let mut tensors: Vec<Filling> = tensors
            .into_iter()
            .map(|(tag, place)| Filling { tag, place, pending: 0.into(), handed_out: false.into() })
            .collect();
        // A stable sort takes kilobytes of the stack.
        tensors.sort_unstable_by_key(|tensor| (tensor.place, tensor.tag));
        let mut ascending: Vec<ByteRange> = writes.to_vec();
        ascending.sort_unstable();

        let broken = |what: String| Error::Internal(format!("plan of an arena: {what}"));
        let disjoint_inside = |ranges: &mut dyn Iterator<Item = ByteRange>| {
            let mut end = 0;
            for range in ranges {
                if range.start() < end || range.end() > len || range.is_empty() {
                    return Err(broken(format!("{range} overlaps its neighbour or leaves the arena")));
                }
                end = range.end();
            }
            Ok(())
        };
        disjoint_inside(&mut ascending.iter().copied())?;
        disjoint_inside(&mut tensors.iter().map(|tensor| tensor.place))?;

        let mut first = 0;
        for Filling { place, pending, .. } in &mut tensors {
            while ascending.get(first).is_some_and(|write| write.end() <= place.start()) {
                first += 1;
            }
            let mut covered = place.start();
            let mut regions = 0;
            for write in &ascending[first..] {
                if write.start() > covered || covered >= place.end() {
                    break;
                }
                covered = write.end();
                regions += 1;
            }
            if covered < place.end() {
                return Err(broken(format!("byte {covered} of the tensor at {place} is never written")));
            }
            *pending.get_mut() = regions;
        }
        Ok(Self { tensors })
    }

    /// The places of all tensors.
    pub(super) fn places(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.tensors.iter().map(|tensor| tensor.place)
    }

    /// The bytes of `region`, one of the writes, are all there: gives the tags and places of the tensors that this
    /// makes whole.
    pub(super) fn complete(&self, region: ByteRange) -> impl Iterator<Item = (usize, ByteRange)> + '_ {
        let first = self.tensors.partition_point(|tensor| tensor.place.end() <= region.start());
        let touched = self.tensors[first..].iter();
        touched.take_while(move |tensor| tensor.place.start() < region.end()).filter_map(|tensor| {
            // AcqRel: the last writer publishes its bytes and sees those of the others.
            let is_last = tensor.pending.fetch_sub(1, Ordering::AcqRel) == 1;
            is_last.then(|| {
                tensor.handed_out.store(true, Ordering::Relaxed);
                (tensor.tag, tensor.place)
            })
        })
    }

    /// The places of tensors that never became whole.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = ByteRange> + '_ {
        let unfinished = self.tensors.iter().filter(|tensor| !tensor.handed_out.load(Ordering::Relaxed));
        unfinished.map(|tensor| tensor.place)
    }
}
