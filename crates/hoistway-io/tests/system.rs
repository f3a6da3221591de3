//! What every system provides behind the seam.

use hoistway_io::file::{FileIdentity, FileUse, open_direct};
use hoistway_io::sys::{
    files, limits, machine, numa,
    pages::{Pages, page_size},
    threads,
    usage::Usage,
};
use std::{
    fs::{self, File},
    hint::black_box,
    io::IoSlice,
    time::{Duration, Instant},
};

/// The bytes of `pages`.
fn bytes(pages: &mut Pages, len: usize) -> &mut [u8] {
    // SAFETY: the pages have `len` initialised bytes, and are borrowed as long as these.
    unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr(), len) }
}

#[test]
fn pages_are_zeroed_and_are_so_again_when_released() {
    let len = 4 * page_size() + 1;
    let mut pages = Pages::new(len, None).unwrap();
    assert!(bytes(&mut pages, len).iter().all(|&byte| byte == 0));
    let page = page_size();
    // Only whole pages: what shares a page with other bytes stays.
    for (range, released) in [
        (page..3 * page, page..3 * page),
        (page..2 * page + 1, page..2 * page),
        (1..3 * page - 1, page..2 * page),
        (1..page, 0..0),
        (page + 1..2 * page - 1, 0..0),
    ] {
        bytes(&mut pages, len).fill(7);
        // SAFETY: no reference to the bytes is left.
        unsafe { pages.release(range.clone()) };
        let is_right = |(at, &byte): (usize, &u8)| byte == if released.contains(&at) { 0 } else { 7 };
        assert!(bytes(&mut pages, len).iter().enumerate().all(is_right), "{range:?}");
    }
}

#[test]
fn a_reservation_is_used_in_parts_again_and_again() {
    let page = page_size();
    // More than any machine has: address space costs nothing.
    let pages = Pages::reserve(1 << 40).unwrap();
    for round in 0..3 {
        for start in [0, 7 * page, (1 << 40) - 2 * page] {
            let range = start..start + 2 * page;
            pages.commit(range.clone()).unwrap();
            // SAFETY: committed, and nothing else uses it.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr().add(start), 2 * page) };
            assert!(bytes.iter().all(|byte| *byte == 0), "round {round}");
            bytes.fill(7);
            // Committing again changes nothing.
            pages.commit(range.clone()).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 7));
            // SAFETY: no reference to the bytes is left.
            unsafe { pages.release(range) };
        }
    }
}

#[test]
fn views_of_files_are_private() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let content: Vec<u8> = (0..3 * page_size() + 5).map(|at| (at % 251) as u8).collect();
    fs::write(&path, &content).unwrap();
    let mut pages = Pages::of_file(&File::open(&path).unwrap(), content.len()).unwrap();
    pages.populate_for_reading(0..content.len()).unwrap();
    assert!(bytes(&mut pages, content.len()) == content);
    bytes(&mut pages, content.len()).fill(0);
    drop(pages);
    assert!(fs::read(&path).unwrap() == content);
    fs::write(&path, "").unwrap();
    Pages::of_file(&File::open(&path).unwrap(), 0).unwrap();
}

#[test]
fn time_on_cores_is_counted() {
    let (before, start) = (Usage::now(), Instant::now());
    // Some systems count in steps of 16 ms, and a busy one may give this thread no core for long.
    while Usage::now().cpu <= before.cpu {
        assert!(start.elapsed() < Duration::from_secs(60), "no time is counted");
        black_box(start);
    }
}

#[test]
fn the_machine_is_a_limit_of_memory() {
    let limits: Vec<_> = limits::sources().iter().filter_map(limits::LimitSource::read).collect();
    let least = limits.iter().map(|limit| limit.total_bytes).min();
    assert!(least.is_some_and(|bytes| bytes > 64 << 20), "{limits:?}");
    assert!(limits.iter().all(|limit| limit.available_bytes <= limit.total_bytes), "{limits:?}");
}

#[test]
fn a_thread_runs_on_the_cores_of_a_node() {
    let cpus = numa::nodes().first().map_or(vec![0], |node| node.cpus.clone());
    threads::run_on(&cpus).unwrap();
    let usable = threads::usable(&cpus).unwrap();
    assert_eq!(threads::usable(&usable).as_ref(), Some(&usable));
    assert_eq!(threads::usable(&[]), Some(Vec::new()));
    if cfg!(target_os = "linux") {
        threads::run_on(&usable[..1]).unwrap();
        assert!(threads::run_on(&[]).is_err());
        assert_eq!(threads::usable(&cpus).as_deref(), Some(&usable[..1]));
    }
    let numbers: Vec<_> = machine::kernel_release().split('.').take(2).map(str::parse::<u32>).collect();
    assert!(numbers.iter().all(Result::is_ok) && numbers.len() == 2, "{numbers:?}");
}

#[test]
fn files_are_read_and_written_at_positions() {
    let folder = tempfile::tempdir().unwrap();
    let file = files::create_nameless(folder.path()).unwrap();
    let mut text = [IoSlice::new(b"hello"), IoSlice::new(b" world")];
    let (mut left, mut offset) = (&mut text[..], 3);
    while !left.is_empty() {
        let written = files::write_vectored_at(&file, left, offset).unwrap();
        offset += written as u64;
        IoSlice::advance_slices(&mut left, written);
    }
    let mut bytes = [1; 14];
    files::read_exact_at(&file, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"\0\0\0hello world");
    assert_eq!(files::read_at(&file, &mut bytes, 9).unwrap(), 5);
    assert_eq!(files::read_at(&file, &mut bytes, 14).unwrap(), 0);
    assert!(files::read_exact_at(&file, &mut bytes, 1).is_err());
    drop(file);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn an_open_file_is_known_by_its_identity_and_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "one").unwrap();
    let (file, has_writer) = files::open_without_waiting(&path).unwrap();
    assert!(!has_writer);
    let before = FileIdentity::of(&file).unwrap();
    assert_eq!((before.len(), before.links()), (3, 1));
    assert_eq!(FileIdentity::of(&files::reopen(&file).unwrap()).unwrap(), before);
    let name = files::name(&file).unwrap();
    assert_eq!(fs::canonicalize(name).unwrap(), fs::canonicalize(&path).unwrap());
    let other = folder.path().join("other");
    fs::write(&other, "two").unwrap();
    let other = FileIdentity::of(&File::open(&other).unwrap()).unwrap();
    assert_eq!(before.change(&other).as_deref(), Some("another file has taken its name"));
    fs::hard_link(&path, folder.path().join("link")).unwrap();
    assert_eq!(FileIdentity::of(&file).unwrap().links(), 2);
}

#[test]
fn a_file_that_is_opened_past_the_cache_says_so() {
    let folder = tempfile::tempdir_in(".").unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; 8192]).unwrap();
    let file = File::open(&path).unwrap();
    assert!(!files::is_direct(&file));
    match open_direct(&file, FileUse::Read) {
        Ok(direct) => {
            assert!(files::is_direct(&direct.file));
            assert!(direct.offset_alignment.is_power_of_two() && direct.offset_alignment <= 4096);
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
