//! What crosses the edge to `dxgi.dll` and `d3d12.dll`: the part of `dxgi.h` and `d3d12.h` that is used here, for 64-bit systems.
//!
//! Places of functions in their tables, and the layout of structures, are those of the package `windows`, which Microsoft generates.

use crate::abi::{Guid, HResult, Handle, Object, UnknownTable};
use std::ffi::c_void;

/// A function that nothing here calls.
pub type Unused = Option<unsafe extern "system" fn()>;

/// `IDXGIFactory1`
pub const IID_DXGI_FACTORY: Guid = Guid::new(0x770aae78_f26f_4dba_a829_253c83d1b387);
/// `IDXGIAdapter1`
pub const IID_DXGI_ADAPTER: Guid = Guid::new(0x29038f61_3839_4626_91fd_086879011a05);
/// `ID3D12Device1`
pub const IID_DEVICE: Guid = Guid::new(0x77acce80_638e_4e65_8895_c1f23386863e);
/// `ID3D12Heap`
pub const IID_HEAP: Guid = Guid::new(0x6b3b2502_6e51_45b3_90ee_9884265e8df3);
/// `ID3D12Resource`
pub const IID_RESOURCE: Guid = Guid::new(0x696442be_a72e_4059_bc79_5b5c98040fad);
/// `ID3D12Fence`
pub const IID_FENCE: Guid = Guid::new(0x0a753dcf_c4d8_4b91_adf6_be5a60d95a76);

/// There is no adapter of this number.
pub const DXGI_ERROR_NOT_FOUND: HResult = 0x887A_0002_u32.cast_signed();
/// An argument cannot be.
pub const E_INVALIDARG: HResult = 0x8007_0057_u32.cast_signed();

/// `D3D_FEATURE_LEVEL_11_0`
pub const FEATURE_LEVEL_11_0: u32 = 0xB000;
/// `DXGI_ADAPTER_FLAG_SOFTWARE`
pub const ADAPTER_SOFTWARE: u32 = 2;
/// `D3D12_HEAP_TYPE_DEFAULT`
pub const HEAP_DEFAULT: u32 = 1;
/// `D3D12_HEAP_FLAG_SHARED`
pub const HEAP_SHARED: u32 = 1;
/// `D3D12_HEAP_FLAG_ALLOW_ONLY_BUFFERS`
pub const HEAP_BUFFERS_ALONE: u32 = 0xC0;
/// `D3D12_RESOURCE_DIMENSION_BUFFER`
pub const DIMENSION_BUFFER: u32 = 1;
/// `D3D12_TEXTURE_LAYOUT_ROW_MAJOR`
pub const LAYOUT_ROW_MAJOR: u32 = 1;
/// `D3D12_RESOURCE_STATE_COMMON`
pub const STATE_COMMON: u32 = 0;
/// `D3D12_FENCE_FLAG_SHARED`
pub const FENCE_SHARED: u32 = 1;
/// `D3D12_RESIDENCY_PRIORITY_MAXIMUM`
pub const RESIDENCY_MAXIMUM: u32 = 0xC800_0000;
/// `GENERIC_ALL`
pub const GENERIC_ALL: u32 = 0x1000_0000;
/// What a fence has reached whose device was removed.
pub const FENCE_OF_REMOVED_DEVICE: u64 = u64::MAX;
/// `D3D12_DEFAULT_RESOURCE_PLACEMENT_ALIGNMENT`, of which the length of a heap is a multiple.
pub const PLACEMENT_BYTES: u64 = 64 << 10;

/// `CreateDXGIFactory1`
pub type CreateFactory = unsafe extern "system" fn(*const Guid, *mut Object) -> HResult;
/// `D3D12CreateDevice`
pub type CreateDevice = unsafe extern "system" fn(Object, u32, *const Guid, *mut Object) -> HResult;

/// `DXGI_ADAPTER_DESC1`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AdapterDescription {
    /// A text that ends with a zero.
    pub name: [u16; 128],
    /// Numbers of vendor, device, subsystem and revision.
    pub numbers: [u32; 4],
    /// Bytes of memory: of its own, of the system for it alone, and of the system.
    pub memory: [usize; 3],
    /// Its locally unique identifier.
    pub luid: [u8; 8],
    /// `DXGI_ADAPTER_FLAG_…`
    pub flags: u32,
}

impl Default for AdapterDescription {
    fn default() -> Self {
        Self { name: [0; 128], numbers: [0; 4], memory: [0; 3], luid: [0; 8], flags: 0 }
    }
}

/// `D3D12_HEAP_PROPERTIES`; zeros beside the kind leave the rest to the driver.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct HeapProperties {
    /// `D3D12_HEAP_TYPE_…`
    pub kind: u32,
    /// How the processor maps it, and where it is.
    pub custom: [u32; 2],
    /// Which of several linked devices have and see it.
    pub nodes: [u32; 2],
}

/// `D3D12_HEAP_DESC`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct HeapDescription {
    /// A multiple of [`PLACEMENT_BYTES`].
    pub bytes: u64,
    /// Where it is.
    pub properties: HeapProperties,
    /// 0: 64 KiB.
    pub alignment: u64,
    /// `D3D12_HEAP_FLAG_…`
    pub flags: u32,
}

/// `D3D12_RESOURCE_DESC`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ResourceDescription {
    /// `D3D12_RESOURCE_DIMENSION_…`
    pub dimension: u32,
    /// 0: 64 KiB.
    pub alignment: u64,
    /// Bytes of a buffer.
    pub width: u64,
    /// 1 for a buffer.
    pub height: u32,
    /// 1 for a buffer.
    pub depth: u16,
    /// 1 for a buffer.
    pub mip_levels: u16,
    /// 0 for a buffer.
    pub format: u32,
    /// Count and quality; 1 and 0 for a buffer.
    pub samples: [u32; 2],
    /// `D3D12_TEXTURE_LAYOUT_…`
    pub layout: u32,
    /// `D3D12_RESOURCE_FLAG_…`
    pub flags: u32,
}

impl ResourceDescription {
    /// That of a buffer.
    pub fn buffer(bytes: u64) -> Self {
        Self {
            dimension: DIMENSION_BUFFER,
            width: bytes,
            height: 1,
            depth: 1,
            mip_levels: 1,
            samples: [1, 0],
            layout: LAYOUT_ROW_MAJOR,
            ..Self::default()
        }
    }
}

/// The table of `IDXGIFactory1`
#[derive(Debug)]
#[repr(C)]
pub struct DxgiFactoryTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// Up to `CreateSoftwareAdapter`
    pub before: [Unused; 9],
    /// `EnumAdapters1`
    pub adapter: unsafe extern "system" fn(Object, u32, *mut Object) -> HResult,
}

/// The table of `IDXGIAdapter1`
#[derive(Debug)]
#[repr(C)]
pub struct DxgiAdapterTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// Up to `CheckInterfaceSupport`
    pub before: [Unused; 7],
    /// `GetDesc1`
    pub description: unsafe extern "system" fn(Object, *mut AdapterDescription) -> HResult,
}

/// The table of `ID3D12Device1`
#[derive(Debug)]
#[repr(C)]
pub struct DeviceTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// Up to `GetCustomHeapProperties`
    pub before: [Unused; 24],
    /// `CreateCommittedResource`
    pub create_committed_resource: unsafe extern "system" fn(
        Object,
        *const HeapProperties,
        u32,
        *const ResourceDescription,
        u32,
        *const c_void,
        *const Guid,
        *mut Object,
    ) -> HResult,
    /// `CreateHeap`
    pub create_heap:
        unsafe extern "system" fn(Object, *const HeapDescription, *const Guid, *mut Object) -> HResult,
    /// `CreatePlacedResource`
    pub create_placed_resource: unsafe extern "system" fn(
        Object,
        Object,
        u64,
        *const ResourceDescription,
        u32,
        *const c_void,
        *const Guid,
        *mut Object,
    ) -> HResult,
    /// `CreateReservedResource`
    pub create_reserved_resource: Unused,
    /// `CreateSharedHandle`
    pub create_shared_handle:
        unsafe extern "system" fn(Object, Object, *const c_void, u32, *const u16, *mut Handle) -> HResult,
    /// Up to `Evict`
    pub between: [Unused; 4],
    /// `CreateFence`
    pub create_fence: unsafe extern "system" fn(Object, u64, u32, *const Guid, *mut Object) -> HResult,
    /// `GetDeviceRemovedReason`
    pub removed_reason: unsafe extern "system" fn(Object) -> HResult,
    /// Up to `SetEventOnMultipleFenceCompletion`
    pub after: [Unused; 8],
    /// `SetResidencyPriority`
    pub set_residency_priority: unsafe extern "system" fn(Object, u32, *const Object, *const u32) -> HResult,
}

/// The table of `ID3D12Heap`, as far as it is used.
#[derive(Debug)]
#[repr(C)]
pub struct HeapTable {
    /// What all objects have.
    pub unknown: UnknownTable,
}

/// The table of `ID3D12Resource`, as far as it is used.
#[derive(Debug)]
#[repr(C)]
pub struct ResourceTable {
    /// What all objects have.
    pub unknown: UnknownTable,
}

/// The table of `ID3D12Fence`
#[derive(Debug)]
#[repr(C)]
pub struct FenceTable {
    /// What all objects have.
    pub unknown: UnknownTable,
    /// Up to `GetDevice`
    pub before: [Unused; 5],
    /// `GetCompletedValue`
    pub completed: unsafe extern "system" fn(Object) -> u64,
    /// `SetEventOnCompletion`
    pub set_event: unsafe extern "system" fn(Object, u64, Handle) -> HResult,
    /// `Signal`
    pub signal: unsafe extern "system" fn(Object, u64) -> HResult,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn structures_lie_as_the_headers_have_them() {
        assert_eq!(size_of::<AdapterDescription>(), 312);
        assert_eq!(offset_of!(AdapterDescription, memory), 272);
        assert_eq!(offset_of!(AdapterDescription, luid), 296);
        assert_eq!(size_of::<HeapProperties>(), 20);
        assert_eq!((size_of::<HeapDescription>(), offset_of!(HeapDescription, alignment)), (48, 32));
        assert_eq!(size_of::<ResourceDescription>(), 56);
        assert_eq!(offset_of!(ResourceDescription, samples), 36);
        assert_eq!(offset_of!(ResourceDescription, flags), 48);
    }

    #[test]
    fn functions_have_the_places_of_the_headers() {
        assert_eq!(offset_of!(DxgiFactoryTable, adapter), 12 * 8);
        assert_eq!(offset_of!(DxgiAdapterTable, description), 10 * 8);
        assert_eq!(offset_of!(DeviceTable, create_committed_resource), 27 * 8);
        assert_eq!(offset_of!(DeviceTable, create_shared_handle), 31 * 8);
        assert_eq!(offset_of!(DeviceTable, create_fence), 36 * 8);
        assert_eq!(offset_of!(DeviceTable, set_residency_priority), 46 * 8);
        assert_eq!(offset_of!(FenceTable, completed), 8 * 8);
        assert_eq!(size_of::<FenceTable>(), 11 * 8);
    }
}
