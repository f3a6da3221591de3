//! Tests of reads that compare digests, over servers that break bodies off or pause in them.

use crate::{HEAD_BYTES, Object, Problem, StoreOptions, policy::Limits};
use objectd::{Checksums, Dialect, Fault, Faults, Server};
use std::{sync::atomic::AtomicBool, thread, time::Duration};

const LEN: usize = HEAD_BYTES + 700_001;

fn bytes() -> Vec<u8> {
    (0..LEN).map(|at| (at * 7 % 251) as u8).collect()
}

/// A server that says the digests of its answers, an object of it, and options for that.
fn serving(dialect: Dialect, bytes: &[u8]) -> (Server, String, StoreOptions) {
    let server = Server::start().unwrap();
    server.speak(dialect);
    server.put("account/models/a.gguf", bytes);
    let mut options = StoreOptions::default();
    if dialect == Dialect::Azure {
        options.set("endpoint", &format!("{}/account", server.url())).unwrap();
        options.set("anonymous", "true").unwrap();
        return (server, "az://models/a.gguf".to_owned(), options);
    }
    server.say_checksums(Checksums::Digests);
    let url = format!("{}/account/models/a.gguf", server.url());
    (server, url, options)
}

fn read_all(url: &str, options: &StoreOptions) -> Vec<u8> {
    let stop = AtomicBool::new(false);
    let (object, mut found) = Object::open_with_head(url, options, &stop).unwrap();
    let from = found.len();
    found.resize(LEN, 0);
    object.read(from as u64, &mut found[from..], &stop).unwrap();
    found
}

#[test]
fn a_read_over_a_server_that_breaks_each_body_off_asks_for_less() {
    let bytes = bytes();
    let reads = |most, dialect| {
        let (server, url, options) = serving(dialect, &bytes);
        server.fail(Faults::always(Fault::TruncateAfter(most)));
        assert!(read_all(&url, &options) == bytes, "{dialect:?} {most}");
        let count = server.take_requests().len();
        assert!(count < 60, "{dialect:?} {most}: {count} requests");
    };
    thread::scope(|scope| {
        for most in [70_000, 300_000, HEAD_BYTES - 1] {
            for dialect in [Dialect::Azure, Dialect::S3] {
                let reads = &reads;
                scope.spawn(move || reads(most, dialect));
            }
        }
    });
}

#[test]
fn a_read_waits_longer_for_bodies_that_pause() {
    let bytes = bytes();
    let reads = |dialect| {
        let (server, url, options) = serving(dialect, &bytes);
        let object = Object::open(&url, &options).unwrap();
        // The first attempt waits for a second.
        server.fail(Faults::always(Fault::StallInside(Duration::from_millis(1500))));
        let mut found = vec![0; LEN - 50];
        object
            .read(50, &mut found, &AtomicBool::new(false))
            .unwrap_or_else(|error| panic!("{dialect:?}: {error}"));
        assert!(found == bytes[50..], "{dialect:?}");
    };
    thread::scope(|scope| {
        for dialect in [Dialect::Azure, Dialect::S3] {
            let reads = &reads;
            scope.spawn(move || reads(dialect));
        }
    });
}

#[test]
fn a_read_asks_for_all_again_once_answers_say_no_digests() {
    let bytes = bytes();
    let (server, url, options) = serving(Dialect::S3, &bytes);
    let object = Object::open(&url, &options).unwrap();
    server.fail(Faults::always(Fault::TruncateAfter(70_000)));
    server.take_requests();
    let (mut found, mut is_first) = (vec![0; LEN - 50], true);
    let came = |_: &[u8]| {
        if std::mem::take(&mut is_first) {
            server.say_checksums(Checksums::None);
            server.fail(Faults::default());
        }
    };
    object.read_with(50, &mut found, &AtomicBool::new(false), came).unwrap();
    assert!(found == bytes[50..]);
    let asked: Vec<_> = server.take_requests().iter().filter_map(|own| own.range).collect();
    // A short one that was compared, one as short without a digest, and the rest.
    let (first, last) = asked[asked.len() - 1];
    assert!(first > 70_050 && first < 300_000 && last == LEN - 1, "{asked:?}");
}

#[test]
fn bytes_that_are_compared_and_never_come_whole_end_a_read() {
    let bytes = bytes();
    let soon = Limits {
        stall: Duration::from_secs(2),
        longest_pause: Duration::from_millis(200),
        ..Limits::default()
    };
    let fails = |fault, dialect| {
        let (server, url, options) = serving(dialect, &bytes);
        // The first request tells of the object all the same.
        server.fail(Faults { fault: Some(fault), only: Some(1), ..Faults::default() });
        assert!(read_all(&url, &options) == bytes, "{fault:?} {dialect:?}");
        let object = Object::open(&url, &options).unwrap();
        object.data_client().pace().limit(soon);
        server.fail(Faults::always(fault));
        server.take_requests();
        let error = object.read(50, &mut vec![0; LEN - 50], &AtomicBool::new(false)).unwrap_err();
        assert!(matches!(&error.problem, Problem::Unreliable { .. }), "{fault:?} {dialect:?}: {error}");
        // It waits between its attempts.
        let count = server.take_requests().len();
        assert!(count < 500, "{fault:?} {dialect:?}: {count} requests");
    };
    // Side by side: each tries for two seconds.
    thread::scope(|scope| {
        for fault in [Fault::Truncate, Fault::Reset, Fault::TruncateAfter(50_000)] {
            for dialect in [Dialect::Azure, Dialect::S3] {
                let fails = &fails;
                scope.spawn(move || fails(fault, dialect));
            }
        }
    });
}
