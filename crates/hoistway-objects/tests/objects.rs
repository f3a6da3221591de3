//! Objects of a server that fails on demand: the right bytes, or an error that says why, in bounded time.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use hoistway_objects::{Error, HEAD_BYTES, Object, Problem, StoreOptions, list};
use objectd::{Fault, Faults, Heads, Server, WrongRegion};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const LEN: usize = HEAD_BYTES + 700_001;
const CANARY: &str = "canary";
/// How long a server stalls that does not answer any more.
const ENDLESS: Duration = Duration::from_secs(600);

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 251) as u8).collect()
}

/// A server with one object.
fn served() -> (Server, Vec<u8>) {
    let server = Server::start().unwrap();
    let bytes = bytes(LEN);
    server.put("models/llama/a b.gguf", &bytes);
    (server, bytes)
}

fn options(server: &Server) -> StoreOptions {
    let mut options = StoreOptions::default();
    for (name, value) in [
        ("endpoint", &*server.url()),
        ("access_key_id", "key"),
        ("secret_access_key", CANARY),
        ("session_token", CANARY),
    ] {
        options.set(name, value).unwrap();
    }
    options
}

fn urls(server: &Server) -> [String; 2] {
    [
        "s3://models/llama/a b.gguf".into(),
        format!("{}/models/llama/a%20b.gguf?X-Amz-Signature={CANARY}", server.url()),
    ]
}

fn read(object: &Object, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut target = vec![0xA5; len];
    let count = object.read(offset, &mut target, &AtomicBool::new(false))?;
    target.truncate(count);
    Ok(target)
}

#[test]
fn requests_say_that_the_caller_pays_if_that_is_asked_for() {
    let (server, bytes) = served();
    let [url, _] = urls(&server);
    for pays in [false, true] {
        let mut options = options(&server);
        options.requester_pays = pays;
        let object = Object::open(&url, &options).unwrap();
        assert!(read(&object, 0, LEN).unwrap() == bytes);
        assert!(!list("s3://models/llama/", &options, &AtomicBool::new(false)).unwrap().is_empty());
        let requests = server.take_requests();
        assert!(requests.len() >= 3);
        for request in requests {
            let signed = request.authorization.unwrap().contains("x-amz-request-payer");
            assert_eq!((request.payer.as_deref(), signed), (pays.then_some("requester"), pays));
        }
    }
}

fn listed(url: &str, server: &Server) -> Result<Vec<String>, Error> {
    list(url, &options(server), &AtomicBool::new(false))
}

/// Nothing that an error or an object shows is secret.
fn assert_shows_no_secret(shown: &str) {
    assert!(!shown.contains(CANARY), "{shown}");
}

#[test]
fn any_range_is_read_and_each_request_names_the_version() {
    let (server, bytes) = served();
    for url in urls(&server) {
        // A server that answered late is waited for longer: on a busy machine, no request is repeated as too slow.
        server.fail(Faults { latency: Duration::from_millis(1500), ..Faults::default() });
        let (object, head) =
            Object::open_with_head(&url, &options(&server), &AtomicBool::new(false)).unwrap();
        assert_eq!((object.len(), object.is_pinned(), &*head), (LEN as u64, true, &bytes[..HEAD_BYTES]));
        server.fail(Faults::default());
        let requests = server.take_requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        assert_eq!(requests[0].range, Some((0, HEAD_BYTES - 1)));
        for (offset, len) in
            [(0, 1), (5, 70_000), (LEN - 3, 3), (LEN - 3, 100), (LEN, 5), (LEN + 5, 5), (0, LEN)]
        {
            let expected = bytes.get(offset..LEN.min(offset + len)).unwrap_or_default();
            assert!(read(&object, offset as u64, len).unwrap() == expected, "{len} bytes from {offset}");
        }
        let requests = server.take_requests();
        assert_eq!(requests.len(), 5, "past the end there is nothing to ask for");
        assert!(requests.iter().all(|own| own.if_match.is_some() && own.method == "GET"));
        let is_signed = |own: &objectd::Request| {
            let signature = own.authorization.as_deref().unwrap_or_default();
            signature.starts_with("AWS4-HMAC-SHA256 Credential=key/")
        };
        assert!(requests.iter().all(|own| is_signed(own) == url.starts_with("s3:")), "{requests:?}");
        assert_shows_no_secret(&format!("{object:?} {}", object.url()));
    }
    assert_eq!(server.connections(), 1 + 1, "one connection each, for signed and for other requests");
}

#[test]
fn what_may_pass_is_tried_again() {
    let (server, bytes) = served();
    let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
    for fault in [
        Fault::Status(500),
        Fault::Status(503),
        Fault::Status(429),
        Fault::Truncate,
        Fault::Reset,
        Fault::Garbage,
        Fault::LongHead,
        Fault::StallInside(ENDLESS),
        Fault::Stall(ENDLESS),
    ] {
        server.fail(Faults::every(2, fault));
        for _ in 0..2 {
            let begun = Instant::now();
            let found = read(&object, 5, LEN - 5).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            assert!(found == bytes[5..], "{fault:?}");
            assert!(begun.elapsed() < ENDLESS / 4, "{fault:?}: {:?}", begun.elapsed());
        }
    }
}

#[test]
fn a_body_that_is_cut_is_continued_where_it_ended() {
    let (server, bytes) = served();
    let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
    server.take_requests();
    server.fail(Faults::every(1, Fault::Truncate));
    // Each attempt brings half of the rest.
    assert!(read(&object, 1, 1 << 16).unwrap() == bytes[1..][..1 << 16]);
    let mut asked: Vec<_> = server.take_requests().iter().filter_map(|own| own.range).collect();
    // What brought nothing in time is asked for again.
    asked.dedup();
    assert_eq!(&asked[..3], [(1, 1 << 16), (1 + (1 << 15), 1 << 16), (1 + (3 << 14), 1 << 16)]);
}

#[test]
fn every_answer_that_brings_bytes_of_the_range_is_progress() {
    let (server, bytes) = served();
    for url in urls(&server) {
        for fault in [Fault::Short, Fault::Chunked, Fault::UntilClose] {
            server.fail(Faults::always(fault));
            server.take_requests();
            let (object, head) =
                Object::open_with_head(&url, &options(&server), &AtomicBool::new(false)).unwrap();
            assert!(head == bytes[..HEAD_BYTES], "{fault:?}");
            assert!(read(&object, 5, LEN - 5).unwrap() == bytes[5..], "{fault:?}");
            // It continues where the part ended.
            let asked: Vec<_> = server.take_requests().iter().filter_map(|own| own.range).collect();
            let fewest = if fault == Fault::Short { 5 } else { 2 };
            assert!(asked.len() >= fewest, "{fault:?}: {asked:?}");
        }
    }
}

#[test]
fn small_files_that_come_whole_are_read_at_any_place_and_large_ones_are_refused() {
    let (server, _) = served();
    let small = bytes(5000);
    server.put("models/small", &small);
    server.fail(Faults::always(Fault::Whole));
    for url in ["s3://models/small".to_owned(), format!("{}/models/small", server.url())] {
        let (object, head) =
            Object::open_with_head(&url, &options(&server), &AtomicBool::new(false)).unwrap();
        assert_eq!(head, small);
        for (offset, len) in [(0, 5000), (7, 100), (4999, 1)] {
            assert_eq!(read(&object, offset, len).unwrap(), small[offset as usize..][..len]);
        }
        server.put("models/small", &small[1..]);
        let changed = read(&object, 7, 100).unwrap_err();
        assert!(matches!(changed.problem, Problem::Changed(_)), "{changed:?}");
        server.put("models/small", &small);
    }
    let refused = Object::open(&urls(&server)[0], &options(&server)).unwrap_err();
    assert!(matches!(refused.problem, Problem::WrongAnswer(_)), "{refused:?}");
}

#[test]
fn links_of_web_servers_are_followed_to_the_object_that_they_lead_to() {
    let ((server, _), (elsewhere, bytes)) = (served(), served());
    server.redirect("download/a", &elsewhere, "models/llama/a b.gguf".replace(' ', "%20").as_str());
    let url = format!("{}/download/a", server.url());
    let object = Object::open(&url, &StoreOptions::default()).unwrap();
    assert_eq!(object.len(), LEN as u64);
    server.take_requests();
    assert!(read(&object, 5, 100_000).unwrap() == bytes[5..100_005]);
    assert!(server.take_requests().is_empty(), "the place is known");
    // What it led to expires: the link is asked again, for the same version.
    elsewhere.expire();
    assert!(read(&object, 7, 100_000).unwrap() == bytes[7..100_007]);
    assert!(!server.take_requests().is_empty());
    elsewhere.put("models/llama/a b.gguf", &bytes[1..]);
    elsewhere.expire();
    let changed = read(&object, 7, 1000).unwrap_err();
    assert!(matches!(changed.problem, Problem::Changed(_)), "{changed:?}");
    // A link that leads to itself ends.
    server.redirect("round", &server, "round");
    let round = Object::open(&format!("{}/round", server.url()), &StoreOptions::default()).unwrap_err();
    assert!(matches!(round.problem, Problem::WrongAnswer(_)), "{round:?}");
    for error in [changed, round] {
        assert_shows_no_secret(&format!("{error} {error:?} {object:?}"));
    }
}

/// Reads of many threads at once, all of which succeed.
fn read_by(threads: usize, object: &Object, bytes: &[u8]) {
    thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|number| {
                scope.spawn(move || {
                    let found =
                        read(object, number as u64, 300_000).unwrap_or_else(|error| panic!("{error}"));
                    assert!(found == bytes[number..][..300_000]);
                })
            })
            .collect();
        readers.into_iter().for_each(|own| own.join().unwrap());
    });
}

#[test]
fn the_last_request_of_a_load_is_asked_a_second_time() {
    let (server, bytes) = served();
    // So long that a busy machine changes little of what is usual.
    let latency = Duration::from_secs(1);
    server.fail(Faults { latency, ..Faults::default() });
    let object = Object::open(&urls(&server)[1], &options(&server)).unwrap();
    server.take_requests();
    // One of them takes longer than four times as long as usual, and not so long that it is given up.
    let fault = Some(Fault::Stall(Duration::from_millis(6500)));
    server.fail(Faults { fault, every: 32, latency, ..Faults::default() });
    read_by(32, &object, &bytes);
    assert!(server.take_requests().len() > 32);
}

#[test]
fn connections_that_the_network_forgot_are_tried_once_and_no_more() {
    let (server, bytes) = served();
    let object = Object::open(&urls(&server)[1], &options(&server)).unwrap();
    // So that many connections are kept.
    server.fail(Faults { latency: Duration::from_millis(500), ..Faults::default() });
    read_by(32, &object, &bytes);
    assert!(server.connections() > 1, "{}", server.connections());
    server.forget_connections();
    assert!(read(&object, 5, 1000).unwrap() == bytes[5..1005]);
    assert_eq!(server.requests_to_the_dead(), 1);
    // All others were closed: more reads at once than there are live connections find none of them.
    read_by(8, &object, &bytes);
    assert_eq!(server.requests_to_the_dead(), 1);
}

#[test]
fn a_restart_and_a_reset_of_all_connections_fail_no_read() {
    for away in [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(3)] {
        let (server, bytes) = served();
        let object = Object::open(&urls(&server)[1], &options(&server)).unwrap();
        server.fail(Faults { latency: Duration::from_millis(200), ..Faults::default() });
        thread::scope(|scope| {
            let reading = scope.spawn(|| read_by(128, &object, &bytes));
            // In the middle of them.
            while server.most_in_flight() < 8 {
                thread::sleep(Duration::from_millis(5));
            }
            server.go_away(true);
            thread::sleep(away);
            server.go_away(false);
            reading.join().unwrap();
        });
    }
}

#[test]
fn an_address_where_no_server_is_fails_soon_and_says_why() {
    // A port that nothing listens on.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let begun = Instant::now();
    let url = format!("http://127.0.0.1:{port}/a");
    let error = Object::open(&url, &StoreOptions::default()).unwrap_err();
    assert!(
        matches!(&error.problem, Problem::Unreliable { last, .. } if last.contains("cannot be reached")),
        "{error:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn a_body_that_trickles_is_given_up_for_another_connection() {
    let (server, bytes) = served();
    let object = Object::open(&urls(&server)[1], &options(&server)).unwrap();
    server.fail(Faults::every(2, Fault::Trickle));
    for _ in 0..2 {
        assert!(read(&object, 50, 1 << 20).unwrap() == bytes[50..][..1 << 20]);
    }
}

#[test]
fn an_answer_that_is_not_the_range_is_an_error() {
    let (server, _) = served();
    for url in urls(&server) {
        server.fail(Faults::default());
        let object = Object::open(&url, &options(&server)).unwrap();
        for fault in [
            Fault::Shift,
            Fault::LyingRange,
            Fault::LongChunks,
            Fault::Whole,
            Fault::LongBody,
            Fault::ShortBody,
            Fault::Encoded,
            Fault::NoRange,
        ] {
            server.fail(Faults::always(fault));
            let error = read(&object, 50, 1000).unwrap_err();
            assert!(matches!(error.problem, Problem::WrongAnswer(_)), "{fault:?}: {error:?}");
            assert_eq!(
                (error.url.as_str(), error.range.clone()),
                (object.url(), Some(50..1050)),
                "{fault:?}"
            );
            assert!(error.to_string().contains("bytes 50..1050"), "{error}");
            assert_shows_no_secret(&format!("{error} {error:?}"));
        }
    }
}

#[test]
fn refusals_say_what_the_server_said() {
    let (server, _) = served();
    let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
    server.fail(Faults::always(Fault::Status(403)));
    let denied = read(&object, 50, 1000).unwrap_err();
    assert!(
        matches!(&denied.problem, Problem::Denied { said } if said == "status 403, AccessDenied"),
        "{denied:?}"
    );
    server.fail(Faults::always(Fault::RedirectWithin));
    let within = read(&object, 50, 1000).unwrap_err();
    assert!(within.to_string().contains("status 302, Found, to /elsewhere/a)"), "{within}");
    server.fail(Faults::always(Fault::Redirect));
    let redirected = read(&object, 50, 1000).unwrap_err();
    let is_told = matches!(&redirected.problem, Problem::Redirected { said, .. } if said.ends_with("to https://elsewhere.example/a"));
    assert!(is_told, "{redirected:?}");
    let missing = Object::open("s3://models/none", &options(&server)).unwrap_err();
    assert!(matches!(missing.problem, Problem::NotFound { .. }), "{missing:?}");
    for error in [denied, within, redirected, missing] {
        assert_shows_no_secret(&format!("{error} {error:?}"));
    }
}

#[test]
fn an_object_that_changed_is_an_error_wherever_it_is_noticed() {
    for ignores_preconditions in [false, true] {
        let (server, bytes) = served();
        for change in ["swapped", "longer", "gone", "other ETag"] {
            server.fail(Faults::default());
            server.put("models/llama/a b.gguf", &bytes);
            let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
            let mut faults = Faults { ignores_preconditions, ..Faults::default() };
            match change {
                "swapped" => faults = Faults { ignores_preconditions, ..Faults::every(1, Fault::Swap) },
                "longer" => server.put("models/llama/a b.gguf", &[&*bytes, b"more"].concat()),
                "gone" => server.remove("models/llama/a b.gguf"),
                _ => faults = Faults { ignores_preconditions, ..Faults::every(1, Fault::OtherETag) },
            }
            server.fail(faults);
            let error = read(&object, 50, 1000).unwrap_err();
            assert!(matches!(error.problem, Problem::Changed(_)), "{change}: {error:?}");
            assert!(object.change().is_some(), "{change}");
        }
    }
}

#[test]
fn an_object_without_a_strong_etag_is_refused_unless_that_is_asked_for() {
    for fault in [Fault::NoETag, Fault::WeakETag] {
        let (server, bytes) = served();
        server.fail(Faults::always(fault));
        let error = Object::open(&urls(&server)[0], &options(&server)).unwrap_err();
        assert!(matches!(error.problem, Problem::NoETag { .. }), "{error:?}");
        let mut options = options(&server);
        options.set("unpinned", "true").unwrap();
        let object = Object::open(&urls(&server)[0], &options).unwrap();
        assert!(!object.is_pinned());
        assert!(read(&object, 50, 1000).unwrap() == bytes[50..1050]);
        server.put("models/llama/a b.gguf", &bytes[..LEN - 1]);
        assert!(matches!(read(&object, 50, 1000).unwrap_err().problem, Problem::Changed(_)));
    }
}

#[test]
fn a_server_that_never_answers_is_an_error_in_bounded_time() {
    let (server, _) = served();
    let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
    server.fail(Faults::always(Fault::Status(500)));
    let begun = Instant::now();
    let error = read(&object, 50, 1000).unwrap_err();
    let is_told = matches!(
        &error.problem,
        Problem::Unreliable { attempts: 10, last } if last.contains("500, InternalError; the server answered so 10 times")
    );
    assert!(is_told && begun.elapsed() < Duration::from_secs(180), "{error:?} after {:?}", begun.elapsed());
}

#[test]
fn a_read_that_is_stopped_ends_soon_and_leaves_no_connection() {
    let (server, _) = served();
    let object = Object::open(&urls(&server)[0], &options(&server)).unwrap();
    for fault in [Fault::StallInside(ENDLESS), Fault::Trickle] {
        server.fail(Faults::always(fault));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // So long that it does not end by itself, a half or a byte at a time.
            let reading = scope.spawn(|| object.read(50, &mut [0; 1 << 16], &stop).unwrap_err());
            thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            let error = reading.join().unwrap();
            assert!(matches!(error.problem, Problem::Stopped), "{fault:?}: {error:?}");
            assert!(begun.elapsed() < Duration::from_secs(60), "{fault:?}: {:?}", begun.elapsed());
        });
    }
}

#[test]
fn a_folder_is_listed_page_by_page() {
    let (server, _) = served();
    for name in ["b.gguf", "c & d.gguf", "e.gguf", "folder/f.gguf"] {
        server.put(&format!("models/llama/{name}"), b"x");
    }
    let names = listed("s3://models/llama/", &server).unwrap();
    assert_eq!(
        names,
        ["a b.gguf", "b.gguf", "c & d.gguf", "e.gguf"].map(|name| format!("s3://models/llama/{name}"))
    );
    assert_eq!(listed("s3://models/none/", &server).unwrap(), [""; 0]);
    server.fail(Faults { endless_listing: true, ..Faults::default() });
    let error = listed("s3://models/llama/", &server).unwrap_err();
    assert!(matches!(error.problem, Problem::WrongAnswer(_)), "{error:?}");
    assert!(matches!(listed("s3://models/llama", &server).unwrap_err().problem, Problem::Invalid(_)));
}

#[test]
fn a_bucket_of_another_region_is_read_there_unless_a_region_is_named() {
    for (at, otherwise) in
        [WrongRegion::Redirect, WrongRegion::Malformed, WrongRegion::InText].into_iter().enumerate()
    {
        let (server, bytes) = served();
        server.lie_in("eu-west-1", otherwise);
        let url = &urls(&server)[0];
        let mut named = options(&server);
        named.set("region", "us-west-2").unwrap();
        for error in [
            Object::open(url, &named).unwrap_err(),
            list("s3://models/llama/", &named, &AtomicBool::new(false)).unwrap_err(),
        ] {
            assert!(
                matches!(&error.problem, Problem::OtherRegion { region, .. } if region == "eu-west-1"),
                "{otherwise:?}: {error:?}"
            );
            assert!(error.to_string().contains("region=eu-west-1"), "{error}");
            assert_shows_no_secret(&format!("{error} {error:?}"));
        }
        server.take_requests();
        // Either may be the first that is asked.
        let open = || Object::open(url, &options(&server)).unwrap();
        let first = if at == 0 { Some(open()) } else { None };
        assert_eq!(listed("s3://models/llama/", &server).unwrap(), *std::slice::from_ref(url));
        let object = first.unwrap_or_else(open);
        assert_eq!(object.region(), Some("eu-west-1"));
        assert!(read(&object, 5, 1000).unwrap() == bytes[5..1005]);
        let is_there = |own: &objectd::Request| {
            own.authorization.as_ref().is_some_and(|own| own.contains("/eu-west-1/s3/"))
        };
        let elsewhere = server.take_requests().iter().filter(|own| !is_there(own)).count();
        assert_eq!(elsewhere, 1, "the region is remembered");
    }
}

/// Objects that are opened at once, as the shards of a model are, and a store that is slow to say checksums.
#[test]
fn a_server_is_asked_for_a_few_checksums_at_a_time() {
    const OBJECTS: usize = 60;
    const MOST: usize = 16;
    let server = Server::start().unwrap();
    for number in 0..OBJECTS {
        server.put(&format!("models/{number}"), &bytes(1000 + number));
    }
    server.answer_heads(Heads::Hold);
    let options = options(&server);
    let objects: Vec<_> = (0..OBJECTS)
        .map(|number| {
            let url = format!("s3://models/{number}");
            Object::open_asking(&url, &options, &AtomicBool::new(false)).unwrap().0
        })
        .collect();
    let heads = server.take_requests().into_iter().filter(|request| request.method == "HEAD").count();
    assert!(heads <= MOST, "{heads}");
    server.answer_heads(Heads::Answer);
    for object in &objects {
        object.wait_for_checksum(Instant::now() + Duration::from_secs(60), &AtomicBool::new(false));
        // On a slow machine the store may have had its time.
        let known = object.known_checksum().unwrap();
        assert!(known.is_ok() || known.is_err_and(|why| why.reason().contains("in time")), "{known:?}");
    }
}
