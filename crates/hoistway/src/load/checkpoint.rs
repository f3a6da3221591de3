//! An open checkpoint: its catalog, and its files ready to be read.
#![forbid(unsafe_code)]

use super::{LoadOptions, Loaded, Loading, OpenArray, StreamOptions, Tensor, mapped, start::Start};
use crate::{
    Cancel, Catalog, Error, Result, Route,
    catalog::{FileId, OpenOptions, TensorId, gguf::ArrayValues},
    metrics, parallel,
    read::ReadFile,
    source::{Bytes, Source, SourceName, registry},
    verify::{self, Manifest},
};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::debug_span;

/// Files that are probed at the same time.
const PARALLEL_PROBES: usize = 16;

/// A checkpoint with its files open. Loads from it read the very files whose headers were checked, also if others
/// take their names.
///
/// ```no_run
/// use hoistway::{Checkpoint, LoadOptions, plan::Selection};
/// let checkpoint = Checkpoint::open(&["models/llama"])?;
/// let options = LoadOptions::default().selection(Selection::all().select("*.weight"));
/// let loaded = checkpoint.load(&options)?;
/// print!("{}", loaded.report());
/// # Ok::<(), hoistway::Error>(())
/// ```
///
/// A child of `fork` may use the checkpoints and tensors of its parent, and start loads and readers of its own. Loads,
/// readers and batches that its parent started return [`Error::Forked`](crate::Error::Forked) there: their threads and
/// their staging memory are the parent's alone. Devices do not work in such a child if the parent has used them.
///
/// In a program whose `main` is written in Rust, fork only while no thread begins or ends, if the child is to load. Loads have
/// threads too. Rust's handler of stack overflows has a lock, and the child's threads could wait for it for ever.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    catalog: Arc<Catalog>,
    sources: Arc<[Arc<dyn Source>]>,
    /// What files beside its own are opened with. `None` if it was named by a URL that names one file and no folder, and may be
    /// signed for that file alone.
    beside: Option<OpenOptions>,
    /// How long opening took, in nanoseconds, until a report has said so. No lock, which a child of `fork` could wait for.
    open_time: Arc<AtomicU64>,
}

impl Checkpoint {
    /// Opens the checkpoint behind `paths`; see [`Catalog::open`] for what they may be.
    ///
    /// # Errors
    /// Those of [`Catalog::open`].
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Self::open_with(paths, &OpenOptions::default())
    }

    /// Like [`Checkpoint::open`], with options.
    ///
    /// # Errors
    /// Those of [`Catalog::open`].
    pub fn open_with<P: AsRef<Path>>(paths: &[P], options: &OpenOptions) -> Result<Self> {
        let started = Instant::now();
        let named = paths.iter().map(|path| SourceName::from(path.as_ref()).shown());
        let _opening = debug_span!("open", paths = named.collect::<Vec<_>>().join(" ")).entered();
        let (catalog, sources) = Catalog::open_sources(paths, options)?;
        let has_folder = !paths.iter().any(|path| SourceName::from(path.as_ref()).has_query());
        Ok(Self::new(catalog, sources, has_folder.then(|| options.clone()), started))
    }

    /// A checkpoint whose sources are open.
    fn new(
        catalog: Catalog,
        sources: Vec<Arc<dyn Source>>,
        beside: Option<OpenOptions>,
        started: Instant,
    ) -> Self {
        // What each file can do is found out ahead of loads, side by side.
        parallel::map(&sources, PARALLEL_PROBES, |source| _ = source.as_local());
        let open_time = Arc::new(AtomicU64::new(started.elapsed().as_nanos() as u64));
        Self { catalog: Arc::new(catalog), sources: sources.into(), beside, open_time }
    }

    /// What it holds.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(super) fn take_open_time(&self) -> Duration {
        Duration::from_nanos(self.open_time.swap(0, Ordering::Relaxed))
    }

    /// A file of the catalog, for reads by a [`Reader`](crate::read::Reader) rather than by a load. `None` if the file
    /// is not one of this catalog's.
    pub fn read_file(&self, file: FileId) -> Option<ReadFile> {
        self.sources.get(file.index()).cloned().map(ReadFile::from_source)
    }

    /// What tells the version of an object that was opened from others of the same URL: a commit, a generation, an ETag or the
    /// date of the last change, and nothing if there is none of these. `None` for a file of this machine.
    pub fn version(&self, file: FileId) -> Option<&str> {
        self.sources().get(file.index())?.version()
    }

    /// Reads a small file that lies in the folder of the first file, such as `config.json`, with the options that the
    /// checkpoint was opened with. `None` if it is not there, or a URL with a query names the checkpoint: such a URL may be
    /// signed, and names one file.
    ///
    /// # Errors
    /// Those of [`ReadFile::open`]; [`Error::InvalidFile`] if it has more than `most_bytes`; [`Error::Cancelled`].
    pub fn read_beside(&self, file: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        match (self.catalog.files().first(), &self.beside) {
            (Some(first), Some(options)) => registry::read_beside(&first.source, file, most_bytes, options),
            _ => Ok(None),
        }
    }

    /// Like [`Checkpoint::read_beside`], until `cancel` ends it, rather than the token that the checkpoint was opened with.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_beside`].
    pub fn read_beside_until(&self, cancel: &Cancel, file: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let beside = self.beside.clone().map(|options| options.cancel(cancel.clone()));
        Self { beside, ..self.clone() }.read_beside(file, most_bytes)
    }

    /// Fails if the file of a tensor was truncated, rewritten or replaced since it was opened, as a load of the tensor would.
    ///
    /// # Errors
    /// [`Error::Truncated`]; [`Error::Changed`]; [`Error::Io`]; [`Error::InvalidOption`] if there is no such tensor.
    pub fn check_unchanged(&self, tensor: TensorId) -> Result<()> {
        let Some(entry) = self.catalog.tensors().get(tensor.index()) else {
            let reason = format!("the checkpoint has {} tensors", self.catalog.tensors().len());
            return Err(Error::invalid_option("tensor", tensor.index(), reason));
        };
        self.source(entry.file).check_unchanged(entry.bytes, |_| Some(entry.name.to_string()))
    }

    pub(crate) fn sources(&self) -> &[Arc<dyn Source>] {
        &self.sources
    }

    pub(crate) fn source(&self, file: FileId) -> &dyn Source {
        &*self.sources[file.index()]
    }

    /// An array among the keys and values of a GGUF file, to be read; `None` if `key` is no array there.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if there is no such file in this checkpoint.
    pub fn array(&self, file: FileId, key: &str) -> Result<Option<OpenArray>> {
        let (Some(source), Some(entry)) =
            (self.sources.get(file.index()), self.catalog.files().get(file.index()))
        else {
            let reason = format!("the checkpoint has {} files, counted from 0", self.sources.len());
            return Err(Error::invalid_option("file", file.index(), reason));
        };
        let array = entry.gguf().and_then(|header| header.metadata.get(key)?.as_array());
        Ok(array.map(|array| OpenArray::new(source.clone(), array.clone())))
    }

    /// Reads an array among the keys and values of a GGUF file, or `None` if `key` is no array there.
    ///
    /// ```no_run
    /// use hoistway::{Checkpoint, catalog::gguf::ArrayValues};
    /// let checkpoint = Checkpoint::open(&["model.gguf"])?;
    /// if let Some(first) = checkpoint.catalog().file_ids().next()
    ///     && let Some(ArrayValues::String(tokens)) = checkpoint.metadata_array(first, "tokenizer.ggml.tokens")?
    /// {
    ///     println!("{} tokens", tokens.len());
    /// }
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Checkpoint::array`] and [`OpenArray::read`].
    pub fn metadata_array(&self, file: FileId, key: &str) -> Result<Option<ArrayValues>> {
        self.array(file, key)?.map(|array| array.read()).transpose()
    }

    /// Compares what `loaded` holds with `manifest` or, without one, with a second, plain reading of the files, and
    /// adds the outcome to its report. Objects that were loaded whole, and that the load has not compared with what their
    /// stores say of them, are compared now: with a checksum (CRC) or a digest (SHA-256, SHA-512, MD5).
    ///
    /// # Errors
    /// [`Error::DigestMismatch`](crate::Error::DigestMismatch) names the first tensor that differs;
    /// [`Error::ChecksumMismatch`](crate::Error::ChecksumMismatch) names an object that differs from what its store says;
    /// [`Error::InvalidManifest`](crate::Error::InvalidManifest) if the manifest lacks a tensor;
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) if a tensor was loaded in part.
    pub fn verify(&self, loaded: &mut Loaded, manifest: Option<(&Path, &Manifest)>) -> Result<()> {
        self.verify_until(&Cancel::default(), loaded, manifest)
    }

    /// Like [`Checkpoint::verify`], until `cancel` ends it: also reads that wait for a server.
    ///
    /// # Errors
    /// Those of [`Checkpoint::verify`], and [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn verify_until(
        &self,
        cancel: &Cancel,
        loaded: &mut Loaded,
        manifest: Option<(&Path, &Manifest)>,
    ) -> Result<()> {
        let report = verify::check(self, loaded, manifest, cancel)?;
        #[cfg(feature = "objects")]
        if loaded.report().checksums.as_ref().is_some_and(|checksums| !checksums.uncompared.is_empty()) {
            loaded.report_mut().checksums = Some(verify::check_stores(self, loaded, cancel)?);
        }
        loaded.report_mut().verify = Some(report);
        Ok(())
    }

    /// Starts to load, on threads of its own.
    ///
    /// Route `mapped` has nothing to do in the background: use [`Checkpoint::load`].
    ///
    /// # Errors
    /// Any [`Error`](crate::Error) that can be known before the first byte moves.
    pub fn start(&self, options: &LoadOptions) -> Result<Loading> {
        self.begin(options, &StreamOptions::default(), false)
    }

    /// Like [`Checkpoint::start`], for callers that take tensors one by one: in the order of the checkpoint, under a bound
    /// of memory, or as they become complete. From a server far away, the first of them is asked for before the others.
    ///
    /// ```no_run
    /// use hoistway::{Checkpoint, LoadOptions, Order, StreamOptions};
    /// let checkpoint = Checkpoint::open(&["models/llama"])?;
    /// let stream = StreamOptions::default().order(Order::File).max_in_flight_bytes(1 << 30);
    /// for tensor in checkpoint.stream(&LoadOptions::default(), &stream)? {
    ///     let tensor = tensor?;
    ///     println!("{}", tensor.name());
    /// }
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Checkpoint::start`].
    pub fn stream(&self, options: &LoadOptions, stream: &StreamOptions) -> Result<Loading> {
        self.begin(options, stream, true)
    }

    fn begin(&self, options: &LoadOptions, stream: &StreamOptions, is_loop: bool) -> Result<Loading> {
        let (catalog, sources, open_time) = (&self.catalog, &*self.sources, self.take_open_time());
        let (device, route) = (options.device, options.route.name());
        let span = debug_span!("load", files = sources.len(), %device, route);
        Loading::start(&Start { catalog, sources, options, stream, is_loop, open_time, span: &span })
            .inspect_err(metrics::count_unbegun)
    }

    /// Loads, and waits for all of it.
    ///
    /// # Errors
    /// Any [`Error`](crate::Error); then nothing is delivered, and all memory, threads and descriptors of this load
    /// are gone.
    pub fn load(&self, options: &LoadOptions) -> Result<Loaded> {
        if options.route.is_mapping() {
            return mapped::map(&self.catalog, &self.sources, options, self.take_open_time())
                .inspect_err(metrics::count_unbegun);
        }
        self.start(options)?.wait()
    }
}

/// Opens the checkpoint behind `paths` and loads from it.
///
/// ```no_run
/// let loaded = hoistway::load(&["model.safetensors"], &hoistway::LoadOptions::default())?;
/// println!("{:?}", loaded.get("lm_head.weight").map(|tensor| tensor.shape()));
/// # Ok::<(), hoistway::Error>(())
/// ```
///
/// # Errors
/// Those of [`Checkpoint::open`] and [`Checkpoint::load`].
pub fn load<P: AsRef<Path>>(paths: &[P], options: &LoadOptions) -> Result<Loaded> {
    Checkpoint::open(paths)?.load(options)
}

/// The tensors of a file whose bytes are `data`, in the order of the file: copies, which share one arena.
///
/// ```
/// let header = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend_from_slice(header);
/// file.extend_from_slice(&[1, 2]);
/// let tensors = hoistway::load_bytes(file, &Default::default())?;
/// assert_eq!(tensors[0].bytes()?, [1, 2].as_slice());
/// # Ok::<(), hoistway::Error>(())
/// ```
///
/// # Errors
/// Those that opening the file would have, and those of [`Checkpoint::load`].
pub fn load_bytes(
    data: impl AsRef<[u8]> + Send + Sync + 'static,
    options: &OpenOptions,
) -> Result<Vec<Tensor>> {
    let started = Instant::now();
    let source: Arc<dyn Source> = Arc::new(Bytes::new(data));
    let catalog = Catalog::of_source(&*source, options)?;
    let checkpoint = Checkpoint::new(catalog, vec![source], None, started);
    Ok(checkpoint.load(&LoadOptions::default().route(Route::Threads))?.into_tensors())
}
