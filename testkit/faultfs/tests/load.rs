//! Loads through a real kernel from a file system that fails: every route ends in the right error or the right bytes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

use faultfs::{Behaviour, FaultFs};
use hoistway::{DirectIo, Error, LoadOptions, Loaded, Result, Route};
use hoistway_io::sys::{files, folders};
use requirements::{Requirement, skip};
use std::time::Duration;

const NAME: &str = "model.safetensors";
const TENSORS: usize = 12;
const TENSOR_BYTES: usize = 1 << 20;

/// A mounted model, or `None` where FUSE cannot be used.
#[track_caller]
fn mounted() -> Option<(FaultFs, tempfile::TempDir, Vec<u8>)> {
    let entries: Vec<String> = (0..TENSORS)
        .map(|i| {
            let (start, end) = (i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES);
            format!(r#""t{i}":{{"dtype":"U8","shape":[{TENSOR_BYTES}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let text = format!("{{{}}}", entries.join(","));
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    file.extend((0..TENSORS * TENSOR_BYTES).map(|i| (i % 251) as u8 ^ (i >> 12) as u8));
    let directory = tempfile::tempdir().unwrap();
    match FaultFs::mount(directory.path(), vec![(NAME.into(), file.clone())]) {
        Ok(mounted) => Some((mounted, directory, file)),
        Err(error) => {
            skip(Requirement::Fuse, error);
            None
        }
    }
}

fn routes() -> Vec<LoadOptions> {
    [
        (Route::Auto, DirectIo::Auto),
        (Route::Auto, DirectIo::Never),
        (Route::Threads, DirectIo::Always),
        (Route::Threads, DirectIo::Never),
    ]
    .map(|(route, direct)| LoadOptions::default().route(route).direct(direct))
    .to_vec()
}

fn load(mounted: &FaultFs, options: &LoadOptions) -> Result<Loaded> {
    hoistway::load(&[mounted.path(NAME)], options)
}

fn assert_is_file(loaded: &Loaded, file: &[u8]) {
    assert_eq!(loaded.tensors().len(), TENSORS);
    let data = &file[file.len() - TENSORS * TENSOR_BYTES..];
    for (tensor, expected) in loaded.tensors().iter().zip(data.chunks(TENSOR_BYTES)) {
        assert!(
            *tensor.bytes().unwrap() == *expected,
            "{} has other bytes\n{}",
            tensor.name(),
            loaded.report()
        );
    }
}

#[test]
fn every_route_reads_a_healthy_file() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    for options in routes() {
        for bypass_cache in [false, true] {
            mounted.behave(NAME, Behaviour { bypass_cache, ..Behaviour::default() });
            assert_is_file(&load(&mounted, &options).unwrap(), &file);
        }
    }
}

#[test]
fn a_broken_sector_names_the_tensor() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    let broken = file.len() as u64 - 3 * TENSOR_BYTES as u64;
    for options in routes() {
        mounted.behave(
            NAME,
            Behaviour { broken_from: Some(broken), bypass_cache: true, ..Behaviour::default() },
        );
        match load(&mounted, &options).unwrap_err() {
            Error::Io { operation: "read", path, tensor: Some(_), range: Some(range), source } => {
                assert_eq!(path, mounted.path(NAME));
                assert!(range.end() > broken);
                assert_eq!(source.raw_os_error(), Some(libc::EIO));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn short_reads_of_a_server_are_continued() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    for options in routes() {
        for short in [1000, 4096, 70_000] {
            let behaviour =
                Behaviour { short_reads: Some(short), bypass_cache: true, ..Behaviour::default() };
            mounted.behave(NAME, behaviour);
            let outcome = load(&mounted, &options);
            if options.direct == DirectIo::Always && short < 4096 {
                // Less than a block at a time cannot be put together by direct reads.
                assert!(matches!(outcome, Err(Error::RouteUnavailable { .. })), "{outcome:?}");
            } else {
                assert_is_file(&outcome.unwrap(), &file);
            }
        }
    }
}

#[test]
fn what_a_signal_interrupts_is_called_again() {
    let Some((mounted, directory, file)) = mounted() else { return };
    mounted.interrupt();
    for direct in [DirectIo::Always, DirectIo::Never] {
        let options = LoadOptions::default().route(Route::Threads).direct(direct);
        assert_is_file(&load(&mounted, &options).unwrap(), &file);
    }
    folders::sync(directory.path()).unwrap();
    files::space(directory.path()).unwrap();
}

#[test]
fn a_file_cut_under_the_reader_is_an_error() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    for options in routes() {
        let cut_after = Some((6, file.len() as u64 / 2));
        mounted.behave(NAME, Behaviour { cut_after, bypass_cache: true, ..Behaviour::default() });
        let error = load(&mounted, &options).unwrap_err();
        assert!(matches!(&error, Error::Truncated { .. } | Error::Changed { .. }), "{error:?}");
    }
}

#[test]
fn a_file_system_without_direct_reads_is_read_buffered_or_refused() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    mounted.behave(NAME, Behaviour { refuse_direct: true, ..Behaviour::default() });
    for route in [Route::Auto, Route::Threads] {
        let loaded = load(&mounted, &LoadOptions::default().route(route)).unwrap();
        assert_is_file(&loaded, &file);
        let refused = &loaded.report().refused;
        assert!(refused.iter().any(|refusal| refusal.why.reason.contains("fuse")), "{refused:?}");
    }
    let error = load(&mounted, &LoadOptions::default().route(Route::IoUring)).unwrap_err();
    assert!(matches!(&error, Error::RouteUnavailable { route: Route::IoUring, .. }), "{error:?}");
}

#[test]
fn a_slow_server_can_be_left_at_any_time() {
    let Some((mounted, _directory, _)) = mounted() else { return };
    mounted.behave(
        NAME,
        Behaviour { delay: Duration::from_millis(5), bypass_cache: true, ..Behaviour::default() },
    );
    for options in routes() {
        let checkpoint = hoistway::Checkpoint::open(&[mounted.path(NAME)]).unwrap();
        let mut loading = checkpoint.start(&options).unwrap();
        loading.next().unwrap().unwrap();
        drop(loading);
    }
}

/// The kernel continues short asynchronous reads of FUSE at the beginning of the request: see
/// `docs/decisions/0002-no-io-uring-on-fuse.md`.
#[test]
fn rings_are_refused_on_fuse() {
    let Some((mounted, _directory, file)) = mounted() else { return };
    let error = load(&mounted, &LoadOptions::default().route(Route::IoUring)).unwrap_err();
    assert!(error.to_string().contains("FUSE"), "{error}");
    let loaded = load(&mounted, &LoadOptions::default()).unwrap();
    assert_is_file(&loaded, &file);
    assert!(loaded.report().refused.iter().any(|refusal| refusal.what == "io_uring"), "{}", loaded.report());
}
