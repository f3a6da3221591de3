//! The native client against a peer that follows the protocol, or does not.
#![forbid(unsafe_code)]

use crate::{
    Error, Refused, RingOptions,
    peer::{FILE_BYTES, FakeMount, Peer, SLOT_BYTES},
    proto::{Cqe, Sqe},
};
use proptest::prelude::*;
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

fn peer(depth: usize) -> Peer {
    let farewell = Duration::ZERO;
    Peer::new(&RingOptions { depth, farewell, ..RingOptions::default() })
}

#[track_caller]
fn assert_protocol(error: &Error, words: &str) {
    assert!(matches!(error, Error::Protocol { detail, .. } if detail.contains(words)), "{error}");
}

/// The name of the only registration that is no ring.
fn registered_buffer(peer: &Peer) -> String {
    let names = std::fs::read_dir(peer.directory.directory.path().join(crate::proto::IOVS)).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.find(|name| name.parse::<crate::Key>().is_ok_and(|key| key.ring.is_none())).unwrap()
}

#[test]
fn a_submission_says_what_to_read_and_where_to() {
    let mut peer = peer(2);
    peer.push(12_345, 678).unwrap();
    peer.push(99, SLOT_BYTES).unwrap();
    let taken = peer.take();
    let iov: crate::Key = registered_buffer(&peer).parse().unwrap();
    let buffer = iov.id.into_bytes();
    let lens: Vec<_> =
        taken.iter().map(|(_, args)| (args.buffer, args.inode, args.file_offset, args.len)).collect();
    let inode = peer.file.inode();
    assert_eq!(lens, [(buffer, inode, 12_345, 678), (buffer, inode, 99, SLOT_BYTES as u64)]);
    assert_ne!(taken[0].0.index, taken[1].0.index);
    assert_ne!(taken[0].1.buffer_offset / SLOT_BYTES, taken[1].1.buffer_offset / SLOT_BYTES);
}

#[test]
fn a_ring_goes_round_with_completions_in_any_order() {
    let mut peer = peer(16);
    let mut ended = Vec::new();
    for round in 0..60u64 {
        for n in 0..16 {
            peer.push(round * 16 + n, 10).unwrap();
        }
        let taken = peer.take();
        peer.release();
        for step in 0..16 {
            peer.complete(&taken[(step * 5 + round as usize) % 16].0, 10);
        }
        for (token, result) in peer.wait().unwrap() {
            assert_eq!(result.unwrap(), 10);
            ended.push(token);
        }
    }
    ended.sort_unstable();
    assert!(ended.into_iter().eq(0..960));
}

#[test]
fn a_ring_whose_first_batch_is_slow_is_full_until_that_ends() {
    let mut peer = peer(16);
    peer.push(0, 10).unwrap();
    let (slow, _) = peer.take()[0];
    // The peer completes whatever follows, but gives no entries back: 64 are all there are.
    for n in 1..64 {
        peer.push(n, 10).unwrap();
        let (sqe, _) = peer.take()[0];
        peer.complete(&sqe, 10);
        assert_eq!(peer.wait().unwrap().len(), 1);
    }
    let Err(Refused::Full(transfer)) = peer.push(64, 10) else { panic!("a full ring took a read") };
    peer.slots.push(transfer.slot);
    peer.release();
    peer.complete(&slow, 10);
    assert_eq!(peer.wait().unwrap()[0].0, 0);
    peer.push(64, 10).unwrap();
}

#[test]
fn a_ring_that_is_full_of_nothing_has_failed() {
    let mut peer = peer(16);
    for n in 0..64 {
        peer.push(n, 10).unwrap();
        let (sqe, _) = peer.take()[0];
        peer.complete(&sqe, 10);
        peer.wait().unwrap();
    }
    let Err(Refused::Failed(_, error)) = peer.push(64, 10) else { panic!("it was taken") };
    assert_protocol(&error, "nothing is in flight");
}

#[test]
fn reads_that_never_end_are_given_up() {
    let stall_limit = Duration::from_millis(300);
    let mut peer =
        Peer::new(&RingOptions { depth: 2, stall_limit, farewell: Duration::ZERO, ..RingOptions::default() });
    let start = Instant::now();
    peer.push(0, 10).unwrap();
    let error = peer.ring.wait(Duration::from_secs(600), &mut Vec::new()).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(start.elapsed() >= stall_limit && start.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_completion_that_belongs_to_nothing_fails_the_ring() {
    type Forge = fn(&Sqe) -> Cqe;
    let forgeries: [(&str, Forge); 5] = [
        ("an index that is none", |sqe| Cqe { index: 65, result: 1, user_data: sqe.user_data, reserved: 0 }),
        ("a negative index", |sqe| Cqe { index: i32::MIN, result: 1, user_data: sqe.user_data, reserved: 0 }),
        ("an index not in use", |sqe| Cqe {
            index: (sqe.index + 7) % 64,
            result: 1,
            user_data: sqe.user_data,
            reserved: 0,
        }),
        ("another mark", |sqe| Cqe { index: sqe.index, result: 1, user_data: !sqe.user_data, reserved: 0 }),
        ("the mark 0", |sqe| Cqe { index: sqe.index, result: 1, user_data: 0, reserved: 0 }),
    ];
    for (what, forge) in forgeries {
        let mut peer = peer(4);
        peer.push(0, 10).unwrap();
        let (sqe, _) = peer.take()[0];
        peer.answer(forge(&sqe));
        assert_protocol(&peer.wait().expect_err(what), "no transfer has");
        // It stays failed, and gives the memory of the read to no other read.
        assert_protocol(&peer.wait().expect_err(what), "no transfer has");
        let Err(Refused::Failed(_, error)) = peer.push(1, 10) else { panic!("it was taken") };
        assert_protocol(&error, "no transfer has");
        assert_eq!(peer.ring.in_flight(), 1);
    }
}

#[test]
fn a_completion_that_comes_twice_fails_the_ring() {
    let mut peer = peer(4);
    peer.push(0, 10).unwrap();
    peer.push(1, 10).unwrap();
    let (sqe, _) = peer.take()[0];
    peer.complete(&sqe, 10);
    peer.complete(&sqe, 10);
    assert_protocol(&peer.wait().unwrap_err(), "no transfer has");
}

#[test]
fn more_bytes_than_asked_for_fail_the_ring() {
    let mut peer = peer(4);
    peer.push(0, 10).unwrap();
    let (sqe, _) = peer.take()[0];
    peer.complete(&sqe, 11);
    assert_protocol(&peer.wait().unwrap_err(), "11 of 10 bytes");
}

#[test]
fn counters_outside_the_ring_fail_it() {
    for value in [-1, 65, i32::MAX, i32::MIN] {
        let mut peer = peer(4);
        peer.push(0, 10).unwrap();
        peer.layout.cqe_head().store(value, SeqCst);
        assert_protocol(&peer.wait().unwrap_err(), "cqe head");
        let mut peer = self::peer(4);
        peer.layout.sqe_tail().store(value, SeqCst);
        let Err(Refused::Failed(_, error)) = peer.push(0, 10) else { panic!("it was taken") };
        assert_protocol(&error, "sqe tail");
    }
}

#[test]
fn what_the_daemon_writes_over_the_clients_counters_does_not_matter() {
    let mut peer = peer(4);
    peer.push(0, 10).unwrap();
    let (sqe, _) = peer.take()[0];
    peer.layout.cqe_tail().store(17, SeqCst);
    peer.complete(&sqe, 10);
    assert_eq!(peer.wait().unwrap().len(), 1);
}

#[test]
fn a_short_read_goes_on_where_it_stopped() {
    let mut peer = peer(4);
    peer.push(1000, 100).unwrap();
    let (sqe, first) = peer.take()[0];
    peer.complete(&sqe, 30);
    assert!(peer.wait().unwrap().is_empty());
    assert!(peer.wait().unwrap().is_empty());
    let (sqe, second) = peer.take()[0];
    assert_eq!((second.file_offset, second.buffer_offset, second.len), (1030, first.buffer_offset + 30, 70));
    peer.complete(&sqe, 70);
    let (token, result) = peer.wait().unwrap().pop().unwrap();
    assert_eq!((token, result.unwrap()), (1000, 100));
}

#[test]
fn a_short_read_at_the_end_of_the_file_has_ended() {
    let mut peer = peer(4);
    let offset = FILE_BYTES as u64 - 30;
    peer.push(offset, 100).unwrap();
    let (sqe, _) = peer.take()[0];
    peer.complete(&sqe, 30);
    assert_eq!(peer.wait().unwrap().pop().unwrap().1.unwrap(), 30);
}

#[test]
fn a_read_that_brings_nothing_inside_the_file_twice_is_an_error() {
    let mut peer = peer(4);
    peer.push(0, 100).unwrap();
    for _ in 0..2 {
        let (sqe, _) = peer.take()[0];
        peer.complete(&sqe, 0);
        let ended = peer.wait().unwrap();
        if let Some((_, result)) = ended.into_iter().next() {
            let error = result.unwrap_err();
            let expected = FILE_BYTES as u64;
            assert!(matches!(error, Error::ShortTransfer { got: 0, file_len, .. } if file_len == expected));
            return;
        }
        peer.wait().unwrap();
    }
    panic!("it did not end");
}

#[test]
fn every_error_number_is_an_error_of_that_read_alone() {
    let mut peer = peer(4);
    let strange = [(i64::MIN, libc::EIO), (-(1 << 40), libc::EIO)];
    for (result, errno) in (1..=133).map(|errno| (-i64::from(errno), errno)).chain(strange) {
        peer.push(5, 10).unwrap();
        let (sqe, _) = peer.take()[0];
        peer.release();
        peer.complete(&sqe, result);
        let error = peer.wait().unwrap().pop().unwrap().1.unwrap_err();
        let Error::Io { offset: 5, len: 10, errno: told, .. } = &error else { panic!("{error}") };
        assert_eq!(*told, errno);
        assert!(error.to_string().contains("offset 5"), "{error}");
    }
}

#[test]
fn a_link_to_something_that_is_no_semaphore_is_not_followed() {
    let fake = FakeMount::new();
    let cases = ["/etc/passwd", "/dev/shm/sem.", "/dev/shm/x", "/dev/shm/sem.a/b", "relative"];
    for target in cases {
        fake.point_submit_at(Path::new(target));
        let mount = fake.mount(Arc::new(|_, _| ())).unwrap();
        let error = mount.create_ring(&RingOptions::default()).unwrap_err();
        assert_protocol(&error, "submit-ios is");
    }
    fake.point_submit_at(Path::new("/dev/shm/sem.hoistway-no-such-name"));
    let mount = fake.mount(Arc::new(|_, _| ())).unwrap();
    let error = mount.create_ring(&RingOptions::default()).unwrap_err();
    assert!(matches!(error, Error::SharedMemoryNamespace { .. }), "{error}");
}

#[test]
fn a_mount_leaves_no_registration_and_no_name_behind() {
    let peer = peer(4);
    let iovs = peer.directory.directory.path().join(crate::proto::IOVS);
    let names = || {
        let mut names: Vec<_> =
            std::fs::read_dir(&iovs).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.retain(|path| !path.ends_with("submit-ios"));
        names
    };
    assert_eq!(names().len(), 2);
    // Their names in /dev/shm are gone already.
    assert!(names().iter().all(|link| !std::fs::read_link(link).unwrap().exists()));
    let Peer { ring, slots, file, mount, directory, .. } = peer;
    drop((ring, slots, file));
    mount.settle().unwrap();
    assert_eq!(names(), Vec::<std::path::PathBuf>::new());
    drop((mount, directory));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a daemon writes, the client ends with an error or with results, and in time.
    #[test]
    fn garbage_in_shared_memory_is_survived(
        answers in prop::collection::vec((any::<i32>(), -1..70i32, any::<i64>(), any::<bool>(), 0..5u64), 0..20),
        counters in prop::collection::vec(prop::option::of(prop_oneof![any::<i32>(), 0..70i32]), 4),
    ) {
        let mut peer = peer(4);
        for n in 0..4 {
            peer.push(n, 10).unwrap();
        }
        for (wild, index, result, plausible, mark) in answers {
            let (index, result) = if plausible { (index, result % 20) } else { (wild, result) };
            peer.answer(Cqe { index, reserved: wild, result, user_data: mark });
        }
        let ring = &peer.layout;
        for (counter, value) in [ring.sqe_head(), ring.sqe_tail(), ring.cqe_head(), ring.cqe_tail()].iter().zip(counters) {
            if let Some(value) = value {
                counter.store(value, SeqCst);
            }
        }
        let _ = peer.wait();
        if !peer.slots.is_empty() {
            let _ = peer.push(9, 10);
        }
        prop_assert!(peer.ring.in_flight() <= 5);
    }
}
