//! Devices of D3D12, which the runtime writes to, and what they share with another interface of the same device.
#![allow(unsafe_code)]

use crate::{
    Failure,
    abi::{Handle, Object},
    graphics_abi::{
        ADAPTER_SOFTWARE, AdapterDescription, CreateDevice, CreateFactory, DXGI_ERROR_NOT_FOUND, DeviceTable,
        DxgiAdapterTable, DxgiFactoryTable, FEATURE_LEVEL_11_0, FENCE_OF_REMOVED_DEVICE, FENCE_SHARED,
        FenceTable, GENERIC_ALL, HEAP_BUFFERS_ALONE, HEAP_DEFAULT, HEAP_SHARED, HeapDescription,
        HeapProperties, HeapTable, PLACEMENT_BYTES, RESIDENCY_MAXIMUM, ResourceDescription, ResourceTable,
        STATE_COMMON,
    },
    interface::Reference,
    libraries::Module,
};
use hoistway_device::Unavailable;
use std::{
    ffi::{CStr, c_void},
    fmt, mem,
    os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle},
    path::PathBuf,
    ptr,
    sync::{Arc, LazyLock},
};

/// Bytes of one buffer, at most: offsets in longer ones wrap in some drivers.
const MOST_BUFFER_BYTES: u64 = 2 << 30;
/// What failures name.
const D3D12: &str = "D3D12";

/// An adapter, as DXGI lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// The identifier that other interfaces know it by, too.
    pub luid: [u8; 8],
    /// Bytes of its own memory.
    pub memory_bytes: u64,
    /// Whether the processor plays it.
    pub is_software: bool,
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (LUID {})", self.name, luid_text(&self.luid))
    }
}

/// An identifier as it is written: its high half, then its low one.
pub fn luid_text(luid: &[u8; 8]) -> String {
    let [a, b, c, d, e, f, g, h] = *luid;
    format!("{:08x}:{:08x}", u32::from_le_bytes([e, f, g, h]), u32::from_le_bytes([a, b, c, d]))
}

/// Lists the adapters of this machine. Makes no device.
///
/// # Errors
/// Why there are none.
pub fn adapters() -> Result<Vec<Adapter>, Unavailable> {
    Ok(each_adapter()?.into_iter().map(|(adapter, _)| adapter).collect())
}

/// The functions of `dxgi.dll` and `d3d12.dll`, which stay loaded.
struct Functions {
    create_factory: CreateFactory,
    create_device: CreateDevice,
}

impl Functions {
    fn get() -> Result<&'static Self, Unavailable> {
        static FUNCTIONS: LazyLock<Result<Functions, Unavailable>> = LazyLock::new(|| {
            let find = |library: &'static str, name: &CStr| -> Result<*const c_void, Unavailable> {
                let refused = |why: String| Unavailable::new(why, "update Windows");
                let module = Module::of_system(&library_of(library))
                    .map_err(|error| refused(format!("{library} cannot be loaded: {error}")))?;
                let function = module.function(name).ok_or_else(|| {
                    refused(format!("{library} has no function {}", name.to_string_lossy()))
                })?;
                mem::forget(module);
                Ok(function)
            };
            // SAFETY: the headers declare the functions of these names so.
            Ok(unsafe {
                Functions {
                    create_factory: mem::transmute::<*const c_void, CreateFactory>(find(
                        "dxgi.dll",
                        c"CreateDXGIFactory1",
                    )?),
                    create_device: mem::transmute::<*const c_void, CreateDevice>(find(
                        "d3d12.dll",
                        c"D3D12CreateDevice",
                    )?),
                }
            })
        });
        FUNCTIONS.as_ref().map_err(Clone::clone)
    }
}

/// The name of a library of Windows, or for tests that of what plays it.
fn library_of(name: &'static str) -> PathBuf {
    #[cfg(feature = "stand-in")]
    if let Some(stand_in) = std::env::var_os("HOISTWAY_D3D12") {
        return stand_in.into();
    }
    name.into()
}

fn each_adapter() -> Result<Vec<(Adapter, Reference<DxgiAdapterTable>)>, Unavailable> {
    let functions = Functions::get()?;
    // SAFETY: the function gives an object with the table that it is asked for.
    let factory: Reference<DxgiFactoryTable> = unsafe {
        Reference::of("CreateDXGIFactory1", |id, object| (functions.create_factory)(id, object))
            .map_err(of_graphics)?
    };
    let mut found = Vec::new();
    for number in 0.. {
        let mut has_ended = false;
        let ask = |_, object| {
            // SAFETY: writes one object, which has this table.
            let code = unsafe { (factory.table().adapter)(factory.object(), number, object) };
            has_ended = code == DXGI_ERROR_NOT_FOUND;
            code
        };
        // SAFETY: as above.
        let adapter: Result<Reference<DxgiAdapterTable>, _> = unsafe { Reference::of("EnumAdapters1", ask) };
        let adapter = match adapter {
            Err(_) if has_ended => break,
            adapter => adapter.map_err(of_graphics)?,
        };
        let mut description = AdapterDescription::default();
        // SAFETY: the structure is that of the header.
        let code = unsafe { (adapter.table().description)(adapter.object(), &raw mut description) };
        Failure::check("GetDesc1", code).map_err(of_graphics)?;
        let len = description.name.iter().position(|&unit| unit == 0).unwrap_or(description.name.len());
        let known = Adapter {
            name: String::from_utf16_lossy(&description.name[..len]),
            luid: description.luid,
            memory_bytes: description.memory[0] as u64,
            is_software: description.flags & ADAPTER_SOFTWARE != 0,
        };
        found.push((known, adapter));
    }
    Ok(found)
}

fn of_graphics(failure: Failure) -> Unavailable {
    failure.of(D3D12).into()
}

/// A device of D3D12 on an adapter that another interface knows, too.
#[derive(Debug)]
pub struct GraphicsDevice {
    device: Reference<DeviceTable>,
    adapter: Adapter,
}

impl GraphicsDevice {
    /// Opens the adapter that has an identifier, whatever its place in the list. `of` says whose identifier it is.
    ///
    /// # Errors
    /// That no adapter has it, with those that there are; or that it has no device.
    pub fn open(luid: [u8; 8], of: &str) -> Result<Arc<Self>, Unavailable> {
        let functions = Functions::get()?;
        let adapters = each_adapter()?;
        let Some((adapter, object)) = adapters.iter().find(|(adapter, _)| adapter.luid == luid) else {
            let listed: Vec<_> = adapters.iter().map(|(adapter, _)| adapter.to_string()).collect();
            let listed = if listed.is_empty() { "none".to_owned() } else { listed.join(", ") };
            return Err(Unavailable::new(
                format!("no adapter of D3D12 is {of} (LUID {}); there are: {listed}", luid_text(&luid)),
                "check that the display driver is in its mode for graphics (WDDM)",
            ));
        };
        let create = |id, device| {
            // SAFETY: the adapter lives during the call.
            unsafe { (functions.create_device)(object.object(), FEATURE_LEVEL_11_0, id, device) }
        };
        // SAFETY: the function gives an object with the table that it is asked for.
        let device = unsafe { Reference::of("D3D12CreateDevice", create).map_err(of_graphics)? };
        Ok(Arc::new(Self { device, adapter: adapter.clone() }))
    }

    /// Returns what it is a device of.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// Makes a buffer that is shared, of `len` bytes or somewhat more.
    ///
    /// # Errors
    /// Why there is none.
    pub fn buffer(self: &Arc<Self>, sharing: Sharing, len: u64) -> Result<SharedBuffer, Unavailable> {
        let len = len.max(1).checked_next_multiple_of(PLACEMENT_BYTES);
        let Some(len) = len.filter(|&len| len <= MOST_BUFFER_BYTES) else {
            let reason = format!("a buffer of D3D12 has {MOST_BUFFER_BYTES} bytes at most here");
            return Err(Unavailable::new(reason, "choose shorter chunks"));
        };
        self.make_buffer(sharing, len).map_err(of_graphics)
    }

    fn make_buffer(self: &Arc<Self>, sharing: Sharing, len: u64) -> Result<SharedBuffer, Failure> {
        let (table, device) = (self.device.table(), self.device.object());
        let description = ResourceDescription::buffer(len);
        let properties = HeapProperties { kind: HEAP_DEFAULT, ..HeapProperties::default() };
        let (resource, heap): (Reference<ResourceTable>, _) = match sharing {
            Sharing::Heap => {
                let flags = HEAP_SHARED | HEAP_BUFFERS_ALONE;
                let wanted = HeapDescription { bytes: len, properties, alignment: 0, flags };
                // SAFETY: the structure is that of the header; an object with the table that it is asked for.
                let heap: Reference<HeapTable> = unsafe {
                    Reference::of("CreateHeap", |id, object| {
                        (table.create_heap)(device, &raw const wanted, id, object)
                    })?
                };
                // SAFETY: as above; the buffer covers the heap.
                let resource = unsafe {
                    Reference::of("CreatePlacedResource", |id, object| {
                        let (heap, none) = (heap.object(), ptr::null());
                        let description = &raw const description;
                        (table.create_placed_resource)(
                            device,
                            heap,
                            0,
                            description,
                            STATE_COMMON,
                            none,
                            id,
                            object,
                        )
                    })?
                };
                (resource, Some(heap))
            }
            Sharing::Resource => {
                // SAFETY: the structures are those of the header; an object with the table that it is asked for.
                let resource = unsafe {
                    Reference::of("CreateCommittedResource", |id, object| {
                        (table.create_committed_resource)(
                            device,
                            &raw const properties,
                            HEAP_SHARED,
                            &raw const description,
                            STATE_COMMON,
                            ptr::null(),
                            id,
                            object,
                        )
                    })?
                };
                (resource, None)
            }
        };
        let shared = heap.as_ref().map_or(resource.object(), Reference::object);
        let priority = RESIDENCY_MAXIMUM;
        // If D3D12 moved the buffer out of device memory, the runtime's writes would not reach the memory that CUDA imported.
        // SAFETY: one object, and one number.
        let kept =
            unsafe { (table.set_residency_priority)(device, 1, &raw const shared, &raw const priority) };
        Failure::check("SetResidencyPriority", kept)?;
        let handle = self.share(shared)?;
        Ok(SharedBuffer { resource, _heap: heap, handle, sharing, len, _device: self.clone() })
    }

    /// Makes a fence that is shared.
    ///
    /// # Errors
    /// What the device answers.
    pub fn fence(self: &Arc<Self>) -> Result<SharedFence, Failure> {
        let (table, device) = (self.device.table(), self.device.object());
        let create = |id, object| {
            // SAFETY: passed on.
            unsafe { (table.create_fence)(device, 0, FENCE_SHARED, id, object) }
        };
        // SAFETY: the function gives an object with the table that it is asked for.
        let fence: Reference<FenceTable> =
            unsafe { Reference::of("CreateFence", create).map_err(|failure| failure.of(D3D12))? };
        let handle = self.share(fence.object()).map_err(|failure| failure.of(D3D12))?;
        Ok(SharedFence { fence, handle, device: self.clone() })
    }

    /// A handle of an object, without a name.
    fn share(&self, object: Object) -> Result<OwnedHandle, Failure> {
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: the object is one of this device's; no attributes and no name.
        let code = unsafe {
            (self.device.table().create_shared_handle)(
                self.device.object(),
                object,
                ptr::null(),
                GENERIC_ALL,
                ptr::null(),
                &raw mut handle,
            )
        };
        Failure::check("CreateSharedHandle", code)?;
        // SAFETY: a new handle, which has no other owner.
        Ok(unsafe { OwnedHandle::from_raw_handle(handle) })
    }

    /// The failure that it was removed.
    pub(crate) fn removal(&self) -> Failure {
        // SAFETY: the object lives.
        let code = unsafe { (self.device.table().removed_reason)(self.device.object()) };
        let code = if code < 0 { code } else { crate::abi::DXGI_ERROR_DEVICE_REMOVED };
        Failure::new("read", code)
    }

    pub(crate) fn object(&self) -> Object {
        self.device.object()
    }
}

/// What of a buffer another interface gets a handle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// The heap that it covers.
    Heap,
    /// Itself.
    Resource,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Heap => "placed on a shared heap",
            Self::Resource => "committed and shared",
        })
    }
}

/// A buffer in the memory of a device.
#[derive(Debug)]
pub struct SharedBuffer {
    resource: Reference<ResourceTable>,
    _heap: Option<Reference<HeapTable>>,
    handle: OwnedHandle,
    sharing: Sharing,
    len: u64,
    _device: Arc<GraphicsDevice>,
}

impl SharedBuffer {
    /// Returns the handle of what [`sharing`](Self::sharing) says. It lives as long as this.
    pub fn handle(&self) -> *mut c_void {
        self.handle.as_raw_handle()
    }

    /// Returns what the handle is of.
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Returns its length in bytes, which is that of what is shared.
    #[expect(clippy::len_without_is_empty, reason = "it has bytes")]
    pub fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn object(&self) -> Object {
        self.resource.object()
    }
}

/// A number that grows as the device's work gets on.
#[derive(Debug)]
pub struct SharedFence {
    fence: Reference<FenceTable>,
    handle: OwnedHandle,
    device: Arc<GraphicsDevice>,
}

impl SharedFence {
    /// Returns its handle, which lives as long as this.
    pub fn handle(&self) -> *mut c_void {
        self.handle.as_raw_handle()
    }

    /// Whether it has reached a value.
    ///
    /// # Errors
    /// That its device was removed.
    pub(crate) fn has_reached(&self, value: u64) -> Result<bool, Failure> {
        // SAFETY: the object lives.
        match unsafe { (self.fence.table().completed)(self.fence.object()) } {
            FENCE_OF_REMOVED_DEVICE => Err(self.device.removal()),
            reached => Ok(reached >= value),
        }
    }

    /// Has an event set once it has reached a value.
    ///
    /// # Errors
    /// What the device answers.
    ///
    /// # Safety
    /// The event stays open until then.
    pub(crate) unsafe fn set_event(&self, value: u64, event: Handle) -> Result<(), Failure> {
        // SAFETY: passed on.
        let code = unsafe { (self.fence.table().set_event)(self.fence.object(), value, event) };
        Failure::check("SetEventOnCompletion", code).map_err(|failure| failure.of(D3D12))
    }

    pub(crate) fn object(&self) -> Object {
        self.fence.object()
    }
}
