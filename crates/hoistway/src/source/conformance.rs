//! What every source must do: read any bytes, know its length, and notice that it is no longer what was opened.
#![allow(clippy::unwrap_used, clippy::panic)]

#[cfg(target_os = "linux")]
use super::threefs::ThreeFs;
use super::{Source, bytes::Bytes, local::Local, registry};
use crate::{
    ByteRange, Cancel, Error,
    catalog::{OpenFile, OpenOptions},
};
use hoistway_io::file::FileSystem;
use std::{
    fs::{self, File},
    path::Path,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

const LEN: usize = 20_011;

/// A source, and what cuts it to a length.
type Opened = (Arc<dyn Source>, Box<dyn Fn(u64)>);

/// A kind of sources, and how one with these bytes is opened.
struct Kind {
    name: &'static str,
    open: fn(&Path, &[u8]) -> Opened,
}

static KINDS: &[Kind] = &[
    Kind {
        name: "local",
        open: |path, bytes| of_file(path, bytes, |path| registry::open(path, &OpenOptions::default())),
    },
    Kind { name: "bytes", open: |_, bytes| in_memory(bytes) },
    #[cfg(target_os = "linux")]
    Kind {
        name: "threefs",
        open: |path, bytes| {
            of_file(path, bytes, |path| Ok(Arc::new(ThreeFs::new(Arc::new(OpenFile::open(path)?)))))
        },
    },
    #[cfg(feature = "fault-injection")]
    Kind {
        name: "toy",
        open: |path, bytes| {
            of_file(path, bytes, |path| {
                registry::open(format!("toy://{}", path.display()).as_ref(), &OpenOptions::default())
            })
        },
    },
];

fn of_file(path: &Path, bytes: &[u8], open: fn(&Path) -> crate::Result<Arc<dyn Source>>) -> Opened {
    fs::write(path, bytes).unwrap();
    // Windows lets no writer in later.
    let writer = File::options().write(true).open(path).unwrap();
    let cut = move |len| writer.set_len(len).unwrap();
    (open(path).unwrap(), Box::new(cut))
}

/// Bytes whose owner shows fewer of them later.
struct Shown(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Shown {
    fn as_ref(&self) -> &[u8] {
        &self.0[..self.1.load(Ordering::Relaxed)]
    }
}

fn in_memory(bytes: &[u8]) -> Opened {
    let shown = Arc::new(AtomicUsize::new(bytes.len()));
    let source = Bytes::new(Shown(bytes.to_vec(), shown.clone()));
    (Arc::new(source), Box::new(move |len| shown.store(len as usize, Ordering::Relaxed)))
}

/// Runs a test on a new source of each kind.
fn for_each_kind(test: impl Fn(&str, &dyn Source, &[u8], &dyn Fn(u64))) {
    let directory = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8).collect();
    for kind in KINDS {
        let (source, cut) = (kind.open)(&directory.path().join(kind.name), &bytes);
        test(kind.name, &*source, &bytes, &*cut);
    }
}

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

#[test]
fn any_bytes_are_read_and_none_past_the_end() {
    for_each_kind(|name, source, bytes, _| {
        assert_eq!(source.len(), LEN as u64, "{name}");
        for (start, len) in
            [(0, LEN), (1, 4095), (4097, 8192), (LEN - 3, 3), (LEN - 3, 100), (LEN, 10), (LEN + 5, 1)]
        {
            let expected = bytes.get(start..LEN.min(start + len)).unwrap_or_default();
            let mut found = vec![0xA5; len];
            let mut filled = 0;
            loop {
                match source
                    .read_at(&mut found[filled..], (start + filled) as u64, &Cancel::default())
                    .unwrap()
                {
                    0 => break,
                    count => filled += count,
                }
            }
            assert!(found[..filled] == *expected, "{name}: {len} bytes from {start}");
            assert!(
                found[filled..].iter().all(|&byte| byte == 0xA5),
                "{name}: bytes past the end were written"
            );
        }
    });
}

#[test]
fn a_source_that_stays_as_it_was_is_unchanged() {
    for_each_kind(|name, source, _, _| {
        for _ in 0..2 {
            source.check_unchanged(range(0, LEN as u64), |_| None).expect(name);
        }
        assert!(!source.path().as_os_str().is_empty() && !source.medium().is_empty(), "{name}");
    });
}

#[test]
fn a_source_that_was_cut_is_truncated_and_its_error_has_name_and_offset() {
    for_each_kind(|name, source, _, cut| {
        cut(9_000);
        let read = source.read_exactly(&mut [0; 1_000], 8_500, Some("weight"), &Cancel::default());
        // The toy has copied its bytes, so that nothing but the check can tell.
        assert_eq!(read.is_ok(), name == "toy", "{name}: {read:?}");
        let needed = range(8_500, 9_500);
        let checked = source.check_unchanged(needed, |_| Some("weight".into()));
        for error in [read.err(), checked.err()].into_iter().flatten() {
            assert!(error.to_string().contains(&*source.path().to_string_lossy()), "{name}: {error}");
            match error {
                Error::Truncated { tensor, needed: found, file_len, .. } => {
                    assert_eq!(
                        (tensor.as_deref(), found, file_len),
                        (Some("weight"), needed, 9_000),
                        "{name}"
                    );
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(source.check_unchanged(needed, |_| None).is_err(), "{name}");
    });
}

#[test]
fn a_change_is_noticed_though_the_bytes_at_stake_are_there() {
    for_each_kind(|name, source, _, cut| {
        cut(9_000);
        match source.check_unchanged(range(100, 200), |at| Some(format!("tensor at {at}"))).unwrap_err() {
            Error::Changed { path, tensor, .. } => {
                assert_eq!((&*path, tensor.as_deref()), (source.path(), Some("tensor at 100")), "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
    });
}

#[test]
fn sources_without_a_file_say_so_and_are_read_without_direct_reads() {
    for_each_kind(|name, source, _, _| {
        let is_file = matches!(name, "local" | "threefs");
        assert_eq!(source.local().is_ok(), is_file, "{name}");
        if !is_file {
            let why = source.local().unwrap_err();
            assert_eq!(source.direct_refusal(), Some(&why), "{name}");
            assert!(!why.reason.is_empty() && !why.fix.is_empty(), "{name}");
        }
    });
}

/// What a route keeps about a file. Tells whether that is open when this is dropped.
#[derive(Default)]
struct Kept(OnceLock<(Weak<OpenFile>, mpsc::Sender<bool>)>);

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some((file, told)) = self.0.get() {
            told.send(file.strong_count() > 0).unwrap();
        }
    }
}

#[test]
fn what_routes_keep_is_dropped_before_the_file_is_closed() {
    type Make = fn(Arc<OpenFile>) -> Arc<dyn Source>;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    fs::write(&path, [1; 100]).unwrap();
    let kinds: &[Make] = &[
        |open| Arc::new(Local::new(open.clone(), FileSystem::of(&open.file().unwrap()).unwrap())),
        #[cfg(target_os = "linux")]
        |open| Arc::new(ThreeFs::new(open)),
    ];
    for make in kinds {
        let open = Arc::new(OpenFile::open(&path).unwrap());
        let (file, (told, heard)) = (Arc::downgrade(&open), mpsc::channel());
        let source = make(open);
        source.extensions().get::<Kept>().0.set((file.clone(), told)).unwrap();
        drop(source);
        assert_eq!((heard.recv(), file.strong_count()), (Ok(true), 0));
    }
}
