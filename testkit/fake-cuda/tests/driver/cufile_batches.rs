//! Batches of cuFile.

use crate::{
    cufile::{Fixture, OK},
    library::{BatchEntry, BatchEvent},
};
use std::ptr;

const COMPLETE: i32 = 0x10;
const CANCELED: i32 = 0x08;
const FAILED: i32 = 0x40;
const BLOCK: usize = 10_000;

/// Reads of one block each, by their number as cookie.
fn reads(fixture: &Fixture, address: u64, count: usize) -> Vec<BatchEntry> {
    let entry = |number: usize| BatchEntry {
        mode: 1,
        base: address,
        file_offset: (number * BLOCK) as i64,
        buffer_offset: (number * BLOCK) as i64,
        size: BLOCK,
        file: fixture.handle,
        operation: 0,
        cookie: number,
    };
    (0..count).map(entry).collect()
}

fn set_up(fixture: &Fixture, entries: u32) -> usize {
    let mut batch = 0;
    assert_eq!(fixture.session.cuFileBatchIOSetUp(&mut batch, entries), OK);
    batch
}

fn submit(fixture: &Fixture, batch: usize, entries: &[BatchEntry]) -> i32 {
    fixture.session.cuFileBatchIOSubmit(batch, entries.len() as u32, entries.as_ptr(), 0).error
}

fn events(
    fixture: &Fixture,
    batch: usize,
    least: u32,
    most: u32,
    timeout_ms: Option<i64>,
) -> Vec<BatchEvent> {
    let timeout = timeout_ms.map(|ms| libc::timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 });
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let mut events = vec![BatchEvent::default(); most as usize];
    let mut count = most;
    let status =
        fixture.session.cuFileBatchIOGetStatus(batch, least, &mut count, events.as_mut_ptr(), timeout);
    assert_eq!(status, OK);
    events.truncate(count as usize);
    events
}

#[test]
fn entries_complete_in_any_order() {
    let fixture = Fixture::new(&["JITTER_US=300"], 0);
    let address = fixture.session.allocate(40 * BLOCK);
    let batch = set_up(&fixture, 40);
    assert_eq!(submit(&fixture, batch, &reads(&fixture, address, 40)), 0);
    let mut seen = events(&fixture, batch, 1, 7, None);
    assert!((1..=7).contains(&seen.len()));
    seen.extend(events(&fixture, batch, 40 - seen.len() as u32, 40, None));
    let order: Vec<_> = seen.iter().map(|event| event.cookie).collect();
    assert!(!order.is_sorted(), "{order:?}");
    seen.sort_by_key(|event| event.cookie);
    for (cookie, event) in seen.iter().enumerate() {
        assert_eq!(*event, BatchEvent { cookie, status: COMPLETE, result: BLOCK as isize });
    }
    assert!(fixture.session.download(address, 40 * BLOCK) == fixture.bytes[..40 * BLOCK]);
    assert_eq!(events(&fixture, batch, 1, 1, None), [], "there is nothing to wait for");
    fixture.session.cuFileBatchIODestroy(batch);
}

#[test]
fn a_batch_is_submitted_again_only_when_all_is_known_to_be_complete() {
    let fixture = Fixture::new(&["COPY_LATENCY_US=20000"], 0);
    let address = fixture.session.allocate(4 * BLOCK);
    let batch = set_up(&fixture, 4);
    let entries = reads(&fixture, address, 4);
    assert_eq!(submit(&fixture, batch, &entries), 0);
    assert_eq!(submit(&fixture, batch, &entries), 5035);
    assert_eq!(events(&fixture, batch, 4, 4, Some(1)), [], "too early");
    let first = events(&fixture, batch, 3, 4, None).len();
    assert_eq!(submit(&fixture, batch, &entries), 5035);
    assert_eq!(first + events(&fixture, batch, 4 - first as u32, 4, None).len(), 4);
    assert_eq!(submit(&fixture, batch, &entries[..2]), 0);
    assert_eq!(events(&fixture, batch, 2, 4, None).len(), 2);
    fixture.session.cuFileBatchIODestroy(batch);
}

#[test]
fn what_has_not_begun_can_be_canceled() {
    let fixture = Fixture::new(&["COPY_LATENCY_US=50000"], 0);
    let address = fixture.session.allocate(20 * BLOCK);
    let batch = set_up(&fixture, 20);
    assert_eq!(submit(&fixture, batch, &reads(&fixture, address, 20)), 0);
    assert_eq!(fixture.session.cuFileBatchIOCancel(batch), OK);
    let events = events(&fixture, batch, 20, 20, None);
    assert_eq!(events.len(), 20);
    assert!(events.iter().filter(|event| event.status == CANCELED).count() >= 17);
    // Whoever destroys a batch may free its memory.
    let reads_before = fixture.session.count("cufile_reads");
    assert_eq!(submit(&fixture, batch, &reads(&fixture, address, 20)), 0);
    fixture.session.cuFileBatchIODestroy(batch);
    assert!(fixture.session.count("cufile_reads") <= reads_before + 3);
    assert_eq!(fixture.session.cuFileBatchIOCancel(batch).error, 5022);
}

#[test]
fn failures_are_those_of_single_entries() {
    let fixture = Fixture::new(&[], 0);
    let address = fixture.session.allocate(3 * BLOCK);
    let batch = set_up(&fixture, 3);
    fixture.session.configure("CUFILE_READ_FAULTS=1=-5,2=-5014");
    assert_eq!(submit(&fixture, batch, &reads(&fixture, address, 3)), 0);
    let mut events = events(&fixture, batch, 3, 3, None);
    events.sort_by_key(|event| event.result);
    let outcomes: Vec<_> = events.iter().map(|event| (event.status, event.result)).collect();
    assert_eq!(outcomes, [(FAILED, -5014), (FAILED, -5), (COMPLETE, BLOCK as isize)]);
    fixture.session.cuFileBatchIODestroy(batch);
}

#[test]
fn batches_that_make_no_sense_are_refused() {
    let fixture = Fixture::new(&[], 0);
    let address = fixture.session.allocate(3 * BLOCK);
    let mut batch = 0;
    assert_eq!(fixture.session.cuFileBatchIOSetUp(&mut batch, 0).error, 5022);
    assert_eq!(fixture.session.cuFileBatchIOSetUp(&mut batch, 129).error, 5022);
    let batch = set_up(&fixture, 2);
    let entries = reads(&fixture, address, 3);
    assert_eq!(submit(&fixture, batch, &entries), 5037);
    assert_eq!(submit(&fixture, batch, &[BatchEntry { mode: 0, ..entries[0] }]), 5022);
    assert_eq!(submit(&fixture, batch, &[BatchEntry { operation: 2, ..entries[0] }]), 5022);
    assert_eq!(submit(&fixture, batch, &[BatchEntry { file: 0, ..entries[0] }]), 5027);
    fixture.session.cuFileBatchIODestroy(batch);
}
