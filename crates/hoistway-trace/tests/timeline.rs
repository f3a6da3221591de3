//! Timelines as viewers read them.
#![allow(missing_docs, clippy::unwrap_used)]

use hoistway_trace::Timeline;
use serde_json::Value;
use std::{cell::OnceCell, fs, io::ErrorKind, path::Path, thread};
use tracing::{info, info_span, trace_span};
use tracing_subscriber::layer::SubscriberExt as _;

/// Calls `work` with a timeline that sees its spans, and a place for files.
fn with_timeline(work: impl FnOnce(&Timeline, &Path)) {
    let directory = tempfile::tempdir().unwrap();
    let timeline = Timeline::new();
    let subscriber = tracing_subscriber::registry().with(timeline.layer());
    tracing::subscriber::with_default(subscriber, || work(&timeline, directory.path()));
}

fn events(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"] == name).collect()
}

/// The name of an event's row.
fn row<'a>(events: &'a [Value], event: &Value) -> &'a str {
    let rows = named(events, "thread_name");
    rows.into_iter().find(|row| row["tid"] == event["tid"]).unwrap()["args"]["name"].as_str().unwrap()
}

fn ends(event: &Value) -> (f64, f64) {
    let begun = event["ts"].as_f64().unwrap();
    (begun, begun + event["dur"].as_f64().unwrap())
}

#[test]
fn entered_spans_are_slices_of_their_threads() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let recording = timeline.record(&path).unwrap();
        let work = || {
            info_span!(target: "hoistway", "outer", bytes = 7, file = "a\"b")
                .in_scope(|| info_span!(target: "hoistway", "inner").in_scope(|| ()))
        };
        tracing::dispatcher::get_default(|dispatch| {
            thread::scope(|scope| {
                let body = || tracing::dispatcher::with_default(dispatch, work);
                thread::Builder::new().name("lane".into()).spawn_scoped(scope, body).unwrap();
            });
        });
        recording.finish().unwrap();
        let events = events(&path);
        let (outer, inner) = (named(&events, "outer")[0], named(&events, "inner")[0]);
        assert_eq!(
            (&outer["ph"], &outer["args"]["bytes"], &outer["args"]["file"]),
            (&"X".into(), &7.into(), &"a\"b".into())
        );
        assert_eq!((row(&events, outer), row(&events, inner)), ("lane", "lane"));
        assert!(ends(outer).0 <= ends(inner).0 && ends(inner).1 <= ends(outer).1, "{outer} {inner}");
    });
}

#[test]
fn spans_in_flight_side_by_side_have_rows_of_their_own() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let recording = timeline.record(&path).unwrap();
        let (first, second) = (
            trace_span!(target: "hoistway", "read", offset = 0),
            trace_span!(target: "hoistway", "read", offset = 1),
        );
        let copy = trace_span!(target: "hoistway", "copy", track = "cuda:0");
        drop((first, second, copy));
        recording.finish().unwrap();
        let events = events(&path);
        let reads = named(&events, "read");
        assert_eq!(reads.len(), 2);
        assert_ne!(reads[0]["tid"], reads[1]["tid"]);
        assert!(reads.iter().all(|read| row(&events, read).ends_with(": read")));
        assert_eq!(row(&events, named(&events, "copy")[0]), "cuda:0: copy");
    });
}

#[test]
fn events_are_instants_and_fields_may_come_late() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let recording = timeline.record(&path).unwrap();
        let span = info_span!(target: "hoistway", "load", bytes = tracing::field::Empty);
        span.record("bytes", 5);
        info!(target: "hoistway", tensor = "w", "delivered");
        drop(span);
        recording.finish().unwrap();
        let events = events(&path);
        assert_eq!(named(&events, "load")[0]["args"]["bytes"], 5);
        let delivered = named(&events, "delivered")[0];
        assert_eq!((&delivered["ph"], &delivered["args"]["tensor"]), (&"i".into(), &"w".into()));
    });
}

#[test]
fn only_what_happens_during_a_recording_is_recorded() {
    with_timeline(|timeline, directory| {
        let (path, again) = (directory.join("1.json"), directory.join("2.json"));
        let span = || info_span!(target: "hoistway", "step");
        assert!(span().is_disabled());
        let before = span();
        let recording = timeline.record(&path).unwrap();
        assert!(!span().is_disabled());
        let across = span();
        drop(before);
        recording.finish().unwrap();
        assert!(span().is_disabled());
        let recording = timeline.record(&again).unwrap();
        drop(across);
        recording.finish().unwrap();
        let events_1 = events(&path);
        let steps = named(&events_1, "step");
        assert_eq!(steps.len(), 2, "{steps:?}");
        assert_eq!(steps.iter().filter(|step| step["args"]["unfinished"] == true).count(), 1);
        assert_eq!(named(&events(&again), "step").len(), 0);
    });
}

#[test]
fn a_second_recording_at_a_time_is_refused() {
    with_timeline(|timeline, directory| {
        let path = directory.join("1.json");
        let recording = timeline.record(&path).unwrap();
        let other = directory.join("2.json");
        assert_eq!(timeline.record(&other).unwrap_err().kind(), ErrorKind::ResourceBusy);
        assert!(!other.exists());
        drop(recording);
        timeline.record(&other).unwrap().finish().unwrap();
        assert_eq!(timeline.record(&directory.join("no/3.json")).unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn a_file_that_another_recording_writes_is_left_alone() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let other = Timeline::new();
        let recording = timeline.record(&path).unwrap();
        let subscriber = tracing_subscriber::registry().with(other.layer());
        tracing::subscriber::with_default(subscriber, || {
            let error = other.record(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ResourceBusy);
            assert!(error.to_string().contains("choose another name"), "{error}");
        });
        info_span!(target: "hoistway", "step").in_scope(|| ());
        recording.finish().unwrap();
        assert_eq!(named(&events(&path), "step").len(), 1);
        // It is replaced once it is over.
        timeline.record(&path).unwrap().finish().unwrap();
        assert_eq!(named(&events(&path), "step").len(), 0);
    });
}

#[cfg(target_os = "linux")]
#[test]
fn a_pipe_is_written_to_if_a_program_reads_it() {
    use std::io::Read;
    with_timeline(|timeline, directory| {
        let path = directory.join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let ended = timeline.record_while(&path, &|| false).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::BrokenPipe);
        // The program starts while it is waited for. It has both ends, so that nothing waits.
        let reader = OnceCell::new();
        let start = || {
            reader.get_or_init(|| fs::File::options().read(true).write(true).open(&path).unwrap());
            true
        };
        let recording = timeline.record_while(&path, &start).unwrap();
        let mut reader = reader.get().unwrap();
        info_span!(target: "hoistway", "step").in_scope(|| ());
        recording.finish().unwrap();
        let mut text = vec![0; 64 << 10];
        let len = reader.read(&mut text).unwrap();
        let events: Vec<Value> = serde_json::from_slice(&text[..len]).unwrap();
        assert_eq!(named(&events, "step").len(), 1);
    });
}

#[test]
fn what_others_do_is_not_recorded() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let recording = timeline.record(&path).unwrap();
        info_span!(target: "hyper", "request").in_scope(|| info!(target: "hoistways", "secret"));
        info_span!(target: "hoistway_io::lane", "read").in_scope(|| ());
        recording.finish().unwrap();
        let names: Vec<_> = events(&path).iter().map(|event| event["name"].clone()).collect();
        assert_eq!(names, ["process_name", "thread_name", "read"]);
    });
}

#[test]
fn a_recording_that_would_see_nothing_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, timeline) = (directory.path().join("timeline.json"), Timeline::new());
    for _ in 0..2 {
        assert_eq!(timeline.record(&path).unwrap_err().kind(), ErrorKind::NotConnected);
        assert!(!path.exists());
    }
    let subscriber = tracing_subscriber::registry().with(timeline.layer());
    tracing::subscriber::with_default(subscriber, || timeline.record(&path).unwrap().finish().unwrap());
}

#[test]
fn a_file_that_is_no_timeline_is_left_alone() {
    with_timeline(|timeline, directory| {
        let path = directory.join("model.safetensors");
        for content in [&b"[\0\0\0\0\0\0\0{}"[..], b"[", b"[\n{\"a\":1}\n]"] {
            fs::write(&path, content).unwrap();
            assert_eq!(timeline.record(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&path).unwrap(), content);
        }
        fs::write(&path, "").unwrap();
        let recording = timeline.record(&path).unwrap();
        (0..100).for_each(|_| info!(target: "hoistway", "longer"));
        recording.finish().unwrap();
        // A timeline may be replaced.
        timeline.record(&path).unwrap().finish().unwrap();
        assert_eq!(named(&events(&path), "longer").len(), 0);
    });
}

#[test]
fn threads_one_after_the_other_share_a_row() {
    with_timeline(|timeline, directory| {
        let path = directory.join("timeline.json");
        let recording = timeline.record(&path).unwrap();
        for _ in 0..5 {
            let dispatch = tracing::dispatcher::get_default(Clone::clone);
            let work = move || {
                tracing::dispatcher::with_default(&dispatch, || {
                    info_span!(target: "hoistway", "step")
                        .in_scope(|| drop(info_span!(target: "hoistway", "read")));
                });
            };
            thread::Builder::new().name("lane".into()).spawn(work).unwrap().join().unwrap();
        }
        recording.finish().unwrap();
        let events = events(&path);
        assert_eq!(named(&events, "step").len(), 5);
        // That of the threads, and that of what they had in flight.
        assert_eq!(named(&events, "thread_name").len(), 2);
    });
}
