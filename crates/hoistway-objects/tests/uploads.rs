//! Uploads: the store has the whole object or the old one, no upload stays open, and a damaged part is sent again.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use hoistway_objects::{Error, Object, Problem, Stop, StoreOptions, Upload, Uploaded};
use objectd::{Checksums, Dialect, Server, Step, WriteFault, WrongRegion};
use std::{
    io::{Read, Write},
    net::TcpStream,
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

const BLOB: &str = "az://models/llama/a b.safetensors";
const BLOB_PATH: &str = "account/models/llama/a b.safetensors";

fn azure() -> (Server, StoreOptions) {
    let server = Server::start().unwrap();
    server.speak(Dialect::Azure);
    let mut options = StoreOptions::default();
    let endpoint = format!("{}/account", server.url());
    for (name, value) in [("endpoint", &*endpoint), ("account", "account"), ("account_key", "Y2FuYXJ5")] {
        options.set(name, value).unwrap();
    }
    (server, options)
}

/// Why an upload failed, and what came of its abortion.
type Failed = Box<(Error, Result<(), Error>)>;

/// What comes of an upload to Azure.
fn upload_blob(bytes: &[u8], options: &StoreOptions) -> Result<Uploaded, Failed> {
    let stop = Stop::default();
    let upload = Upload::begin(BLOB, bytes.len() as u64, options, &stop).unwrap();
    let sent = (0..upload.parts()).rev().try_for_each(|number| {
        let range = upload.range(number);
        upload.send(number, &[&bytes[range.start as usize..range.end as usize]], &stop)
    });
    sent.and_then(|()| upload.complete(&stop)).map_err(|error| Box::new((error, upload.abort(&stop))))
}

#[test]
fn blobs_of_azure_are_written_by_one_request_or_in_blocks() {
    let (server, options) = azure();
    for (len, requests) in [(1, 1), (8 << 20, 1), (LEN, 4)] {
        server.take_requests();
        let bytes = bytes(len);
        let uploaded = upload_blob(&bytes, &options).unwrap();
        assert_eq!((uploaded.compared, uploaded.repeated), (Ok("CRC-64/NVME"), 0));
        assert!(server.object(BLOB_PATH).unwrap() == bytes, "{len}");
        let asked = server.take_requests();
        assert_eq!(asked.len(), requests, "{asked:?}");
        assert!(asked.iter().all(|own| own.authorization.is_some() && own.checksum.is_some()), "{asked:?}");
    }
    assert!(server.open_uploads().is_empty());
    let mut without = options;
    without.set("checksums", "off").unwrap();
    let uploaded = upload_blob(&bytes(LEN), &without).unwrap();
    assert_eq!(uploaded.compared, Err("the store option checksums is off"));
    assert!(server.take_requests().iter().all(|own| own.checksum.is_none()));
}

#[test]
fn an_emulator_that_knows_no_checksums_takes_blobs_without() {
    let (server, options) = azure();
    for (step, len, requests) in [(Step::Put, 1000, 2), (Step::Part, LEN, 5)] {
        server.fail_writes(step, usize::MAX, WriteFault::NoChecksums);
        server.take_requests();
        let uploaded = upload_blob(&bytes(len), &options).unwrap();
        assert_eq!(uploaded.compared, Err("the store refuses checksums of uploads"));
        assert!(server.object(BLOB_PATH).unwrap() == bytes(len));
        assert_eq!(server.take_requests().len(), requests);
    }
}

#[test]
fn one_refusal_of_a_proxy_does_not_turn_the_checksums_of_a_blob_off() {
    let (server, options) = azure();
    server.fail_writes(Step::Part, 1, WriteFault::Status(501));
    let uploaded = upload_blob(&bytes(LEN), &options).unwrap();
    assert_eq!(uploaded.compared, Ok("CRC-64/NVME"));
    assert!(server.object(BLOB_PATH).unwrap() == bytes(LEN));
    // The part that was refused, two others, and the list.
    assert_eq!(server.take_requests().iter().filter(|own| own.checksum.is_some()).count(), 4);
}

#[test]
fn a_list_of_blocks_that_the_store_refuses_as_damaged_leaves_no_doubt() {
    let (server, options) = azure();
    server.put(BLOB_PATH, b"old");
    server.fail_writes(Step::Complete, usize::MAX, WriteFault::Flip);
    let (error, _) = *upload_blob(&bytes(LEN), &options).unwrap_err();
    let is_told =
        matches!(&error.problem, Problem::Unreliable { last, .. } if last.contains("Crc64Mismatch"));
    assert!(is_told, "{error}");
    assert_eq!(server.object(BLOB_PATH).unwrap(), b"old");
}

#[test]
fn what_another_save_to_the_same_blob_took_away_is_told() {
    let ((server, options), stop, bytes) = (azure(), Stop::default(), bytes(LEN));
    let first = Upload::begin(BLOB, bytes.len() as u64, &options, &stop).unwrap();
    for number in 0..first.parts() {
        let range = first.range(number);
        first.send(number, &[&bytes[range.start as usize..range.end as usize]], &stop).unwrap();
    }
    upload_blob(&bytes, &options).unwrap();
    let error = first.complete(&stop).unwrap_err();
    assert!(error.to_string().contains("InvalidBlockList; another save to this name"), "{error}");
    server.fail_writes(Step::Part, usize::MAX, WriteFault::Status(409));
    let (error, _) = *upload_blob(&bytes, &options).unwrap_err();
    assert!(error.to_string().contains("BlockCountExceedsLimit; saves that failed"), "{error}");
}

#[test]
fn what_may_pass_in_azure_is_tried_again() {
    let faults = [
        WriteFault::Status(500),
        WriteFault::Status(503),
        WriteFault::Reset,
        WriteFault::Lost,
        WriteFault::Flip,
    ];
    let passes = |step, len, fault| {
        let (server, options) = azure();
        server.put(BLOB_PATH, b"old");
        server.fail_writes(step, 2, fault);
        let bytes = bytes(len);
        let uploaded = upload_blob(&bytes, &options).unwrap();
        assert!(server.object(BLOB_PATH).unwrap() == bytes, "{step:?} {fault:?}");
        assert_eq!(uploaded.compared, Ok("CRC-64/NVME"), "{step:?} {fault:?}");
        assert!(uploaded.repeated > 0 && server.open_uploads().is_empty(), "{step:?} {fault:?}");
    };
    // Side by side: each waits between its attempts.
    thread::scope(|scope| {
        for (step, len) in [(Step::Part, LEN), (Step::Complete, LEN), (Step::Put, 1000)] {
            for fault in faults {
                let passes = &passes;
                scope.spawn(move || passes(step, len, fault));
            }
        }
    });
}

#[test]
fn blocks_of_an_upload_that_fails_stay_unseen_and_that_is_told() {
    let (server, options) = azure();
    server.put(BLOB_PATH, b"old");
    // A store that refused each block has none.
    for status in [403, 404, 412] {
        server.fail_writes(Step::Part, usize::MAX, WriteFault::Status(status));
        let (error, aborted) = *upload_blob(&bytes(LEN), &options).unwrap_err();
        assert!(error.to_string().contains(&format!("status {status}")), "{error}");
        aborted.unwrap();
        assert!(server.open_uploads().is_empty());
    }
    server.fail_writes(Step::Complete, usize::MAX, WriteFault::Status(403));
    let (error, aborted) = *upload_blob(&bytes(LEN), &options).unwrap_err();
    assert!(matches!(&error.problem, Problem::Denied { .. }), "{error}");
    let left = aborted.unwrap_err();
    assert!(matches!(&left.problem, Problem::BlocksLeft), "{left}");
    assert!(left.to_string().contains("for a week"), "{left}");
    assert_eq!(server.object(BLOB_PATH).unwrap(), b"old");
    assert_eq!(server.open_uploads(), [BLOB_PATH]);
    // The next one takes them away.
    server.fail_writes(Step::Part, 0, WriteFault::Reset);
    upload_blob(&bytes(LEN), &options).unwrap();
    assert!(server.open_uploads().is_empty());
    // Whether a block is stored whose answer is lost shows nothing.
    server.fail_writes(Step::Part, 1, WriteFault::Lost);
    server.then_fail_writes(Step::Part, usize::MAX, WriteFault::Status(403));
    let (_, aborted) = *upload_blob(&bytes(LEN), &options).unwrap_err();
    assert!(matches!(aborted.unwrap_err().problem, Problem::BlocksLeft));
    server.fail_writes(Step::Part, 0, WriteFault::Reset);
    upload_blob(&bytes(LEN), &options).unwrap();
    let upload = Upload::begin(BLOB, LEN as u64, &options, &Stop::default()).unwrap();
    upload.abort(&Stop::default()).unwrap();
    server.fail_writes(Step::Put, usize::MAX, WriteFault::Status(403));
    let (error, aborted) = *upload_blob(b"new", &options).unwrap_err();
    assert!(matches!(&error.problem, Problem::Denied { .. }), "{error}");
    aborted.unwrap();
}

#[test]
fn a_lost_answer_of_azure_is_in_doubt_unless_the_blob_shows_what_became_of_it() {
    let is_told = |step, len| {
        let (server, options) = azure();
        server.put(BLOB_PATH, b"old");
        server.fail_writes(step, 1, WriteFault::Lost);
        server.then_fail_writes(step, usize::MAX, WriteFault::Status(403));
        upload_blob(&bytes(len), &options).unwrap();
        assert!(server.object(BLOB_PATH).unwrap() == bytes(len), "{step:?}");
        // The blob is that of another save, of the same length.
        let mut other = bytes(len);
        other[0] ^= 1;
        server.put(BLOB_PATH, &other);
        server.fail_writes(step, usize::MAX, WriteFault::Status(500));
        let (error, _) = *upload_blob(&bytes(len), &options).unwrap_err();
        assert!(matches!(&error.problem, Problem::Doubtful(_)), "{step:?}: {error}");
    };
    // Side by side: each waits between its attempts.
    thread::scope(|scope| {
        scope.spawn(|| is_told(Step::Put, 1000));
        scope.spawn(|| is_told(Step::Complete, LEN));
    });
    let (server, options) = azure();
    server.fail_writes(Step::Part, 1, WriteFault::OtherChecksum);
    assert_eq!(upload_blob(&bytes(LEN), &options).unwrap().repeated, 1);
    server.fail_writes(Step::Put, 1, WriteFault::OtherChecksum);
    let (error, _) = *upload_blob(&bytes(1000), &options).unwrap_err();
    assert!(matches!(&error.problem, Problem::StoredDamaged(_)), "{error}");
}

#[test]
fn blocks_that_another_program_left_are_named_as_the_reason() {
    let (server, options) = azure();
    let mut socket = TcpStream::connect(server.url().trim_start_matches("http://")).unwrap();
    let target = "/account/models/llama/a%20b.safetensors?comp=block&blockid=YQ%3D%3D";
    write!(socket, "PUT {target} HTTP/1.1\r\nContent-Length: 1\r\n\r\na").unwrap();
    assert!(socket.read(&mut [0; 4096]).unwrap() > 0);
    let (error, _) = *upload_blob(&bytes(LEN), &options).unwrap_err();
    assert!(error.to_string().contains("InvalidBlobOrBlock; another program"), "{error}");
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
        let both = [Checksums::Whole, Checksums::None]
            .map(|own| [WriteFault::Lost, WriteFault::Garbled].map(|fault| (own, fault)));
        for (checksums, fault) in both.into_iter().flatten() {
            let server = Server::start().unwrap();
            server.put(PATH, b"old");
            server.say_checksums(checksums);
            server.fail_writes(step, 1, fault);
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
    for fault in [WriteFault::Lost, WriteFault::Garbled] {
        let server = Server::start().unwrap();
        server.fail_writes(Step::Create, 1, fault);
        let uploaded = upload(URL, &bytes(LEN), &options(&server, &[])).unwrap();
        assert!(uploaded.has_stray);
        assert_eq!(server.open_uploads(), [PATH]);
    }
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
    server.fail_writes(Step::Create, usize::MAX, WriteFault::Status(400));
    let error = upload(URL, &self::bytes(LEN), &options).unwrap_err();
    assert!(matches!(&error.problem, Problem::Refused { status: 400, .. }), "{error}");
    assert_eq!(server.received(Step::Create), 1);
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
            "web servers are only read; give a path of this machine, or an s3://, gs:// or az:// URL",
        ),
        ("hf://org/model/a", "the hub is only read"),
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
