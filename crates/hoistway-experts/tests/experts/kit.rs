//! What the suites share: models, a policy, stores, and a look at what leases hold.

use crate::gguf;
use hoistway::{
    Checkpoint, Dtype,
    read::ReaderOptions,
    route::fault::{Fault, FaultScript},
};
use hoistway_device::{CopyStream, Device};
use hoistway_experts::{
    ExpertId, Policy,
    catalog::ExpertCatalog,
    store::{Lease, LeasedUnit, Store, StoreOptions},
};
use std::{
    collections::VecDeque,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Longer than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const SHORT: Duration = Duration::from_millis(100);

/// Evicts what was used least recently.
#[derive(Default)]
pub(crate) struct Lru(VecDeque<ExpertId>);

impl Policy for Lru {
    fn visit(&mut self, layer: u32, experts: &[(u32, f32)]) {
        for (expert, _) in experts {
            let id = ExpertId { layer, expert: *expert };
            if let Some(position) = self.0.iter().position(|other| *other == id) {
                self.0.remove(position);
                self.0.push_back(id);
            }
        }
    }

    fn insert(&mut self, expert: ExpertId) {
        self.0.push_back(expert);
    }

    fn remove(&mut self, expert: ExpertId) {
        self.0.retain(|other| *other != expert);
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(ExpertId) -> bool) -> Option<ExpertId> {
        self.0.iter().copied().find(|other| may_evict(*other))
    }

    fn name(&self) -> &'static str {
        "lru"
    }
}

pub(crate) fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Bytes that depend on a name and their place.
pub(crate) fn bytes_of(name: &str, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Adds a tensor of a type of ggml; `shape` is slowest first.
pub(crate) fn add(writer: &mut gguf::Writer, name: &str, type_id: u32, shape: &[u64]) {
    let dtype = Dtype::from_ggml(type_id).unwrap();
    let bytes = bytes_of(name, dtype.size_of(shape).unwrap());
    let dimensions = shape.iter().rev().copied().collect();
    let (name, offset) = (name.into(), None);
    writer.tensors.push(gguf::Tensor { name, dimensions, type_id, offset, bytes });
}

/// `F16`, whose slices of this shape are no whole blocks.
const SLICE: [u64; 2] = [37, 96];
/// Bytes of a slice.
pub(crate) const SLICE_BYTES: u64 = 37 * 96 * 2;
pub(crate) const LAYERS: u32 = 3;
pub(crate) const EXPERTS: u32 = 8;

/// A GGUF model of 3 layers with 8 experts, of which a token uses 2.
pub(crate) fn gguf_model(directory: &Path) -> PathBuf {
    let mut writer = gguf::Writer::default()
        .key("general.architecture", "test")
        .key("test.expert_used_count", gguf::Item::U32(2));
    add(&mut writer, "token_embd.weight", 0, &[50, 16]);
    for layer in 0..LAYERS {
        for role in ["gate", "up", "down"] {
            let shape = [u64::from(EXPERTS), SLICE[0], SLICE[1]];
            add(&mut writer, &format!("blk.{layer}.ffn_{role}_exps.weight"), 1, &shape);
        }
        add(&mut writer, &format!("blk.{layer}.ffn_gate_exps.bias"), 0, &[EXPERTS.into(), 37]);
        add(&mut writer, &format!("blk.{layer}.attn_q.weight"), 0, &[33, 41]);
    }
    let path = directory.join("model.gguf");
    fs::write(&path, writer.finish()).unwrap();
    path
}

/// Writes a safetensors file; bytes depend on the name.
pub(crate) fn safetensors(path: &Path, tensors: &[(&str, Dtype, &[u64])]) {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape) in tensors {
        let start = data.len();
        data.extend(bytes_of(name, dtype.size_of(shape).unwrap()));
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{}]}}"#,
            data.len()
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    fs::write(path, file).unwrap();
}

/// A model on disk, open.
pub(crate) struct Model {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) catalog: Arc<ExpertCatalog>,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self::with_writer().0
    }

    /// The model, and its file for writing: opened first, as Windows lets no writer in later. Windows may have the times of the
    /// file late until it is closed.
    pub(crate) fn with_writer() -> (Self, fs::File) {
        let directory = disk();
        let path = gguf_model(directory.path());
        let bytes = fs::read(&path).unwrap();
        let writer = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let catalog = Arc::new(ExpertCatalog::of_checkpoint(&checkpoint, None).unwrap());
        (Self { directory, path, bytes, checkpoint, catalog }, writer)
    }

    pub(crate) fn open(&self, options: &StoreOptions) -> hoistway_experts::Result<Store> {
        let files = ExpertCatalog::open_files(&self.checkpoint);
        Store::open(self.catalog.clone(), files, Box::new(Lru::default()), options)
    }

    pub(crate) fn store(&self, options: &StoreOptions) -> Store {
        self.open(options).unwrap()
    }

    /// Fails unless each part of the lease is what the file has at its place.
    pub(crate) fn assert_holds(&self, lease: &Lease) {
        lease.units().for_each(|unit| self.assert_unit(unit));
    }

    pub(crate) fn assert_unit(&self, unit: LeasedUnit<'_>) {
        for part in unit.parts() {
            let range = part.part().bytes;
            let expected = &self.bytes[range.start() as usize..range.end() as usize];
            let found = match part.bytes() {
                Some(bytes) => blake3::hash(bytes),
                None => {
                    let mut bytes = vec![0; expected.len()];
                    let device = Device::open(part.memory()).unwrap();
                    CopyStream::new(&device).unwrap().read_back(part.address(), &mut bytes).unwrap();
                    blake3::hash(&bytes)
                }
            };
            assert_eq!(found, blake3::hash(expected), "{}, {}", unit.unit().label(), part.part().role);
        }
    }
}

/// Options of a store that holds as many experts of [`gguf_model`] in slots.
pub(crate) fn budget_of(experts: u64) -> StoreOptions {
    // Each part touches 3 blocks at most.
    StoreOptions::default().budget_bytes(experts * 3 * 3 * 4096).timeout(LONG)
}

/// The same, read under a script.
pub(crate) fn scripted(
    options: StoreOptions,
    decide: impl Fn(u64, u64) -> Option<Fault> + Send + Sync + 'static,
) -> (StoreOptions, FaultScript) {
    let script = FaultScript::new(decide);
    let reader = ReaderOptions::default().huge_pages(false).faults(script.clone());
    (options.reader(reader), script)
}

/// Waits until a change of the file would move its times: the clock of a file system is coarse.
pub(crate) fn let_file_time_pass(path: &Path) {
    #[cfg(unix)]
    let change_time = |file: &fs::File| {
        use std::os::unix::fs::MetadataExt;
        let stat = file.metadata().unwrap();
        (stat.ctime(), stat.ctime_nsec())
    };
    #[cfg(windows)]
    let change_time = |file: &fs::File| file.metadata().unwrap().modified().unwrap();
    let changed_at = change_time(&fs::File::open(path).unwrap());
    let mut probe = tempfile::tempfile_in(path.parent().unwrap()).unwrap();
    until("the clock of the file system", || {
        probe.write_all(b".").unwrap();
        change_time(&probe) > changed_at
    });
}

/// Waits until something holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} does not come to hold");
        std::thread::sleep(Duration::from_millis(1));
    }
}
