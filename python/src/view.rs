//! The memory of hoistway's tensors: a load's, or bytes that another object keeps.
#![allow(unsafe_code)]

use crate::process::Attached;
use hoistway::{
    DeviceId, Dtype, Result, TensorMemory,
    device::{Device, Error},
};
use hoistway_device::CopyStream;
use pyo3::prelude::*;
use std::{any::Any, borrow::Cow, ptr, slice, sync::Arc};

/// A tensor in memory. Clones share the bytes, and keep them.
#[derive(Clone)]
pub(crate) enum View {
    /// Memory of a load.
    Loaded(hoistway::Tensor),
    /// Memory of a lease, a layer or a read.
    Kept(KeptTensor),
}

/// A tensor whose bytes stay where they are as long as `owner` lives.
#[derive(Clone)]
pub(crate) struct KeptTensor {
    name: Arc<str>,
    dtype: Dtype,
    shape: Arc<[u64]>,
    device: DeviceId,
    address: u64,
    len_bytes: u64,
    /// Whether others see the same bytes.
    is_read_only: bool,
    owner: Arc<dyn Any + Send + Sync>,
}

/// Where a tensor's bytes are.
pub(crate) struct Place {
    /// The device whose memory it is; [`DeviceId::Cpu`] for the host's.
    pub(crate) device: DeviceId,
    /// Address of the first byte.
    pub(crate) address: u64,
    pub(crate) len_bytes: u64,
}

impl KeptTensor {
    /// A tensor of bytes that `owner` keeps.
    ///
    /// # Safety
    /// The bytes of `place` must be initialised memory of its device, and stay so until `owner` is dropped. If the tensor is
    /// read-only, nothing may write to them until then. Host addresses must be exposed.
    pub(crate) unsafe fn new(
        name: Arc<str>,
        dtype: Dtype,
        shape: Arc<[u64]>,
        place: Place,
        is_read_only: bool,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let Place { device, address, len_bytes } = place;
        Self { name, dtype, shape, device, address, len_bytes, is_read_only, owner }
    }

    fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        let too_long = |_| hoistway::Error::Internal("a tensor is larger than the address space".into());
        let len = usize::try_from(self.len_bytes).map_err(too_long)?;
        if len == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        if self.device.is_host() {
            let start: *const u8 = ptr::with_exposed_provenance(self.address as usize);
            // SAFETY: `new` was promised that these are initialised bytes as long as the owner lives, which `self` holds.
            return Ok(Cow::Borrowed(unsafe { slice::from_raw_parts(start, len) }));
        }
        let mut bytes = hoistway::memory::zeroed(self.len_bytes, "memory for a copy of a tensor")?;
        let mut copy = || -> Result<(), Error> {
            CopyStream::new(&Device::open(self.device)?)?.read_back(self.address, &mut bytes)
        };
        copy()?;
        Ok(Cow::Owned(bytes))
    }
}

impl From<hoistway::Tensor> for View {
    fn from(tensor: hoistway::Tensor) -> Self {
        Self::Loaded(tensor)
    }
}

impl From<KeptTensor> for View {
    fn from(tensor: KeptTensor) -> Self {
        Self::Kept(tensor)
    }
}

impl View {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Loaded(tensor) => tensor.name(),
            Self::Kept(tensor) => &tensor.name,
        }
    }

    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Self::Loaded(tensor) => tensor.dtype(),
            Self::Kept(tensor) => tensor.dtype,
        }
    }

    pub(crate) fn shape(&self) -> &[u64] {
        match self {
            Self::Loaded(tensor) => tensor.shape(),
            Self::Kept(tensor) => &tensor.shape,
        }
    }

    pub(crate) fn device(&self) -> DeviceId {
        match self {
            Self::Loaded(tensor) => tensor.device(),
            Self::Kept(tensor) => tensor.device,
        }
    }

    /// Whether the host sees the bytes, also if a device uses them.
    pub(crate) fn is_in_host_memory(&self) -> bool {
        match self {
            Self::Loaded(tensor) => matches!(tensor.memory(), TensorMemory::Host(_)),
            Self::Kept(tensor) => tensor.device.is_host(),
        }
    }

    /// Whether others see the same bytes, so that nothing may write to them.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self, Self::Kept(KeptTensor { is_read_only: true, .. }))
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        match self {
            Self::Loaded(tensor) => tensor.len_bytes(),
            Self::Kept(tensor) => tensor.len_bytes,
        }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Loaded(tensor) => tensor.address(),
            Self::Kept(tensor) => tensor.address,
        }
    }

    /// The bytes; a copy if they are in the memory of a device.
    pub(crate) fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::Loaded(tensor) => tensor.bytes(),
            Self::Kept(tensor) => tensor.bytes(),
        }
    }

    /// The object that owns memory which the package's allocator gave, and where the tensor begins in it.
    pub(crate) fn lent_by(&self) -> Option<(&Py<PyAny>, u64)> {
        let Self::Loaded(tensor) = self else { return None };
        let TensorMemory::Device(block) = tensor.memory() else { return None };
        let (owner, start) = block.lent_by()?;
        owner.downcast_ref::<Attached>().map(|owner| (owner.get(), start))
    }

    /// The object that keeps the bytes in place.
    pub(crate) fn owner(&self) -> Box<dyn Any + Send + Sync> {
        match self {
            Self::Loaded(tensor) => Box::new(tensor.memory().clone()),
            Self::Kept(tensor) => Box::new(tensor.owner.clone()),
        }
    }
}
