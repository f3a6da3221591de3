//! Uploads: the store has the whole object or the old one, no upload stays open, and a damaged part is sent again.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use hoistway_objects::{Error, Object, Problem, Stop, StoreOptions, Upload, Uploaded};
use objectd::{Checksums, Dialect, Server, Step, WriteFault, WrongRegion};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const URL: &str = "s3://models/llama/a b.safetensors";
const PATH: &str = "models/llama/a b.safetensors";
const CANARY: &str = "canary";
/// Of three parts.
const LEN: usize = (16 << 20) + 12_345;
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// Less than the time that a cleanup has. One that takes as long may fail: this machine was away.
const FOR_CLEANUP: Duration = Duration::from_secs(9);

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 251) as u8).collect()
}

fn options(server: &Server, more: &[(&str, &str)]) -> StoreOptions {
    let mut options = StoreOptions::default();
    let own = [("endpoint", &*server.url()), ("access_key_id", "key"), ("secret_access_key", CANARY)];
    own.iter().chain(more).for_each(|(name, value)| options.set(name, value).unwrap());
    options
}

fn upload(url: &str, bytes: &[u8], options: &StoreOptions) -> Result<Uploaded, Error> {
    let stop = Stop::default();
    let upload = Upload::begin(url, bytes.len() as u64, options, &stop)?;
    // In an order that is not that of the object, each from two pieces.
    let sent = (0..upload.parts()).rev().try_for_each(|number| {
        let range = upload.range(number);
        let part = &bytes[range.start as usize..range.end as usize];
        let (first, second) = part.split_at(part.len() / 3);
        upload.send(number, &[first, second], &stop)
    });
    let done = sent.and_then(|()| upload.complete(&stop));
    if done.is_err() && !aborts(&upload) {
        WAS_AWAY.store(true, Ordering::Relaxed);
    }
    done
}

/// Whether this machine was away for all of the time that an abort had.
static WAS_AWAY: AtomicBool = AtomicBool::new(false);

fn is_clean(server: &Server) -> bool {
    server.open_uploads().is_empty() || WAS_AWAY.load(Ordering::Relaxed)
}

#[test]
fn objects_of_any_length_are_written_whole() {
    let server = Server::start().unwrap();
    let options = options(&server, &[]);
    for (len, parts) in [(1, 1), (8 << 20, 1), ((8 << 20) + 1, 2), (LEN, 3)] {
        server.take_requests();
        let bytes = bytes(len);
        let uploaded = upload(URL, &bytes, &options).unwrap();
        assert_eq!(uploaded.compared, Ok("CRC-64/NVME"));
        assert_eq!(uploaded.repeated, 0);
        assert!(server.object(PATH).unwrap() == bytes, "{len}");
        let requests = server.take_requests();
        let puts: Vec<_> = requests.iter().filter(|own| own.method == "PUT").collect();
        assert_eq!(puts.len(), parts);
        assert!(requests.iter().all(|own| own.authorization.is_some()), "{requests:?}");
        assert!(puts.iter().all(|own| own.checksum.is_some()), "{puts:?}");
        assert_eq!(requests.len(), if parts == 1 { 1 } else { parts + 2 });
        let (object, _) = Object::open_with_head(URL, &options, &AtomicBool::new(false)).unwrap();
        assert_eq!(object.len(), len as u64);
    }
    assert!(server.open_uploads().is_empty());
}

#[test]
fn objects_of_google_are_written_with_their_own_checksum() {
    let server = Server::start().unwrap();
    server.speak(Dialect::Google);
    let mut options = StoreOptions::default();
    for (name, value) in [("endpoint", &*server.url()), ("anonymous", "true")] {
        options.set(name, value).unwrap();
    }
    for len in [100, LEN] {
        let bytes = bytes(len);
        let uploaded = upload("gs://models/llama/a b.safetensors", &bytes, &options).unwrap();
        assert_eq!(uploaded.compared, Ok("CRC-32C"));
        assert!(server.object(PATH).unwrap() == bytes, "{len}");
    }
}

#[test]
fn what_may_pass_is_tried_again() {
    let bytes = bytes(LEN);
    for (step, fault) in [
        (Step::Create, WriteFault::Status(503)),
        (Step::Create, WriteFault::Reset),
        (Step::Part, WriteFault::Status(500)),
        (Step::Part, WriteFault::Status(503)),
        (Step::Part, WriteFault::Reset),
        (Step::Part, WriteFault::Lost),
        (Step::Part, WriteFault::Flip),
        (Step::Complete, WriteFault::Status(500)),
        (Step::Complete, WriteFault::ErrorInBody("InternalError")),
        (Step::Complete, WriteFault::ErrorInBody("SlowDown")),
        (Step::Complete, WriteFault::Reset),
        (Step::Complete, WriteFault::Lost),
    ] {
        let server = Server::start().unwrap();
        server.put(PATH, b"old");
        server.fail_writes(step, 2, fault);
        let uploaded = upload(URL, &bytes, &options(&server, &[])).unwrap();
        assert!(server.object(PATH).unwrap() == bytes, "{step:?} {fault:?}");
        assert_eq!(uploaded.compared, Ok("CRC-64/NVME"), "{step:?} {fault:?}");
        assert!(server.open_uploads().is_empty(), "{step:?} {fault:?}");
        assert!(step == Step::Create || uploaded.repeated > 0, "{step:?} {fault:?}");
    }
    let short = &bytes[..1000];
    for fault in [WriteFault::Status(503), WriteFault::Reset, WriteFault::Lost, WriteFault::Flip] {
        let server = Server::start().unwrap();
        server.fail_writes(Step::Put, 2, fault);
        let uploaded = upload(URL, short, &options(&server, &[])).unwrap();
        assert!(server.object(PATH).unwrap() == short && uploaded.repeated > 0, "{fault:?}");
    }
}

#[test]
fn what_does_not_pass_is_an_error_and_the_old_object_stays() {
    let bytes = bytes(LEN);
    let cases = [
        (Step::Create, WriteFault::Status(403), "status 403, AccessDenied"),
        (Step::Part, WriteFault::Status(403), "status 403, AccessDenied"),
        (Step::Part, WriteFault::Status(500), "status 500, InternalError"),
        (Step::Part, WriteFault::Flip, "BadDigest"),
        (Step::Complete, WriteFault::Status(403), "status 403, AccessDenied"),
        (Step::Complete, WriteFault::Status(500), "status 500, InternalError"),
        (Step::Complete, WriteFault::ErrorInBody("InvalidPart"), "status 200, InvalidPart"),
        (Step::Complete, WriteFault::ErrorInBody("InternalError"), "status 200, InternalError"),
    ];
    let fails = |step, fault, said: &str| {
        let server = Server::start().unwrap();
        server.put(PATH, b"old");
        server.fail_writes(step, usize::MAX, fault);
        let error = upload(URL, &bytes, &options(&server, &[])).unwrap_err();
        assert_eq!(error.url, URL);
        let text = format!("{error} {error:?}");
        assert!(text.contains(said) && !text.contains(CANARY), "{step:?} {fault:?}: {text}");
        assert_eq!(error.range.is_some(), step == Step::Part, "{text}");
        assert_eq!(server.object(PATH).unwrap(), b"old");
        assert!(is_clean(&server), "{step:?} {fault:?}");
    };
    // Side by side: each waits between its attempts.
    thread::scope(|scope| {
        for (step, fault, said) in cases {
            let fails = &fails;
            scope.spawn(move || fails(step, fault, said));
        }
    });
}

#[test]
fn an_upload_that_cannot_be_aborted_is_told() {
    let server = Server::start().unwrap();
    let (options, stop) = (options(&server, &[]), Stop::default());
    let upload = Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
    assert_eq!(server.open_uploads(), [PATH]);
    server.fail_writes(Step::Abort, usize::MAX, WriteFault::Status(403));
    let error = upload.abort(&stop).unwrap_err();
    assert!(matches!(&error.problem, Problem::LeftOpen(why) if why.contains("403")), "{error}");
    assert_eq!(server.open_uploads(), [PATH]);
    // What may pass is tried again.
    let mut open = 1;
    for fault in [WriteFault::Status(503), WriteFault::Reset, WriteFault::Lost] {
        let upload = Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
        server.fail_writes(Step::Abort, 1, fault);
        open += usize::from(!aborts(&upload));
        assert_eq!(server.open_uploads().len(), open);
    }
}

#[test]
fn aborts_end_ten_seconds_after_a_stop_however_many_there_are() {
    let server = Server::start().unwrap();
    let (options, stop) = (options(&server, &[]), Stop::default());
    let begin = || Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
    let uploads: Vec<_> = (0..6).map(|_| begin()).collect();
    server.fail_writes(Step::Abort, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
    let begun = Instant::now();
    for upload in &uploads {
        let error = upload.abort(&stop).unwrap_err();
        assert!(matches!(&error.problem, Problem::LeftOpen(_)), "{error}");
    }
    // Six limits of ten seconds would be as long.
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
}

#[test]
fn an_upload_is_aborted_again_where_a_part_came_after_the_abort() {
    let server = Server::start().unwrap();
    server.fail_writes(Step::Part, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
    server.then_fail_writes(Step::Abort, 2, WriteFault::PartAfter);
    let (options, stop) = (options(&server, &[]), Stop::default());
    let upload = Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
    let bytes = bytes(8 << 20);
    let error = stopped_at(&server, Step::Part, &stop, || upload.send(0, &[&bytes], &stop));
    assert!(matches!(error.problem, Problem::Stopped), "{error}");
    assert!(!aborts(&upload) || server.open_uploads().is_empty());
}

/// Aborts an upload that the store would abort. Whether it did: it fails where this machine was away for all of the time for it.
fn aborts(upload: &Upload) -> bool {
    let begun = Instant::now();
    match upload.abort(&Stop::default()) {
        Ok(()) => true,
        Err(error) => {
            assert!(begun.elapsed() >= FOR_CLEANUP, "{error}");
            false
        }
    }
}

/// What comes of work that is stopped once the server has got all of a request of this step.
fn stopped_at<T: Send>(
    server: &Server,
    step: Step,
    stop: &Stop,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> Error {
    let (begun, before) = (Instant::now(), server.received(step));
    let done = thread::scope(|scope| {
        let working = scope.spawn(|| work().map(drop));
        while server.received(step) == before {
            assert!(begun.elapsed() < LONG);
            thread::sleep(Duration::from_millis(1));
        }
        stop.set();
        working.join().unwrap()
    });
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    done.unwrap_err()
}

#[test]
fn a_stop_ends_a_part_that_is_not_answered_and_aborts_the_upload() {
    let server = Server::start().unwrap();
    let (options, stop) = (options(&server, &[]), Stop::default());
    let bytes = bytes(LEN);
    server.fail_writes(Step::Part, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
    let begun = Instant::now();
    let error = thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let upload = Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
            let range = upload.range(0);
            upload.send(0, &[&bytes[..range.end as usize]], &stop)
        });
        while server.received(Step::Part) == 0 {
            assert!(begun.elapsed() < LONG);
            thread::sleep(Duration::from_millis(1));
        }
        stop.set();
        sending.join().unwrap().unwrap_err()
    });
    assert!(matches!(error.problem, Problem::Stopped), "{error}");
    assert!(begun.elapsed() < LONG);
    assert!(server.open_uploads().is_empty() || begun.elapsed() >= FOR_CLEANUP);
}

#[test]
fn a_lost_completion_that_the_store_cannot_confirm_is_in_doubt() {
    let server = Server::start().unwrap();
    server.say_checksums(Checksums::None);
    server.fail_writes(Step::Complete, 1, WriteFault::Lost);
    let error = upload(URL, &bytes(LEN), &options(&server, &[])).unwrap_err();
    assert!(matches!(&error.problem, Problem::Doubtful(_)), "{error}");
    assert!(is_clean(&server));
}

#[test]
fn a_lost_answer_stays_in_doubt_whatever_the_store_says_later() {
    for (step, len) in [(Step::Put, 1000), (Step::Complete, LEN)] {
        for checksums in [Checksums::Whole, Checksums::None] {
            let server = Server::start().unwrap();
            server.put(PATH, b"old");
            server.say_checksums(checksums);
            server.fail_writes(step, 1, WriteFault::Lost);
            server.then_fail_writes(step, usize::MAX, WriteFault::Status(403));
            let (bytes, done) = (bytes(len), upload(URL, &bytes(len), &options(&server, &[])));
            assert!(server.object(PATH).unwrap() == bytes, "{step:?}");
            match (checksums, done) {
                (Checksums::Whole, done) => assert_eq!(done.unwrap().compared, Ok("CRC-64/NVME")),
                (_, Err(Error { problem: Problem::Doubtful(why), .. })) => {
                    assert!(why.contains("403"), "{why}")
                }
                (_, done) => panic!("{step:?}: {done:?}"),
            }
        }
    }
}

#[test]
fn a_write_that_is_refused_leaves_no_doubt() {
    let server = Server::start().unwrap();
    server.say_checksums(Checksums::None);
    for (step, len) in [(Step::Put, 1000), (Step::Complete, LEN)] {
        server.fail_writes(step, usize::MAX, WriteFault::Status(403));
        let error = upload(URL, &bytes(len), &options(&server, &[])).unwrap_err();
        assert!(matches!(&error.problem, Problem::Denied { .. }), "{error}");
    }
}

#[test]
fn a_stop_while_the_store_may_write_the_object_is_in_doubt_soon() {
    let long = Duration::from_secs(600);
    for (step, fault) in [
        (Step::Put, WriteFault::Stall(long)),
        (Step::Complete, WriteFault::Stall(long)),
        (Step::Complete, WriteFault::Trickle(long)),
    ] {
        let server = Server::start().unwrap();
        let (options, stop) = (options(&server, &[]), Stop::default());
        let bytes = bytes(if step == Step::Put { 1000 } else { LEN });
        let upload = Upload::begin(URL, bytes.len() as u64, &options, &stop).unwrap();
        let send = |number| {
            let range = upload.range(number);
            upload.send(number, &[&bytes[range.start as usize..range.end as usize]], &stop)
        };
        server.fail_writes(step, usize::MAX, fault);
        let error = match step {
            Step::Put => stopped_at(&server, step, &stop, || send(0)),
            _ => {
                (0..upload.parts()).for_each(|number| send(number).unwrap());
                stopped_at(&server, step, &stop, || upload.complete(&stop))
            }
        };
        assert!(matches!(&error.problem, Problem::Doubtful(_)), "{step:?} {fault:?}: {error}");
        assert!(!aborts(&upload) || server.open_uploads().is_empty());
    }
}

#[test]
fn a_completion_that_sends_blanks_for_long_is_waited_for() {
    let server = Server::start().unwrap();
    // A body of a load that comes so slowly is given up after 20 s.
    server.fail_writes(Step::Complete, 1, WriteFault::Trickle(Duration::from_secs(23)));
    let bytes = bytes(LEN);
    let uploaded = upload(URL, &bytes, &options(&server, &[])).unwrap();
    assert!(server.object(PATH).unwrap() == bytes);
    assert_eq!(uploaded.repeated, 0);
}

#[test]
fn a_store_that_says_another_checksum_gets_a_part_again_and_has_damaged_an_object_that_it_shows() {
    let server = Server::start().unwrap();
    let options = options(&server, &[]);
    server.fail_writes(Step::Part, 1, WriteFault::OtherChecksum);
    assert_eq!(upload(URL, &bytes(LEN), &options).unwrap().repeated, 1);
    for (step, len) in [(Step::Put, 1000), (Step::Complete, LEN)] {
        server.fail_writes(step, 1, WriteFault::OtherChecksum);
        let error = upload(URL, &bytes(len), &options).unwrap_err();
        let said = "its CRC-64/NVME is AAAAAAAAAAA=";
        assert!(matches!(&error.problem, Problem::StoredDamaged(why) if why.contains(said)), "{error}");
    }
}

#[test]
fn an_upload_whose_name_was_lost_is_told() {
    let server = Server::start().unwrap();
    server.fail_writes(Step::Create, 1, WriteFault::Lost);
    let uploaded = upload(URL, &bytes(LEN), &options(&server, &[])).unwrap();
    assert!(uploaded.has_stray);
    assert_eq!(server.open_uploads(), [PATH]);
}

#[test]
fn an_upload_that_may_stay_open_is_told_with_whatever_fails() {
    let server = Server::start().unwrap();
    let options = options(&server, &[]);
    server.fail_writes(Step::Create, usize::MAX, WriteFault::Stall(Duration::from_secs(600)));
    let stop = Stop::default();
    let error = stopped_at(&server, Step::Create, &stop, || Upload::begin(URL, LEN as u64, &options, &stop));
    assert!(matches!(&error.problem, Problem::MayBeOpen(_)), "{error}");
    server.fail_writes(Step::Create, 1, WriteFault::Lost);
    server.then_fail_writes(Step::Create, usize::MAX, WriteFault::Status(403));
    let error = Upload::begin(URL, LEN as u64, &options, &Stop::default()).unwrap_err();
    assert!(matches!(&error.problem, Problem::MayBeOpen(why) if why.contains("403")), "{error}");
    server.fail_writes(Step::Create, 1, WriteFault::Lost);
    let stop = Stop::default();
    let upload = Upload::begin(URL, LEN as u64, &options, &stop).unwrap();
    let begun = Instant::now();
    let error = upload.abort(&stop).unwrap_err();
    let was_away = matches!(&error.problem, Problem::LeftOpen(_)) && begun.elapsed() >= FOR_CLEANUP;
    assert!(was_away || matches!(&error.problem, Problem::MayBeOpen(_)), "{error}");
}

#[test]
fn a_store_without_checksums_takes_objects_and_that_is_told() {
    let bytes = bytes(LEN);
    let server = Server::start().unwrap();
    server.fail_writes(Step::Create, usize::MAX, WriteFault::NoChecksums);
    let uploaded = upload(URL, &bytes, &options(&server, &[])).unwrap();
    assert_eq!(uploaded.compared, Err("the store refuses checksums of uploads"));
    server.fail_writes(Step::Put, usize::MAX, WriteFault::NoChecksums);
    let uploaded = upload(URL, &bytes[..10], &options(&server, &[])).unwrap();
    assert_eq!(uploaded.compared, Err("the store refuses checksums of uploads"));
    assert!(server.object(PATH).unwrap() == bytes[..10]);
    server.fail_writes(Step::Put, usize::MAX, WriteFault::Silent);
    let uploaded = upload(URL, &bytes[..10], &options(&server, &[])).unwrap();
    assert_eq!(
        uploaded.compared,
        Err("the store did not say that it compared the bytes with their checksums")
    );
    server.take_requests();
    let uploaded = upload(URL, &bytes, &options(&server, &[("checksums", "off")])).unwrap();
    assert_eq!(uploaded.compared, Err("the store option checksums is off"));
    assert!(server.take_requests().iter().all(|own| own.checksum.is_none()));
    assert!(server.object(PATH).unwrap() == bytes);
}

#[test]
fn bytes_are_sent_again_without_a_checksum_only_where_that_was_refused() {
    let (server, bytes) = (Server::start().unwrap(), bytes(10));
    let options = options(&server, &[]);
    server.fail_writes(Step::Put, usize::MAX, WriteFault::Status(400));
    let error = upload(URL, &bytes, &options).unwrap_err();
    assert!(matches!(&error.problem, Problem::Refused { status: 400, .. }), "{error}");
    assert_eq!(server.received(Step::Put), 1);
    // The store may still be asked for the checksum of what it has.
    server.fail_writes(Step::Put, 1, WriteFault::NoChecksums);
    server.then_fail_writes(Step::Put, 1, WriteFault::Lost);
    server.then_fail_writes(Step::Put, usize::MAX, WriteFault::Status(403));
    upload(URL, &bytes, &options).unwrap();
    assert!(server.object(PATH).unwrap() == bytes);
}

#[test]
fn an_object_goes_to_the_region_of_its_bucket() {
    for (otherwise, len) in [(WrongRegion::Redirect, 10), (WrongRegion::Malformed, LEN)] {
        let server = Server::start().unwrap();
        server.lie_in("eu-west-1", otherwise);
        let url = format!("s3://upload-region-{len}/a");
        upload(&url, &bytes(len), &options(&server, &[])).unwrap();
        assert!(server.object(&format!("upload-region-{len}/a")).is_some());
    }
}

#[test]
fn what_cannot_be_written_is_said_with_what_can() {
    let stop = Stop::default();
    for (url, said) in [
        (
            "https://host/a",
            "web servers are only read; give a path of this machine, or an s3:// or gs:// URL",
        ),
        ("hf://org/model/a", "the hub is only read"),
        ("az://container/a", "saving to Azure is not there yet"),
        ("ftp://host/a", "there is no such scheme"),
        ("s3://bucket/folder/", "that of a folder"),
        ("s3://bucket", "that of a folder"),
    ] {
        let error = Upload::begin(url, 5, &StoreOptions::default(), &stop).unwrap_err();
        assert!(matches!(&error.problem, Problem::Invalid(why) if why.contains(said)), "{url}: {error}");
    }
    let error = Upload::begin(URL, u64::MAX, &StoreOptions::default(), &stop).unwrap_err();
    assert!(matches!(&error.problem, Problem::Invalid(why) if why.contains("5 TiB")), "{error}");
}
