//! What a checkpoint holds.
#![allow(unsafe_code)]

use crate::{
    handle::{self, held},
    status::{Failure, call, hoistway_status},
    system, text,
    versioned::{self, Versioned},
};
use hoistway::{ByteRange, Catalog, Checkpoint, catalog::OpenOptions, read::ReadFile};
use std::{
    ffi::{CString, c_char},
    path::Path,
    slice,
};

/// An open checkpoint: its files and tensors. The files stay open until the catalog is freed.
pub struct hoistway_catalog {
    checkpoint: Checkpoint,
    /// Names, types and paths for C, by the number of tensor or file.
    names: Vec<CString>,
    dtypes: Vec<CString>,
    paths: Vec<CString>,
}

/// How to open a checkpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_catalog_options {
    /// `sizeof(hoistway_catalog_options)`.
    pub size: u64,
    /// Where the GGUF begins, in bytes, if it is embedded in another file; else 0.
    pub offset: u64,
    /// 1 accepts files that violate the specification of their format in harmless ways; 0 refuses them.
    pub lenient: i32,
    /// Must be 0.
    pub reserved: i32,
    /// `store_count` options of object stores, for paths that are URLs; NULL if there are none. What they do not say comes
    /// from the environment.
    pub store: *const hoistway_store_option,
    /// Number of options in `store`.
    pub store_count: u64,
}

/// An option of object stores, such as "endpoint" or "secret_access_key". docs/objects.md lists them. This structure never
/// grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_store_option {
    /// Name of the option.
    pub name: *const c_char,
    /// Its value. It is copied, and no message shows it.
    pub value: *const c_char,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_catalog_options {
    const NAME: &str = "hoistway_catalog_options";
    const FIRST_SIZE: usize = 24;
}

/// One tensor. Its pointers are valid as long as the catalog.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hoistway_tensor {
    /// Set by the caller to `sizeof(hoistway_tensor)`. The call sets it to the bytes that it filled in.
    pub size: u64,
    /// Name of the tensor, unique in the catalog.
    pub name: *const c_char,
    /// Element type, such as "BF16" or "Q4_K".
    pub dtype: *const c_char,
    /// Number of the element type in ggml; -1 if the file is no GGUF.
    pub ggml_type: i32,
    /// Length of `shape`.
    pub dimensions: u32,
    /// Elements along each dimension, slowest first. GGUF has the reverse order.
    pub shape: *const u64,
    /// Path of the file that holds the tensor.
    pub path: *const c_char,
    /// Number of that file in the catalog.
    pub file: u64,
    /// Where the tensor begins in the file, in bytes.
    pub offset: u64,
    /// Length of the tensor in bytes.
    pub bytes: u64,
}

// SAFETY: numbers and pointers, of which the first is the size.
unsafe impl Versioned for hoistway_tensor {
    const NAME: &str = "hoistway_tensor";
    const FIRST_SIZE: usize = 72;
}

/// Opens a checkpoint, and reads its headers. Each of the `count` paths is a safetensors or GGUF file, a
/// `*.safetensors.index.json`, a directory, a glob pattern, or a URL of an object store or a web server. For a split GGUF,
/// give any of its files. `options` may be NULL. Free `catalog` with `hoistway_catalog_free`.
///
/// # Safety
/// `paths` must be `count` strings, `options` NULL or readable for its size, its `store` as many options of two strings as
/// it says, `catalog` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_catalog_open(
    paths: *const *const c_char,
    count: u64,
    options: *const hoistway_catalog_options,
    catalog: *mut *mut hoistway_catalog,
) -> hoistway_status {
    let open = || {
        // SAFETY: strings, as the caller says.
        let paths = unsafe { borrow_paths(paths, count)? };
        // SAFETY: as the caller says.
        let options = unsafe { open_options(options)? };
        Ok(hoistway_catalog::new(Checkpoint::open_with(&paths, &options)?))
    };
    // SAFETY: writable, as the caller says.
    unsafe { handle::make(catalog, open) }
}

/// Frees a catalog. NULL is allowed.
///
/// # Safety
/// `catalog` must be NULL or come from [`hoistway_catalog_open`], and neither be in use nor have been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_catalog_free(catalog: *mut hoistway_catalog) {
    // SAFETY: as the caller says.
    unsafe { handle::free(catalog) }
}

/// Returns the number of tensors; 0 if `catalog` is NULL.
///
/// # Safety
/// `catalog` must be NULL or a live catalog.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_catalog_tensor_count(catalog: *const hoistway_catalog) -> u64 {
    // SAFETY: live, as the caller says.
    unsafe { catalog.as_ref() }.map_or(0, |catalog| catalog.catalog().tensors().len() as u64)
}

/// Describes the tensor at position `index`, counted from 0. Tensors are ordered by file, and within a file by offset.
/// `HOISTWAY_NOT_FOUND` if `index` is past the last tensor.
///
/// # Safety
/// `catalog` must be a live catalog, `tensor` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_catalog_tensor(
    catalog: *const hoistway_catalog,
    index: u64,
    tensor: *mut hoistway_tensor,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let catalog = unsafe { held(catalog, "catalog")? };
        // SAFETY: writable, as the caller says.
        unsafe { catalog.tell(usize::try_from(index).unwrap_or(usize::MAX), tensor) }
    })
}

/// Describes the tensor called `name`. `HOISTWAY_NOT_FOUND` if there is none.
///
/// # Safety
/// `catalog` must be a live catalog, `name` a string, `tensor` writable for its `size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hoistway_catalog_find(
    catalog: *const hoistway_catalog,
    name: *const c_char,
    tensor: *mut hoistway_tensor,
) -> hoistway_status {
    call(|| {
        // SAFETY: live, as the caller says.
        let catalog = unsafe { held(catalog, "catalog")? };
        // SAFETY: a string, as the caller says.
        let name = unsafe { text::required(name, "name")? };
        let id = catalog.catalog().find(name).ok_or_else(|| catalog.catalog().no_such_tensor(name))?;
        // SAFETY: writable, as the caller says.
        unsafe { catalog.tell(id.index(), tensor) }
    })
}

impl hoistway_catalog {
    fn new(checkpoint: Checkpoint) -> Self {
        let catalog = checkpoint.catalog();
        let names = catalog.tensors().iter().map(|tensor| text::without_nul(&tensor.name)).collect();
        let dtypes =
            catalog.tensors().iter().map(|tensor| text::without_nul(&tensor.dtype.to_string())).collect();
        let path = |path: &Path| CString::new(system::bytes_of(path)).unwrap_or_default();
        let paths = catalog.files().iter().map(|file| path(file.source.as_path())).collect();
        Self { checkpoint, names, dtypes, paths }
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn catalog(&self) -> &Catalog {
        self.checkpoint.catalog()
    }

    /// One of its files, as it was when its header was read, if the tensors that have bytes in `range` can be read.
    pub(crate) fn file(&self, number: u64, range: ByteRange) -> Result<Option<ReadFile>, Failure> {
        let Some(id) = usize::try_from(number).ok().and_then(|number| self.catalog().file_ids().nth(number))
        else {
            return Ok(None);
        };
        self.catalog().check_readable_range(id, range).map_err(hoistway::Error::from)?;
        Ok(self.checkpoint.read_file(id))
    }

    /// Describes a tensor to the caller.
    ///
    /// # Safety
    /// `place` must be NULL or writable as far as its `size` says.
    unsafe fn tell(&self, index: usize, place: *mut hoistway_tensor) -> Result<(), Failure> {
        if place.is_null() {
            return Err(Failure::argument("the output pointer for the tensor is NULL"));
        }
        let entry = self.catalog().tensors().get(index).ok_or_else(|| {
            let count = self.catalog().tensors().len();
            Failure::not_found(format!("there is no tensor {index}: the catalog has {count}"))
        })?;
        let is_gguf = self.catalog().file(entry.file).gguf().is_some();
        let ggml_type = entry.dtype.ggml_id().filter(|_| is_gguf).and_then(|id| i32::try_from(id).ok());
        let described = hoistway_tensor {
            size: 0,
            name: self.names[index].as_ptr(),
            dtype: self.dtypes[index].as_ptr(),
            ggml_type: ggml_type.unwrap_or(-1),
            dimensions: u32::try_from(entry.shape.len()).unwrap_or(u32::MAX),
            shape: entry.shape.as_ptr(),
            path: self.paths[entry.file.index()].as_ptr(),
            file: entry.file.index() as u64,
            offset: entry.bytes.start(),
            bytes: entry.bytes.len(),
        };
        // SAFETY: writable, as the caller says.
        unsafe { versioned::write(place, described, |tensor, size| tensor.size = size) }
    }
}

/// # Safety
/// `options` must be NULL or as its size says.
unsafe fn open_options(options: *const hoistway_catalog_options) -> Result<OpenOptions, Failure> {
    if options.is_null() {
        return Ok(OpenOptions::default());
    }
    // SAFETY: readable, as the caller says.
    let hoistway_catalog_options { offset, lenient, reserved, store, store_count, .. } =
        unsafe { versioned::read(options)? };
    if reserved != 0 {
        return Err(Failure::argument("hoistway_catalog_options.reserved is not 0"));
    }
    let options = OpenOptions::default().lenient(lenient != 0).offset(offset);
    // SAFETY: as the caller says.
    unsafe { with_store(options, store, store_count) }
}

/// Adds the options of object stores.
///
/// # Safety
/// `store` must be `count` options, whose strings live, or `count` be 0.
unsafe fn with_store(
    options: OpenOptions,
    store: *const hoistway_store_option,
    count: u64,
) -> Result<OpenOptions, Failure> {
    if count == 0 {
        return Ok(options);
    }
    // SAFETY: as many, as the caller says.
    let store = unsafe { handle::list(store, count, "store options") }?;
    // The count may be wrong: a name that is no string ends this early.
    let mut named = Vec::with_capacity(store.len().min(64));
    for option in store {
        // SAFETY: strings, as the caller says.
        named.push(unsafe {
            (text::required(option.name, "store.name")?, text::required(option.value, "store.value")?)
        });
    }
    stored(options, &named)
}

#[cfg(feature = "objects")]
fn stored(options: OpenOptions, named: &[(&str, &str)]) -> Result<OpenOptions, Failure> {
    let mut store = hoistway::objects::StoreOptions::default();
    for (name, value) in named {
        // Its message has no value, which may be secret.
        store.set(name, value).map_err(|error| Failure::argument(error.to_string()))?;
    }
    Ok(options.store(store))
}

#[cfg(not(feature = "objects"))]
fn stored(_: OpenOptions, _: &[(&str, &str)]) -> Result<OpenOptions, Failure> {
    Err(Failure::argument("this library was built without the feature objects: it reads no object stores"))
}

/// # Safety
/// `paths` must be `count` strings that outlive the result.
unsafe fn borrow_paths<'a>(paths: *const *const c_char, count: u64) -> Result<Vec<&'a Path>, Failure> {
    if paths.is_null() || count == 0 {
        return Err(Failure::argument("the list of paths is NULL or empty"));
    }
    let count = usize::try_from(count).map_err(|_| Failure::argument("the list of paths is too long"))?;
    // SAFETY: as many, as the caller says.
    let paths = unsafe { slice::from_raw_parts(paths, count) };
    // SAFETY: strings, as the caller says.
    let paths = paths.iter().map(|path| unsafe { text::borrow_path(*path) });
    paths.map(|path| path?.ok_or_else(|| Failure::argument("one of the paths is NULL"))).collect()
}
