//! Blocks in the memory of devices, on the stand-in driver and its cuFile: by way of the host, and directly.

#[path = "../../../hoistway/tests/common/stand_in.rs"]
#[allow(unreachable_pub, dead_code, unused_qualifications, missing_docs, clippy::expect_used)]
mod stand_in;

#[path = "device_memory.rs"]
#[allow(unreachable_pub, dead_code, unused_qualifications, missing_docs)]
mod device_memory;

#[cfg(target_os = "linux")]
#[path = "../../../hoistway/tests/common/nodes.rs"]
#[allow(unreachable_pub, dead_code, missing_docs)]
mod nodes;

use crate::{
    common::*,
    damage::{files, flip},
};
use device_memory::DeviceMemory;
use hoistway_device::{CopyDirection, DeviceId};
use hoistway_kv::{
    BufferItem, Carrier, DeviceBuffer, DirectPath, Durability, Item, KeepAlive, LayoutKind, Namespace, Piece,
    Region, Request, Status, Store, StoreOptions, Ticket, TransferOptions,
};
use requirements::{Requirement, skip};
use stand_in::{Turn, Vendor};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const PAGE: usize = 4096;

/// Memory of a device with room for one block, known to the store or not. Shards begin at whole pages.
struct Rows {
    // Given back before the memory is.
    region: Option<Region>,
    memory: Arc<DeviceMemory>,
    shape: Shape,
}

impl Rows {
    fn new(store: &Store, shape: Shape, is_registered: bool) -> Self {
        Self::of(Vendor::Cuda, store, shape, is_registered)
    }

    fn of(vendor: Vendor, store: &Store, shape: Shape, is_registered: bool) -> Self {
        let untouched = vec![0xEE; shape.shards as usize * Self::stride(shape)];
        let memory = Arc::new(DeviceMemory::of(vendor, 1, &untouched));
        let register = || {
            // SAFETY: the memory outlives the region.
            unsafe { store.register_device(vendor.device(1), memory.address, memory.len as u64) }.unwrap()
        };
        Self { region: is_registered.then(register), memory, shape }
    }

    fn stride(shape: Shape) -> usize {
        (shape.skew + shape.len).next_multiple_of(PAGE)
    }

    fn fill(&self, name: &str) {
        let mut bytes = vec![0; self.memory.len];
        for (shard, row) in bytes.chunks_mut(Self::stride(self.shape)).enumerate() {
            row[self.shape.skew..][..self.shape.len].copy_from_slice(&bytes_of(
                name,
                shard as u32,
                self.shape.len,
            ));
        }
        self.memory.copy(CopyDirection::ToDevice, bytes.as_ptr().expose_provenance());
    }

    fn holds(&self, name: &str) -> bool {
        self.memory.bytes().chunks(Self::stride(self.shape)).enumerate().all(|(shard, row)| {
            row[self.shape.skew..][..self.shape.len] == bytes_of(name, shard as u32, self.shape.len)
        })
    }

    /// A row in as many pieces as the shape says.
    fn pieces(&self, shard: usize) -> Vec<Piece> {
        let (mut start, mut left) = (shard * Self::stride(self.shape) + self.shape.skew, self.shape.len);
        let mut pieces = Vec::new();
        for number in (1..=self.shape.pieces).rev() {
            let len = if number == 1 { left } else { (left / number).next_multiple_of(PAGE).min(left) };
            pieces.push(self.memory.piece(start, len));
            (start, left) = (start + len, left - len);
        }
        pieces
    }

    fn request(&self, name: &str) -> Request {
        let items = (0..self.shape.shards)
            .map(|shard| Item::new(key(name), shard, self.pieces(shard as usize)))
            .collect();
        let mut request = Request::new(items, KeepAlive::new(Arc::clone(&self.memory) as _));
        request.shards = self.shape.shards;
        request
    }

    fn begin_store(&self, blocks: &Namespace, name: &str) -> Ticket {
        // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
        unsafe { blocks.store(self.request(name)) }.unwrap()
    }

    fn store(&self, blocks: &Namespace, name: &str) -> Vec<Status> {
        self.fill(name);
        end(&self.begin_store(blocks, name)).items
    }

    /// What was delivered is what was stored.
    fn load(&self, blocks: &Namespace, name: &str) -> Vec<Status> {
        self.fill("something else");
        // SAFETY: as above.
        let statuses = end(&unsafe { blocks.load(self.request(name)) }.unwrap()).items;
        assert!(!all(&statuses, Status::Ok) || self.holds(name), "{name}");
        statuses
    }
}

fn all(statuses: &[Status], expected: Status) -> bool {
    statuses.iter().all(|status| *status == expected)
}

/// `(read, written)` by way of one carrier.
fn carried(store: &Store, carrier: Carrier) -> (u64, u64) {
    let report = store.report().unwrap();
    let share = report.carriers.iter().find(|share| share.carrier == carrier);
    share.map_or((0, 0), |share| (share.read_bytes, share.written_bytes))
}

/// Whether files can be read past the page cache here, which cuFile needs.
#[track_caller]
fn has_direct_files(options: &StoreOptions) -> bool {
    let mut options = options.clone();
    options.root = options.root.with_file_name("probe");
    let store = Store::open(options).unwrap();
    put(&namespace(&store), "a", Shape::of(1, 4096));
    let is_direct = carried(&store, Carrier::IoUringDirect).1 + carried(&store, Carrier::ThreadsDirect).1 > 0;
    if !is_direct {
        skip(Requirement::Direct, format!("{:?}", store.report().unwrap().refused));
    }
    is_direct
}

const SHAPES: [Shape; 6] = [
    Shape::of(1, 4096),
    Shape::of(3, 65536),
    Shape { shards: 2, len: 1 << 20, skew: 0, pieces: 8 },
    Shape { shards: 1, len: 100_001, skew: 0, pieces: 3 },
    Shape { shards: 4, len: 5000, skew: 7, pieces: 1 },
    Shape { shards: 16, len: 12, skew: 512, pieces: 1 },
];

#[test]
fn blocks_of_devices_come_back_as_they_were() {
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        for (way, is_registered) in
            [(DirectPath::Off, false), (DirectPath::Prefer, false), (DirectPath::Prefer, true)]
        {
            each(|_, mut options| {
                options.direct = way;
                let store = Store::open(options.clone()).unwrap();
                let blocks = namespace(&store);
                for (number, shape) in SHAPES.into_iter().enumerate() {
                    let (name, rows) =
                        (format!("shape {number}"), Rows::of(vendor, &store, shape, is_registered));
                    assert!(all(&rows.load(&blocks, &name), Status::Miss));
                    let stored = rows.store(&blocks, &name);
                    assert!(all(&stored, Status::Ok), "{name}: {stored:?} {options:?}");
                    let loaded = rows.load(&blocks, &name);
                    assert!(all(&loaded, Status::Ok), "{name}: {loaded:?} {options:?}");
                    // Whatever wrote it, it is the same block.
                    assert_eq!(get_status(&blocks, &name, Shape { skew: 0, pieces: 1, ..shape }), Status::Ok);
                }
                let (read, written) = carried(&store, Carrier::Gds);
                let has_path = is_registered && vendor == Vendor::Cuda;
                let is_direct = has_path && has_direct_files(&options);
                assert_eq!((read > 0, written > 0), (is_direct, is_direct), "{:?}", store.report().unwrap());
                store.close(LONG).unwrap();

                let store = Store::open(options).unwrap();
                let blocks = namespace(&store);
                for (number, shape) in SHAPES.into_iter().enumerate() {
                    let (name, rows) =
                        (format!("shape {number}"), Rows::of(vendor, &store, shape, is_registered));
                    assert!(all(&rows.load(&blocks, &name), Status::Ok), "{name} after opening anew");
                }
                store.close(LONG).unwrap();
            });
            stand_in.assert_nothing_left(way.name());
        }
    }
}

/// Blocks of devices pass no more pinned memory than was asked for.
#[test]
fn the_memory_that_blocks_pass_can_be_set() {
    let turn = Turn::take();
    let root = tempfile::tempdir().unwrap();
    let least = StoreOptions::LEAST_STAGING_BYTES;
    let error = Store::open(options(&root).staging_bytes(least - 1)).unwrap_err();
    assert!(error.to_string().contains("staging_bytes"), "{error}");
    for (bytes, most) in [(least, least), (16 << 20, 16 << 20)] {
        let options = options(&root).direct(DirectPath::Off).staging_bytes(bytes);
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        for (number, shape) in SHAPES.into_iter().enumerate() {
            let name = format!("{bytes} {number}");
            let rows = Rows::new(&store, shape, false);
            assert!(
                all(&rows.store(&blocks, &name), Status::Ok) && all(&rows.load(&blocks, &name), Status::Ok)
            );
        }
        let (pinned, report) = (turn.count("pinned_bytes"), store.report().unwrap());
        assert!(
            pinned > 0 && pinned <= most && report.bounce_bytes <= most,
            "{pinned} are pinned: {report:?}"
        );
        store.close(LONG).unwrap();
    }
    turn.assert_nothing_left("the store");
}

#[test]
fn blocks_that_a_device_does_not_take_pass_the_least_memory() {
    let stand_in = Turn::take();
    let root = tempfile::tempdir().unwrap();
    let options = options(&root).staging_bytes(StoreOptions::LEAST_STAGING_BYTES);
    if !has_direct_files(&options) {
        return;
    }
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    let rows = Rows::new(&store, Shape::of(1, 8 << 20), true);
    assert!(rows.region.as_ref().is_some_and(Region::is_direct), "{:?}", store.report().unwrap().refused);
    assert!(all(&rows.store(&blocks, "a"), Status::Ok));
    let directly = carried(&store, Carrier::Gds);
    assert!(directly.1 >= 8 << 20);
    stand_in.set("FAULTS=cuFileRead:*=5034");
    assert!(all(&rows.load(&blocks, "a"), Status::Ok));
    assert_eq!(carried(&store, Carrier::Gds), directly, "it is read by way of the host");
}

#[test]
fn what_has_to_go_directly_does_or_fails() {
    let _turn = Turn::take();
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    if !has_direct_files(&options) {
        return;
    }
    options.direct = DirectPath::Require;
    let store = Store::open(options).unwrap();
    let blocks = namespace(&store);
    let shape = Shape::of(2, 65536);
    let unknown = Rows::new(&store, shape, false);
    let refused = unknown.store(&blocks, "a");
    assert!(refused.iter().all(|status| matches!(status, Status::Io(_))), "{refused:?}");
    assert_eq!(blocks.lookup(&["a"]).unwrap(), [false]);
    let rows = Rows::new(&store, shape, true);
    assert!(rows.region.as_ref().is_some_and(Region::is_direct));
    assert!(all(&rows.store(&blocks, "a"), Status::Ok));
    assert!(all(&rows.load(&blocks, "a"), Status::Ok));
    assert_eq!(carried(&store, Carrier::Gds), (2 * 65536, 2 * 65536));
    let refused = unknown.load(&blocks, "a");
    assert!(refused.iter().all(|status| matches!(status, Status::Io(_))), "{refused:?}");
    // It was the memory's fault, not the block's.
    assert!(all(&rows.load(&blocks, "a"), Status::Ok));
}

#[test]
fn a_device_that_goes_through_the_host_is_said_to() {
    let stand_in = Turn::take();
    stand_in.set("CUFILE_THROUGH_HOST=1");
    let root = tempfile::tempdir().unwrap();
    let mut options = options(&root);
    let is_possible = has_direct_files(&options);
    options.direct = DirectPath::Prefer;
    let store = Store::open(options.clone()).unwrap();
    let rows = Rows::new(&store, Shape::of(2, 65536), true);
    assert!(!rows.region.as_ref().is_some_and(Region::is_direct));
    let blocks = namespace(&store);
    assert!(all(&rows.store(&blocks, "a"), Status::Ok));
    assert!(all(&rows.load(&blocks, "a"), Status::Ok));
    assert_eq!(carried(&store, Carrier::Gds), (0, 0));
    let refused = store.report().unwrap().refused;
    assert!(!is_possible || refused.iter().any(|refusal| refusal.what == "gds"), "{refused:?}");
    drop((rows, store));

    options.direct = DirectPath::Require;
    let store = Store::open(options).unwrap();
    let memory = DeviceMemory::of(Vendor::Cuda, 1, &[0; PAGE]);
    // SAFETY: the memory outlives the region.
    let error = unsafe { store.register_device(DeviceId::Cuda(1), memory.address, PAGE as u64) }.unwrap_err();
    assert!(matches!(error, hoistway_kv::Error::RouteUnavailable { .. }), "{error}");
}

#[test]
fn directly_written_blocks_make_room_for_others_and_are_never_mixed_up() {
    let _turn = Turn::take();
    for layout in LayoutKind::ALL {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        (options.capacity_bytes, options.layout) = (Some(24 << 20), Some(*layout));
        (options.direct, options.durability) = (DirectPath::Prefer, Durability::None);
        let store = Store::open(options.clone()).unwrap();
        let blocks = namespace(&store);
        let shape = Shape::of(2, 128 << 10);
        let rows = Rows::new(&store, shape, true);
        let names: Vec<String> = (0..300).map(|number| format!("block {number}")).collect();
        let mut dropped = 0;
        for name in &names {
            match rows.store(&blocks, name)[0] {
                Status::Ok => {}
                Status::Dropped(_) => dropped += 1,
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(dropped < 30, "{dropped} of 300 were dropped");
        let there = |store: &Store| {
            let (blocks, rows) = (namespace(store), Rows::new(store, shape, true));
            names.iter().filter(|name| all(&rows.load(&blocks, name), Status::Ok)).count()
        };
        assert!(there(&store) > 20, "{layout}");
        assert!(store.stats().unwrap().root_bytes <= 24 << 20);
        drop(rows);
        store.close(LONG).unwrap();
        let store = Store::open(options).unwrap();
        assert!(there(&store) > 20, "{layout}, opened anew");
    }
}

#[test]
fn a_damaged_block_is_not_delivered_to_a_device() {
    let _turn = Turn::take();
    // Without a checksum, only what describes the block tells.
    for (way, is_registered, damaged_at) in
        [(DirectPath::Off, false, PAGE), (DirectPath::Off, false, 0), (DirectPath::Prefer, true, 0)]
    {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.direct = way;
        let store = Store::open(options.clone()).unwrap();
        let blocks = namespace(&store);
        let rows = Rows::new(&store, Shape::of(1, 65536), is_registered);
        assert!(all(&rows.store(&blocks, "a"), Status::Ok));
        store.flush(LONG).unwrap();
        let mut segments = Vec::new();
        files(&options.root, ".kvs", &mut segments);
        let start = &bytes_of("a", 0, 65536)[..64];
        let bytes = std::fs::read(&segments[0]).unwrap();
        let page = bytes.chunks(PAGE).position(|page| page.starts_with(start)).unwrap();
        // The header lies before the payload.
        flip(&segments[0], ((page - 1) * PAGE + damaged_at + 100) as u64);
        assert_eq!(rows.load(&blocks, "a"), [Status::Corrupt]);
        assert_eq!(rows.load(&blocks, "a"), [Status::Miss]);
        assert_eq!(store.stats().unwrap().corrupt_blocks, 1);
    }
}

#[test]
fn a_driver_that_fails_fails_the_request_and_leaves_nothing() {
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        let root = tempfile::tempdir().unwrap();
        let mut options = options(&root);
        options.direct = DirectPath::Off;
        let store = Store::open(options).unwrap();
        let blocks = namespace(&store);
        let rows = Rows::of(vendor, &store, Shape::of(2, 65536), false);
        rows.fill("a");
        stand_in.set(&vendor.faults("cuMemcpyDtoHAsync_v2:1=1"));
        let failed = end(&rows.begin_store(&blocks, "a")).items;
        stand_in.reset();
        assert!(failed.iter().any(|status| !matches!(status, Status::Ok)), "{failed:?}");
        assert_eq!(blocks.lookup(&["a"]).unwrap(), [false]);
        assert!(all(&rows.store(&blocks, "a"), Status::Ok));
        assert!(all(&rows.load(&blocks, "a"), Status::Ok));
        store.close(LONG).unwrap();
        drop((rows, store, blocks));
        stand_in.assert_nothing_left("the store");
    }
}

#[test]
fn buffers_of_a_device_need_no_pinned_memory_where_there_is_none() {
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        let mut buffer = DeviceBuffer::allocate(vendor.device(0), 5000, 1).unwrap().remove(0);
        stand_in.set(&vendor.faults("cuMemHostRegister_v2:*=801"));
        buffer.write(&bytes_of("a", 0, 5000)).unwrap();
        assert_eq!(buffer.read(5000).unwrap()[..], bytes_of("a", 0, 5000)[..]);
        stand_in.reset();
        drop(buffer);
        stand_in.assert_nothing_left("buffers");
    }
}

#[test]
fn buffers_of_a_device_are_lent_and_given_back() {
    const LEN: usize = 10_000;
    let stand_in = Turn::take();
    for vendor in Vendor::ALL {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(options(&root)).unwrap();
        let blocks = namespace(&store);
        let names = ["a", "b", "c"];
        let items = |buffers: Vec<DeviceBuffer>| -> Vec<_> {
            let item = |(name, buffer): (&&str, _)| BufferItem::new(key(name), 0, buffer);
            names.iter().zip(buffers).map(item).collect()
        };
        let is_direct = |region: &Region| region.is_direct() == (vendor == Vendor::Cuda);
        let mut buffers = DeviceBuffer::allocate(vendor.device(1), LEN, names.len()).unwrap();
        let regions = store.register_buffers(&buffers).unwrap();
        assert!(regions.len() == 1 && regions.iter().all(is_direct));
        drop(regions);
        // Of buffers in any order, and of some of them.
        buffers.reverse();
        let regions = store.register_buffers(&buffers).unwrap();
        assert!(regions.len() == 1 && regions.iter().all(is_direct));
        drop(store.register_buffers(&buffers[1..]).unwrap());
        for (name, buffer) in names.iter().zip(&mut buffers) {
            buffer.write(&bytes_of(name, 0, LEN)).unwrap();
        }
        let stored = blocks.store_buffers(items(buffers), &TransferOptions::default()).unwrap();
        let (completion, mut buffers) = stored.wait(LONG).unwrap();
        assert!(completion.is_ok(), "{completion:?}");
        for buffer in &mut buffers {
            // What is too much is left out.
            buffer.write(&[0; LEN + 1]).unwrap();
        }
        let loaded = blocks.load_buffers(items(buffers), &TransferOptions::default()).unwrap();
        let (completion, buffers) = loaded.wait(LONG).unwrap();
        assert!(completion.is_ok(), "{completion:?}");
        for (name, buffer) in names.iter().zip(&buffers) {
            assert_eq!(buffer.read(LEN + 1).unwrap()[..], bytes_of(name, 0, LEN)[..], "{name}");
            assert_eq!(buffer.read(3).unwrap()[..], bytes_of(name, 0, LEN)[..3]);
        }
        // The region keeps the memory that it is of.
        drop(buffers);
        drop(regions);
        store.close(LONG).unwrap();
        drop((store, blocks));
        stand_in.assert_nothing_left("buffers");
    }
}

/// Threads and memory that bytes of devices pass, on a machine of two NUMA nodes, which this test makes the engine see.
#[cfg(target_os = "linux")]
#[test]
fn threads_and_memory_are_on_the_node_of_the_device_that_comes_first() {
    use nodes::{ABSENT, Nodes, cpus_of, halves, has_memory_for_us, own_cpus};

    let turn = Turn::take();
    let machine = tempfile::tempdir().unwrap();
    let own = own_cpus();
    let all: Vec<usize> = own.iter().copied().collect();
    if all.len() == 1 {
        eprintln!("skipped: the process may use one processor");
        return;
    }
    let (low, high) = halves(&all);
    let [first, second] = [0, 1].map(|ordinal| Vendor::Cuda.device(ordinal));
    let nodes = Nodes::new(machine.path().into(), second);
    let shape = Shape::of(2, 65536);
    let is_ok = |statuses: &[Status]| statuses.iter().all(|status| *status == Status::Ok);
    // Processors of the second node, the node of the device; where threads run, and the node of the report.
    let cases = [
        (high, "1", high, Some(1)),
        (high, "0", low, Some(0)),
        (high, "-1", &all[..], None),
        (&[ABSENT][..], "1", &all[..], Some(1)),
    ];
    for (of_second, of_device, expected, node) in cases {
        nodes.set(low, of_second, of_device);
        nodes.put(first, "0");
        // Devices are opened anew.
        turn.set("COPY_LATENCY_US=0");
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(options(&root)).unwrap();
        let blocks = namespace(&store);
        let report = store.report().unwrap();
        assert_eq!((report.numa_node, report.notes), (None, Vec::new()), "no device was used yet");

        // A device that cannot be opened fails its own requests, and places nothing.
        let absent = DeviceId::Cuda(15);
        let item = Item::new(key("absent"), 0, vec![Piece::new(absent, 4096, 4096)]);
        // SAFETY: there is no such memory, and no device to use it.
        let ticket = unsafe { blocks.store(Request::new(vec![item], KeepAlive::new(Arc::new(())))) }.unwrap();
        assert!(!is_ok(&end(&ticket).items));
        let report = store.report().unwrap();
        assert_eq!((report.numa_node, report.notes), (None, Vec::new()), "no device was opened");

        let rows = Rows::new(&store, shape, false);
        assert!(is_ok(&rows.store(&blocks, "a")) && is_ok(&rows.load(&blocks, "a")));
        let expected = expected.iter().copied().collect();
        // Threads go there before they move bytes. Those of the case before may be there for a moment.
        let are_there = || {
            let found = cpus_of("hoistway-kv-dev").unwrap();
            found.contains(&expected) && found.iter().all(|cpus| *cpus == expected || *cpus == own)
        };
        let last = Instant::now() + Duration::from_secs(120);
        while !are_there() {
            assert!(Instant::now() < last, "{of_device}: {:?}", cpus_of("hoistway-kv-dev"));
            thread::sleep(Duration::from_millis(1));
        }
        assert!(cpus_of("hoistway-kv-io").unwrap().iter().all(|cpus| *cpus == own), "{of_device}");
        assert_eq!(own_cpus(), own, "the caller's thread stays where it is");
        let report = store.report().unwrap();
        assert_eq!(report.numa_node, node, "{of_device}");
        let has = |text: &str| report.notes.iter().any(|note| note.contains(text));
        assert_eq!(has("threads ran on any node"), of_second == [ABSENT], "{report:?}");
        let is_refused = node.is_some_and(|node| !has_memory_for_us(node));
        assert_eq!(has("staging memory may be on any node"), is_refused, "{report:?}");

        // A device that comes later is told of.
        let memory = Arc::new(DeviceMemory::of(Vendor::Cuda, 0, &bytes_of("b", 0, 4096)));
        let item = Item::new(key("b"), 0, vec![memory.piece(0, 4096)]);
        let request = Request::new(vec![item], KeepAlive::new(Arc::clone(&memory) as _));
        // SAFETY: the request keeps the memory, and nothing writes to it before the ticket has ended.
        assert!(is_ok(&end(&unsafe { blocks.store(request) }.unwrap()).items));
        let notes = store.report().unwrap().notes;
        let is_told = notes.iter().any(|note| note.starts_with("cuda:0 is on NUMA node 0, but"));
        assert_eq!(is_told, node == Some(1), "{notes:?}");
        store.close(LONG).unwrap();
    }
    turn.assert_nothing_left("stores on nodes");
}
