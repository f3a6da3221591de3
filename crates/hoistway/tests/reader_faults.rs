//! Faults of files and drives under readers: each read ends in its bytes or in an error that says where, the others go
//! on, and nothing stays behind. To memory of every kind, by every route.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, QUEUED, assert_nothing_left, in_memory, let_file_time_pass, make_cold,
    on_device::{CUDA, Played, ROCM, TOY},
    reading::{
        Kind, LONG, Place, TestFile, assert_all_hold, lanes, no_faults, open_reader, places, prepare, range,
        reader, submit, write_file,
    },
    stand_in::Turn,
    system::write_all_at,
};
use hoistway::{
    ByteRange, DirectIo, Error, Route,
    read::{Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::{
        Access,
        fault::{Fault, FaultScript},
    },
};
use proptest::prelude::*;
use std::{
    fs,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

const LEN: u64 = 1_200_003;

/// Within a block, over blocks, over chunks, to the end.
fn ranges() -> [ByteRange; 4] {
    [range(4000, 200), range(8192, 16384), range(70_001, 300_000), range(LEN - 200_000, 200_000)]
}

/// A third of all numbers, in no rhythm that could always meet the same read.
fn scattered(number: u64) -> bool {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 0xFF < 85
}

#[test]
fn a_ring_reads_into_no_memory_of_the_callers() {
    // If waiting for a ring fails for good, it is unknown what the kernel still writes to.
    let file = TestFile::new(LEN as usize);
    let whole_blocks = range(8192, 1 << 20);
    for (route, direct) in [
        (QUEUED, DirectIo::Auto),
        (QUEUED, DirectIo::Never),
        (Route::Threads, DirectIo::Auto),
        (Route::Threads, DirectIo::Never),
    ] {
        let Some(reader) = open_reader(&ReaderOptions::default().route(route).direct(direct)) else {
            continue;
        };
        let mut place = Place::new(Kind::Host(0), whole_blocks);
        let batch = reader.submit([place.request(&file.open())], Priority::Demand).unwrap();
        batch.wait().unwrap();
        place.assert_holds(file.bytes_of(whole_blocks), &batch, 0);
        let staged = if route == QUEUED { whole_blocks.len() } else { 0 };
        assert_eq!(batch.report().staged_bytes, staged, "{route}, {direct:?}");
    }
}

#[test]
fn short_reads_are_continued_and_counted() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, warm) in lanes() {
        for bytes in [0, 1, 511, 4096, 5000] {
            let _warm = prepare(&file, warm);
            // Too many empty reads in a row are the end of the file.
            let is_short = move |number: u64| if bytes == 0 { number < 3 } else { scattered(number) };
            let script = FaultScript::new(move |number, _| is_short(number).then_some(Fault::Short(bytes)));
            let (reader, mut places) = (reader(route, direct, script), places(&ranges()));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
            let report = batch.report();
            assert_eq!((report.delivered, report.delivered_bytes), (places.len(), report.bytes), "{report}");
            assert_eq!(batch.bytes_done(), report.bytes);
            // A copy from the page cache that ends early is not repeated but read.
            assert!(report.retries.short > 0 || route == Route::Auto, "{report}");
            assert!(report.read_bytes >= report.delivered_bytes, "{report}");
        }
    }
}

/// Direct reads go on at whole blocks, so a short one may spoil what the one before it had brought of a block.
#[test]
fn what_a_short_read_spoils_is_read_again() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, last) in [
        (Route::Threads, Fault::Short(0)),
        (Route::Threads, Fault::Refused),
        // Only a refusal is an error of a route that is named: the end of a file is read through the page cache.
        (QUEUED, Fault::Short(0)),
    ] {
        make_cold(&file.path);
        let faults = [Fault::Short(5000), Fault::Short(100), last];
        let script = FaultScript::new(move |number, _| faults.get(number as usize).cloned());
        let options = ReaderOptions::default().route(route).chunk_bytes(64 << 10).faults(script);
        let Some(reader) = open_reader(&options) else { continue };
        let mut places = [Place::new(Kind::Memory, range(1 << 20, 60_000))];
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &places, &batch);
        assert!(
            batch.report().carriers.iter().any(|carrier| carrier.access == Access::Buffered),
            "{}",
            batch.report()
        );
    }
}

#[test]
fn interruptions_are_repeated_and_counted() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, warm) in lanes() {
        for fault in [Fault::Interrupted, Fault::Again] {
            let _warm = prepare(&file, warm);
            let script = FaultScript::new(move |number, _| scattered(number).then(|| fault.clone()));
            let (reader, mut places) = (reader(route, direct, script), places(&ranges()));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Prefetch);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
            assert!(batch.report().retries.interrupted > 0, "{}", batch.report());
            assert!(batch.report().to_string().contains("interrupted"), "{}", batch.report());
        }
    }
}

#[test]
fn one_failing_read_does_not_stop_the_rest() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    // One chunk of the file cannot be read.
    let broken = range(128 << 10, 64 << 10);
    for (route, direct, warm) in lanes() {
        let _warm = prepare(&file, warm);
        let script = FaultScript::new(move |_, offset| {
            (broken.start()..broken.end()).contains(&offset).then_some(Fault::Broken)
        });
        let (reader, mut places) = (reader(route, direct, script), places(&ranges()));
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        let first = batch.wait().unwrap_err().to_string();
        let mut failed = 0;
        for (read, place) in places.iter().enumerate() {
            let Some(error) = batch.status(read).error() else {
                place.assert_holds(file.bytes_of(place.range), &batch, read);
                continue;
            };
            failed += 1;
            place.assert_fenced();
            assert!(batch.take(read).is_none(), "bytes of a read that failed are not given out");
            match error {
                Error::Io { operation: "read", path, tensor: Some(name), range: Some(lost), source } => {
                    assert_eq!(*path, file.path);
                    assert_eq!(*name, format!("{:?} {}", place.kind, place.range));
                    assert!(broken.start() <= lost.start() && lost.end() <= broken.end(), "{lost}");
                    assert_eq!(source.raw_os_error(), Fault::Broken.errno());
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(failed, Kind::ALL.len(), "one range of each kind lies there");
        let report = batch.report();
        assert_eq!((report.failed, report.delivered), (failed, places.len() - failed), "{report}");
        let is_told = report.to_string().contains(&format!("{failed} failed"));
        assert!(report.delivered_bytes < report.bytes && is_told, "{report}");
        let carried: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
        assert_eq!((carried, batch.bytes_done()), (report.delivered_bytes, report.delivered_bytes));
        for part in ["data", "(tensor 'Memory 70001..370001')", "bytes 131072..196608"] {
            assert!(first.contains(part), "{first}");
        }
    }
}

#[test]
fn reads_that_never_progress_end_in_an_error() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, warm) in lanes() {
        let _warm = prepare(&file, warm);
        for (fault, kind) in [
            (Fault::Short(0), std::io::ErrorKind::UnexpectedEof),
            (Fault::Interrupted, std::io::ErrorKind::Interrupted),
        ] {
            let script = FaultScript::new(move |_, _| Some(fault.clone()));
            let (reader, mut places) = (reader(route, direct, script), places(&ranges()[..2]));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            for read in 0..places.len() {
                match batch.wait_read(read, LONG).error() {
                    Some(Error::Io { source, .. }) => assert_eq!(source.kind(), kind, "{source}"),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn refused_direct_reads_fall_back_only_where_allowed() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, warm) in lanes() {
        if warm || direct == DirectIo::Never {
            continue;
        }
        make_cold(&file.path);
        let refusals = AtomicU32::new(0);
        let script = FaultScript::new(move |number, _| {
            let is_first = number >= 2 && refusals.fetch_add(1, Ordering::Relaxed) < 1;
            is_first.then_some(Fault::Refused)
        });
        // Opening a file may bring its beginning into the page cache, from where it would be copied.
        let (reader, mut places) = (reader(route, direct, script), places(&ranges()[3..]));
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        if route == Route::Auto {
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
            let report = batch.report();
            let refusal = report.refused.iter().find(|refusal| refusal.what == "direct reads");
            let refusal = refusal.unwrap_or_else(|| panic!("{report}"));
            assert_eq!(refusal.path.as_deref(), Some(&*file.path));
            assert!(report.carriers.iter().any(|carrier| carrier.access == Access::Buffered), "{report}");
            assert!(report.to_string().contains("not used: direct reads on"), "{report}");
        } else {
            match batch.wait().unwrap_err() {
                Error::RouteUnavailable { route: named, path, why } => {
                    assert_eq!((*named, path.as_ref()), (route, Some(&file.path)));
                    assert!(why.reason.contains("refused a direct read") && !why.fix.is_empty(), "{why}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(batch.report().failed, 1, "only the read that met it: {}", batch.report());
        }
    }
}

#[test]
fn a_file_cut_or_rewritten_while_it_is_read_is_noticed() {
    let _turn = Turn::take();
    #[derive(Clone, Copy, PartialEq)]
    enum Change {
        Cut,
        Rewrite,
        /// With the modification time set back.
        HiddenRewrite,
    }
    for (route, direct, warm) in lanes() {
        for change in [Change::Cut, Change::Rewrite, Change::HiddenRewrite] {
            let file = TestFile::new(LEN as usize);
            let _warm = prepare(&file, warm);
            let_file_time_pass(&file.path);
            let modified = fs::metadata(&file.path).unwrap().modified().unwrap();
            // Windows lets a writer in before the reader alone, and may have the times of the file late until it is closed.
            let writer = Mutex::new(Some(fs::OpenOptions::new().write(true).open(&file.path).unwrap()));
            let script = FaultScript::new(move |number, _| {
                if number == 3
                    && let Some(file) = writer.lock().unwrap().take()
                {
                    match change {
                        Change::Cut => file.set_len(1 << 19).unwrap(),
                        _ => write_all_at(&file, b"other", 1 << 19),
                    }
                    if change == Change::HiddenRewrite {
                        file.set_modified(modified).unwrap();
                    }
                }
                None
            });
            let (reader, mut places) = (reader(route, direct, script), places(&ranges()));
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            batch.wait().unwrap_err();
            let mut noticed = 0;
            for (read, place) in places.iter().enumerate() {
                match batch.status(read).error() {
                    // It ended before.
                    None => place.assert_holds(file.bytes_of(place.range), &batch, read),
                    Some(Error::Truncated { path, tensor: Some(_), needed, file_len: 524_288 }) => {
                        assert!(change == Change::Cut && *path == file.path && needed.end() > 1 << 19);
                        noticed += 1;
                    }
                    Some(Error::Changed { path, tensor: Some(_), .. }) => {
                        assert_eq!(*path, file.path);
                        noticed += 1;
                    }
                    Some(other) => panic!("{other:?}"),
                }
                place.assert_fenced();
            }
            assert!(noticed > 0);
        }
    }
}

#[test]
fn a_file_that_changed_before_it_is_read_fails_every_read() {
    let _turn = Turn::take();
    for (route, direct, warm) in lanes() {
        let file = TestFile::new(LEN as usize);
        // Windows lets no writer in later.
        let writer = fs::OpenOptions::new().write(true).open(&file.path).unwrap();
        let open = file.open();
        writer.set_len(LEN + 1).unwrap();
        drop(writer);
        let _warm = prepare(&file, warm);
        let (reader, mut places) = (reader(route, direct, no_faults()), places(&ranges()));
        let batch = submit(&reader, &open, &mut places, Priority::Demand);
        batch.wait().unwrap_err();
        for read in 0..places.len() {
            let error = batch.status(read).error().unwrap();
            assert!(matches!(error, Error::Changed { tensor: Some(_), .. }), "{error:?}");
        }
        assert_eq!(batch.report().delivered_bytes, 0);
    }
}

#[test]
fn ranges_past_the_end_fail_by_themselves() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    let open = file.open();
    let reader = reader(Route::Auto, DirectIo::Auto, no_faults());
    let beyond =
        [range(LEN - 10, 11), range(LEN + 5, 0), range(u64::MAX - 4096, 4096), range(1 << 50, 1 << 50)];
    // Nothing is read, so the memory behind a lent address does not matter.
    let kinds = [Kind::Memory, Kind::Sink];
    let mut requests = Vec::new();
    for (range, kind) in beyond.iter().flat_map(|range| kinds.map(|kind| (*range, kind))) {
        let target = Place::new(kind, ByteRange::default()).target();
        requests.push(ReadRequest::new(&open, range, target).named("beyond"));
    }
    let mut good = Place::new(Kind::Host(0), range(5, 100_000));
    requests.push(good.request(&open));
    let batch = reader.submit(requests, Priority::Demand).unwrap();
    batch.wait().unwrap_err();
    for (read, wanted) in beyond.iter().flat_map(|range| [range, range]).enumerate() {
        match batch.status(read).error() {
            Some(Error::Truncated { path, tensor: Some(name), needed, file_len }) => {
                assert_eq!((path, &**name, needed, *file_len), (&file.path, "beyond", wanted, LEN));
            }
            other => panic!("{other:?}"),
        }
    }
    good.assert_holds(file.bytes_of(good.range), &batch, batch.len() - 1);
}

#[test]
fn files_in_memory_are_read_through_the_page_cache_or_refused() {
    let _turn = Turn::take();
    let Some(directory) = in_memory() else { return };
    let path = directory.path().join("data");
    let bytes = write_file(&path, LEN as usize);
    let open = ReadFile::open(&path).unwrap();
    for (route, direct, is_served) in [
        (Route::Auto, DirectIo::Auto, true),
        (Route::Auto, DirectIo::Always, false),
        (Route::Threads, DirectIo::Auto, true),
        (Route::Threads, DirectIo::Never, true),
        (Route::Threads, DirectIo::Always, false),
    ] {
        let reader = reader(route, direct, no_faults());
        let mut places = places(&ranges());
        let batch = submit(&reader, &open, &mut places, Priority::Demand);
        if !is_served {
            match batch.wait().unwrap_err() {
                Error::RouteUnavailable { why, .. } => {
                    assert!(why.reason.contains("lives in memory"), "{why}")
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(batch.report().failed, places.len());
            continue;
        }
        batch.wait().unwrap();
        for (read, place) in places.iter().enumerate() {
            let expected = &bytes[place.range.start() as usize..place.range.end() as usize];
            place.assert_holds(expected, &batch, read);
        }
        let report = batch.report();
        assert!(report.carriers.iter().all(|carrier| carrier.access == Access::Buffered), "{report}");
        let is_told = report.refused.iter().any(|refusal| refusal.what == "direct reads");
        assert_eq!(is_told, direct == DirectIo::Auto, "{report}");
    }
}

#[test]
fn direct_says_whether_reads_go_past_the_page_cache() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    for (route, direct, _) in lanes() {
        // What is cached tells the accesses apart: `always` does not look there.
        let _warm = prepare(&file, true);
        let (reader, mut places) = (reader(route, direct, no_faults()), places(&ranges()));
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &places, &batch);
        let report = batch.report();
        let accesses: Vec<Access> = report.carriers.iter().map(|access| access.access).collect();
        match direct {
            DirectIo::Never => assert!(accesses.iter().all(|access| *access == Access::Buffered), "{report}"),
            DirectIo::Always => assert!(accesses.iter().all(|access| *access == Access::Direct), "{report}"),
            DirectIo::Auto => {}
        }
        let (route, is_only) = match route {
            // Windows does not say what is cached.
            Route::Auto if cfg!(windows) => (Route::Threads, true),
            Route::Auto => (Route::Cached, true),
            named => (named, true),
        };
        assert_eq!(report.carriers.iter().all(|carrier| carrier.route == route), is_only, "{report}");
        let carried: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
        assert_eq!((carried, report.delivered_bytes), (report.bytes, report.bytes), "{report}");
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn route_cached_refuses_what_the_page_cache_does_not_hold() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    make_cold(&file.path);
    let reader = reader(Route::Cached, DirectIo::Auto, no_faults());
    let mut places = places(&ranges()[2..3]);
    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
    match batch.wait().unwrap_err() {
        Error::RouteUnavailable { route: Route::Cached, path, why } => {
            assert_eq!(path.as_ref(), Some(&file.path));
            // Nothing was copied, so it is not known which bytes are there.
            assert!(why.reason.contains("does not hold all of bytes "), "{why}");
            assert!(why.fix.contains("hoistway warm"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(batch.report().failed, places.len());
    drop(batch);
    let _warm = prepare(&file, true);
    let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
    batch.wait().unwrap();
    assert_all_hold(&file, &places, &batch);
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn route_cached_names_the_first_byte_that_a_copy_has_not_found() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    // One read of whole blocks: of several reads, any could be the first.
    let wanted = range(8192, 40_960);
    for kind in Kind::ALL {
        let _warm = prepare(&file, true);
        let script = FaultScript::new(|number, _| (number == 0).then_some(Fault::Short(5000)));
        let reader = reader(Route::Cached, DirectIo::Auto, script);
        let mut places = [Place::new(kind, wanted)];
        match submit(&reader, &file.open(), &mut places, Priority::Demand).wait().unwrap_err() {
            Error::RouteUnavailable { route: Route::Cached, why, .. } => {
                let missing = format!("does not hold byte {} ", wanted.start() + 5000);
                assert!(why.reason.contains(&missing), "{kind:?}: {why}");
            }
            other => panic!("{kind:?}: {other:?}"),
        }
    }
}

/// What is read in place goes on where the copy has ended, at a whole block. Reads that pass a slot start over.
#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn what_the_page_cache_holds_in_part_is_read_on_to_every_kind_of_memory() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    let wanted = range(8192, 40_960);
    for kind in Kind::ALL {
        let _warm = prepare(&file, true);
        let script = FaultScript::new(|number, _| (number == 0).then_some(Fault::Short(10_000)));
        let reader = reader(Route::Auto, DirectIo::Auto, script);
        let mut places = [Place::new(kind, wanted)];
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &places, &batch);
        let report = batch.report();
        let by = |is_cached: bool| -> (u64, u64) {
            let carriers = report.carriers.iter().filter(|own| (own.route == Route::Cached) == is_cached);
            carriers.fold((0, 0), |sum, own| (sum.0 + own.tensor_bytes, sum.1 + own.read_bytes))
        };
        let (cached, others) = (by(true), by(false));
        assert_eq!((cached.0 + others.0, cached.1), (wanted.len(), 10_000), "{kind:?}: {report}");
        match kind {
            Kind::Memory | Kind::Host(0) => assert_eq!(cached.0, 8192, "{report}"),
            Kind::Sink | Kind::Device(..) => assert_eq!(cached.0, 0, "{report}"),
            // Memory that does not agree with the file's blocks: it depends on whether direct reads can be had.
            Kind::Host(_) => {}
        }
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn a_file_that_changes_between_a_copy_and_the_read_of_the_rest_is_noticed() {
    let _turn = Turn::take();
    for kind in Kind::ALL {
        let file = TestFile::new(LEN as usize);
        let _warm = prepare(&file, true);
        let_file_time_pass(&file.path);
        let writer = fs::OpenOptions::new().write(true).open(&file.path).unwrap();
        let script = FaultScript::new(move |number, _| {
            (number == 0).then(|| {
                write_all_at(&writer, b"other", 30_000);
                Fault::Short(10_000)
            })
        });
        let reader = reader(Route::Auto, DirectIo::Auto, script);
        let mut places = [Place::new(kind, range(8192, 40_960))];
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        let error = batch.wait().unwrap_err();
        assert!(matches!(&error, Error::Changed { path, .. } if *path == file.path), "{kind:?}: {error:?}");
        assert_eq!(batch.report().delivered_bytes, 0);
    }
}

/// Loads of every kind of trouble, again and again: descriptors, threads, mappings and what is on the device return to
/// what they were.
#[test]
fn readers_leave_nothing_behind() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    let lanes = lanes();
    let run = |round: usize| {
        for &(route, direct, warm) in &lanes {
            let _warm = prepare(&file, warm);
            let script = FaultScript::new(move |number, _| match (number as usize + round) % 7 {
                0 => Some(Fault::Broken),
                1 => Some(Fault::Delay(Duration::from_millis(1))),
                _ => None,
            });
            let reader = reader(route, direct, script);
            let mut places = places(&ranges());
            let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
            let mut others = common::reading::places(&ranges());
            let dropped = submit(&reader, &file.open(), &mut others, Priority::Prefetch);
            match round % 3 {
                0 => drop(batch.wait()),
                1 => batch.cancel(),
                _ => {}
            }
            if round.is_multiple_of(2) {
                drop(reader);
            }
            drop((batch, dropped));
        }
    };
    run(0);
    let before = Footprint::now();
    (1..7).for_each(run);
    assert_nothing_left(&before);
}

#[test]
fn hundreds_of_small_batches_share_a_reader() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    drop(places(&ranges()));
    let before = Footprint::now();
    {
        let (reader, open) = (reader(Route::Auto, DirectIo::Auto, no_faults()), file.open());
        for round in 0..500u64 {
            let mut places = [Place::new(Kind::Memory, range(round * 2000, 3000 + round))];
            let batch = submit(&reader, &open, &mut places, Priority::Prefetch);
            batch.wait().unwrap();
            assert_all_hold(&file, &places, &batch);
        }
    }
    assert_nothing_left(&before);
}

#[test]
#[cfg_attr(windows, ignore = "asks /proc for the memory of arenas")]
fn staging_memory_stays_within_the_budget() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    make_cold(&file.path);
    drop(places(&ranges()));
    let before = Footprint::now();
    let (chunk_bytes, memory_budget_bytes) = (1 << 20, 8 << 20);
    // Mappings take this much of address space more, to begin at a huge page.
    let slack = 2 << 20;
    for route in [Route::Auto, QUEUED] {
        let options = ReaderOptions::default()
            .route(route)
            .chunk_bytes(chunk_bytes)
            .memory_budget_bytes(memory_budget_bytes);
        let Ok(reader) = Reader::new(&options) else { continue };
        let mut places = places(&ranges());
        let batch = submit(&reader, &file.open(), &mut places, Priority::Demand);
        batch.wait().unwrap();
        assert_all_hold(&file, &places, &batch);
        // What is left are the slots, for the host and for each device.
        drop((batch, places));
        let staging = (Footprint::now().arena_kib - before.arena_kib) << 10;
        let rings = 1 + Played::ALL.len() as u64;
        assert!(0 < staging && staging <= rings * (memory_budget_bytes + slack), "{staging}");
        for played in Played::ALL {
            let pinned = played.pinned_bytes();
            assert!(0 < pinned && pinned <= memory_budget_bytes, "{pinned} for {played:?}");
        }
    }
    assert_nothing_left(&before);
}

#[derive(Clone, Debug)]
struct Case {
    lane: usize,
    chunk_blocks: u64,
    in_flight: usize,
    reads: Vec<(u64, u64, usize, usize)>,
    faults: Vec<Option<Fault>>,
}

fn case() -> impl Strategy<Value = Case> {
    let read = (0..LEN, 0..200_000u64, 0..6usize, 0..4096usize);
    let fault = prop_oneof![
        4 => Just(None),
        2 => (0..70_000usize).prop_map(|bytes| Some(Fault::Short(bytes))),
        1 => Just(Some(Fault::Interrupted)),
        1 => Just(Some(Fault::Broken)),
        1 => Just(Some(Fault::Delay(Duration::from_micros(200)))),
    ];
    let (reads, faults) = (prop::collection::vec(read, 1..8), prop::collection::vec(fault, 1..16));
    (0..6usize, 1..40u64, 1..6usize, reads, faults).prop_map(
        |(lane, chunk_blocks, in_flight, reads, faults)| Case {
            lane,
            chunk_blocks,
            in_flight,
            reads,
            faults,
        },
    )
}

/// Whatever is read where to under whatever faults: the bytes of the file, or an error.
#[test]
fn any_read_ends_in_the_bytes_of_the_file_or_in_an_error() {
    let _turn = Turn::take();
    let file = TestFile::new(LEN as usize);
    let open = file.open();
    let lanes = lanes();
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) };
    proptest!(config, |(case in case())| {
        let (route, direct, warm) = lanes[case.lane % lanes.len()];
        let _warm = prepare(&file, warm);
        // Reads of less than a block, and interruptions, can meet the same read until it gives up.
        let starves = case.faults.iter().any(|fault| matches!(fault, Some(Fault::Short(..4096))));
        let can_fail = starves || case.faults.iter().any(|fault| matches!(fault, Some(Fault::Broken | Fault::Interrupted)));
        let faults = case.faults.clone();
        let options = ReaderOptions::default()
            .route(route)
            .direct(direct)
            .chunk_bytes(case.chunk_blocks * 4096)
            .in_flight(case.in_flight)
            .faults(FaultScript::new(move |number, _| faults[number as usize % faults.len()].clone()));
        let reader = Reader::new(&options).unwrap();
        let mut places: Vec<Place> = case.reads.iter().map(|&(start, len, kind, shift)| {
            let range = ByteRange::new(start, (start + len).min(LEN)).unwrap();
            let devices = [CUDA, ROCM, TOY].map(|device| Kind::Device(device, shift));
            let kinds = [Kind::Memory, Kind::Host(shift), Kind::Sink, devices[0], devices[1], devices[2]];
            Place::new(kinds[kind], range)
        }).collect();
        let batch = submit(&reader, &open, &mut places, Priority::Prefetch);
        let outcome = batch.wait();
        for (read, place) in places.iter().enumerate() {
            match batch.status(read).error() {
                None => place.assert_holds(file.bytes_of(place.range), &batch, read),
                Some(Error::Io { .. }) => place.assert_fenced(),
                Some(Error::RouteUnavailable { .. }) if starves && route != Route::Auto => place.assert_fenced(),
                Some(other) => panic!("{other:?}"),
            }
        }
        let report = batch.report();
        prop_assert_eq!(outcome.is_ok(), report.failed == 0);
        prop_assert!(can_fail || report.failed == 0, "{}", report);
        prop_assert!(report.failed > 0 || report.delivered_bytes == report.bytes, "{}", report);
    });
}

/// What a path cannot be is told when it is opened.
#[test]
fn what_is_no_regular_file_is_not_opened() {
    let _turn = Turn::take();
    assert!(matches!(ReadFile::open("/nonexistent/data"), Err(Error::NotFound { .. })));
    assert!(ReadFile::open(Path::new("/")).is_err());
    let file = TestFile::new(10);
    let named = ReadFile::from_file(fs::File::open(&file.path).unwrap(), "another name").unwrap();
    assert_eq!((named.path(), named.len()), (Path::new("another name"), 10));
    let reader = Reader::new(&ReaderOptions::default()).unwrap();
    let request = ReadRequest::new(&named, range(0, 11), Target::memory());
    let batch = reader.submit([request], Priority::Demand).unwrap();
    assert!(batch.wait().unwrap_err().to_string().contains("another name"));
}
