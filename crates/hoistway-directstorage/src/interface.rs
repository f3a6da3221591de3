//! References to objects of the runtime.
#![allow(unsafe_code)]

use crate::{
    Failure,
    abi::{FactoryTable, FileTable, Guid, HResult, Object, QueueTable, StatusArrayTable, UnknownTable},
    graphics_abi::{
        self, DeviceTable, DxgiAdapterTable, DxgiFactoryTable, FenceTable, HeapTable, ResourceTable,
    },
};
use std::{marker::PhantomData, ptr, ptr::NonNull};

/// A table of functions that begins with that of `IUnknown`.
///
/// # Safety
/// It does, and objects that are asked for [`ID`](Self::ID) have it.
pub(crate) unsafe trait Table {
    const ID: Guid;
}

/// Gives tables the names of their interfaces.
macro_rules! tables {
    ($($table:ty = $id:expr;)*) => {
        $(
            // SAFETY: as the header declares it.
            unsafe impl Table for $table {
                const ID: Guid = $id;
            }
        )*
    };
}

tables! {
    FactoryTable = crate::abi::IID_FACTORY;
    FileTable = crate::abi::IID_FILE;
    QueueTable = crate::abi::IID_QUEUE_1;
    StatusArrayTable = crate::abi::IID_STATUS_ARRAY;
    DxgiFactoryTable = graphics_abi::IID_DXGI_FACTORY;
    DxgiAdapterTable = graphics_abi::IID_DXGI_ADAPTER;
    DeviceTable = graphics_abi::IID_DEVICE;
    HeapTable = graphics_abi::IID_HEAP;
    ResourceTable = graphics_abi::IID_RESOURCE;
    FenceTable = graphics_abi::IID_FENCE;
}

/// A counted reference to an object. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Reference<T: Table>(NonNull<*const T>, PhantomData<T>);

// SAFETY: objects of the runtime may be used by any thread, several at a time.
unsafe impl<T: Table> Send for Reference<T> {}
// SAFETY: as above.
unsafe impl<T: Table> Sync for Reference<T> {}

impl<T: Table> Reference<T> {
    /// Asks for an object with this table.
    ///
    /// # Errors
    /// What the function answers.
    ///
    /// # Safety
    /// What `ask` writes, if it does not fail, is an object with the table that it is asked for, and the caller's reference to it.
    pub(crate) unsafe fn of(
        operation: &'static str,
        ask: impl FnOnce(*const Guid, *mut Object) -> HResult,
    ) -> Result<Self, Failure> {
        let mut object: Object = ptr::null_mut();
        let id = T::ID;
        Failure::check(operation, ask(&raw const id, &raw mut object))?;
        match NonNull::new(object.cast()) {
            Some(object) => Ok(Self(object, PhantomData)),
            None => Err(Failure::new(operation, crate::abi::E_FAIL).with("it gave no object")),
        }
    }

    /// Returns the object, which lives as long as this reference.
    pub(crate) fn object(&self) -> Object {
        self.0.as_ptr().cast()
    }

    /// Returns its functions.
    pub(crate) fn table(&self) -> &T {
        // SAFETY: by the contract of `of`, and tables live as long as the library, which is never unloaded once it gave an object.
        unsafe { &**self.0.as_ref() }
    }
}

impl<T: Table> Drop for Reference<T> {
    fn drop(&mut self) {
        // SAFETY: by the contract of `Table`, the table begins so; the reference is this value's, and is not used after this.
        unsafe {
            let table: *const UnknownTable = (*self.0.as_ptr()).cast();
            ((*table).release)(self.object());
        }
    }
}
