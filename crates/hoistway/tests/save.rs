//! What is saved is what was there, every way of writing it; what goes wrong leaves what was there before.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    all_devices, can_read,
    child::{forbid, in_child},
    expected, in_memory,
    saving::{Owned, assert_is, data, go_on, mixed, names, owned, reference},
};
use hoistway::{
    DirectIo, Dtype, Error, LoadOptions, Route,
    save::{
        ContentError, Encoded, FileLayout, SaveOptions, SaveReport, Sharding, TensorData, save, save_sharded,
    },
};
use requirements::{Requirement, skip};
use std::{
    collections::BTreeSet,
    fs, io,
    ops::ControlFlow,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options(direct: DirectIo) -> SaveOptions {
    let mut options = SaveOptions::default();
    options.direct = direct;
    options
}

fn save_to(path: &Path, tensors: &[Owned], options: &SaveOptions) -> hoistway::Result<SaveReport> {
    save(path, &data(tensors), None, options, go_on)
}

fn shards_of(max_shard_bytes: u64) -> Sharding {
    Sharding::default().max_shard_bytes(max_shard_bytes)
}

fn save_shards(directory: &Path, tensors: &[Owned], max_shard_bytes: u64) -> hoistway::Result<SaveReport> {
    let sharding = shards_of(max_shard_bytes);
    save_sharded(directory, &data(tensors), None, &sharding, &SaveOptions::default(), go_on)
}

/// Ways to write that work in this directory.
fn ways(directory: &Path) -> Vec<SaveOptions> {
    let mut ways = Vec::new();
    for direct in [DirectIo::Auto, DirectIo::Always, DirectIo::Never] {
        if direct == DirectIo::Always && !can_read(directory, Route::Threads, direct) {
            continue;
        }
        for (sync, threads) in [(true, None), (false, Some(1)), (false, Some(3))] {
            let mut way = options(direct);
            (way.sync, way.threads) = (sync, threads);
            ways.push(way);
        }
    }
    ways
}

#[test]
fn every_way_of_writing_makes_the_file_of_the_reference() {
    let directory = disk();
    let tensors = mixed();
    let file = reference(&tensors);
    let path = directory.path().join("model.safetensors");
    for way in ways(directory.path()) {
        let report = save_to(&path, &tensors, &way).unwrap();
        assert!(fs::read(&path).unwrap() == file, "{way:?}");
        assert_eq!(report.direct_bytes + report.buffered_bytes, file.len() as u64);
        assert_eq!(report.file_bytes, file.len() as u64);
        assert_eq!((report.files, report.tensors, &report.paths), (1, tensors.len(), &vec![path.clone()]));
        match way.direct {
            DirectIo::Always => assert!(report.buffered_bytes < 4096, "{report}"),
            DirectIo::Never => assert_eq!((report.direct_bytes, report.refused.len()), (0, 0), "{report}"),
            DirectIo::Auto if !way.sync => {
                assert_eq!(report.direct_bytes, 0, "{report}");
                assert!(report.to_string().contains("not used: direct writes on"), "{report}");
            }
            DirectIo::Auto => {}
        }
        fs::remove_file(&path).unwrap();
    }
    let mut memory = vec![0; file.len()];
    let data = data(&tensors);
    let encoded = Encoded::new(&data, None).unwrap();
    encoded.write_to(&mut memory).unwrap();
    assert!(memory == file);
    assert!(encoded.write_to(&mut memory[1..]).is_err());
}

#[test]
fn what_is_saved_loads_back_by_every_route() {
    let directory = disk();
    let tensors = mixed();
    let path = directory.path().join("model.safetensors");
    for alignment in [8, 24, 64, 4096, 4 << 20] {
        let way = SaveOptions::default().alignment(alignment);
        save_to(&path, &tensors, &way).unwrap();
        let catalog = hoistway::Catalog::open(&[&path]).unwrap();
        assert!(catalog.tensors()[0].bytes.start().is_multiple_of(alignment));
        for route in [Route::Auto, Route::IoUring, Route::Threads, Route::Mapped] {
            if route == Route::Mapped || can_read(directory.path(), route, DirectIo::Auto) {
                let load = LoadOptions::default().route(route);
                assert_is(&hoistway::load(&[&path], &load).unwrap(), &tensors);
            }
        }
    }
}

#[test]
fn a_layout_is_that_of_the_file_that_is_saved() {
    let directory = disk();
    let tensors = mixed();
    let path = directory.path().join("model.safetensors");
    let metadata = [("key".to_owned(), "text".to_owned())].into();
    for alignment in [8, 24, 4096] {
        let options = SaveOptions::default().alignment(alignment);
        let data = data(&tensors);
        save(&path, &data, Some(&metadata), &options, |_| ControlFlow::Continue(())).unwrap();
        let shapes: Vec<_> = data.iter().map(|tensor| (tensor.name, tensor.dtype, tensor.shape)).collect();
        let layout = FileLayout::new(&shapes, Some(&metadata), &options).unwrap();
        let file = fs::read(&path).unwrap();
        assert_eq!(layout.len, file.len() as u64);
        assert!(file.starts_with(&layout.header) && (layout.header.len() as u64).is_multiple_of(alignment));
        let catalog = hoistway::Catalog::open(&[&path]).unwrap();
        for (data, range) in data.iter().zip(layout.tensors) {
            let saved = catalog.tensors().iter().find(|tensor| *tensor.name == *data.name).unwrap();
            assert!(saved.bytes == range || range.is_empty(), "{}", data.name);
        }
    }
    let twice = [("a", Dtype::U8, &[1][..]); 2];
    let error = FileLayout::new(&twice, None, &SaveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("given twice"), "{error}");
}

#[test]
fn tensors_of_a_load_are_saved_from_wherever_they_are() {
    let directory = disk();
    let tensors = mixed();
    let file = reference(&tensors);
    let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
    fs::write(&from, &file).unwrap();
    for device in all_devices() {
        for direct in [DirectIo::Auto, DirectIo::Never] {
            let load = LoadOptions::default().device(device);
            let loaded = hoistway::load(&[&from], &load).unwrap();
            let data: Vec<TensorData<'_>> = loaded.tensors().iter().map(TensorData::from).collect();
            save(&to, &data, None, &options(direct), go_on).unwrap();
            assert!(fs::read(&to).unwrap() == file, "{device}, {direct:?}");
        }
    }
}

#[test]
fn what_cannot_be_saved_is_refused_before_anything_is_written() {
    let directory = disk();
    let path = directory.path().join("new").join("model.safetensors");
    let twice = [owned("a", Dtype::U8, &[4], 0), owned("a", Dtype::U8, &[4], 0)];
    let error = save_to(&path, &twice, &SaveOptions::default()).unwrap_err();
    let duplicate = matches!(&error, Error::Content(ContentError::DuplicateName { tensor }) if tensor == "a");
    assert!(duplicate, "{error:?}");
    assert!(save_shards(&directory.path().join("new"), &twice, 4).is_err());
    assert!(names(directory.path()).is_empty());
    let error = save_to(&path, &twice[..1], &SaveOptions::default()).unwrap_err();
    let not_there = matches!(&error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound);
    assert!(not_there, "{error:?}");
    let error = save_to(directory.path(), &twice[..1], &SaveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
    for folder in ["new/", "new/."] {
        let error =
            save_to(&directory.path().join(folder), &twice[..1], &SaveOptions::default()).unwrap_err();
        assert!(error.to_string().contains("name a file in it"), "{folder}: {error}");
    }
    // Nothing is saved there, with object stores or without.
    for url in ["https://host/model.safetensors", "toy:///model.safetensors"] {
        for saved in [
            save_to(url.as_ref(), &twice[..1], &SaveOptions::default()),
            save_shards(url.as_ref(), &twice[..1], 4),
        ] {
            match saved.unwrap_err() {
                Error::InvalidOption { option: "path", value, .. } => assert_eq!(value, url),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_link_stays_and_the_file_behind_it_is_replaced() {
    let directory = disk();
    let [file, link, dangling, new] =
        ["blob", "model.safetensors", "later.safetensors", "not-yet"].map(|name| directory.path().join(name));
    fs::write(&file, "old").unwrap();
    symlink("blob", &link).unwrap();
    symlink(&new, &dangling).unwrap();
    let tensors = [owned("a", Dtype::U8, &[4], 0)];
    for path in [&link, &dangling] {
        save_to(path, &tensors, &SaveOptions::default()).unwrap();
        assert!(fs::symlink_metadata(path).unwrap().is_symlink());
    }
    for path in [&file, &new] {
        assert_eq!(fs::read(path).unwrap(), reference(&tensors));
    }
    symlink("loop", directory.path().join("loop")).unwrap();
    let error = save_to(&directory.path().join("loop"), &tensors, &SaveOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Io { operation: "follow links", .. }), "{error:?}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_replaced_file_keeps_its_mode_and_a_new_one_gets_that_of_any_new_file() {
    let directory = disk();
    let [file, link, plain] = ["blob", "model.safetensors", "plain"].map(|name| directory.path().join(name));
    let tensors = [owned("a", Dtype::U8, &[4], 0)];
    fs::write(&plain, "").unwrap();
    save_to(&file, &tensors, &SaveOptions::default()).unwrap();
    assert_eq!(mode(&file), mode(&plain));
    symlink("blob", &link).unwrap();
    for kept in [0o600, 0o640, 0o444, 0o666] {
        set_mode(&file, kept);
        for path in [&file, &link] {
            let report = save_to(path, &tensors, &SaveOptions::default()).unwrap();
            assert_eq!((mode(&file), report.notes), (kept, vec![]));
        }
    }
    // What runs as another user is no property of tensors.
    set_mode(&file, 0o4755);
    save_to(&file, &tensors, &SaveOptions::default()).unwrap();
    assert_eq!(mode(&file), 0o755);
}

#[test]
fn a_link_with_the_name_of_a_temporary_file_is_left_alone() {
    let directory = disk();
    let victim = directory.path().join("victim");
    fs::write(&victim, "another's").unwrap();
    let temp = |number| directory.path().join(format!(".model.safetensors.hoistway-{number:016x}.tmp"));
    symlink(&victim, temp(1)).unwrap();
    fs::write(temp(2), "left by a save that was killed").unwrap();
    let tensors = [owned("a", Dtype::U8, &[16], 0)];
    let path = directory.path().join("model.safetensors");
    let report = save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    assert_eq!(report.notes, [] as [String; 0]);
    assert!(fs::symlink_metadata(temp(1)).is_ok() && !temp(2).exists());
    assert_eq!(fs::read(&victim).unwrap(), b"another's");
}

#[test]
fn what_killed_saves_of_any_name_left_is_removed_and_what_is_being_saved_stays() {
    for is_sharded in [false, true] {
        let directory = disk();
        let file = |name: &str| {
            let path = directory.path().join(name);
            fs::write(&path, "bytes").unwrap();
            path
        };
        let left = [
            file(".step-1.safetensors.hoistway-0123456789abcdef.tmp"),
            file(".step-2.safetensors.index.json.hoistway-0000000000000000.tmp"),
            // Of a set, whose lock is gone.
            file(".model.safetensors.hoistway-00000000000000aa-12.tmp"),
        ];
        let others = [
            file("step-1.safetensors.hoistway-0123456789abcdef.tmp"),
            file(".step-1.safetensors.hoistway-0123456789abcde.tmp"),
            file(".step-1.safetensors.hoistway-0123456789abcdeg.tmp"),
            file(".0123456789abcdef.tmp"),
            file(".model.safetensors.hoistway-00000000000000aa-.tmp"),
        ];
        // The lock is what tells a file that is being written.
        let written = file(".step-3.safetensors.hoistway-0123456789abcdef.tmp");
        let _writer = locked(&written);
        let of_its_set = file(".step-3.safetensors.hoistway-0123456789abcdef-3.tmp");
        let tensors = [owned("a", Dtype::U8, &[16], 0)];
        if is_sharded {
            save_shards(directory.path(), &tensors, 1 << 20).unwrap();
        } else {
            save_to(&directory.path().join("step-4.safetensors"), &tensors, &SaveOptions::default()).unwrap();
        }
        assert!(left.iter().all(|path| !path.exists()), "{:?}", names(directory.path()));
        assert!(others.iter().all(|path| path.exists()), "{:?}", names(directory.path()));
        assert!(written.exists() && of_its_set.exists(), "{:?}", names(directory.path()));
    }
}

#[test]
fn only_the_owner_can_read_what_is_being_saved() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let tensors = [owned("a", Dtype::U8, &[5 << 20], 0)];
    let seen = AtomicUsize::new(0);
    let look = |_| {
        for name in names(directory.path()).iter().filter(|name| name.ends_with(".tmp")) {
            assert_eq!(mode(&directory.path().join(name)), 0o600);
            seen.fetch_add(1, Ordering::Relaxed);
        }
        ControlFlow::Continue(())
    };
    save(&path, &data(&tensors), None, &SaveOptions::default(), look).unwrap();
    set_mode(&path, 0o666);
    save(&path, &data(&tensors), None, &SaveOptions::default(), look).unwrap();
    let tensors = [owned("a", Dtype::U8, &[400], 0), owned("b", Dtype::U8, &[400], 0)];
    let sharding = shards_of(400);
    save_sharded(directory.path(), &data(&tensors), None, &sharding, &SaveOptions::default(), look).unwrap();
    assert!(seen.into_inner() >= 4);
}

#[test]
fn shards_and_index_get_what_all_files_of_the_replaced_save_allow() {
    let directory = disk();
    let modes = || -> BTreeSet<u32> {
        names(directory.path()).iter().map(|name| mode(&directory.path().join(name))).collect()
    };
    let tensors = [1, 2, 3].map(|seed| owned(&seed.to_string(), Dtype::U8, &[400], seed));
    save_to(&directory.path().join("model.safetensors"), &tensors, &SaveOptions::default()).unwrap();
    set_mode(&directory.path().join("model.safetensors"), 0o640);
    // Three shards in place of a single file, two of three, one file of two.
    for (max_shard_bytes, files) in [(400, 4), (800, 3), (1200, 1)] {
        save_shards(directory.path(), &tensors, max_shard_bytes).unwrap();
        assert_eq!((names(directory.path()).len(), modes()), (files, [0o640].into()));
    }
    save_shards(directory.path(), &tensors, 400).unwrap();
    for (name, mode) in names(directory.path()).iter().zip([0o664, 0o646, 0o644, 0o666]) {
        set_mode(&directory.path().join(name), mode);
    }
    save_shards(directory.path(), &tensors, 400).unwrap();
    assert_eq!(modes(), [0o644].into());
}

/// Gives a file or the future files of a folder an access control list: owner rw, user 4321 r, group nothing, mask r, others
/// nothing.
fn set_access_list(path: &Path, attribute: &str) -> rustix::io::Result<()> {
    let none = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(0x01, 6, none), (0x02, 4, 4321), (0x04, 0, none), (0x10, 4, none), (0x20, 0, none)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
    }
    rustix::fs::setxattr(path, attribute, &list, rustix::fs::XattrFlags::empty())
}

#[test]
fn the_group_does_not_get_what_an_access_control_list_gave_others() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let tensors = [owned("a", Dtype::U8, &[4], 0)];
    fs::write(&path, "old").unwrap();
    if let Err(error) = set_access_list(&path, "system.posix_acl_access") {
        skip(Requirement::Acl, error);
        return;
    }
    // The mask takes the place of the group.
    assert_eq!(mode(&path), 0o640);
    save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    assert_eq!(mode(&path), 0o600);
    // Files of this folder get such a list from the start; the replaced one had none.
    set_access_list(directory.path(), "system.posix_acl_default").unwrap();
    set_mode(&path, 0o640);
    save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    let list = rustix::fs::getxattr(&path, "system.posix_acl_access", &mut [0u8; 256][..]);
    assert_eq!((mode(&path), list), (0o640, Err(rustix::io::Errno::NODATA)));
}

/// Runs as root, as another may not give files away.
#[test]
fn shards_of_several_groups_give_none_of_these_the_others_rights() {
    if !rustix::process::geteuid().is_root() {
        skip(Requirement::Root, "only root can give files away");
        return;
    }
    let directory = disk();
    let tensors = [1, 2].map(|seed| owned(&seed.to_string(), Dtype::U8, &[400], seed));
    save_shards(directory.path(), &tensors, 400).unwrap();
    let path = |name: &String| directory.path().join(name);
    for (name, group) in names(directory.path()).iter().zip(1000..) {
        chown(path(name), None, Some(group)).unwrap();
        set_mode(&path(name), 0o664);
    }
    save_shards(directory.path(), &tensors, 400).unwrap();
    assert!(names(directory.path()).iter().all(|name| mode(&path(name)) == 0o644));
}

/// Runs as root, as another may not give files away.
#[test]
fn a_replaced_file_keeps_its_owner_and_no_other_group_gets_its_rights() {
    const TEST: &str = "a_replaced_file_keeps_its_owner_and_no_other_group_gets_its_rights";
    if !rustix::process::geteuid().is_root() {
        skip(Requirement::Root, "only root can give files away");
        return;
    }
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let tensors = [owned("a", Dtype::U8, &[4], 0)];
    fs::write(&path, "old").unwrap();
    set_mode(&path, 0o640);
    chown(&path, Some(4321), Some(1234)).unwrap();
    save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    let owner = |path: &Path| fs::metadata(path).map(|stat| (stat.uid(), stat.gid())).unwrap();
    assert_eq!((owner(&path), mode(&path)), ((4321, 1234), 0o640));
    // As where the process may not: its own group gets nothing of what the other had.
    if !in_child(TEST) {
        return;
    }
    forbid(&[libc::SYS_fchown], libc::EPERM);
    save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    assert_eq!((owner(&path), mode(&path)), ((0, 0), 0o600));
}

#[test]
fn a_save_that_is_cancelled_leaves_the_old_file() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let [old, new] = [1, 2].map(|seed| vec![owned("a", Dtype::U8, &[20 << 20], seed)]);
    save_to(&path, &old, &SaveOptions::default()).unwrap();
    for after in [0, 1, 5 << 20, 20 << 20] {
        let written = AtomicU64::new(0);
        let stop = |bytes| {
            let written = written.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if written >= after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let result = save(&path, &data(&new), None, &SaveOptions::default(), stop);
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        assert_eq!(names(directory.path()), ["model.safetensors".to_owned()].into());
        assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &old);
    }
}

#[test]
fn two_saves_of_one_name_at_a_time_do_not_disturb_each_other() {
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let [inner, outer] = [1, 2].map(|seed| vec![owned("a", Dtype::U8, &[9 << 20], seed)]);
    let calls = AtomicUsize::new(0);
    let meanwhile = |_| {
        if calls.fetch_add(1, Ordering::Relaxed) == 0 {
            save_to(&path, &inner, &SaveOptions::default()).unwrap();
            assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &inner);
        }
        ControlFlow::Continue(())
    };
    save(&path, &data(&outer), None, &SaveOptions::default(), meanwhile).unwrap();
    assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &outer);
    assert_eq!(names(directory.path()), ["model.safetensors".to_owned()].into());
}

#[test]
fn memory_takes_no_direct_writes_and_the_report_says_so() {
    let Some(directory) = in_memory() else { return };
    let path = directory.path().join("model.safetensors");
    let tensors = mixed();
    let report = save_to(&path, &tensors, &SaveOptions::default()).unwrap();
    assert!(fs::read(&path).unwrap() == reference(&tensors));
    assert_eq!(report.direct_bytes, 0);
    let refusal = report.refused.iter().find(|refusal| refusal.what == "direct writes").unwrap();
    assert!(refusal.why.reason.contains("tmpfs"), "{refusal:?}");
    let error = save_to(&path, &tensors, &options(DirectIo::Always)).unwrap_err();
    assert!(
        matches!(&error, Error::RouteUnavailable { why, .. } if why.reason.contains("tmpfs")),
        "{error:?}"
    );
    assert_eq!(names(directory.path()), ["model.safetensors".to_owned()].into());
}

/// A small file system in memory. Unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Returns `None` where nothing can be mounted.
    fn mount() -> Option<Self> {
        let directory = disk();
        let mount = ["-t", "tmpfs", "-o", "size=3m", "tmpfs"];
        let why = match Command::new("mount").args(mount).arg(directory.path()).output() {
            Ok(output) if output.status.success() => return Some(Self(directory)),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => format!("mount: {error}"),
        };
        skip(Requirement::Mount, why.trim());
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_disk_is_an_error_before_the_first_write_and_the_old_file_stays() {
    let Some(small) = SmallDisk::mount() else { return };
    let directory = small.0.path();
    let path = directory.join("model.safetensors");
    let old = [owned("a", Dtype::U8, &[1 << 20], 1)];
    save_to(&path, &old, &SaveOptions::default()).unwrap();
    let new = [owned("a", Dtype::U8, &[1 << 20], 2), owned("b", Dtype::U8, &[2 << 20], 2)];
    let written = AtomicU64::new(0);
    let count = |bytes| {
        written.fetch_add(bytes, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    let options = SaveOptions::default();
    for result in [
        save(&path, &data(&new), None, &options, count),
        save_sharded(directory, &data(&new), None, &shards_of(1 << 20), &options, count),
    ] {
        match result.unwrap_err() {
            Error::Io { operation: "allocate", path, source, .. } => {
                assert!(path.starts_with(directory));
                assert_eq!(source.kind(), io::ErrorKind::StorageFull);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(written.into_inner(), 0);
    assert_eq!(names(directory), ["model.safetensors".to_owned()].into());
    assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &old);
}

/// Runs `fail` in a child over an old file, where these calls fail, and looks at what is left.
fn failing(test: &str, calls: &[i64], errno: i32, fail: impl Fn(&Path, &[Owned])) {
    if !in_child(test) {
        return;
    }
    let directory = disk();
    let path = directory.path().join("model.safetensors");
    let [old, new] = [1, 2].map(|seed| {
        vec![owned("first", Dtype::U8, &[5 << 20], seed), owned("second", Dtype::U8, &[5 << 20], seed)]
    });
    save_to(&path, &old, &SaveOptions::default()).unwrap();
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    forbid(calls, errno);
    fail(&path, &new);
    assert_eq!(fs::read_dir("/proc/self/fd").unwrap().count(), descriptors);
    assert_eq!(names(directory.path()), ["model.safetensors".to_owned()].into());
    assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &old);
}

#[test]
fn a_broken_disk_names_tensor_and_offset() {
    let test = "a_broken_disk_names_tensor_and_offset";
    failing(test, &[libc::SYS_pwritev], libc::EIO, |path, new| {
        let mut single = options(DirectIo::Never);
        single.threads = Some(1);
        match save_to(path, new, &single).unwrap_err() {
            // The first write begins with the header.
            Error::Io { operation: "write", path: at, tensor: None, range: Some(range), source } => {
                assert_eq!((at.as_path(), range.start()), (path, 0));
                assert_eq!(source.raw_os_error(), Some(libc::EIO));
            }
            other => panic!("{other:?}"),
        }
        for direct in [DirectIo::Auto, DirectIo::Never] {
            match save_to(path, new, &options(direct)).unwrap_err() {
                Error::Io { operation: "write", path: at, source, .. } => {
                    assert_eq!((at.as_path(), source.raw_os_error()), (path, Some(libc::EIO)));
                }
                other => panic!("{other:?}"),
            }
        }
        let error = save_shards(path.parent().unwrap(), new, 5 << 20).unwrap_err();
        assert!(error.to_string().contains("model-0000"), "{error}");
    });
}

#[test]
fn a_sync_that_fails_fails_the_save() {
    failing("a_sync_that_fails_fails_the_save", &[libc::SYS_fsync], libc::EIO, |path, new| {
        for result in
            [save_to(path, new, &SaveOptions::default()), save_shards(path.parent().unwrap(), new, 5 << 20)]
        {
            match result.unwrap_err() {
                Error::Io { operation: "sync", source, .. } => {
                    assert_eq!(source.raw_os_error(), Some(libc::EIO));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn names_that_cannot_be_given_leave_the_old_ones() {
    let calls = [libc::SYS_rename, libc::SYS_renameat, libc::SYS_renameat2];
    failing("names_that_cannot_be_given_leave_the_old_ones", &calls, libc::EACCES, |path, new| {
        for result in [
            save_to(path, new, &SaveOptions::default()),
            save_shards(path.parent().unwrap(), new, 5 << 20),
            save_shards(path.parent().unwrap(), new, 50 << 20),
        ] {
            let error = result.unwrap_err();
            assert!(matches!(&error, Error::Io { operation: "rename", .. }), "{error:?}");
        }
    });
}

#[test]
fn file_systems_that_lack_locks_and_allocation_serve() {
    if !in_child("file_systems_that_lack_locks_and_allocation_serve") {
        return;
    }
    forbid(&[libc::SYS_fallocate, libc::SYS_flock, libc::SYS_renameat2], libc::EOPNOTSUPP);
    let directory = disk();
    let tensors = mixed();
    for max_shard_bytes in [1 << 20, 2 << 20, u64::MAX] {
        save_shards(directory.path(), &tensors, max_shard_bytes).unwrap();
        assert_is(&hoistway::load(&[directory.path()], &LoadOptions::default()).unwrap(), &tensors);
    }
}

fn shard_names(paths: &[PathBuf]) -> Vec<&str> {
    paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect()
}

#[test]
fn shards_have_the_names_and_the_index_of_hugging_face() {
    let directory = disk();
    let folder = directory.path().join("new").join("model");
    let tensors: Vec<_> = (0..5u8).map(|i| owned(&format!("t{i}"), Dtype::U8, &[1000], i)).collect();
    let report = save_shards(&folder, &tensors, 2000).unwrap();
    let expected_names = [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ];
    assert_eq!(shard_names(&report.paths), expected_names);
    assert_eq!(names(&folder), expected_names.map(str::to_owned).into());
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(report.paths.last().unwrap()).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 5000);
    assert_eq!(index["weight_map"]["t2"], "model-00002-of-00003.safetensors");
    let second = fs::read(&report.paths[1]).unwrap();
    assert_eq!(expected(&second, "t3"), tensors[3].bytes);
    assert_is(&hoistway::load(&[&folder], &LoadOptions::default()).unwrap(), &tensors);
}

#[test]
fn every_save_over_another_leaves_itself_alone() {
    let directory = disk();
    let folder = directory.path();
    fs::write(folder.join("config.json"), "{}").unwrap();
    fs::write(folder.join("model-2-00001-of-00001.safetensors"), "another's").unwrap();
    let generation = |seed, count: u64| -> Vec<Owned> {
        (0..count).map(|i| owned(&format!("t{i}"), Dtype::U8, &[1000], seed)).collect()
    };
    let mut seed = 0;
    // Of every kind over every kind: shards in several numbers, a single file.
    for (count, shards) in [(4, 2), (4, 2), (6, 3), (2, 1), (2, 1), (4, 2), (2, 1), (6, 3), (6, 3)] {
        seed += 1;
        let tensors = generation(seed, count);
        let report = save_shards(folder, &tensors, 2000).unwrap();
        assert_eq!(report.files, shards);
        let mut expected: Vec<String> = shard_names(&report.paths).into_iter().map(str::to_owned).collect();
        expected.extend(["config.json".into(), "model-2-00001-of-00001.safetensors".into()]);
        assert_eq!(names(folder), expected.into_iter().collect());
        // The file alone, or the index: that stays where there was one, as another's file is not to be taken for one's own.
        let catalog = report.paths.last().unwrap();
        assert_is(&hoistway::load(&[catalog], &LoadOptions::default()).unwrap(), &tensors);
    }
}

#[test]
fn shards_without_an_index_are_replaced_like_any_others() {
    let directory = disk();
    let folder = directory.path();
    let [old, new] = [1, 2]
        .map(|seed| [owned("a", Dtype::U8, &[1000], seed), owned("b", Dtype::U8, &[1000], seed)].to_vec());
    for max_shard_bytes in [1000, 5000] {
        let report = save_shards(folder, &old, 1000).unwrap();
        fs::remove_file(report.paths.last().unwrap()).unwrap();
        assert_is(&hoistway::load(&[folder], &LoadOptions::default()).unwrap(), &old);
        let report = save_shards(folder, &new, max_shard_bytes).unwrap();
        assert_eq!(names(folder).len(), report.paths.len());
        assert_is(&hoistway::load(&[folder], &LoadOptions::default()).unwrap(), &new);
    }
}

#[test]
fn shards_that_are_not_all_there_are_no_checkpoint() {
    let directory = disk();
    let folder = directory.path();
    let tensors = [owned("a", Dtype::U8, &[1000], 1), owned("b", Dtype::U8, &[1000], 1)];
    let report = save_shards(folder, &tensors, 1000).unwrap();
    for path in &report.paths[1..] {
        fs::remove_file(path).unwrap();
    }
    let error = hoistway::load(&[folder], &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("1 of the 2 files of 'model-"), "{error}");
    // The next save does not count on them, and removes them.
    let report = save_shards(folder, &tensors, 1000).unwrap();
    assert_eq!(names(folder).len(), report.paths.len());
    assert_is(&hoistway::load(&[folder], &LoadOptions::default()).unwrap(), &tensors);
}

/// The lock of a folder, as another save has it.
fn locked(folder: &Path) -> fs::File {
    let file = fs::File::open(folder).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

#[test]
fn a_save_of_many_shards_has_few_files_open() {
    if std::env::var_os(CHILD).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new("sh");
        child.args(["-c", "ulimit -n 64; exec \"$0\" --exact a_save_of_many_shards_has_few_files_open"]);
        assert!(child.arg(program).env(CHILD, "1").status().unwrap().success());
        return;
    }
    let directory = disk();
    let tensors: Vec<_> = (0..150).map(|at| owned(&format!("t{at}"), Dtype::U8, &[1100], at)).collect();
    let report = save_shards(directory.path(), &tensors, 1100).unwrap();
    assert_eq!((report.files, report.paths.len()), (150, 151));
    for tensor in &tensors {
        let found = report.paths[..150].iter().find_map(|path| {
            let file = fs::read(path).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
            tensors.tensor(&tensor.name).ok().map(|view| view.data() == tensor.bytes)
        });
        assert_eq!(found, Some(true), "{}", tensor.name);
    }
}

/// Set in a child with few descriptors.
const CHILD: &str = "HOISTWAY_TEST_FEW_FILES";

#[test]
fn a_save_that_waits_for_another_can_be_cancelled() {
    let directory = disk();
    let _lock = locked(directory.path());
    let tensors = [owned("a", Dtype::U8, &[1000], 1)];
    let calls = AtomicUsize::new(0);
    let stop = |_| match calls.fetch_add(1, Ordering::Relaxed) {
        // It is waiting by then: a single extent is done after two.
        10 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let options = SaveOptions::default();
    let result = save_sharded(directory.path(), &data(&tensors), None, &shards_of(5000), &options, stop);
    assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
    assert!(names(directory.path()).is_empty());
}

#[test]
fn a_save_that_waits_long_for_a_lock_says_who_holds_it() {
    let directory = disk();
    let holder = Mutex::new(Some(locked(directory.path())));
    let tensors = [owned("a", Dtype::U8, &[1000], 1)];
    let (calls, waiting_since, late_calls) = (AtomicUsize::new(0), OnceLock::new(), AtomicUsize::new(0));
    let go_on = |_| {
        // It is waiting by the tenth call: a single extent is done after two. Then it looks at its wait between calls.
        if calls.fetch_add(1, Ordering::Relaxed) >= 10
            && waiting_since.get_or_init(Instant::now).elapsed() > Duration::from_millis(1100)
            && late_calls.fetch_add(1, Ordering::Relaxed) > 0
        {
            *holder.lock().unwrap() = None;
        }
        ControlFlow::Continue(())
    };
    let options = SaveOptions::default();
    let saved = save_sharded(directory.path(), &data(&tensors), None, &shards_of(5000), &options, go_on);
    let notes = saved.unwrap().notes;
    let holder = format!("process {} (", std::process::id());
    assert!(notes.iter().any(|note| note.contains("waited") && note.contains(&holder)), "{notes:?}");
}

#[test]
fn a_save_can_be_cancelled_until_names_are_given() {
    let directory = disk();
    let folder = directory.path();
    let path = folder.join("model.safetensors");
    let [old, new] = [1, 2].map(|seed| [owned("a", Dtype::U8, &[1000], seed)]);
    save_to(&path, &old, &SaveOptions::default()).unwrap();
    let len = reference(&new).len() as u64;
    for is_sharded in [false, true] {
        let written = AtomicU64::new(0);
        let stop = |bytes| match written.fetch_add(bytes, Ordering::Relaxed) {
            // Bytes that are written are told of once, so this is after that.
            before if before == len => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let options = SaveOptions::default();
        let result = match is_sharded {
            true => save_sharded(folder, &data(&new), None, &shards_of(5000), &options, stop),
            false => save(&path, &data(&new), None, &options, stop),
        };
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        assert_eq!(names(folder), ["model.safetensors".to_owned()].into());
        assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &old);
    }
}

/// A process that has all descriptors of this one and does nothing. Killed when dropped.
struct Forked(libc::pid_t);

impl Forked {
    fn off() -> Self {
        // SAFETY: the child calls what may be called between fork and exec alone.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: it takes nothing.
                unsafe { libc::pause() };
            },
            child => Self(child),
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // SAFETY: the child is this one's, and nothing has waited for it.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

#[test]
fn a_process_that_is_forked_off_during_a_save_keeps_no_lock_of_it() {
    let directory = disk();
    let tensors = [owned("a", Dtype::U8, &[1000], 1)];
    let len = reference(&tensors).len() as u64;
    let (written, child) = (AtomicU64::new(0), Mutex::new(None));
    let fork = |bytes| {
        if written.fetch_add(bytes, Ordering::Relaxed) == len {
            // All is written, and the folder locked.
            child.lock().unwrap().get_or_insert_with(Forked::off);
        }
        ControlFlow::Continue(())
    };
    let options = SaveOptions::default();
    save_sharded(directory.path(), &data(&tensors), None, &shards_of(5000), &options, fork).unwrap();
    assert!(child.lock().unwrap().is_some());
    let file = fs::File::open(directory.path()).unwrap();
    let locking = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert_eq!(locking, Ok(()), "the child has the lock of the folder");
    let file = fs::File::open(directory.path().join("model.safetensors")).unwrap();
    let locking = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert_eq!(locking, Ok(()), "the child has the lock of the file");
}

#[test]
fn a_folder_that_cannot_be_synced_once_names_are_given_is_told_apart() {
    if !in_child("a_folder_that_cannot_be_synced_once_names_are_given_is_told_apart") {
        return;
    }
    let directory = disk();
    let tensors = [owned("a", Dtype::U8, &[1000], 1)];
    let len = reference(&tensors).len() as u64;
    let path = directory.path().join("model.safetensors");
    let written = AtomicU64::new(0);
    let forbid_syncs = |bytes| {
        if written.fetch_add(bytes, Ordering::Relaxed) == len {
            forbid(&[libc::SYS_fsync], libc::EIO);
        }
        ControlFlow::Continue(())
    };
    let mut options = SaveOptions::default();
    options.threads = Some(1);
    match save(&path, &data(&tensors), None, &options, forbid_syncs).unwrap_err() {
        Error::NotSynced { path: at, source } => {
            assert_eq!((at, source.raw_os_error()), (path.clone(), Some(libc::EIO)));
        }
        other => panic!("{other:?}"),
    }
    assert_is(&hoistway::load(&[&path], &LoadOptions::default()).unwrap(), &tensors);
}

/// Two tensors in two shards, by the name of that single file.
fn save_as(folder: &Path, file_name: &str, seed: u8) -> Vec<Owned> {
    let tensors = ["a", "b"].map(|name| owned(name, Dtype::U8, &[1000], seed));
    let sharding = shards_of(1000).file_name(file_name);
    save_sharded(folder, &data(&tensors), None, &sharding, &SaveOptions::default(), go_on).unwrap();
    tensors.into()
}

#[test]
fn a_checkpoint_whose_name_looks_like_a_set_of_another_stays() {
    for order in
        [["model-set2.safetensors", "model.safetensors"], ["model.safetensors", "model-set2.safetensors"]]
    {
        let directory = disk();
        let folder = directory.path();
        let mut latest = std::collections::BTreeMap::new();
        // The second rounds have sets of the same names as each other's.
        for (seed, name) in (1..).zip(order.iter().cycle().take(6)) {
            latest.insert(*name, save_as(folder, name, seed));
            for (name, tensors) in &latest {
                let index = folder.join(format!("{name}.index.json"));
                assert_is(&hoistway::load(&[index], &LoadOptions::default()).unwrap(), tensors);
            }
        }
        assert_eq!(names(folder).len(), 6, "{:?}", names(folder));
    }
}

#[test]
fn files_of_other_names_that_the_old_index_names_stay_and_change_nothing() {
    let directory = disk();
    let folder = directory.path();
    let [old, new] = [1, 2].map(|seed| ["a", "b"].map(|name| owned(name, Dtype::U8, &[1000], seed)).to_vec());
    save_to(&folder.join("base.safetensors"), &old, &SaveOptions::default()).unwrap();
    let index = r#"{"weight_map": {"a": "base.safetensors", "b": "base.safetensors"}}"#;
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    for max_shard_bytes in [5000, 5000, 1000, 5000] {
        let report = save_shards(folder, &new, max_shard_bytes).unwrap();
        assert_is(&hoistway::load(&[folder], &LoadOptions::default()).unwrap(), &new);
        let mut expected: Vec<&str> = shard_names(&report.paths);
        expected.push("base.safetensors");
        assert_eq!(names(folder), expected.into_iter().map(str::to_owned).collect());
    }
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    let report = save_shards(folder, &new, 1000).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("base.safetensors is left")), "{report:?}");
}

#[test]
fn a_report_lists_what_a_save_removed() {
    let directory = disk();
    let first = save_shards(directory.path(), &mixed(), 1 << 20).unwrap();
    let second = save_shards(directory.path(), &mixed(), u64::MAX).unwrap();
    let [mut removed, mut expected] = [second.removed, first.paths];
    removed.sort();
    expected.sort();
    assert_eq!(removed, expected);
}
