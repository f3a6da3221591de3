//! What the model does not say.
#![forbid(unsafe_code)]

use super::super::{Candidates, Entry, Existing, Index, IndexOptions, Lookup, Want};
use super::{block, fingerprint};
use crate::{Admission, Eviction};

const LRU: IndexOptions = IndexOptions { eviction: Eviction::Lru, admission: Admission::Always };
const S3FIFO: IndexOptions = IndexOptions { eviction: Eviction::S3Fifo, admission: Admission::Always };

fn filled(options: IndexOptions, blocks: std::ops::Range<u64>) -> Index {
    let index = Index::new(options);
    for number in blocks {
        index.insert(fingerprint(number), &block(number), Existing::Replace);
    }
    index
}

fn evict(index: &Index, from: Candidates, blocks: u64) -> Vec<u64> {
    let want = Want { from, bytes: blocks * (64 << 10) };
    index.evict(&want, 1).iter().map(|removed| removed.entry.sequence).collect()
}

#[test]
fn what_is_filled_in_goes_in_its_order_and_the_newer_of_two_stays() {
    let index = filled(LRU, 0..3);
    let mut blocks: Vec<u64> = (3..40_000).collect();
    blocks.push(5);
    let replaced = index.fill(&blocks, |number| (fingerprint(*number), block(*number)));
    assert_eq!(replaced.iter().map(|gone| gone.entry.sequence).collect::<Vec<_>>(), [5]);
    index.insert(fingerprint(40_000), &block(40_000), Existing::Replace);
    let order = (0..5).chain(6..40_000).chain([5, 40_000]).collect::<Vec<_>>();
    assert_eq!(evict(&index, Candidates::Anywhere, 50_000), order);
}

#[test]
fn the_tail_of_a_touched_prefix_goes_first() {
    let index = filled(LRU, 0..10);
    index.touch(&[4, 2, 7].map(fingerprint));
    assert_eq!(evict(&index, Candidates::Anywhere, 10), [0, 1, 3, 5, 6, 8, 9, 7, 2, 4]);
}

#[test]
fn one_scan_does_not_displace_what_is_used() {
    let index = filled(S3FIFO, 0..100);
    for number in 0..100 {
        index.touch(&[fingerprint(number)]);
    }
    for number in 100..10_000 {
        index.insert(fingerprint(number), &block(number), Existing::Replace);
        assert_eq!(evict(&index, Candidates::Anywhere, 1).len(), 1);
    }
    let kept = (0..100).filter(|number| index.contains(&fingerprint(*number), 1)).count();
    assert!(kept >= 85, "{kept} of 100 blocks that were used are left after 9,900 that were not");
}

#[test]
fn what_comes_again_soon_is_protected() {
    let index = filled(S3FIFO, 0..20);
    assert_eq!(evict(&index, Candidates::Anywhere, 1), [0]);
    index.insert(fingerprint(0), &block(0), Existing::Replace);
    assert_eq!(evict(&index, Candidates::Anywhere, 17), (1..18).collect::<Vec<_>>());
    assert!(index.contains(&fingerprint(0), 1));
}

#[test]
fn the_segment_whose_blocks_are_not_used_is_the_coldest() {
    for options in [S3FIFO, LRU] {
        // Segments 0 to 3 have 1024 blocks each, but the blocks of segment 2 are not used.
        let index = filled(options, 0..4096);
        let used: Vec<_> = (0..4096).filter(|number| number / 1024 != 2).map(fingerprint).collect();
        index.touch(&used);
        let coldest = || index.survey().into_iter().find(|worth| !worth.is_in_use).unwrap().segment;
        assert_eq!((coldest(), index.survey().len()), (2, 4));

        assert!(index.pin(&fingerprint(2048)));
        assert_ne!(coldest(), 2);
        index.unpin(&fingerprint(2048));
        let Lookup::Found(_, hold) = index.get(&fingerprint(2049), 1) else { panic!("it is there") };
        assert!(index.remove(&fingerprint(2049)).is_some());
        assert_ne!(coldest(), 2, "it is read by a reader of a removed block");
        drop(hold);
        assert_eq!(coldest(), 2);
    }
}

#[test]
fn nothing_is_asked_of_an_empty_index() {
    let index = Index::new(S3FIFO);
    assert!(index.survey().is_empty());
    assert!(evict(&index, Candidates::Anywhere, 5).is_empty());
    assert_eq!(index.list(0, 10, &mut Vec::new()), None);
}

#[test]
fn if_everything_is_pinned_nothing_goes() {
    for options in [S3FIFO, LRU] {
        let index = filled(options, 0..100);
        (0..100).for_each(|number| assert!(index.pin(&fingerprint(number))));
        assert!(evict(&index, Candidates::Anywhere, 1).is_empty());
        index.unpin(&fingerprint(33));
        assert_eq!(evict(&index, Candidates::Anywhere, 5), [33]);
    }
}

#[test]
fn second_touch_admits_what_was_offered_or_asked_for_long_ago() {
    let index = Index::new(IndexOptions { admission: Admission::SecondTouch, ..S3FIFO });
    let [a, b, c] = [1, 2, 3].map(fingerprint);
    assert!(!index.admit(&a, 1000));
    assert!(index.admit(&a, 1001), "it was offered before");

    let mut found = [true; 1];
    for now in 1000..1010 {
        index.contains_many(&[b], |key| key, now, &mut found);
        assert!(matches!(index.get(&b, now), Lookup::Miss));
    }
    assert!(!index.admit(&b, 1010), "one request that asks again and again is one use");
    index.contains(&c, 1000);
    assert!(index.admit(&c, 1060), "it was asked for a minute ago");

    index.insert(c, &block(3), Existing::Replace);
    assert_eq!(evict(&index, Candidates::Anywhere, 1), [3]);
    assert!(index.admit(&c, 1061), "it was here lately");
}

#[test]
fn always_admits() {
    assert!(Index::new(S3FIFO).admit(&fingerprint(1), 0));
}

#[test]
fn listing_goes_on_where_it_stopped() {
    let index = filled(S3FIFO, 0..5000);
    let (mut cursor, mut seen) = (Some(0), Vec::new());
    while let Some(from) = cursor {
        let before = seen.len();
        cursor = index.list(from, 77, &mut seen);
        assert!(seen.len() - before <= 77);
        // What goes meanwhile does not disturb the rest.
        if let Some((gone, _)) = seen.last() {
            index.remove(gone);
        }
    }
    let mut numbers: Vec<_> = seen.iter().map(|(_, entry)| entry.sequence).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..5000).collect::<Vec<_>>());
}

#[test]
fn expired_blocks_are_told_a_few_at_a_time() {
    let index = Index::new(S3FIFO);
    for number in 0..100 {
        let entry = Entry { expires: 10 + number as u32, ..block(number) };
        index.insert(fingerprint(number), &entry, Existing::Replace);
    }
    assert!(index.expired(9, usize::MAX).is_empty());
    assert!(index.contains(&fingerprint(0), 9) && !index.contains(&fingerprint(0), 10));
    assert!(matches!(index.get(&fingerprint(0), 10), Lookup::Expired));
    let mut gone = 0;
    for _ in 0..10 {
        let some = index.expired(59, 7);
        assert!(some.len() <= 7 && some.iter().all(|removed| removed.entry.expires <= 59));
        gone += some.len();
    }
    assert_eq!(gone, 50);
    assert_eq!(index.totals(None).own_blocks, 50);
}

#[test]
fn a_quota_tells_what_has_to_go() {
    let index = filled(S3FIFO, 0..10);
    assert_eq!(index.quota_excess(0, u64::MAX), 0);
    index.set_quota(0, Some(8 * (64 << 10)));
    assert_eq!(index.quota_excess(0, 64 << 10), 3 * (64 << 10));
    assert_eq!(index.quota_excess(1, 64 << 10), 0);
    let want = Want { from: Candidates::Namespace(0), bytes: index.quota_excess(0, 64 << 10) };
    assert_eq!(index.evict(&want, 1).len(), 3);
    assert_eq!(index.quota_excess(0, 64 << 10), 0);
}

#[test]
fn more_owners_than_there_are_numbers_for_are_refused() {
    let index = Index::with_partitions(S3FIFO, 1);
    let mut refused = 0;
    for number in 0..70_000u64 {
        let entry = Entry { owner: 1 + (number % 2) as u16, namespace: (number / 2) as u16, ..block(number) };
        let inserted = index.insert(fingerprint(number), &entry, Existing::Replace);
        refused += u64::from(inserted == super::super::Inserted::Refused);
    }
    assert_eq!(refused, 70_000 - (1 << 16));
    assert_eq!(index.totals(None).foreign_blocks, 1 << 16);
}
