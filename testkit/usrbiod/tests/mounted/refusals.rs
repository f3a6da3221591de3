//! What cannot be is an error that says what to do.

use crate::fixture::{Fixture, Session, clients};
use hoistway_usrbio::{Client, Error, IovOptions, Mount, Refused, RingOptions, extract_mount_point};
use std::path::Path;
use usrbiod::{Faults, Options};

#[test]
fn a_read_only_mount_cannot_be_registered_with() {
    let Some(fixture) = Fixture::start_with(&Options { read_only: true, ..Options::default() }) else {
        return;
    };
    for client in clients() {
        let mount = fixture.mount(client);
        let error = mount.create_ring(&RingOptions::default()).unwrap_err();
        assert!(
            matches!(&error, Error::ReadOnlyMount { mount } if mount == fixture.daemon.mount_point()),
            "{error}"
        );
        let error = mount.create_iov(&IovOptions::default().len(4096)).unwrap_err();
        assert!(matches!(error, Error::ReadOnlyMount { .. }), "{error}");
    }
}

#[test]
fn paths_elsewhere_are_not_on_a_3fs_and_the_error_names_what_is() {
    let Some(fixture) = Fixture::start() else { return };
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    let Err(Error::NotOn3fs { path, seen }) = Mount::open(elsewhere.path(), Client::Native) else {
        panic!("it was opened");
    };
    assert_eq!(path, elsewhere.path());
    assert!(seen.contains(&fixture.daemon.mount_point().to_owned()), "{seen:?}");
    for client in clients() {
        let mount = fixture.mount(client);
        assert!(matches!(mount.open_file(elsewhere.path()), Err(Error::NotOn3fs { .. })));
        assert!(matches!(mount.open_file(fixture.daemon.mount_point()), Err(Error::Invalid(_))));
    }
}

#[test]
fn a_missing_file_is_an_error_and_not_the_end_of_the_process() {
    let Some(fixture) = Fixture::start() else { return };
    let missing = fixture.path("missing");
    for client in clients() {
        let error = fixture.mount(client).open_file(&missing).unwrap_err();
        assert!(matches!(&error, Error::System { path, .. } if *path == missing), "{error}");
        assert_eq!(error.errno(), Some(libc::ENOENT));
    }
    assert_eq!(extract_mount_point(&missing).unwrap_err().errno(), Some(libc::ENOENT));
}

#[test]
fn the_mount_point_is_found_from_inside_and_by_links() {
    let Some(fixture) = Fixture::start() else { return };
    fixture.write("file", 1);
    std::fs::create_dir(fixture.behind("directory")).unwrap();
    let point = fixture.daemon.mount_point();
    let link = tempfile::tempdir().unwrap();
    let linked = link.path().join("link");
    std::os::unix::fs::symlink(fixture.path("file"), &linked).unwrap();
    for path in [point, &fixture.path("file"), &fixture.path("directory"), &linked] {
        assert_eq!(extract_mount_point(path).unwrap(), point, "{}", path.display());
    }
    assert!(extract_mount_point(Path::new("/")).is_err());
}

#[test]
fn each_error_number_says_what_it_means_and_where_it_happened() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 10_000);
    let cases = [
        (0, libc::EREMOTEIO, "network"),
        (libc::EACCES, libc::EACCES, "InfiniBand"),
        (libc::EBADF, libc::EBADF, "open it again"),
        (libc::ENODATA, libc::ENODATA, "hole"),
        (libc::EINVAL, libc::EINVAL, "buffer"),
        (libc::EIO, libc::EIO, "log"),
    ];
    for client in clients() {
        let mut session = Session::new(fixture.mount(client), 1, 4096);
        let file = session.mount.open_file(&path).unwrap();
        for (errno, expected, word) in cases {
            fixture.daemon.behave(Faults { error_every: 1, errno, ..Faults::default() }).unwrap();
            let error = session.read(&file, 5000, 4096).unwrap_err();
            let Error::Io { path: named, offset: 5000, len: 4096, errno, hint, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!((named, *errno), (&path, expected));
            assert!(hint.contains(word), "{error}");
        }
        // The ring outlives errors of its reads.
        fixture.daemon.behave(Faults::default()).unwrap();
        assert_eq!(session.read(&file, 0, 4096).unwrap().len(), 4096);
    }
}

#[test]
fn reads_that_leave_their_slot_or_straddle_blocks_are_refused() {
    let Some(fixture) = Fixture::start() else { return };
    let path = fixture.write("file", 10_000);
    for client in clients() {
        let mount = fixture.mount(client);
        let options = IovOptions::default().len(8192).block_bytes(4096);
        let mut slots = mount.create_iov(&options).unwrap().slots(8192);
        let mut session = Session::new(mount, 1, 100);
        let file = session.mount.open_file(&path).unwrap();
        session.slots.append(&mut slots);
        for (offset, len) in [(0, 8193), (0, 0), (u64::MAX, 1), (0, 4097)] {
            match session.push(&file, offset, len) {
                Err(Refused::Failed(transfer, Error::Invalid(_))) => session.slots.push(transfer.slot),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(session.read(&file, 0, 4096).unwrap().len(), 4096);
    }
}

#[test]
fn impossible_rings_and_buffers_are_refused() {
    let Some(fixture) = Fixture::start() else { return };
    for client in clients() {
        let mount = fixture.mount(client);
        for (depth, batch) in [(0, 1), (1 << 20, 1), (1, 0), (1, 1000)] {
            let error = mount.create_ring(&RingOptions::default().depth(depth).batch(batch)).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
        }
        for (len, block_bytes) in [(0, 0), (10, 11)] {
            let error =
                mount.create_iov(&IovOptions::default().len(len).block_bytes(block_bytes)).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
        }
    }
}
