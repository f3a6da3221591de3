//! The direct path from storage to devices for readers and for loads into the caller's memory: proven or refused, and what
//! becomes of reads that cuFile fails. The suite `direct_path` asks the same of loads. On the stand-in driver and its cuFile.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{
    Footprint, assert_nothing_left, can_read, make_cold,
    on_device::{chunky, disk, start_threads_that_stay},
    stand_in::{STAND_IN, Turn},
};
use hoistway::{
    ByteRange, Carrier, Checkpoint, DeviceId, DirectIo, Error, FillTarget, Filled, LoadOptions, Order,
    Refusal, Route,
    device::Device,
    plan::{Selection, TensorSlice},
    read::{Batch, Priority, ReadFile, ReadRequest, Reader, ReaderOptions, Target},
    route::fault::{Fault, FaultScript},
};
use hoistway_device::DirectBuffer;
use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const CHUNK: u64 = 256 << 10;
/// Where targets begin in their allocation: nothing of theirs is aligned.
const SHIFT: u64 = 3;

/// Who reads.
#[derive(Clone, Copy, Debug)]
enum Customer {
    Reader,
    Fill,
}

const CUSTOMERS: [Customer; 2] = [Customer::Reader, Customer::Fill];

/// What became of a file that was read into a device.
struct Told {
    carriers: Vec<Carrier>,
    refused: Vec<Refusal>,
    proof: Option<String>,
    text: String,
}

impl Told {
    fn bytes_by(&self, is_own: impl Fn(&Carrier) -> bool) -> u64 {
        self.carriers.iter().filter(|carrier| is_own(carrier)).map(|carrier| carrier.tensor_bytes).sum()
    }
}

/// A checkpoint on disk, cold, and its bytes.
struct OnDisk {
    _directory: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl OnDisk {
    /// `None` where files of the disk cannot be read directly: cuFile refuses them.
    fn new() -> Option<Self> {
        if !can_read(Path::new(env!("CARGO_TARGET_TMPDIR")), Route::Threads, DirectIo::Always) {
            return None;
        }
        let directory = disk();
        let (path, bytes) = chunky(directory.path());
        make_cold(&path);
        Some(Self { _directory: directory, path, bytes })
    }

    /// The bytes of its tensors.
    fn data(&self) -> Range<usize> {
        let header = u64::from_le_bytes(self.bytes[..8].try_into().unwrap()) as usize;
        8 + header..self.bytes.len()
    }

    /// Has a customer read all tensors into a device, and compares them with the file.
    fn read_by(&self, customer: Customer, route: Route, faults: Option<FaultScript>) -> Result<Told, Error> {
        let data = self.data();
        let len = data.len() as u64;
        let memory = DirectBuffer::new(&Device::open(DeviceId::Cuda(0))?, len + SHIFT)?;
        let told = match customer {
            Customer::Reader => {
                let options = ReaderOptions::default().route(route).chunk_bytes(CHUNK);
                let options = faults.into_iter().fold(options, ReaderOptions::faults);
                let reader = Reader::new(&options)?;
                let range = ByteRange::at(data.start as u64, len).unwrap();
                // SAFETY: within the buffer, which outlives the batch.
                let target = unsafe { Target::device(DeviceId::Cuda(0), memory.address() + SHIFT) };
                let request = ReadRequest::new(&ReadFile::open(&self.path)?, range, target).named("all");
                let batch = reader.submit([request], Priority::Demand)?;
                wait(batch)?
            }
            Customer::Fill => {
                let options = LoadOptions::default().route(route).chunk_bytes(CHUNK);
                let options = faults.into_iter().fold(options, LoadOptions::faults);
                let checkpoint = Checkpoint::open(&[&self.path])?;
                let requests = Selection::all().resolve(checkpoint.catalog())?;
                let targets = requests.into_iter().map(|request| {
                    let bytes = checkpoint.catalog().tensor(request.tensor).bytes;
                    let address = memory.address() + SHIFT + bytes.start() - data.start as u64;
                    FillTarget::new(request, DeviceId::Cuda(0), address, bytes.len())
                });
                fill(&checkpoint, &targets.collect::<Vec<_>>(), &options)?
            }
        };
        let mut seen = vec![0; (len + SHIFT) as usize];
        memory.read_back(&mut seen)?;
        assert!(seen[SHIFT as usize..] == self.bytes[data], "{customer:?} by {route}\n{}", told.text);
        let moved = told.bytes_by(|_| true);
        assert_eq!(moved, len, "{customer:?} by {route}\n{}", told.text);
        Ok(told)
    }
}

fn wait(batch: Batch) -> Result<Told, Error> {
    if batch.wait().is_err() {
        return Err(again(batch.status(0).error().unwrap()));
    }
    let report = batch.report();
    let text = report.to_string();
    Ok(Told { carriers: report.carriers, refused: report.refused, proof: report.proof, text })
}

fn fill(checkpoint: &Checkpoint, targets: &[FillTarget], options: &LoadOptions) -> Result<Told, Error> {
    // SAFETY: within buffers of the caller's, which outlive the load.
    let mut filling = unsafe { checkpoint.fill(targets, options, Order::Arrival)? };
    loop {
        match filling.next_within(Duration::from_secs(60)) {
            Ok(Filled::Target(_)) => {}
            Ok(Filled::Pending) => panic!("nothing comes"),
            Ok(Filled::Finished) => break,
            Err(error) => return Err(again(error)),
        }
    }
    let report = filling.report();
    let text = report.to_string();
    let proof = report.device.and_then(|device| device.proof);
    Ok(Told { carriers: report.carriers, refused: report.refused, proof, text })
}

/// An error like one that is borrowed.
fn again(error: &Error) -> Error {
    match error {
        Error::RouteUnavailable { route, path, why } => {
            Error::RouteUnavailable { route: *route, path: path.clone(), why: why.clone() }
        }
        Error::Io { operation, path, tensor, range, source } => Error::Io {
            operation,
            path: path.clone(),
            tensor: tensor.clone(),
            range: *range,
            source: std::io::Error::new(source.kind(), source.to_string()),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn gds_is_proven_and_every_byte_of_it_is_named() {
    let _stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for (customer, route) in
        CUSTOMERS.iter().flat_map(|customer| [(*customer, Route::Gds), (*customer, Route::Auto)])
    {
        make_cold(&file.path);
        let told = file.read_by(customer, route, None).unwrap();
        let direct = told.bytes_by(|carrier| carrier.route == Route::Gds && carrier.via.is_none());
        let tail =
            told.bytes_by(|carrier| carrier.route == Route::Threads && carrier.via == Some(Route::Staged));
        let cached = told.bytes_by(|carrier| carrier.route == Route::Cached);
        assert!(route == Route::Auto || cached == 0, "{}", told.text);
        assert_eq!(direct + tail + cached, file.data().len() as u64, "{customer:?}\n{}", told.text);
        // All but the last block, which is not whole.
        assert!(tail <= file.bytes.len() as u64 % 4096, "{customer:?}\n{}", told.text);
        assert!(direct > file.bytes.len() as u64 / 2, "{customer:?}\n{}", told.text);
        assert!(told.proof.as_ref().unwrap().contains("nvidia-fs"), "{}", told.text);
        assert!(told.text.contains("nvidia-fs"), "{}", told.text);
        assert!(told.refused.iter().all(|refusal| refusal.what != "gds"), "{}", told.text);
    }
}

/// The library promises a direct path, and reads through the host all the same: never `gds`.
#[test]
fn compatibility_mode_cannot_pass_as_gds() {
    let stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for customer in CUSTOMERS {
        stand_in.reset();
        drop(file.read_by(customer, Route::Gds, None).unwrap());
        // It was proven a moment ago. Now every read is counted as one through the host.
        stand_in.set("CUFILE_THROUGH_HOST=1");
        match file.read_by(customer, Route::Gds, None).map(|told| told.text).unwrap_err() {
            Error::RouteUnavailable { route: Route::Gds, path: None, why } => {
                assert!(why.reason.contains("through host memory"), "{why}");
                assert!(why.fix.contains("gds-compat"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        make_cold(&file.path);
        let told = file.read_by(customer, Route::Auto, None).unwrap();
        assert!(told.carriers.iter().all(|carrier| carrier.route != Route::Gds), "{}", told.text);
        assert!(told.refused.iter().any(|refusal| refusal.what == "gds"), "{}", told.text);
        assert_eq!(told.proof, None);
        let told = file.read_by(customer, Route::GdsCompat, None).unwrap();
        assert!(told.carriers.iter().any(|carrier| carrier.route == Route::GdsCompat), "{}", told.text);
        assert_eq!(told.proof, None);
    }
}

#[test]
fn reads_that_cufile_fails_are_errors_or_are_made_by_others() {
    let stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for customer in CUSTOMERS {
        stand_in.reset();
        // Proves the path, so that the faults below hit the reads.
        drop(file.read_by(customer, Route::Gds, None).unwrap());
        start_threads_that_stay(&file.path);
        let before = Footprint::now();
        for (fault, words) in [
            ("3=-5030", "5030"),
            ("2=-5016", "BAR1"),
            ("1=-5008", "does not support GPUDirect Storage"),
            ("4=-5", "os error 5"),
        ] {
            make_cold(&file.path);
            stand_in.set(&format!("CUFILE_READ_FAULTS={fault}"));
            match file.read_by(customer, Route::Gds, None).map(|told| told.text).unwrap_err() {
                error @ Error::Io { operation: "read", tensor: Some(_), range: Some(_), .. } => {
                    assert!(error.to_string().contains(words), "{error}");
                }
                other => panic!("{other:?}"),
            }
            assert_nothing_left(&before);
            stand_in.set(&format!("CUFILE_READ_FAULTS={fault}"));
            let told = file.read_by(customer, Route::Auto, None).unwrap();
            assert!(told.refused.iter().any(|refusal| refusal.what == "gds"), "{}", told.text);
            assert_nothing_left(&before);
        }
        stand_in.set("CUFILE_READ_FAULTS=1=short:4096,2=short:5000,3=short:1");
        drop(file.read_by(customer, Route::Gds, None).unwrap());
        stand_in.set("CUFILE_READ_FAULTS=");
        // The first buffer is the test's own.
        for fault in ["cuFileRead:2=5034", "cuFileBufRegister:2=5016"] {
            stand_in.set(&format!("FAULTS={fault}"));
            let error = file.read_by(customer, Route::Gds, None).map(|told| told.text).unwrap_err();
            assert!(matches!(error, Error::Io { .. } | Error::RouteUnavailable { .. }), "{error:?}");
            stand_in.set(&format!("FAULTS={fault}"));
            make_cold(&file.path);
            drop(file.read_by(customer, Route::Auto, None).unwrap());
        }
    }
}

/// One thread gives cuFile up while others have reads to go on with.
#[test]
fn giving_cufile_up_strands_no_read() {
    let _stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for (customer, round) in CUSTOMERS.iter().flat_map(|customer| (0..5u64).map(|round| (*customer, round))) {
        make_cold(&file.path);
        let failed = Arc::new(AtomicU64::new(0));
        let script = FaultScript::new(move |number, offset| match number % 7 {
            // Not the last block, which is not cuFile's.
            _ if number >= round && offset < 20 << 20 && failed.fetch_add(1, Ordering::Relaxed) == 0 => {
                Some(Fault::Broken)
            }
            1 | 4 => Some(Fault::Short(4096)),
            2 | 5 => Some(Fault::Delay(Duration::from_millis(1))),
            _ => None,
        });
        let told = file.read_by(customer, Route::Auto, Some(script)).unwrap();
        assert!(told.refused.iter().any(|refusal| refusal.what == "gds"), "{}", told.text);
    }
}

#[test]
fn files_that_cufile_does_not_take_are_named_with_the_fix() {
    let stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for customer in CUSTOMERS {
        stand_in.reset();
        drop(file.read_by(customer, Route::Gds, None).unwrap());
        stand_in.set("CUFILE_REFUSE_FS=1");
        match file.read_by(customer, Route::Gds, None).map(|told| told.text).unwrap_err() {
            Error::RouteUnavailable { route: Route::Gds, path: at, why } => {
                assert_eq!(at.as_ref(), Some(&file.path));
                assert!(why.reason.contains("5030") && why.fix.contains("/run/udev"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        make_cold(&file.path);
        let told = file.read_by(customer, Route::Auto, None).unwrap();
        let names_it = |refusal: &Refusal| refusal.what == "gds" && refusal.path.as_ref() == Some(&file.path);
        assert!(told.refused.iter().any(names_it), "{}", told.text);
    }
}

#[test]
fn staged_never_goes_past_the_host() {
    let _stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for customer in CUSTOMERS {
        make_cold(&file.path);
        let told = file.read_by(customer, Route::Staged, None).unwrap();
        assert!(told.carriers.iter().all(|carrier| carrier.via == Some(Route::Staged)), "{}", told.text);
        assert!(told.refused.iter().all(|refusal| refusal.what != "gds"), "{}", told.text);
    }
}

#[test]
fn routes_past_the_host_do_not_lead_to_the_host() {
    let _stand_in = Turn::take();
    let Some(file) = OnDisk::new() else { return };
    for route in [Route::Gds, Route::GdsCompat] {
        let reader = Reader::new(&ReaderOptions::default().route(route)).unwrap();
        let open = ReadFile::open(&file.path).unwrap();
        let request = ReadRequest::new(&open, ByteRange::at(0, 4096).unwrap(), Target::memory());
        let batch = reader.submit([request], Priority::Demand).unwrap();
        match batch.wait().unwrap_err() {
            Error::RouteUnavailable { route: refused, why, .. } => {
                assert_eq!(*refused, route);
                assert!(why.reason.contains("host memory"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Rows with gaps come in one read, and only they are copied on the device.
#[test]
fn rows_of_a_tensor_are_packed_past_the_host() {
    let _stand_in = Turn::take();
    if OnDisk::new().is_none() {
        return;
    }
    let directory = disk();
    let path = directory.path().join("rows.safetensors");
    let (rows, columns) = (3000u64, 512u64);
    let bytes =
        common::write_model(&path, &[common::tensor("t", hoistway::Dtype::U8, &[rows, columns])], 0, 1);
    for (route, kept) in [(Route::Gds, 10..200u64), (Route::Auto, 1..2), (Route::GdsCompat, 0..512)] {
        make_cold(&path);
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let slice = TensorSlice::new(vec![0..rows, kept.clone()]);
        let requests = Selection::all().slice("t", slice).resolve(checkpoint.catalog()).unwrap();
        let width = kept.end - kept.start;
        let memory =
            DirectBuffer::new(&Device::open(DeviceId::Cuda(0)).unwrap(), rows * width + SHIFT).unwrap();
        let target =
            FillTarget::new(requests[0].clone(), DeviceId::Cuda(0), memory.address() + SHIFT, rows * width);
        let options = LoadOptions::default().route(route).chunk_bytes(CHUNK);
        let told = fill(&checkpoint, &[target], &options).unwrap();
        assert!(told.bytes_by(|carrier| carrier.via.is_none()) > 0, "{}", told.text);
        let mut seen = vec![0; (rows * width + SHIFT) as usize];
        memory.read_back(&mut seen).unwrap();
        let data = &bytes[bytes.len() - (rows * columns) as usize..];
        let wanted: Vec<u8> = (0..rows)
            .flat_map(|row| &data[(row * columns + kept.start) as usize..(row * columns + kept.end) as usize])
            .copied()
            .collect();
        assert!(seen[SHIFT as usize..] == wanted, "{route}");
    }
}

/// Rows are longer than a chunk, and so are the gaps between them, of which some parts are not read at all.
#[test]
fn rows_of_a_tensor_are_packed_into_host_memory_over_chunks() {
    let directory = disk();
    let path = directory.path().join("rows.safetensors");
    let (rows, columns, kept) = (6u64, 300_000u64, 10..150_000u64);
    let bytes =
        common::write_model(&path, &[common::tensor("t", hoistway::Dtype::U8, &[rows, columns])], 0, 1);
    let data = &bytes[bytes.len() - (rows * columns) as usize..];
    let row =
        |number: u64| &data[(number * columns + kept.start) as usize..][..(kept.end - kept.start) as usize];
    let wanted: Vec<u8> = (0..rows).flat_map(row).copied().collect();
    for (route, is_cold) in [(Route::Threads, true), (Route::Auto, true), (Route::Auto, false)] {
        if is_cold {
            make_cold(&path);
        }
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let slice = TensorSlice::new(vec![0..rows, kept.clone()]);
        let requests = Selection::all().slice("t", slice).resolve(checkpoint.catalog()).unwrap();
        let mut memory = vec![0xEE; wanted.len() + 2 * SHIFT as usize];
        let address = memory.as_mut_ptr().expose_provenance() as u64 + SHIFT;
        let target = FillTarget::new(requests[0].clone(), DeviceId::Cpu, address, wanted.len() as u64);
        fill(&checkpoint, &[target], &LoadOptions::default().route(route).chunk_bytes(64 << 10)).unwrap();
        let (before, rest) = memory.split_at(SHIFT as usize);
        let (filled, after) = rest.split_at(wanted.len());
        assert!(*filled == *wanted, "{route}");
        assert!(
            before.iter().chain(after).all(|&byte| byte == 0xEE),
            "{route}: bytes beside it were written"
        );
    }
}

/// What drivers do with memory that is not pinned differs between machines: on some, a copy has not read it when it returns.
#[test]
fn bytes_of_a_buffer_are_copied_by_way_of_pinned_memory() {
    let turn = Turn::take();
    let device = Device::open(DeviceId::Cuda(0)).unwrap();
    // More than goes at once.
    for len in [1, 4096, (9 << 20) + 5] {
        let bytes: Vec<u8> = (0..len).map(|at: usize| (at % 251) as u8 ^ (at >> 20) as u8).collect();
        let before = STAND_IN.count("pageable_copies");
        let buffer = DirectBuffer::new(&device, bytes.len() as u64).unwrap();
        STAND_IN.set("COPY_LATENCY_US=2000");
        buffer.write(&bytes).unwrap();
        let mut seen = vec![0; bytes.len()];
        buffer.read_back(&mut seen).unwrap();
        STAND_IN.reset();
        assert!(seen == bytes, "{len}");
        assert_eq!(STAND_IN.count("pageable_copies"), before, "{len}");
        let error = buffer.write(&vec![0; len + 1]).unwrap_err();
        assert!(error.to_string().contains(&format!("{} bytes for a buffer of {len}", len + 1)), "{error}");
    }
    // Where the platform pins none, they arrive all the same.
    STAND_IN.set("FAULTS=cuMemHostRegister_v2:*=801");
    let (before, bytes) = (STAND_IN.count("pageable_copies"), [7; 5000]);
    let (buffer, mut seen) = (DirectBuffer::new(&device, 5000).unwrap(), [0; 5000]);
    buffer.write(&bytes).unwrap();
    buffer.read_back(&mut seen).unwrap();
    assert_eq!((seen, STAND_IN.count("pageable_copies")), (bytes, before + 2));
    STAND_IN.reset();
    drop((buffer, device));
    turn.assert_nothing_left("the buffers");
}
