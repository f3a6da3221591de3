//! Bytes between the caller's memory and ours, with checksums on the way.
#![allow(unsafe_code)]

use super::{
    checksum::{PartSum, RunSum},
    plan::{Content, Span, SpanMemory, Step},
    staging::StagingLease,
};
use crate::format::HEADER_LEN;
use hoistway_device::DeviceId;
use std::{ops::Range, ptr, slice};

/// Bytes that are copied before they are summed: what a core's nearest cache holds.
const CHUNK_BYTES: usize = 16 << 10;

/// The memory of bytes `range` of a step, in order.
pub(super) fn segments(step: &Step, lease: &StagingLease, range: Range<u64>) -> Vec<libc::iovec> {
    let mut segments: Vec<libc::iovec> = Vec::with_capacity(step.spans.len().min(64));
    let mut add = |address: *mut u8, len: usize| match segments.last_mut() {
        Some(last) if last.iov_base.addr() + last.iov_len == address.addr() => last.iov_len += len,
        _ => segments.push(libc::iovec { iov_base: address.cast(), iov_len: len }),
    };
    let mut position = 0;
    for span in &step.spans {
        let start = range.start.max(position);
        let end = range.end.min(position + span.len);
        if start < end {
            let (skipped, len) = (start - position, end - start);
            match (span.place, span.content) {
                (SpanMemory::Bounced(at), _) => {
                    lease.runs(at + skipped, len).for_each(|(address, len)| add(address, len));
                }
                (SpanMemory::InPlace, Content::Payload { address, .. }) => {
                    add(pointer(address + skipped), len as usize);
                }
                (SpanMemory::InPlace, Content::Header(_) | Content::Padding) => {}
            }
        }
        position += span.len;
    }
    segments
}

fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Sums payload as it passes by: each part's bytes of a step come in a row.
struct Summing<'a> {
    /// One for each part; empty if they are not wanted.
    sums: &'a mut [PartSum],
    current: Option<(usize, u64, RunSum)>,
}

impl<'a> Summing<'a> {
    fn new(sums: &'a mut [PartSum]) -> Self {
        Self { sums, current: None }
    }

    /// Bytes of `part` follow.
    fn at(&mut self, part: usize, start: u64) {
        if !self.sums.is_empty() && self.current.as_ref().is_none_or(|(current, ..)| *current != part) {
            self.finish();
            self.current = Some((part, start, RunSum::new()));
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        if let Some((_, _, sum)) = &mut self.current {
            sum.update(bytes);
        }
    }

    fn is_on(&self) -> bool {
        !self.sums.is_empty()
    }

    fn finish(&mut self) {
        if let Some((part, start, sum)) = self.current.take()
            && let Some(total) = self.sums.get_mut(part)
        {
            total.add(start, &sum);
        }
    }
}

/// Which way bytes are copied.
#[derive(Clone, Copy)]
enum Towards {
    Ours,
    Callers,
}

/// Fills our part of a step that will be written, but for the header, and sums what will be written. Bytes of devices
/// must be in the lease already.
///
/// # Safety
/// The pieces of host memory must be readable, and nothing may write to them or to the lease meanwhile.
pub(super) unsafe fn gather(step: &Step, lease: &StagingLease, sums: &mut [PartSum]) {
    // SAFETY: passed on.
    unsafe { copy_and_sum(step, lease, sums, Towards::Ours) };
    for Span { content, len, place } in &step.spans {
        if let (Content::Padding, SpanMemory::Bounced(at)) = (content, place) {
            // SAFETY: memory of the lease, which is ours.
            lease.runs(*at, *len).for_each(|(address, len)| unsafe { address.write_bytes(0, len) });
        }
    }
}

/// Delivers what a step has read to the caller's host memory, and sums it. Bytes of devices are summed in the lease.
///
/// # Safety
/// The pieces of host memory must be writable, and nothing else may use them or the lease meanwhile.
pub(super) unsafe fn scatter(step: &Step, lease: &StagingLease, sums: &mut [PartSum]) {
    // SAFETY: passed on.
    unsafe { copy_and_sum(step, lease, sums, Towards::Callers) };
}

/// # Safety
/// As for [`gather`] and [`scatter`].
unsafe fn copy_and_sum(step: &Step, lease: &StagingLease, sums: &mut [PartSum], towards: Towards) {
    let mut summing = Summing::new(sums);
    for Span { content, len, place } in &step.spans {
        let &Content::Payload { part, start, address, device } = content else { continue };
        summing.at(part, start);
        match place {
            SpanMemory::InPlace if summing.is_on() => {
                // SAFETY: the caller's memory, of this length, which the transfer may read.
                summing.update(unsafe { slice::from_raw_parts(pointer(address), *len as usize) });
            }
            SpanMemory::InPlace => {}
            SpanMemory::Bounced(at) => {
                let mut theirs = pointer(address);
                for (ours, len) in lease.runs(*at, *len) {
                    let mut done = 0;
                    while done < len {
                        let count = CHUNK_BYTES.min(len - done);
                        // SAFETY: `count` bytes of the lease's run and of the piece; ours and theirs do not overlap,
                        // and nothing else uses them, by this function's contract.
                        let bytes = unsafe {
                            let ours = ours.add(done);
                            match (device, towards) {
                                (DeviceId::Cpu, Towards::Ours) => {
                                    ptr::copy_nonoverlapping(theirs, ours, count)
                                }
                                (DeviceId::Cpu, Towards::Callers) => {
                                    ptr::copy_nonoverlapping(ours, theirs, count);
                                }
                                _ => {}
                            }
                            slice::from_raw_parts(ours, count)
                        };
                        summing.update(bytes);
                        theirs = theirs.wrapping_add(count);
                        done += count;
                    }
                }
            }
        }
    }
    summing.finish();
}

/// Puts the header of a member into its place in the lease. It is cut or filled up with zeros to its length.
pub(super) fn put_header(step: &Step, lease: &StagingLease, member: usize, header: &[u8]) {
    for (address, range) in header_runs(step, lease, member) {
        let bytes = header.get(range.start..).unwrap_or(&[]);
        let count = bytes.len().min(range.len());
        // SAFETY: inside the run, which is memory of the lease: the step that holds it is not under way yet.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), address, count);
            address.add(count).write_bytes(0, range.len() - count);
        }
    }
}

/// The header of a member that a step has read.
pub(super) fn header(step: &Step, lease: &StagingLease, member: usize) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_LEN);
    for (address, range) in header_runs(step, lease, member) {
        // SAFETY: inside the run, which is memory of the lease: the step that holds it has ended.
        header.extend_from_slice(unsafe { slice::from_raw_parts(address, range.len()) });
    }
    header
}

/// The memory of a member's header, with which of its bytes are there.
fn header_runs(step: &Step, lease: &StagingLease, member: usize) -> Vec<(*mut u8, Range<usize>)> {
    let mut runs = Vec::new();
    let mut position = 0;
    for span in step.spans.iter().filter(|span| span.content == Content::Header(member)) {
        let SpanMemory::Bounced(at) = span.place else { continue };
        for (address, len) in lease.runs(at, span.len) {
            runs.push((address, position..position + len));
            position += len;
        }
    }
    debug_assert!(position <= HEADER_LEN, "a member has one header");
    runs
}
