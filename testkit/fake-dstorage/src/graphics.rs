//! What `dxgi.dll` and `d3d12.dll` have of adapters, devices, heaps, buffers and fences, as far as they are shared.
//!
//! A buffer has no bytes of its own: a write overwrites with poison at once, and what is written to it is kept, with the value of the fence that was signalled next by the same
//! thread, until the stand-in of CUDA's driver waits for that value. Who does not wait sees what was there before.
#![allow(unsafe_code)]

use crate::{
    control::{state, violation},
    object::{Kind, kind, make, unknown},
};
use hoistway_directstorage::{
    abi::{DXGI_ERROR_DEVICE_REMOVED, E_FAIL, Guid, HResult, Handle, Object},
    graphics_abi::{
        ADAPTER_SOFTWARE, AdapterDescription, DIMENSION_BUFFER, DXGI_ERROR_NOT_FOUND, DeviceTable,
        DxgiAdapterTable, DxgiFactoryTable, E_INVALIDARG, FENCE_OF_REMOVED_DEVICE, FENCE_SHARED, FenceTable,
        GENERIC_ALL, HEAP_BUFFERS_ALONE, HEAP_DEFAULT, HEAP_SHARED, HeapDescription, HeapProperties,
        HeapTable, IID_DEVICE, IID_DXGI_ADAPTER, IID_DXGI_FACTORY, IID_FENCE, IID_HEAP, IID_RESOURCE,
        PLACEMENT_BYTES, RESIDENCY_MAXIMUM, ResourceDescription, ResourceTable, STATE_COMMON,
    },
};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    mem, ptr, slice,
    sync::{
        Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};
use windows_sys::{
    Win32::{
        Foundation::GetHandleInformation,
        System::{
            LibraryLoader::{GetModuleHandleW, GetProcAddress},
            Threading::{CreateEventW, SetEvent},
        },
    },
    w,
};

/// What the stand-in of CUDA's driver asks about a handle. Kinds: 1 a heap, 2 a resource, 3 a fence.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Shared {
    pub kind: u32,
    pub luid: [u8; 8],
    pub bytes: u64,
    /// Names what the handle is of.
    pub object: u64,
}

const HEAP: u32 = 1;
const RESOURCE: u32 = 2;
const FENCE: u32 = 3;

/// What is known of an object that may be shared.
#[derive(Clone)]
struct Known {
    shared: Shared,
    is_shareable: bool,
    /// The object that has the bytes, and where they begin there.
    memory: (u64, u64),
    fence: Option<Arc<FenceState>>,
}

/// Bytes that were written to a buffer, and by which value of which fence they can be seen.
struct Written {
    memory: u64,
    offset: u64,
    bytes: Vec<u8>,
    by: ThreadId,
    signal: Option<(u64, u64)>,
}

static OBJECTS: LazyLock<Mutex<HashMap<usize, Known>>> = LazyLock::new(Mutex::default);
static HANDLES: LazyLock<Mutex<HashMap<usize, Known>>> = LazyLock::new(Mutex::default);
/// How often each object is imported now.
static IMPORTS: LazyLock<Mutex<HashMap<u64, i64>>> = LazyLock::new(Mutex::default);
static WRITTEN: Mutex<Vec<Written>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A result that a setting asks for, if it does.
fn refusal(setting: &str) -> Result<(), HResult> {
    match state().get(setting) as u32 {
        0 => Ok(()),
        code => Err(code.cast_signed()),
    }
}

/// Adapters, none of them at the place of its CUDA device: one that CUDA does not know, and those of `cuda:1` and `cuda:0`. `dxgi_hidden`
/// hides those whose bits are set.
fn adapters() -> Vec<AdapterDescription> {
    let hidden = state().get("dxgi_hidden");
    let all = [("Software", 0x99, ADAPTER_SOFTWARE), ("Stand-in 1", 2, 0), ("Stand-in 0", 1, 0)];
    let shown = all.iter().enumerate().filter(|(place, _)| hidden >> place & 1 == 0);
    shown
        .map(|(_, &(name, luid, flags))| {
            let mut found =
                AdapterDescription { luid: self::luid(luid), flags, ..AdapterDescription::default() };
            found.memory[0] = 8 << 30;
            found.name.iter_mut().zip(name.encode_utf16()).for_each(|(place, unit)| *place = unit);
            found
        })
        .collect()
}

/// As the stand-in of CUDA's driver has them: those of `cuda:N` begin with N + 1.
fn luid(first: u8) -> [u8; 8] {
    [first, 0, 0, 0, 0x57, 0x48, 0, 0]
}

struct DxgiFactory;

impl Kind for DxgiFactory {
    type Table = DxgiFactoryTable;
    const TABLE: &'static DxgiFactoryTable =
        &DxgiFactoryTable { unknown: unknown::<Self>(), before: [None; 9], adapter };
    const IDS: &'static [Guid] = &[IID_DXGI_FACTORY];
}

struct DxgiAdapter(AdapterDescription);

impl Kind for DxgiAdapter {
    type Table = DxgiAdapterTable;
    const TABLE: &'static DxgiAdapterTable =
        &DxgiAdapterTable { unknown: unknown::<Self>(), before: [None; 7], description };
    const IDS: &'static [Guid] = &[IID_DXGI_ADAPTER];
}

/// # Safety
/// That of the real one.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn CreateDXGIFactory1(id: *const Guid, out: *mut Object) -> HResult {
    // SAFETY: callers give valid pointers.
    unsafe { make(DxgiFactory, id, out) }
}

unsafe extern "system" fn adapter(_: Object, number: u32, out: *mut Object) -> HResult {
    match adapters().get(number as usize) {
        // SAFETY: callers give valid pointers.
        Some(&found) => unsafe { make(DxgiAdapter(found), &IID_DXGI_ADAPTER, out) },
        None => DXGI_ERROR_NOT_FOUND,
    }
}

unsafe extern "system" fn description(object: Object, out: *mut AdapterDescription) -> HResult {
    // SAFETY: callers give a living object and a valid pointer.
    unsafe { out.write(kind::<DxgiAdapter>(object).0) };
    0
}

struct Device {
    luid: [u8; 8],
}

impl Kind for Device {
    type Table = DeviceTable;
    const TABLE: &'static DeviceTable = &DeviceTable {
        unknown: unknown::<Self>(),
        before: [None; 24],
        create_committed_resource,
        create_heap,
        create_placed_resource,
        create_reserved_resource: None,
        create_shared_handle,
        between: [None; 4],
        create_fence,
        removed_reason,
        after: [None; 8],
        set_residency_priority,
    };
    const IDS: &'static [Guid] = &[IID_DEVICE];
}

/// # Safety
/// That of the real one.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn D3D12CreateDevice(
    adapter: Object,
    _: u32,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    if let Err(code) = refusal("d3d12_refuse_device") {
        return code;
    }
    let mut found = AdapterDescription::default();
    // SAFETY: callers give an adapter, of `dxgi.dll`'s copy of this library, and valid pointers.
    unsafe {
        let table = &**adapter.cast::<*const DxgiAdapterTable>();
        (table.description)(adapter, &raw mut found);
        state().count("devices");
        make(Device { luid: found.luid }, id, out)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        state().discount("devices");
    }
}

/// A heap or a buffer, which is known by its number.
struct Memory<const OF: u32>(u64);

impl<const OF: u32> Drop for Memory<OF> {
    fn drop(&mut self) {
        state().discount(if OF == HEAP { "heaps" } else { "resources" });
        // CUDA's driver keeps what it has imported, but a program that counts on that has released in the wrong order.
        if lock(&IMPORTS).get(&self.0).is_some_and(|&count| count > 0) {
            violation();
        }
        lock(&OBJECTS).retain(|_, known| known.shared.object != self.0);
        lock(&HANDLES).retain(|_, known| known.shared.object != self.0);
        lock(&WRITTEN).retain(|written| written.memory != self.0);
    }
}

impl Kind for Memory<HEAP> {
    type Table = HeapTable;
    const TABLE: &'static HeapTable = &HeapTable { unknown: unknown::<Self>() };
    const IDS: &'static [Guid] = &[IID_HEAP];
}

impl Kind for Memory<RESOURCE> {
    type Table = ResourceTable;
    const TABLE: &'static ResourceTable = &ResourceTable { unknown: unknown::<Self>() };
    const IDS: &'static [Guid] = &[IID_RESOURCE];
}

/// A number that no other object has.
fn number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

fn is_buffer(description: &ResourceDescription, state: u32) -> bool {
    let ResourceDescription { dimension, height, depth, mip_levels, format, samples, layout, .. } =
        *description;
    let one = (height, depth, mip_levels, samples, layout);
    dimension == DIMENSION_BUFFER
        && format == 0
        && one == (1, 1, 1, [1, 0], 1)
        && state == STATE_COMMON
        && description.width > 0
}

unsafe extern "system" fn create_heap(
    object: Object,
    description: *const HeapDescription,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give a living object and valid pointers.
    let (device, description) = unsafe { (kind::<Device>(object), &*description) };
    if let Err(code) = refusal("d3d12_refuse_heap") {
        return code;
    }
    if description.bytes == 0
        || description.bytes % PLACEMENT_BYTES != 0
        || description.properties.kind != HEAP_DEFAULT
        || description.flags & HEAP_BUFFERS_ALONE != HEAP_BUFFERS_ALONE
    {
        return E_INVALIDARG;
    }
    let object = number();
    state().count("heaps");
    let known = Known {
        shared: Shared { kind: HEAP, luid: device.luid, bytes: description.bytes, object },
        is_shareable: description.flags & HEAP_SHARED != 0,
        memory: (object, 0),
        fence: None,
    };
    // SAFETY: callers give valid pointers.
    unsafe { known_by(Memory::<HEAP>(object), known, id, out) }
}

/// # Safety
/// That of `make`.
unsafe fn known_by<K: Kind>(object: K, known: Known, id: *const Guid, out: *mut Object) -> HResult {
    // SAFETY: passed on; `out` has the object if it was made.
    unsafe {
        let code = make(object, id, out);
        if code >= 0 {
            lock(&OBJECTS).insert(*out as usize, known);
        }
        code
    }
}

unsafe extern "system" fn create_placed_resource(
    object: Object,
    heap: Object,
    offset: u64,
    description: *const ResourceDescription,
    first_state: u32,
    _: *const c_void,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give living objects and valid pointers.
    let (device, description) = unsafe { (kind::<Device>(object), &*description) };
    if let Err(code) = refusal("d3d12_refuse_placed") {
        return code;
    }
    let Some(heap) = lock(&OBJECTS).get(&(heap as usize)).cloned() else { return E_INVALIDARG };
    let fits = offset.checked_add(description.width).is_some_and(|end| end <= heap.shared.bytes);
    if !fits || !is_buffer(description, first_state) || heap.shared.kind != HEAP {
        return E_INVALIDARG;
    }
    let object = number();
    state().count("resources");
    let known = Known {
        shared: Shared { kind: RESOURCE, luid: device.luid, bytes: description.width, object },
        // Of a placed one, its heap is shared.
        is_shareable: false,
        memory: (heap.shared.object, offset),
        fence: None,
    };
    // SAFETY: callers give valid pointers.
    unsafe { known_by(Memory::<RESOURCE>(object), known, id, out) }
}

unsafe extern "system" fn create_committed_resource(
    object: Object,
    properties: *const HeapProperties,
    flags: u32,
    description: *const ResourceDescription,
    first_state: u32,
    _: *const c_void,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give a living object and valid pointers.
    let (device, properties, description) = unsafe { (kind::<Device>(object), &*properties, &*description) };
    if let Err(code) = refusal("d3d12_refuse_committed") {
        return code;
    }
    // The driver rounds the memory of others up.
    if properties.kind != HEAP_DEFAULT
        || !is_buffer(description, first_state)
        || description.width % PLACEMENT_BYTES != 0
    {
        return E_INVALIDARG;
    }
    let object = number();
    state().count("resources");
    let known = Known {
        shared: Shared { kind: RESOURCE, luid: device.luid, bytes: description.width, object },
        is_shareable: flags & HEAP_SHARED != 0,
        memory: (object, 0),
        fence: None,
    };
    // SAFETY: callers give valid pointers.
    unsafe { known_by(Memory::<RESOURCE>(object), known, id, out) }
}

unsafe extern "system" fn create_shared_handle(
    _: Object,
    object: Object,
    attributes: *const c_void,
    access: u32,
    name: *const u16,
    out: *mut Handle,
) -> HResult {
    if let Err(code) = refusal("d3d12_refuse_handle") {
        return code;
    }
    let Some(known) = lock(&OBJECTS).get(&(object as usize)).cloned() else { return E_INVALIDARG };
    if !known.is_shareable || !attributes.is_null() || !name.is_null() || access != GENERIC_ALL {
        return E_INVALIDARG;
    }
    // A handle of the system's, which counts as one.
    // SAFETY: no attributes and no name.
    let handle = unsafe { CreateEventW(ptr::null(), 1, 0, ptr::null()) };
    if handle.is_null() {
        return E_FAIL;
    }
    lock(&HANDLES).insert(handle as usize, known);
    // SAFETY: callers give a valid pointer.
    unsafe { out.write(handle) };
    0
}

unsafe extern "system" fn set_residency_priority(
    _: Object,
    count: u32,
    objects: *const Object,
    priorities: *const u32,
) -> HResult {
    // SAFETY: callers give as many objects and numbers.
    let (objects, priorities) = unsafe {
        (slice::from_raw_parts(objects, count as usize), slice::from_raw_parts(priorities, count as usize))
    };
    let known = lock(&OBJECTS);
    if !objects.iter().all(|object| known.contains_key(&(*object as usize))) {
        return E_INVALIDARG;
    }
    drop(known);
    if priorities.iter().all(|&priority| priority == RESIDENCY_MAXIMUM) {
        state().count("kept_resident");
    }
    0
}

unsafe extern "system" fn removed_reason(_: Object) -> HResult {
    if state().get("d3d12_remove") != 0 { DXGI_ERROR_DEVICE_REMOVED } else { 0 }
}

#[derive(Default)]
struct FenceState {
    reached: Mutex<Reached>,
    moved: Condvar,
}

#[derive(Default)]
struct Reached {
    value: u64,
    /// Events, and the values at which they are set.
    events: Vec<(u64, usize)>,
}

struct Fence {
    number: u64,
    state: Arc<FenceState>,
}

impl Kind for Fence {
    type Table = FenceTable;
    const TABLE: &'static FenceTable =
        &FenceTable { unknown: unknown::<Self>(), before: [None; 5], completed, set_event, signal };
    const IDS: &'static [Guid] = &[IID_FENCE];
}

impl Drop for Fence {
    fn drop(&mut self) {
        state().discount("fences");
        lock(&OBJECTS).retain(|_, known| known.shared.object != self.number);
    }
}

unsafe extern "system" fn create_fence(
    object: Object,
    value: u64,
    flags: u32,
    id: *const Guid,
    out: *mut Object,
) -> HResult {
    // SAFETY: callers give a living object.
    let device = unsafe { kind::<Device>(object) };
    if let Err(code) = refusal("d3d12_refuse_fence") {
        return code;
    }
    let (number, fence) = (number(), Arc::new(FenceState::default()));
    lock(&fence.reached).value = value;
    state().count("fences");
    let known = Known {
        shared: Shared { kind: FENCE, luid: device.luid, bytes: 0, object: number },
        is_shareable: flags & FENCE_SHARED != 0,
        memory: (0, 0),
        fence: Some(fence.clone()),
    };
    // SAFETY: callers give valid pointers.
    unsafe { known_by(Fence { number, state: fence }, known, id, out) }
}

unsafe extern "system" fn completed(object: Object) -> u64 {
    if state().get("d3d12_remove") != 0 {
        return FENCE_OF_REMOVED_DEVICE;
    }
    // SAFETY: callers give a living object.
    lock(&unsafe { kind::<Fence>(object) }.state.reached).value
}

unsafe extern "system" fn set_event(object: Object, value: u64, event: Handle) -> HResult {
    if let Err(code) = refusal("d3d12_refuse_event") {
        return code;
    }
    // SAFETY: callers give a living object.
    let mut reached = lock(&unsafe { kind::<Fence>(object) }.state.reached);
    reached.events.push((value, event as usize));
    tell(&mut reached);
    0
}

unsafe extern "system" fn signal(object: Object, value: u64) -> HResult {
    // SAFETY: callers give a living object.
    let fence = unsafe { kind::<Fence>(object) };
    let by = thread::current().id();
    for written in lock(&WRITTEN).iter_mut().filter(|written| written.by == by) {
        written.signal.get_or_insert((fence.number, value));
    }
    let deaf_at = state().get("d3d12_deaf_at");
    if deaf_at != 0 && value >= deaf_at {
        return 0;
    }
    let mut reached = lock(&fence.state.reached);
    // The real one takes smaller values, too, but a caller that signals one has made a mistake.
    if value < reached.value {
        violation();
    }
    reached.value = value;
    tell(&mut reached);
    drop(reached);
    fence.state.moved.notify_all();
    0
}

fn tell(reached: &mut Reached) {
    let value = reached.value;
    reached.events.retain(|&(wanted, event)| {
        if wanted > value {
            return true;
        }
        // SAFETY: its owner keeps it until then.
        if unsafe { SetEvent(event as Handle) } == 0 {
            violation();
        }
        false
    });
}

/// Writes to a buffer: by the stand-in of DirectStorage. 0: it has so many bytes.
///
/// # Safety
/// `bytes` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_d3d12_write(
    resource: Object,
    offset: u64,
    bytes: *const u8,
    len: usize,
) -> c_int {
    let Some(known) = lock(&OBJECTS).get(&(resource as usize)).cloned() else { return 1 };
    if offset.checked_add(len as u64).is_none_or(|end| end > known.shared.bytes) {
        return 1;
    }
    // SAFETY: by the contract of this function.
    let bytes = unsafe { slice::from_raw_parts(bytes, len) }.to_vec();
    let (memory, start) = known.memory;
    spoil(memory, start + offset, len as u64);
    let by = thread::current().id();
    lock(&WRITTEN).push(Written { memory, offset: start + offset, bytes, by, signal: None });
    0
}

/// Has the stand-in of CUDA's driver overwrite what it has there: who still copies from it gets none of the old bytes.
fn spoil(memory: u64, offset: u64, len: u64) {
    type Spoil = unsafe extern "C" fn(u64, u64, u64);
    // SAFETY: texts that end with a zero; the function has this signature.
    unsafe {
        let driver = [w!("fake_cuda.dll"), w!("nvcuda.dll")].into_iter().map(|name| GetModuleHandleW(name));
        let found = driver.filter(|module| !module.is_null());
        for function in found.filter_map(|module| GetProcAddress(module, c"fake_cuda_spoil".as_ptr().cast()))
        {
            let spoil: Spoil = mem::transmute(function);
            spoil(memory, offset, len);
        }
    }
}

/// Describes what a handle is of: for the stand-in of CUDA's driver. 0: it is one.
///
/// # Safety
/// `out` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_d3d12_describe(handle: Handle, out: *mut Shared) -> c_int {
    let mut flags = 0;
    // SAFETY: asks about a number that may be no handle.
    let is_open = unsafe { GetHandleInformation(handle, &raw mut flags) } != 0;
    match lock(&HANDLES).get(&(handle as usize)).filter(|_| is_open) {
        Some(known) => {
            // SAFETY: by the contract of this function.
            unsafe { out.write(known.shared) };
            0
        }
        None => 1,
    }
}

/// Counts imports of an object: by the stand-in of CUDA's driver.
#[unsafe(no_mangle)]
pub extern "C" fn fake_d3d12_imported(object: u64, more: i64) {
    *lock(&IMPORTS).entry(object).or_default() += more;
}

/// Waits until a fence has reached a value, and gives what that lets be seen: for a stream of CUDA's.
///
/// # Safety
/// `give` takes `context`, the number of an object, an offset there, and bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_d3d12_acquire(
    fence: u64,
    value: u64,
    context: *mut c_void,
    give: unsafe extern "C" fn(*mut c_void, u64, u64, *const u8, usize),
) {
    let find = |known: &Known| known.fence.clone().filter(|_| known.shared.object == fence);
    let Some(found) = lock(&HANDLES).values().find_map(find) else { return };
    let mut reached = lock(&found.reached);
    while reached.value < value && state().get("d3d12_remove") == 0 {
        let waited = found.moved.wait_timeout(reached, std::time::Duration::from_millis(10));
        reached = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(reached);
    let is_seen = |written: &mut Written| written.signal.is_some_and(|(by, at)| by == fence && at <= value);
    let seen: Vec<Written> = lock(&WRITTEN).extract_if(.., is_seen).collect();
    for Written { memory, offset, bytes, .. } in seen {
        // SAFETY: by the contract of this function.
        unsafe { give(context, memory, offset, bytes.as_ptr(), bytes.len()) };
    }
}
