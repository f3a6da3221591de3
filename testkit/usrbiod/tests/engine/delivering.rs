//! Right bytes by the right way.

use crate::{
    Model, by,
    common::{assert_is_file, assert_is_gguf, expected, mixed_gguf, tensor, write_model},
    fixture::PATIENCE,
    reading::without_threads,
    ways,
};
use hoistway::{
    Checkpoint, DeviceId, Dtype, FillTarget, Filled, LoadOptions, Loaded, Order, Route, StreamOptions,
    UsrbioClient,
    device::Device,
    plan::{Layout, Selection, TensorSlice},
    route::Access,
};
use hoistway_device::DirectBuffer;
use std::{fs, os::unix::fs::FileExt, path::PathBuf, thread};
use usrbiod::Options;

/// Fails unless all bytes came by USRBIO, past the page cache, and through its memory.
fn assert_all_by_usrbio(loaded: &Loaded, options: &LoadOptions) {
    let report = loaded.report();
    let moved: u64 = report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum();
    assert_eq!(moved, report.tensor_bytes, "{report:?}");
    let via = (options.device != DeviceId::Cpu).then_some(Route::Staged);
    for carrier in &report.carriers {
        assert_eq!(
            (carrier.route, carrier.access, carrier.via),
            (Route::Usrbio, Access::Direct, via),
            "{report}"
        );
    }
    assert_eq!(report.staged_bytes, report.tensor_bytes, "{report}");
    let client = match options.usrbio {
        UsrbioClient::Native => "by the native client",
        _ => "by the vendor client",
    };
    assert!(report.notes.iter().any(|note| note.contains(client)), "{:?}", report.notes);
}

#[test]
fn a_safetensors_file_arrives_whole_in_every_layout_and_chunk() {
    let Some(model) = Model::start() else { return };
    for way in ways() {
        for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
            for chunk_bytes in [64 << 10, 4 << 20] {
                let options = way.clone().layout(layout).chunk_bytes(chunk_bytes);
                let loaded = model.load(&options).unwrap();
                assert_is_file(&loaded, &model.file);
                assert_all_by_usrbio(&loaded, &options);
            }
        }
    }
}

#[test]
fn a_gguf_file_arrives_whole_in_every_layout() {
    let Some(model) = Model::start() else { return };
    let (_, tensors) = mixed_gguf(&model.fixture.behind(""));
    let path = model.fixture.path("mixed.gguf");
    for way in ways() {
        for layout in [Layout::File, Layout::Packed, Layout::Tensor] {
            let options = way.clone().layout(layout);
            let loaded = hoistway::load(&[&path], &options).unwrap();
            assert_is_gguf(&loaded, &tensors);
            assert_all_by_usrbio(&loaded, &options);
        }
    }
}

#[test]
fn blocks_of_4_kib_and_one_read_in_flight_are_enough() {
    let Some(model) = Model::start() else { return };
    for way in ways() {
        let options = way.chunk_bytes(4096).in_flight_bytes(4096).rings(1);
        let selection = Selection::all().exclude("large");
        let loaded = model.load(&options.clone().selection(selection)).unwrap();
        assert_all_by_usrbio(&loaded, &options);
        for tensor in loaded.tensors() {
            assert!(*tensor.bytes().unwrap() == *expected(&model.file, tensor.name()), "{}", tensor.name());
        }
    }
}

#[test]
fn slices_are_those_parts() {
    let Some(model) = Model::start() else { return };
    let path = model.fixture.path("sliced.safetensors");
    let file = write_model(
        &model.fixture.behind("sliced.safetensors"),
        &[tensor("v", Dtype::F32, &[1000]), tensor("m", Dtype::U16, &[512, 4096])],
        0,
        5,
    );
    let whole = expected(&file, "m");
    for way in ways() {
        for (rows, columns) in [(100..420u64, 0..4096u64), (0..512, 1024..1040), (0..512, 0..4095)] {
            let slice = TensorSlice::new(vec![rows.clone(), columns.clone()]);
            let selection = Selection::all().select("m").slice("m", slice);
            let loaded = hoistway::load(&[&path], &way.clone().selection(selection)).unwrap();
            let part: Vec<u8> = rows
                .flat_map(|row| {
                    let start = row as usize * 8192;
                    whole[start + columns.start as usize * 2..start + columns.end as usize * 2].to_vec()
                })
                .collect();
            assert!(*loaded.get("m").unwrap().bytes().unwrap() == *part, "{columns:?} by {:?}", way.route);
        }
    }
}

#[test]
fn dense_slices_are_moved_together_in_shared_memory_and_copied_into_a_device() {
    let Some(model) = Model::start() else { return };
    let path = model.fixture.path("sliced.safetensors");
    let file = write_model(
        &model.fixture.behind("sliced.safetensors"),
        &[tensor("m", Dtype::U16, &[512, 4096])],
        0,
        5,
    );
    let whole = expected(&file, "m");
    let [_, device] = crate::common::devices();
    for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
        for columns in [1024..1040u64, 1..4095] {
            let checkpoint = Checkpoint::open(&[&path]).unwrap();
            let slice = TensorSlice::new(vec![3..509, columns.clone()]);
            let selection = Selection::all().select("m").slice("m", slice);
            let request = selection.resolve(checkpoint.catalog()).unwrap().remove(0);
            let rows = whole.chunks(8192).take(509).skip(3);
            let part: Vec<u8> = rows
                .flat_map(|row| &row[columns.start as usize * 2..columns.end as usize * 2])
                .copied()
                .collect();
            let len_bytes = part.len() as u64;
            let memory =
                DirectBuffer::new(&Device::open(DeviceId::Cuda(0)).unwrap(), len_bytes + 4096).unwrap();
            let targets = [FillTarget::new(request, device, memory.address() + 7, len_bytes)];
            // Several pieces, which are several rows each.
            let options = (by(Route::Usrbio, client, DeviceId::Cpu)).chunk_bytes(64 << 10);
            // SAFETY: the memory outlives the load, and nothing else uses it.
            #[allow(unsafe_code)]
            let mut filling = unsafe { checkpoint.fill(&targets, &options, Order::Arrival) }.unwrap();
            assert_eq!(filling.next_within(PATIENCE).unwrap(), Filled::Target(0));
            let report = filling.report();
            assert!(report.carriers.iter().all(|carrier| carrier.route == Route::Usrbio), "{report}");
            assert_eq!(report.carriers.iter().map(|carrier| carrier.tensor_bytes).sum::<u64>(), len_bytes);
            let notes = report.notes.iter().filter(|note| note.contains(&format!("by the {client} client")));
            assert_eq!(notes.count(), 1, "{report}");
            let mut all = vec![0; part.len() + 4096];
            memory.read_back(&mut all).unwrap();
            assert!(all[7..7 + part.len()] == part, "{columns:?} by the {client} client");
        }
    }
}

#[test]
fn floats_are_converted_on_the_device_by_way_of_shared_memory() {
    let Some(model) = Model::start() else { return };
    let [_, device] = crate::common::devices();
    for client in [UsrbioClient::Native, UsrbioClient::Vendor] {
        let converted = |route| (by(route, client, device)).dtype(Dtype::F32).selection(floats());
        let (shared, plain) = (model.load(&converted(Route::Usrbio)), model.load(&converted(Route::Threads)));
        let (shared, plain) = (shared.unwrap(), plain.unwrap());
        for tensor in plain.tensors() {
            let other = shared.get(tensor.name()).unwrap();
            assert!(tensor.bytes().unwrap() == other.bytes().unwrap(), "{}", tensor.name());
        }
    }
}

fn floats() -> Selection {
    Selection::all().filter(|tensor| matches!(tensor.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32))
}

/// A file of 47 MiB in chunks of 8 MiB, which reads of the length by default cross.
fn in_long_chunks(model: &Model) -> (PathBuf, Vec<u8>) {
    let tensors = [tensor("a", Dtype::U8, &[40 << 20]), tensor("b", Dtype::U8, &[7 << 20])];
    let file = write_model(&model.fixture.behind("big.safetensors"), &tensors, 0, 2);
    (model.fixture.path("big.safetensors"), file)
}

const LONG_CHUNKS: Options = Options { chunk_bytes: 8 << 20, read_only: false };

fn reads(loaded: &Loaded) -> u64 {
    loaded.report().carriers.iter().map(|carrier| carrier.reads).sum()
}

#[test]
fn reads_take_whole_chunks_of_the_file() {
    let Some(model) = Model::start_with(&LONG_CHUNKS) else { return };
    let (path, file) = in_long_chunks(&model);
    for device in crate::common::devices() {
        let options = by(Route::Usrbio, UsrbioClient::Native, device);
        let loaded = hoistway::load(&[&path], &options).unwrap();
        assert_is_file(&loaded, &file);
        // To a device, a last block that is cut short is read by itself.
        let chunks = (file.len() as u64).div_ceil(8 << 20);
        assert!((chunks..=chunks + 1).contains(&reads(&loaded)), "{}", loaded.report());
        // Four reads of 8 MiB in flight, and what is being copied beside them.
        let staging = loaded.report().memory.staging_bytes;
        assert!((32 << 20..=64 << 20).contains(&staging), "{staging}");
    }
}

/// The memory of a device is no part of the budget.
#[test]
fn reads_take_whole_chunks_as_long_as_the_budget_has_room_for_one() {
    let Some(model) = Model::start_with(&LONG_CHUNKS) else { return };
    let (path, file) = in_long_chunks(&model);
    let chunks = (file.len() as u64).div_ceil(8 << 20);
    for device in crate::common::devices() {
        let options = by(Route::Usrbio, UsrbioClient::Native, device);
        let arenas = if device.is_host() { 48 << 20 } else { 0 };
        for (staging, is_whole) in [(9 << 20, true), (7 << 20, false)] {
            let options = options.clone().memory_budget_bytes(arenas + staging);
            let loaded = hoistway::load(&[&path], &options).unwrap();
            assert_is_file(&loaded, &file);
            assert_all_by_usrbio(&loaded, &options);
            let report = loaded.report();
            assert_eq!(reads(&loaded) <= chunks + 1, is_whole, "{report}");
            let is_told = report.notes.iter().any(|note| note.contains("4.0 MiB long at most"));
            assert_eq!(is_told, !is_whole, "{report}");
            assert!(report.memory.staging_bytes <= staging, "{report}");
        }
    }
}

/// What a load knows of its reads, and the slot for those that are elsewhere, are left to it by the slots of the route.
#[test]
fn shared_memory_takes_what_the_load_leaves_of_the_budget() {
    let Some(model) = Model::start() else { return };
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = disk.path().join("other.safetensors");
    let other = write_model(&path, &[tensor("other", Dtype::U8, &[9 << 20])], 0, 4);
    for device in crate::common::devices() {
        let options = by(Route::Auto, UsrbioClient::Native, device).layout(Layout::Packed).chunk_bytes(4096);
        let whole = hoistway::load(&[&path, &model.path], &options).unwrap();
        let reads = reads(&whole);
        assert!(reads > 3000, "{reads}");
        let known = 1408 * reads;
        let arenas = if device.is_host() { whole.report().memory.arena_bytes } else { 0 };
        drop(whole);
        let budget = arenas + known + (256 << 10);
        let loaded = hoistway::load(&[&path, &model.path], &options.memory_budget_bytes(budget)).unwrap();
        for tensor in loaded.tensors() {
            let file = if tensor.name() == "other" { &other } else { &model.file };
            assert!(*tensor.bytes().unwrap() == *expected(file, tensor.name()), "{}", tensor.name());
        }
        let report = loaded.report();
        assert!(report.carriers.iter().any(|carrier| carrier.route == Route::Usrbio), "{report}");
        assert!(arenas + known + report.memory.staging_bytes <= budget, "{report}");
    }
}

#[test]
fn a_stream_by_usrbio_takes_memory_for_what_is_there_at_once() {
    let Some(model) = Model::start() else { return };
    let tensors: Vec<_> = (0..8).map(|number| tensor(&format!("t{number}"), Dtype::U8, &[4 << 20])).collect();
    let file = write_model(&model.fixture.behind("many.safetensors"), &tensors, 0, 6);
    let path = model.fixture.path("many.safetensors");
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu).layout(Layout::Tensor);
    let options = options.chunk_bytes(1 << 20).memory_budget_bytes(16 << 20);
    let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(4 << 20);
    let loading = Checkpoint::open(&[&path]).unwrap().stream(&options, &stream).unwrap();
    for tensor in loading {
        let tensor = tensor.unwrap();
        assert!(*tensor.bytes().unwrap() == *expected(&file, tensor.name()), "{}", tensor.name());
    }
}

#[test]
fn a_budget_for_memory_makes_do_with_less_of_it() {
    let Some(model) = Model::start() else { return };
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu);
    let whole = model.load(&options).unwrap();
    let memory = &whole.report().memory;
    let budget = memory.arena_bytes + (4 << 20);
    assert!(memory.staging_bytes > 4 << 20, "{memory:?}");
    drop(whole);
    let tight = options.clone().memory_budget_bytes(budget);
    let loaded = model.load(&tight).unwrap();
    assert_is_file(&loaded, &model.file);
    assert!(loaded.report().memory.staging_bytes <= 4 << 20, "{:?}", loaded.report().memory);
    let none = options.memory_budget_bytes(budget - (4 << 20));
    let error = model.load(&none).unwrap_err();
    assert!(matches!(error, hoistway::Error::MemoryBudget { .. }), "{error:?}");
}

/// Rows so far apart that each is a read of its own, and so many that there is no memory to know all of them at once.
#[test]
fn columns_of_very_many_rows_come_in_waves() {
    let Some(model) = Model::start() else { return };
    let (rows, row) = (14_000u64, 128 << 10);
    let header =
        format!(r#"{{"m":{{"dtype":"U8","shape":[{rows},{row}],"data_offsets":[0,{}]}}}}"#, rows * row);
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let behind = model.fixture.behind("columns.safetensors");
    fs::write(&behind, &head).unwrap();
    let file = fs::File::options().write(true).open(&behind).unwrap();
    // All but every 37th row is a hole.
    file.set_len(head.len() as u64 + rows * row).unwrap();
    let mut expected = vec![0; rows as usize];
    for (number, byte) in expected.iter_mut().enumerate().step_by(37) {
        *byte = (number % 251) as u8;
        file.write_all_at(&[*byte], head.len() as u64 + number as u64 * row).unwrap();
    }
    let column = Selection::all().slice("m", TensorSlice::new(vec![0..rows, 0..1]));
    let budget = 14 << 20;
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu);
    let options = options.selection(column).memory_budget_bytes(budget);
    let loaded = hoistway::load(&[&model.fixture.path("columns.safetensors")], &options).unwrap();
    assert!(*loaded.get("m").unwrap().bytes().unwrap() == *expected);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|own| own.route == Route::Usrbio), "{report}");
    assert_eq!(report.carriers.iter().map(|own| own.tensor_bytes).sum::<u64>(), rows, "{report}");
    assert!(report.notes.iter().any(|note| note.contains("waves")), "{report}");
    assert!(report.notes.iter().any(|note| note.contains("by the native client")), "{report}");
    assert!(report.memory.arena_bytes + report.memory.staging_bytes <= budget, "{report}");
}

#[test]
fn a_load_that_has_no_memory_for_the_route_and_does_not_name_it_goes_without() {
    let Some(model) = Model::start() else { return };
    let path = model.fixture.path("plain.safetensors");
    let tensors = [tensor("a", Dtype::U8, &[9 << 20])];
    let file = write_model(&model.fixture.behind("plain.safetensors"), &tensors, 0, 5);
    let options = by(Route::Auto, UsrbioClient::Native, DeviceId::Cpu);
    let whole = hoistway::load(&[&path], &options).unwrap();
    assert_all_by_usrbio(&whole, &options);
    let budget = whole.report().memory.arena_bytes + (64 << 10);
    drop(whole);
    let loaded = hoistway::load(&[&path], &options.memory_budget_bytes(budget)).unwrap();
    assert_is_file(&loaded, &file);
    let report = loaded.report();
    assert!(report.carriers.iter().all(|carrier| carrier.route != Route::Usrbio), "{report}");
    let mut refused = report.refused.iter();
    assert!(
        refused.any(|refusal| refusal.what == "usrbio" && refusal.why.reason.contains("budget")),
        "{report}"
    );
}

#[test]
fn a_relative_path_holds_when_the_working_directory_changes() {
    let Some(model) = Model::start() else { return };
    let before = std::env::current_dir().unwrap();
    std::env::set_current_dir(model.path.parent().unwrap()).unwrap();
    let checkpoint = Checkpoint::open(&[model.path.file_name().unwrap()]);
    std::env::set_current_dir(before).unwrap();
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu);
    let loaded = checkpoint.unwrap().load(&options).unwrap();
    assert_is_file(&loaded, &model.file);
    assert_all_by_usrbio(&loaded, &options);
}

#[test]
fn a_small_load_that_names_the_route_takes_it() {
    let Some(model) = Model::start() else { return };
    for way in ways().into_iter().filter(|way| way.route == Route::Usrbio) {
        let selection = Selection::all().select("small.*").select("scalar");
        let loaded = model.load(&way.clone().selection(selection)).unwrap();
        assert_all_by_usrbio(&loaded, &way);
        for tensor in loaded.tensors() {
            assert!(*tensor.bytes().unwrap() == *expected(&model.file, tensor.name()), "{}", tensor.name());
        }
    }
}

#[test]
fn auto_takes_usrbio_for_a_few_bytes_with_threads_and_without() {
    let Some(model) = Model::start() else { return };
    // It keeps the mount open, which has threads of its own.
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    let selection = Selection::all().select("small.*").select("scalar");
    let way = by(Route::Auto, UsrbioClient::Native, DeviceId::Cpu).selection(selection);
    let load = || {
        let loaded = checkpoint.load(&way).unwrap();
        assert_all_by_usrbio(&loaded, &way);
        assert!(loaded.tensors().len() > 1);
        for tensor in loaded.tensors() {
            assert!(*tensor.bytes().unwrap() == *expected(&model.file, tensor.name()), "{}", tensor.name());
        }
    };
    load();
    thread::scope(|scope| {
        scope.spawn(|| {
            without_threads();
            load();
        });
    });
}

#[test]
fn files_on_a_3fs_and_elsewhere_each_go_their_way() {
    let Some(model) = Model::start() else { return };
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = disk.path().join("other.safetensors");
    let other = write_model(&path, &[tensor("other", Dtype::U8, &[9 << 20])], 0, 4);
    for way in ways().into_iter().filter(|way| way.route != Route::Usrbio) {
        for layout in [Layout::File, Layout::Packed] {
            let options = way.clone().layout(layout);
            let loaded = hoistway::load(&[&path, &model.path], &options).unwrap();
            for tensor in loaded.tensors() {
                let file = if tensor.name() == "other" { &other } else { &model.file };
                assert!(*tensor.bytes().unwrap() == *expected(file, tensor.name()), "{}", tensor.name());
            }
            let by_usrbio = |carrier: &hoistway::Carrier| {
                if carrier.route == Route::Usrbio { carrier.tensor_bytes } else { 0 }
            };
            let shared: u64 = loaded.report().carriers.iter().map(by_usrbio).sum();
            assert_eq!(shared, loaded.report().tensor_bytes - (9 << 20), "{}", loaded.report());
        }
    }
}

#[test]
fn a_mount_is_proven_once_and_stays_open_with_its_checkpoint() {
    let Some(model) = Model::start() else { return };
    let options = by(Route::Usrbio, UsrbioClient::Native, DeviceId::Cpu);
    let checkpoint = Checkpoint::open(&[&model.path]).unwrap();
    for is_first in [true, false, false] {
        let before = model.fixture.daemon.transfers().unwrap();
        let loaded = checkpoint.load(&options).unwrap();
        let reads: u64 = loaded.report().carriers.iter().map(|carrier| carrier.reads).sum();
        let probes = model.fixture.daemon.transfers().unwrap() - before - reads;
        assert_eq!(probes, u64::from(is_first));
    }
    drop(checkpoint);
    // Opened anew, and proven already.
    let before = model.fixture.daemon.transfers().unwrap();
    let loaded = model.load(&options).unwrap();
    let reads: u64 = loaded.report().carriers.iter().map(|carrier| carrier.reads).sum();
    assert_eq!(model.fixture.daemon.transfers().unwrap() - before, reads);
}

#[test]
fn several_threads_load_from_one_mount_at_once() {
    let Some(model) = Model::start() else { return };
    thread::scope(|scope| {
        for way in ways() {
            let model = &model;
            scope.spawn(move || assert_is_file(&model.load(&way).unwrap(), &model.file));
        }
    });
}
