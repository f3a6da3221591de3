//! One suite that every route must pass: the bytes are the file's, whatever is asked and however the file is cached.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    HAS_DIRECT_PATH, QUEUED, all_devices, assert_is_file, assert_is_gguf, can_read, devices, expected,
    in_memory, make_cold, make_warm, mixed_gguf, mixed_model, reading::Warm, system::write_all_at, tensor,
    write_model,
};
use hoistway::{
    Arrival, Cancel, Catalog, Checkpoint, DeviceId, DirectIo, Dtype, Error, LoadOptions, Loaded,
    NumaPlacement, Route, StreamOptions,
    catalog::{FormatError, index::IndexError},
    memory::{HugePages, MemoryPool},
    plan::{Layout, PlanError, Selection, TensorSlice},
    route::Access,
    save::{SaveOptions, Sharding, TensorBytes, TensorData, save_sharded},
};
use std::{fs, path::Path};

/// Every way to move bytes to private memory and to a device, with what must carry them on a cold file of a disk.
fn routes(directory: &Path) -> Vec<(LoadOptions, Route)> {
    let with = |route, direct| LoadOptions::default().route(route).direct(direct);
    let on_host: Vec<_> = [
        (with(Route::Auto, DirectIo::Auto), QUEUED),
        (with(QUEUED, DirectIo::Auto), QUEUED),
        (with(QUEUED, DirectIo::Never), QUEUED),
        (with(Route::Threads, DirectIo::Always), Route::Threads),
        (with(Route::Threads, DirectIo::Never), Route::Threads),
        (with(Route::Auto, DirectIo::Never), Route::Threads),
        (with(Route::Toy, DirectIo::Auto), Route::Toy),
        ((with(QUEUED, DirectIo::Auto)).rings(3), QUEUED),
        ((with(Route::Threads, DirectIo::Auto)).threads(1), Route::Threads),
    ]
    .into_iter()
    .filter(|(options, _)| can_read(directory, options.route, options.direct))
    .collect();
    let [_, device] = devices();
    let to_device = |(options, carrier): &(LoadOptions, Route)| {
        // The stand-in's path past the host is what `auto` takes.
        let past_host = HAS_DIRECT_PATH && options.route == Route::Auto && options.direct == DirectIo::Auto;
        (options.clone().device(device), if past_host { Route::Gds } else { *carrier })
    };
    let only_to_device = [
        (Route::Staged, DirectIo::Auto, QUEUED),
        (Route::Gds, DirectIo::Auto, Route::Gds),
        (Route::GdsCompat, DirectIo::Always, Route::GdsCompat),
    ]
    .map(|(route, direct, carrier)| ((with(route, direct)).device(device), carrier));
    let has_direct = can_read(directory, Route::Threads, DirectIo::Always);
    let past_host =
        |(options, _): &(LoadOptions, Route)| has_direct && HAS_DIRECT_PATH || options.route == Route::Staged;
    let to_device: Vec<_> =
        on_host.iter().map(to_device).chain(only_to_device.into_iter().filter(past_host)).collect();
    on_host.into_iter().chain(to_device).collect()
}

/// Tests that need a disk put their files here, since `/tmp` may be memory.
fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn every_route_delivers_the_file_in_every_layout() {
    let directory = disk();
    let (safetensors, file) = mixed_model(directory.path());
    every_route_delivers(directory.path(), &safetensors, |loaded| assert_is_file(loaded, &file));
}

#[test]
fn every_route_delivers_a_gguf_in_every_layout() {
    let directory = disk();
    let (gguf, tensors) = mixed_gguf(directory.path());
    every_route_delivers(directory.path(), &gguf, |loaded| {
        assert_is_gguf(loaded, &tensors);
        for tensor in loaded.tensors().iter().filter(|tensor| tensor.dtype().block_len() > 1) {
            let alignment = if tensor.device() == DeviceId::Cpu { tensor.dtype().alignment() } else { 32 };
            let empty = tensor.len_bytes() == 0;
            assert!(empty || tensor.address() % alignment == 0, "{} is misaligned", tensor.name());
        }
    });
}

fn every_route_delivers(directory: &Path, path: &Path, assert_is_whole: impl Fn(&Loaded)) {
    for (options, carrier) in routes(directory) {
        for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
            for chunk_bytes in [4096, 64 << 10, 4 << 20] {
                make_cold(path);
                let options = options.clone().layout(layout).chunk_bytes(chunk_bytes);
                let loaded = hoistway::load(&[path], &options).unwrap();
                assert_is_whole(&loaded);
                let report = loaded.report();
                let moved: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
                assert_eq!(moved, report.tensor_bytes, "{report:?}");
                if !matches!(options.route, Route::Auto | Route::Staged) {
                    // What cuFile cannot serve is listed: a file's last block, if it is not whole.
                    let is_tail = |carried: &hoistway::Carrier| {
                        matches!(carrier, Route::Gds | Route::GdsCompat)
                            && carried.route == Route::Threads
                            && carried.tensor_bytes < 4096
                    };
                    assert!(
                        report.carriers.iter().all(|carried| carried.route == carrier || is_tail(carried)),
                        "{report}"
                    );
                }
                if options.direct == DirectIo::Never {
                    assert!(
                        report.carriers.iter().all(|carrier| carrier.access == Access::Buffered),
                        "{report}"
                    );
                }
                for carrier in &report.carriers {
                    let by_device =
                        matches!(carrier.route, Route::Gds | Route::GdsCompat | Route::PinnedCache);
                    let staged = options.device != DeviceId::Cpu && !by_device;
                    assert_eq!(carrier.via, staged.then_some(Route::Staged), "{report}");
                }
            }
        }
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn a_warm_file_is_copied_from_the_cache_and_a_cold_one_is_not_cached() {
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for device in all_devices() {
        make_cold(&path);
        let cold = hoistway::load(&[&path], &LoadOptions::default().device(device)).unwrap();
        assert_is_file(&cold, &file);
        let direct = sum(&cold, QUEUED) + sum(&cold, Route::Gds);
        assert!(direct * 10 > cold.report().tensor_bytes * 9, "{}", cold.report());

        let _warm = Warm::make(&path);
        for route in [Route::Auto, Route::Cached] {
            let options = LoadOptions::default().route(route).device(device);
            let warm = hoistway::load(&[&path], &options).unwrap();
            assert_is_file(&warm, &file);
            assert_eq!(from_page_cache(&warm), warm.report().tensor_bytes, "{}", warm.report());
            assert!(route == Route::Auto || sum(&warm, Route::PinnedCache) == 0, "{}", warm.report());
        }
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn direct_always_goes_past_a_warm_cache_and_says_so() {
    let directory = disk();
    if !can_read(directory.path(), Route::Threads, DirectIo::Always) {
        return;
    }
    let (path, file) = mixed_model(directory.path());
    make_warm(&path);
    let always = LoadOptions::default().direct(DirectIo::Always);
    let loaded = hoistway::load(&[&path], &always).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|carrier| carrier.access == Access::Direct), "{report}");
    assert!(report.refused.iter().any(|refusal| refusal.what == "cached"), "{report}");
    for route in [Route::Cached, Route::Mapped] {
        let error = hoistway::load(&[&path], &always.clone().route(route)).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "direct", .. }), "{error:?}");
    }
}

#[test]
#[cfg_attr(windows, ignore = "of FIFOs; tests/windows.rs has devices")]
fn what_is_no_regular_file_is_refused_by_its_kind() {
    let directory = disk();
    let folder = directory.path();
    for name in ["pipe.safetensors", "pipe.safetensors.index.json", "shard.safetensors"] {
        assert!(std::process::Command::new("mkfifo").arg(folder.join(name)).status().unwrap().success());
    }
    let index = r#"{"weight_map": {"a": "shard.safetensors", "b": "folder.safetensors"}}"#;
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    fs::create_dir(folder.join("folder.safetensors")).unwrap();
    let refused = |path: &Path| match hoistway::load(&[path], &LoadOptions::default()).unwrap_err() {
        Error::InvalidFile { path, problem: FormatError::NotRegular { kind } } => (path, kind),
        other => panic!("{other:?}"),
    };
    for name in ["pipe.safetensors", "pipe.safetensors.index.json"] {
        assert_eq!(refused(&folder.join(name)), (folder.join(name), "a FIFO (a named pipe)"));
    }
    let (path, kind) = refused(&folder.join("model.safetensors.index.json"));
    let of_index = [("folder.safetensors", "a directory"), ("shard.safetensors", "a FIFO (a named pipe)")];
    assert!(of_index.contains(&(path.file_name().unwrap().to_str().unwrap(), kind)), "{path:?} {kind}");
    assert_eq!(refused(Path::new("/dev/null")).1, "a character device");
}

/// Reading of a FIFO would wait for a writer.
#[test]
#[cfg_attr(windows, ignore = "of FIFOs")]
fn a_save_beside_an_index_that_is_a_fifo_is_refused() {
    let directory = disk();
    let index = directory.path().join("model.safetensors.index.json");
    assert!(std::process::Command::new("mkfifo").arg(&index).status().unwrap().success());
    let bytes = TensorBytes::Host(&[0; 4]);
    let tensor = TensorData::new("a", Dtype::U8, &[4], bytes);
    let go_on = |_| std::ops::ControlFlow::Continue(());
    let (sharding, options) = (Sharding::default(), SaveOptions::default());
    let error = save_sharded(directory.path(), &[tensor], None, &sharding, &options, go_on).unwrap_err();
    assert!(matches!(&error, Error::InvalidFile { path, .. } if *path == index), "{error:?}");
}

/// Brings these bytes into the page cache, and only these.
#[cfg(target_os = "linux")]
fn warm_part(path: &Path, start: u64, len: usize) {
    let file = fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut vec![0; len], start).unwrap();
}

fn sum(loaded: &Loaded, route: Route) -> u64 {
    loaded
        .report()
        .carriers
        .iter()
        .filter(|carrier| carrier.route == route)
        .map(|carrier| carrier.tensor_bytes)
        .sum()
}

/// Devices that can copy from pages of the page cache do.
fn from_page_cache(loaded: &Loaded) -> u64 {
    sum(loaded, Route::Cached) + sum(loaded, Route::PinnedCache)
}

#[cfg(target_os = "linux")]
#[test]
fn a_half_cached_file_takes_each_half_by_its_own_route() {
    let directory = disk();
    let path = directory.path().join("half.safetensors");
    let file =
        write_model(&path, &[tensor("a", Dtype::U8, &[16 << 20]), tensor("b", Dtype::U8, &[16 << 20])], 0, 1);
    for (device, layout) in
        all_devices().flat_map(|device| [(device, Layout::File), (device, Layout::Packed)])
    {
        let mut reports = String::new();
        // The system may drop what it has cached at any time: one try in ten has to show it.
        let shown = (0..10).any(|_| {
            make_cold(&path);
            warm_part(&path, 0, file.len() / 2);
            let options = LoadOptions::default().layout(layout).device(device);
            let loaded = hoistway::load(&[&path], &options).unwrap();
            assert_is_file(&loaded, &file);
            reports += &loaded.report().to_string();
            let direct = sum(&loaded, Route::IoUring) + sum(&loaded, Route::Gds);
            // The extents at either end of the cached half may be read as cold: one has bytes that are not cached, and
            // in the other a plain read has proven the path past the host.
            from_page_cache(&loaded) >= 8 << 20 && direct >= 8 << 20
        });
        assert!(shown, "{reports}");
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows does not say what its cache holds")]
fn the_route_cached_fails_on_a_cold_file_and_names_the_tensor() {
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    make_cold(&path);
    for device in all_devices() {
        let options = LoadOptions::default().route(Route::Cached).device(device);
        match hoistway::load(&[&path], &options).unwrap_err() {
            Error::RouteUnavailable { route: Route::Cached, path: at, why } => {
                assert_eq!(at.as_ref(), Some(&path));
                assert!(why.reason.contains("tensor '") && why.fix.contains("hoistway warm"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
#[cfg_attr(windows, ignore = "Windows has no file system in memory")]
fn memory_file_systems_are_copied_and_direct_reads_refused() {
    let Some(directory) = in_memory() else { return };
    let (path, file) = mixed_model(directory.path());
    for device in all_devices() {
        let loaded = hoistway::load(&[&path], &LoadOptions::default().device(device)).unwrap();
        assert_is_file(&loaded, &file);
        let refused = &loaded.report().refused;
        assert!(
            refused
                .iter()
                .any(|refusal| refusal.what == "direct reads" && refusal.why.reason.contains("tmpfs")),
            "{refused:?}"
        );
        let routes: &[_] =
            if device.is_host() { &[Route::Threads] } else { &[Route::Cached, Route::PinnedCache] };
        let carried: u64 = routes.iter().map(|&route| sum(&loaded, route)).sum();
        assert_eq!(carried, loaded.report().tensor_bytes, "{}", loaded.report());
        let loaded = hoistway::load(&[&path], &LoadOptions::default().device(device).route(Route::Cached));
        let loaded = loaded.unwrap();
        assert_is_file(&loaded, &file);
        assert_eq!(sum(&loaded, Route::Cached), loaded.report().tensor_bytes, "{}", loaded.report());
    }
    let [_, device] = devices();
    for options in [
        LoadOptions::default().route(Route::Gds).device(device),
        LoadOptions::default().route(Route::GdsCompat).device(device),
        LoadOptions::default().route(Route::IoUring),
        LoadOptions::default().direct(DirectIo::Always),
    ] {
        let error = hoistway::load(&[&path], &options).unwrap_err();
        assert!(matches!(error, Error::RouteUnavailable { .. }), "{error:?}");
    }
}

#[test]
fn mapped_tensors_are_the_file_and_outlive_everything() {
    let directory = disk();
    let path = directory.path().join("mapped.safetensors");
    let tensors =
        [tensor("a", Dtype::F32, &[100, 100]), tensor("b", Dtype::U8, &[5]), tensor("c", Dtype::F32, &[0])];
    let (mut aligned, mut misaligned) = (0, 0);
    // The header's length decides where the floats lie.
    for padding in 0..4 {
        let file = write_model(&path, &tensors, padding, 3);
        for populate in [false, true] {
            let options = LoadOptions::default().route(Route::Mapped).populate(populate);
            if (file.len() - 40_005).is_multiple_of(4) {
                let cancel = Cancel::default();
                let ended = options.clone().cancel(cancel.clone());
                assert_is_file(&hoistway::load(&[&path], &ended).unwrap(), &file);
                cancel.cancel();
                assert!(matches!(hoistway::load(&[&path], &ended), Err(Error::Cancelled)));
                let loaded = hoistway::load(&[&path], &options).unwrap();
                assert_is_file(&loaded, &file);
                assert_eq!(sum(&loaded, Route::Mapped), 40_005);
                let kept = loaded.get("a").unwrap().clone();
                drop(loaded);
                assert_eq!(*kept.bytes().unwrap(), *expected(&file, "a"));
                aligned += 1;
            } else {
                match hoistway::load(&[&path], &options).unwrap_err() {
                    Error::RouteUnavailable { route: Route::Mapped, why, .. } => {
                        assert!(why.reason.contains("misaligned"), "{why}");
                    }
                    other => panic!("{other:?}"),
                }
                misaligned += 1;
            }
        }
    }
    assert_eq!((aligned, misaligned), (2, 6));
    let start = Checkpoint::open(&[&path]).unwrap().start(&mapped());
    assert!(matches!(start, Err(Error::InvalidOption { option: "route", .. })), "{start:?}");
    let pooled = mapped().pool(MemoryPool::new(1).unwrap());
    let refused = hoistway::load(&[&path], &pooled).unwrap_err();
    assert!(matches!(refused, Error::InvalidOption { option: "pool", .. }), "{refused:?}");
}

fn mapped() -> LoadOptions {
    LoadOptions::default().route(Route::Mapped)
}

#[test]
fn numbers_that_no_load_can_work_with_are_refused() {
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    for options in [
        LoadOptions::default().threads(0),
        LoadOptions::default().rings(0),
        LoadOptions::default().chunk_bytes(1 << 40),
        LoadOptions::default().chunk_bytes(5000),
        LoadOptions::default().populate(true),
        mapped().layout(Layout::Packed),
        mapped().huge_pages(HugePages::Reserved),
        mapped().numa(NumaPlacement::Node(0)),
    ] {
        let error = hoistway::load(&[&path], &options).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
    }
    for (numa, said) in [(NumaPlacement::Node(3), "'3'"), (NumaPlacement::NearStorage, "'near_storage'")] {
        let error = hoistway::load(&[&path], &mapped().numa(numa)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("numa cannot be {said}")), "{error}");
    }
}

#[test]
fn files_that_claim_more_than_any_memory_are_refused_before_anything_is_allocated() {
    let directory = disk();
    let path = directory.path().join("sparse.safetensors");
    let bytes = 15u64 << 40;
    write_model(&path, &[], 0, 1);
    let text = format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(text.as_bytes());
    fs::write(&path, &file).unwrap();
    let sparse = fs::OpenOptions::new().write(true).open(&path).unwrap();
    sparse.set_len(file.len() as u64 + bytes).unwrap();
    let error = hoistway::load(&[&path], &LoadOptions::default()).unwrap_err();
    assert!(matches!(error, Error::MemoryBudget { .. }), "{error:?}");
    let fine = LoadOptions::default().chunk_bytes(4096);
    let error = hoistway::load(&[&path], &fine).unwrap_err();
    assert!(matches!(error, Error::Plan(PlanError::TooManyReads { .. })), "{error:?}");
}

/// Memory that a tensor is dropped from stays away, although threads touch memory ahead of the reads.
#[test]
#[cfg_attr(windows, ignore = "asks /proc what is resident")]
fn memory_of_tensors_that_are_dropped_as_they_arrive_does_not_come_back() {
    let directory = disk();
    let path = directory.path().join("streamed.safetensors");
    let tensors: Vec<_> = (0..64).map(|i| tensor(&format!("t{i}"), Dtype::U8, &[4 << 20])).collect();
    write_model(&path, &tensors, 0, 1);
    make_warm(&path);
    let before = resident();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let mut loading = checkpoint.start(&LoadOptions::default()).unwrap();
    for tensor in loading.by_ref() {
        drop(tensor.unwrap());
    }
    let after = resident();
    assert!(after.saturating_sub(before) < 64 << 20, "{before} → {after}: dropped memory came back");
}

fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap().to_owned();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn slices_are_those_parts_and_only_their_bytes_are_read() {
    let directory = disk();
    let path = directory.path().join("sliced.safetensors");
    let file =
        write_model(&path, &[tensor("m", Dtype::U16, &[512, 4096]), tensor("v", Dtype::F32, &[1000])], 0, 5);
    let whole = expected(&file, "m");
    let row = 4096 * 2;
    for (options, _) in routes(directory.path()) {
        for (ranges, shape) in [
            (vec![100..200], [100u64, 4096]),
            (vec![0..512, 1024..1040], [512, 16]),
            (vec![7..9, 0..4096], [2, 4096]),
            (vec![511..512, 4095..4096], [1, 1]),
            (vec![5..5], [0, 4096]),
        ] {
            make_cold(&path);
            let selection = Selection::all().select("m").slice("m", TensorSlice::new(ranges.clone()));
            let loaded = hoistway::load(&[&path], &options.clone().selection(selection)).unwrap();
            let tensor = loaded.get("m").unwrap();
            assert_eq!(tensor.shape(), shape);
            let columns = ranges.get(1).cloned().unwrap_or(0..4096);
            let part: Vec<u8> = (ranges[0].start..ranges[0].end)
                .flat_map(|r| {
                    let start = r as usize * row;
                    whole[start + columns.start as usize * 2..start + columns.end as usize * 2].to_vec()
                })
                .collect();
            assert!(*tensor.bytes().unwrap() == *part, "{ranges:?} by {:?}", options.route);
        }
    }
    let selection = Selection::all().select("m").slice("m", TensorSlice::new(vec![0..8]));
    let loaded = hoistway::load(&[&path], &LoadOptions::default().selection(selection)).unwrap();
    assert!(loaded.report().read_bytes <= 8 * row as u64 + 8192, "{}", loaded.report());
}

#[test]
fn selections_choose_and_unknown_names_are_errors() {
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    let names = |selection: Selection| -> Vec<String> {
        let loaded = hoistway::load(&[&path], &LoadOptions::default().selection(selection)).unwrap();
        loaded.tensors().iter().map(|tensor| tensor.name().to_owned()).collect()
    };
    assert_eq!(names(Selection::all().select("scalar").select("od*")), ["scalar", "odd"]);
    assert_eq!(names(Selection::all().exclude("small.*").exclude("large")).len(), 5);
    assert_eq!(names(Selection::all().filter(|tensor| tensor.dtype == Dtype::F64)), ["small.F64", "scalar"]);
    for (asked, meant) in [
        ("larg", Some("large")),
        ("lagre", Some("large")),
        ("odf", Some("odd")),
        ("sacla*", Some("scalar")),
        ("samll.F6?", Some("small.F64")),
        ("medium", None),
        ("*", None),
    ] {
        let selection = Selection::all().select(asked).exclude("*");
        let loaded = hoistway::load(&[&path], &LoadOptions::default().selection(selection));
        match loaded {
            Err(Error::NoSuchTensor { pattern, nearest }) => {
                assert_eq!((pattern.as_str(), nearest.as_deref()), (asked, meant));
            }
            other => assert!(other.is_ok() && asked == "*", "{asked}"),
        }
    }
}

#[test]
fn a_typo_is_found_among_many_names_of_its_length() {
    let directory = disk();
    let path = directory.path().join("many.safetensors");
    let names = (0..10_000).map(|number| format!("experts.{number:05}.w")).chain(["zz.router.bias".into()]);
    let tensors = names.map(|name| format!(r#""{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#));
    let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let catalog = Catalog::open(&[&path]).unwrap();
    let told = catalog.no_such_tensor("zz.ruoter.bais").to_string();
    assert!(told.contains("did you mean 'zz.router.bias'"), "{told}");
}

#[test]
fn tensors_arrive_one_by_one_and_the_progress_adds_up() {
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    for device in all_devices() {
        make_cold(&path);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let options = LoadOptions::default().chunk_bytes(4096).device(device);
        let mut loading = checkpoint.start(&options).unwrap();
        let mut tensors = Vec::new();
        while let Arrival::Tensor(tensor) = loading.next_within(std::time::Duration::from_secs(60)).unwrap() {
            assert!(
                *tensor.bytes().unwrap() == *expected(&file, tensor.name()),
                "{} arrived with other bytes",
                tensor.name()
            );
            tensors.push(tensor);
        }
        let progress = loading.progress();
        assert_eq!(progress.bytes_done, progress.bytes_total);
        assert_eq!(progress.tensors_done, progress.tensors_total);
        assert_is_file(&loading.into_loaded(tensors), &file);
    }
}

#[test]
fn pooled_and_huge_and_bound_memory_hold_the_same_bytes() {
    let directory = disk();
    let (path, file) = mixed_model(directory.path());
    let pool = MemoryPool::new(64 << 20).unwrap();
    let pooled = LoadOptions::default().pool(pool.clone());
    for _ in 0..3 {
        let loaded = hoistway::load(&[&path], &pooled).unwrap();
        assert_is_file(&loaded, &file);
        assert!(pool.free_bytes() < pool.capacity_bytes());
    }
    assert_eq!(pool.free_bytes(), pool.capacity_bytes(), "dropped tensors give their memory back");
    let bound = LoadOptions::default().numa(NumaPlacement::Node(0));
    for options in [bound, LoadOptions::default().huge_pages(HugePages::Never)] {
        assert_is_file(&hoistway::load(&[&path], &options).unwrap(), &file);
    }
    let no_node = LoadOptions::default().numa(NumaPlacement::Node(999));
    assert!(matches!(hoistway::load(&[&path], &no_node), Err(Error::InvalidOption { option: "numa", .. })));
}

#[test]
fn a_load_beyond_its_budget_is_refused_before_it_allocates() {
    let directory = disk();
    let (path, _) = mixed_model(directory.path());
    let options = LoadOptions::default().memory_budget_bytes(1 << 20);
    match hoistway::load(&[&path], &options).unwrap_err() {
        Error::MemoryBudget { needed, available, limit_name, .. } => {
            assert!(needed > 8 << 20);
            assert_eq!(available, 1 << 20);
            assert_eq!(limit_name, "the memory budget");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_load_knows_of_its_reads_is_part_of_its_budget() {
    let directory = disk();
    let path = directory.path().join("columns.safetensors");
    // Rows so far apart that each is a read of its own. All but the header is a hole.
    let (rows, row) = (20_000, 128 << 10);
    let header =
        format!(r#"{{"m":{{"dtype":"U8","shape":[{rows},{row}],"data_offsets":[0,{}]}}}}"#, rows * row);
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(&path, &file).unwrap();
    let len = file.len() as u64 + rows * row;
    let writer = fs::File::options().write(true).open(&path).unwrap();
    writer.set_len(len).unwrap();
    let mut expected = vec![0; rows as usize];
    for (number, byte) in expected.iter_mut().enumerate().step_by(37) {
        *byte = (number % 251) as u8;
        write_all_at(&writer, &[*byte], file.len() as u64 + number as u64 * row);
    }
    let column = Selection::all().slice("m", TensorSlice::new(vec![0..rows, 0..1]));
    let options = LoadOptions::default().selection(column).direct(DirectIo::Never);
    let load = |budget| hoistway::load(&[&path], &options.clone().memory_budget_bytes(budget)).unwrap();
    assert!(*load(256 << 20).get("m").unwrap().bytes().unwrap() == *expected);
    // In waves.
    let budget = 16 << 20;
    let loaded = load(budget);
    assert!(*loaded.get("m").unwrap().bytes().unwrap() == *expected);
    let report = loaded.report();
    assert!(report.notes.iter().any(|note| note.contains("waves")), "{report}");
    assert!(report.memory.arena_bytes + report.memory.staging_bytes <= budget, "{report}");
    let carried: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
    assert_eq!((carried, report.tensors, report.files), (rows, 1, 1), "{report}");
    // Also if all reads fit the budget, and the tensor beside them does not.
    let columns = Selection::all().slice("m", TensorSlice::new(vec![0..rows, 0..512]));
    let wide = options.clone().selection(columns).memory_budget_bytes(28 << 20);
    let loaded = hoistway::load(&[&path], &wide).unwrap();
    let first: Vec<u8> = loaded.get("m").unwrap().bytes().unwrap().iter().copied().step_by(512).collect();
    assert!(first == expected);
    assert!(loaded.report().notes.iter().any(|note| note.contains("waves")), "{}", loaded.report());
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let in_waves = options.clone().memory_budget_bytes(budget);
    // What cannot go in waves is refused.
    let stream = StreamOptions::default().max_in_flight_bytes(1 << 20);
    let [_, device] = devices();
    let on_device = in_waves.clone().device(device);
    for refused in [checkpoint.stream(&in_waves, &stream), checkpoint.start(&on_device)] {
        match refused.map(drop).unwrap_err() {
            Error::MemoryBudget { needed, limit_name, .. } => {
                assert!(needed >= rows * 1024 && limit_name == "the memory budget", "{needed} {limit_name}");
            }
            other => panic!("{other:?}"),
        }
    }
    let mut loading = checkpoint.start(&in_waves).unwrap();
    loading.cancel();
    assert!(matches!(loading.find_map(Result::err), Some(Error::Cancelled)));
    assert!(loading.next().is_none(), "an error ends it");
    assert!(matches!(loading.wait(), Err(Error::Cancelled)), "nothing partial is delivered");
    drop(checkpoint.start(&in_waves).unwrap());
    let mut loading = checkpoint.start(&in_waves).unwrap();
    writer.set_len(len / 2).unwrap();
    let error = loading.find_map(Result::err).unwrap();
    match &error {
        Error::Truncated { tensor: Some(name), .. } | Error::Changed { tensor: Some(name), .. } => {
            assert_eq!(name, "m");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(loading.progress().tensors_done, 0);
    assert!(loading.next().is_none() && loading.next_arrived().is_none(), "an error ends it");
    assert!(matches!(loading.wait(), Err(Error::Cancelled)), "nothing partial is delivered");
    writer.set_len(len).unwrap();
    match hoistway::load(&[&path], &options.memory_budget_bytes(4 << 20)).unwrap_err() {
        Error::MemoryBudget { needed, available, limit_name, .. } => {
            assert!(needed > 10 << 20 && available <= 4 << 20, "{needed} {available}");
            assert_eq!(limit_name, "the memory budget");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn sharded_checkpoints_load_by_index_directory_glob_and_list() {
    let directory = disk();
    let shard = |i: usize| directory.path().join(format!("model-{i:05}-of-00003.safetensors"));
    let mut weight_map = serde_json::Map::new();
    let mut files = Vec::new();
    for i in 1..=3 {
        let name = format!("layers.{i}.weight");
        files.push((
            name.clone(),
            write_model(&shard(i), &[tensor(&name, Dtype::F32, &[i as u64 * 1000])], 0, i as u64),
        ));
        weight_map.insert(name, shard(i).file_name().unwrap().to_str().unwrap().into());
    }
    let index = directory.path().join("model.safetensors.index.json");
    let check = |paths: &[&Path]| {
        for device in all_devices() {
            let loaded = hoistway::load(paths, &LoadOptions::default().device(device)).unwrap();
            assert_eq!(loaded.tensors().len(), 3);
            for (name, file) in &files {
                assert!(*loaded.get(name).unwrap().bytes().unwrap() == *expected(file, name));
            }
            assert_eq!(loaded.report().files, 3);
        }
    };
    check(&[directory.path()]);
    fs::write(&index, serde_json::json!({ "weight_map": weight_map }).to_string()).unwrap();
    check(&[directory.path()]);
    check(&[&index]);
    check(&[&directory.path().join("model-*.safetensors")]);
    check(&[&shard(1), &shard(3), &shard(2)]);

    let twice = hoistway::load(&[&shard(1), &shard(1)], &LoadOptions::default()).unwrap_err();
    assert!(matches!(twice, Error::DuplicateTensor { .. }), "{twice:?}");
    weight_map.insert("missing".into(), "model-00001-of-00003.safetensors".into());
    fs::write(&index, serde_json::json!({ "weight_map": weight_map }).to_string()).unwrap();
    let missing = hoistway::load(&[&index], &LoadOptions::default()).unwrap_err();
    assert!(
        matches!(&missing, Error::InvalidIndex { .. }) && missing.to_string().contains("'missing'"),
        "{missing:?}"
    );
    fs::remove_file(shard(2)).unwrap();
    let gone = hoistway::load(&[&index], &LoadOptions::default()).unwrap_err();
    assert!(matches!(gone, Error::NotFound { .. }), "{gone:?}");
}

#[test]
fn hidden_files_are_no_shards() {
    let directory = disk();
    let file = write_model(&directory.path().join("m.safetensors"), &[tensor("a", Dtype::U8, &[100])], 0, 1);
    // What macOS leaves beside files on file systems of others.
    for name in ["._m.safetensors", "._model.safetensors.index.json", ".n.safetensors", "._m.gguf"] {
        fs::write(directory.path().join(name), b"\0\x05\x16\x07\0\x02\0\0Mac OS X        ").unwrap();
    }
    let check = |path: &Path| {
        let loaded =
            hoistway::load(&[path], &LoadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_is_file(&loaded, &file);
    };
    check(directory.path());
    for pattern in ["*.safetensors", "?m.safetensors*", "*", "[.m]*.safetensors"] {
        match hoistway::load(&[&directory.path().join(pattern)], &LoadOptions::default()) {
            Ok(loaded) => assert_is_file(&loaded, &file),
            // What matches hidden files alone matches nothing.
            Err(Error::NotFound { reason, .. }) if pattern.starts_with('?') => {
                assert!(reason.contains("hidden"), "{reason}");
            }
            Err(other) => panic!("{pattern}: {other:?}"),
        }
    }
    // What is named is meant.
    let hidden = directory.path().join(".cache");
    fs::create_dir(&hidden).unwrap();
    fs::rename(directory.path().join("m.safetensors"), hidden.join(".m.safetensors")).unwrap();
    check(&hidden.join(".m.safetensors"));
    check(&hidden.join(".*.safetensors"));
    let none = hoistway::load(&[&hidden], &LoadOptions::default()).unwrap_err();
    assert!(matches!(&none, Error::NotFound { reason, .. } if reason.contains("hidden")), "{none:?}");
}

/// An index that is older than the files beside it, or another model's.
#[test]
fn what_an_index_says_is_held_against_the_files() {
    let directory = disk();
    let place = |name: &str| directory.path().join(name);
    let (one, other) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let file = write_model(&place(one), &[tensor("a", Dtype::U8, &[100])], 0, 1);
    write_model(&place(other), &[tensor("b", Dtype::U8, &[100])], 0, 2);
    let index = place("model.safetensors.index.json");
    let load = |weight_map: serde_json::Value| {
        fs::write(&index, serde_json::json!({ "weight_map": weight_map }).to_string()).unwrap();
        hoistway::load(&[directory.path()], &LoadOptions::default())
    };
    // No such file.
    match load(serde_json::json!({"a": one, "c": "gone.safetensors", "b": "gone.safetensors"})).unwrap_err() {
        Error::NotFound { path, reason } => {
            assert_eq!(path, place("gone.safetensors"));
            assert!(reason.contains("model.safetensors.index.json has tensor 'b' there"), "{reason}");
        }
        error => panic!("{error:?}"),
    }
    // No such tensor in any file; one that is in another file, whether or not that is one of the index's.
    for (weight_map, named) in [
        (serde_json::json!({"a": one, "c": other}), ("c", other)),
        (serde_json::json!({"a": other, "b": other}), ("a", other)),
        (serde_json::json!({"a": other, "b": one}), ("a", other)),
    ] {
        match load(weight_map.clone()).unwrap_err() {
            Error::InvalidIndex { path, problem: IndexError::MissingTensor { tensor, file } } => {
                assert_eq!(path, index, "{weight_map}");
                assert_eq!((&*tensor, &*file), named, "{weight_map}");
            }
            error => panic!("{weight_map}: {error:?}"),
        }
    }
    // Not all files, by any name of theirs.
    for name in [one, "./model-00001-of-00002.safetensors", ".//./model-00001-of-00002.safetensors"] {
        let loaded = load(serde_json::json!({ "a": name })).unwrap();
        assert_is_file(&loaded, &file);
        let notes = &loaded.report().notes;
        let is_told = notes.iter().any(|note| note.contains("left out") && note.ends_with(other));
        assert!(is_told, "{notes:?}");
    }
    for name in ["sub/../model-00001-of-00002.safetensors", "../model.safetensors"] {
        match load(serde_json::json!({ "a": name })).unwrap_err() {
            Error::InvalidIndex { problem: IndexError::UnsafePath { tensor, file }, .. } => {
                assert_eq!((&*tensor, &*file), ("a", name));
            }
            error => panic!("{name}: {error:?}"),
        }
    }
}

#[test]
fn an_index_that_is_older_than_the_single_file_beside_it_is_called_that() {
    let directory = disk();
    let single = directory.path().join("model.safetensors");
    let file = write_model(&single, &[tensor("a", Dtype::U8, &[100])], 0, 1);
    let index = directory.path().join("model.safetensors.index.json");
    let write_index = |name: &str| {
        fs::write(&index, serde_json::json!({"weight_map": {"a": name}}).to_string()).unwrap();
    };
    write_index("model-00001-of-00002.safetensors");
    match hoistway::load(&[directory.path()], &LoadOptions::default()).unwrap_err() {
        Error::NotFound { path, reason } => {
            assert_eq!(path, directory.path());
            for told in ["model-00001-of-00002.safetensors", "older than model.safetensors", "by its name"] {
                assert!(reason.contains(told), "{reason}");
            }
        }
        other => panic!("{other:?}"),
    }
    assert_is_file(&hoistway::load(&[&single], &LoadOptions::default()).unwrap(), &file);
    for name in ["model.safetensors", "./model.safetensors"] {
        write_index(name);
        assert_is_file(&hoistway::load(&[directory.path()], &LoadOptions::default()).unwrap(), &file);
    }
}

#[test]
fn small_loads_report_why_no_ring_was_used() {
    let directory = disk();
    let path = directory.path().join("small.safetensors");
    let file = write_model(&path, &[tensor("a", Dtype::U8, &[900_000])], 0, 1);
    make_cold(&path);
    for device in all_devices() {
        let loaded = hoistway::load(&[&path], &LoadOptions::default().device(device)).unwrap();
        assert_is_file(&loaded, &file);
        assert!(
            loaded.report().refused.iter().any(|refusal| refusal.what == QUEUED.to_string()),
            "{}",
            loaded.report()
        );
    }
}

#[test]
#[cfg_attr(windows, ignore = "asks /proc what is resident")]
fn memory_of_dropped_tensors_returns_while_others_live() {
    let directory = disk();
    let path = directory.path().join("big.safetensors");
    write_model(&path, &[tensor("small", Dtype::U8, &[1000]), tensor("big", Dtype::U8, &[64 << 20])], 0, 1);
    let loaded = hoistway::load(&[&path], &LoadOptions::default()).unwrap();
    let with_all = resident();
    let small = loaded.get("small").unwrap().clone();
    drop(loaded);
    let with_small = resident();
    assert!(
        with_all.saturating_sub(with_small) > 48 << 20,
        "{with_all} → {with_small}: the big tensor stayed"
    );
    assert_eq!(small.len_bytes(), 1000);
}
