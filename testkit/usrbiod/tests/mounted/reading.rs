//! Right bytes: at odd offsets, out of order, in pieces that come short, from several threads.

use crate::fixture::{Fixture, Session, clients, pattern};
use hoistway_usrbio::{Error, Refused, RingOptions, RingPriority};
use std::{fs::File, os::unix::fs::FileExt, time::Duration};
use usrbiod::Faults;

const MIB: usize = 1 << 20;

#[test]
fn every_byte_of_a_file_beyond_2_gib_is_right_at_odd_offsets() {
    let Some(fixture) = Fixture::start() else { return };
    // Islands of data in a hole: at the ends, around 2^31, and at places that no power of two divides.
    const LEN: u64 = (1 << 31) + 77 * 1024 * 1024 + 13;
    let behind = File::create(fixture.behind("large")).unwrap();
    behind.set_len(LEN).unwrap();
    let islands = (0..LEN / 50_000_017).map(|n| n * 50_000_017).chain([(1 << 31) - 5_000, LEN - 10_000]);
    for island in islands {
        behind.write_all_at(&pattern(island, 10_000), island).unwrap();
    }
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 4, 8 * MIB + 1);
        const PIECE: u64 = 8 * MIB as u64 + 1;
        let ranges = (0..LEN.div_ceil(PIECE)).map(|n| (n * PIECE, PIECE.min(LEN - n * PIECE) as usize));
        session.compare(&fixture.path("large"), &fixture.behind("large"), ranges);
    }
}

#[test]
fn reads_that_end_out_of_order_land_in_their_own_slots() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 5 * MIB);
    let faults = [
        Faults { reorder: true, delay: Duration::from_micros(200), ..Faults::default() },
        Faults { slow_every: 3, delay: Duration::from_micros(300), ..Faults::default() },
    ];
    for (client, faults) in
        clients().into_iter().flat_map(|client| faults.map(|faults| (client.clone(), faults)))
    {
        fixture.daemon.behave(faults).unwrap();
        for batch in [1, 3] {
            let options = RingOptions::default().depth(8).batch(batch);
            let mut session = Session::with(fixture.mount(client.clone()), 8, 9973, &options);
            let ranges =
                (0..400u64).map(|n| (n * 12_007 % (5 * MIB as u64 - 9973), 1 + (n as usize * 97) % 9973));
            session.compare(&path, &fixture.behind("file"), ranges);
        }
    }
}

#[test]
fn a_ring_goes_round_many_times() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", MIB);
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 5, 512);
        session.compare(&path, &fixture.behind("file"), (0..2000u64).map(|n| (n * 509, 511)));
    }
}

#[test]
fn a_read_that_comes_short_goes_on_from_there() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 3 * MIB);
    // One at a time, so that what goes on is never what comes short.
    fixture.daemon.behave(Faults { short_every: 2, ..Faults::default() }).unwrap();
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 1, MIB);
        session.compare(&path, &fixture.behind("file"), (0..30u64).map(|n| (n * 100_003, 70_001)));
    }
}

#[test]
fn a_read_that_comes_short_twice_fails_and_says_where() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", MIB);
    fixture.daemon.behave(Faults { short_every: 1, ..Faults::default() }).unwrap();
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 1, MIB);
        let file = session.mount.open_file(&path).unwrap();
        let error = session.read(&file, 1000, 8000).unwrap_err();
        let Error::ShortTransfer { path: named, offset: 1000, len: 8000, got: 6000, file_len } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((named, *file_len), (&path, MIB as u64));
    }
}

#[test]
fn the_end_of_a_file_is_no_error_and_a_hole_is_one() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 10_000);
    let sparse = File::create(fixture.behind("sparse")).unwrap();
    sparse.write_all_at(&pattern(0, 4096), 0).unwrap();
    sparse.set_len(MIB as u64).unwrap();
    fixture.daemon.behave(Faults { holes: true, ..Faults::default() }).unwrap();
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 1, MIB);
        let file = session.mount.open_file(&path).unwrap();
        assert_eq!(session.read(&file, 9000, 5000).unwrap(), pattern(9000, 1000));
        assert_eq!(session.read(&file, 10_000, 1).unwrap(), []);
        let file = session.mount.open_file(&fixture.path("sparse")).unwrap();
        let error = session.read(&file, 0, 20_000).unwrap_err();
        assert!(matches!(error, Error::ShortTransfer { got: 4096, .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_short_gives_less_and_never_zeros() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", MIB);
    for client in clients() {
        File::options().write(true).open(fixture.behind("file")).unwrap().set_len(MIB as u64).unwrap();
        let mut session = Session::new(fixture.mount(client), 1, MIB);
        let file = session.mount.open_file(&path).unwrap();
        File::options().write(true).open(fixture.behind("file")).unwrap().set_len(5000).unwrap();
        assert_eq!(session.read(&file, 0, MIB).unwrap().len(), 5000);
        assert_eq!(file.len_now().unwrap(), 5000);
        std::fs::write(fixture.behind("file"), pattern(0, MIB)).unwrap();
    }
}

#[test]
fn two_threads_share_a_mount_and_a_file() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 4 * MIB);
    for client in clients() {
        let mount = fixture.mount(client);
        std::thread::scope(|scope| {
            for start in [0, 7] {
                let (mount, path, behind) = (mount.clone(), &path, fixture.behind("file"));
                scope.spawn(move || {
                    let mut session = Session::new(mount, 4, 65_536);
                    session.compare(path, &behind, (0..200u64).map(|n| (start + n * 20_011, 65_001)));
                });
            }
        });
    }
}

#[test]
fn a_file_stays_readable_when_its_descriptor_number_was_used_before() {
    let Some(fixture) = Fixture::start() else { return };
    let paths: Vec<_> = (0..3).map(|n| fixture.write(&format!("file{n}"), 1000 * (n + 1))).collect();
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 1, 4096);
        for round in 0..20 {
            let which = round % 3;
            let file = session.mount.open_file(&paths[which]).unwrap();
            assert_eq!(session.read(&file, 0, 4096).unwrap().len(), 1000 * (which + 1));
        }
    }
}

#[test]
fn a_file_that_is_open_twice_is_one_file() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 1000);
    for client in clients() {
        let mount = fixture.mount(client);
        let file = mount.open_file(&path).unwrap();
        assert!(std::sync::Arc::ptr_eq(&file, &mount.open_file(&path).unwrap()));
        assert_eq!(file.chunk_bytes(), 1 << 20);
    }
}

#[test]
fn rings_of_each_priority_are_served() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    for client in clients() {
        for priority in [RingPriority::High, RingPriority::Normal, RingPriority::Low] {
            let options = RingOptions::default().depth(2).priority(priority);
            let mut session = Session::with(fixture.mount(client.clone()), 2, 10_000, &options);
            session.compare(&path, &fixture.behind("file"), (0..9u64).map(|n| (n * 10_000, 10_000)));
        }
    }
}

#[test]
fn a_ring_takes_as_many_reads_as_it_is_deep_and_gives_the_next_one_back() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 100_000);
    fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
    for client in clients() {
        let mount = fixture.mount(client);
        let options = RingOptions::default().depth(2);
        let mut session = Session::with(mount, 3, 100, &options);
        let file = session.mount.open_file(&path).unwrap();
        session.push(&file, 0, 100).unwrap();
        session.push(&file, 100, 100).unwrap();
        let Err(Refused::Full(transfer)) = session.push(&file, 200, 100) else {
            panic!("a full ring took a read")
        };
        assert_eq!(transfer.token, 200);
        session.ring.submit().unwrap();
        fixture.daemon.behave(Faults::default()).unwrap();
        assert_eq!(session.drain().unwrap().len(), 2);
        fixture.daemon.behave(Faults { stall: true, ..Faults::default() }).unwrap();
    }
}
