//! The C ABI of the vendor's library: its structs, and the functions that are used.
#![allow(unsafe_code)]

use std::{
    ffi::{c_char, c_int, c_void},
    mem::offset_of,
};

/// The longest mount point, with the NUL at its end.
pub const MOUNT_POINT_BYTES: usize = 256;

/// `struct hf3fs_iov`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Iov {
    /// The first byte.
    pub base: *mut u8,
    /// The library's own.
    pub handle: *mut c_void,
    /// The buffer's number.
    pub id: [u8; 16],
    /// Where the file system is mounted.
    pub mount_point: [c_char; MOUNT_POINT_BYTES],
    /// Length in bytes.
    pub size: usize,
    /// See [`IovOptions`](crate::IovOptions).
    pub block_size: usize,
    /// The NUMA node, or -1.
    pub numa: c_int,
}

/// `struct hf3fs_ior`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ior {
    /// The ring's memory.
    pub iov: Iov,
    /// The library's own.
    pub handle: *mut c_void,
    /// Where the file system is mounted.
    pub mount_point: [c_char; MOUNT_POINT_BYTES],
    /// Reads, not writes.
    pub for_read: bool,
    /// See [`RingKey`](crate::RingKey).
    pub io_depth: c_int,
    /// Negative is high, positive low.
    pub priority: c_int,
    /// Milliseconds.
    pub timeout: c_int,
    /// Bits.
    pub flags: u64,
}

/// `struct hf3fs_cqe`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Cqe {
    /// Which transfer, by index.
    pub index: i32,
    /// Unused.
    pub reserved: i32,
    /// Bytes, or a negative error number.
    pub result: i64,
    /// What the client gave.
    pub user_data: *const c_void,
}

const _: () = {
    assert!(size_of::<Iov>() == 312 && offset_of!(Iov, handle) == 8 && offset_of!(Iov, id) == 16);
    assert!(offset_of!(Iov, mount_point) == 32 && offset_of!(Iov, size) == 288);
    assert!(offset_of!(Iov, block_size) == 296 && offset_of!(Iov, numa) == 304);
    assert!(size_of::<Ior>() == 600 && offset_of!(Ior, handle) == 312 && offset_of!(Ior, mount_point) == 320);
    assert!(offset_of!(Ior, for_read) == 576 && offset_of!(Ior, io_depth) == 580);
    assert!(
        offset_of!(Ior, priority) == 584 && offset_of!(Ior, timeout) == 588 && offset_of!(Ior, flags) == 592
    );
    assert!(size_of::<Cqe>() == 24 && offset_of!(Cqe, result) == 8 && offset_of!(Cqe, user_data) == 16);
};

impl Iov {
    /// One of nothing.
    pub const fn empty() -> Self {
        Self {
            base: std::ptr::null_mut(),
            handle: std::ptr::null_mut(),
            id: [0; 16],
            mount_point: [0; MOUNT_POINT_BYTES],
            size: 0,
            block_size: 0,
            numa: -1,
        }
    }
}

impl Ior {
    /// One of nothing.
    pub const fn empty() -> Self {
        Self {
            iov: Iov::empty(),
            handle: std::ptr::null_mut(),
            mount_point: [0; MOUNT_POINT_BYTES],
            for_read: false,
            io_depth: 0,
            priority: 0,
            timeout: 0,
            flags: 0,
        }
    }
}

/// Declares the functions once: as fields of [`Functions`], and as what is looked up.
macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal : $type:ty;)*) => {
        /// The library's functions that are used.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $field: $type,)*
        }

        impl Functions {
            /// Looks all of them up.
            ///
            /// # Safety
            /// The library must be the vendor's, or have the same ABI, and stay loaded.
            pub(crate) unsafe fn find(library: &libloading::os::unix::Library) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: the caller's promise: the symbol is a function of this type.
                    $($field: *unsafe { library.get::<$type>($symbol) }.map_err(|error| error.to_string())?,)*
                })
            }
        }
    };
}

functions! {
    /// Fills the struct; makes and registers nothing.
    iov_wrap = c"hf3fs_iovwrap":
        unsafe extern "C" fn(*mut Iov, *mut c_void, *const u8, *const c_char, usize, usize, c_int) -> c_int;
    /// The variant with a priority, which the fourth does not have.
    ior_create = c"hf3fs_iorcreate2":
        unsafe extern "C" fn(*mut Ior, *const c_char, c_int, bool, c_int, c_int, c_int) -> c_int;
    /// Gives a ring back.
    ior_destroy = c"hf3fs_iordestroy": unsafe extern "C" fn(*mut Ior);
    /// Success is not positive.
    reg_fd = c"hf3fs_reg_fd": unsafe extern "C" fn(c_int, u64) -> c_int;
    /// Needs the file open, and the daemon alive.
    dereg_fd = c"hf3fs_dereg_fd": unsafe extern "C" fn(c_int);
    /// An index, or a negative error number.
    prep_io = c"hf3fs_prep_io":
        unsafe extern "C" fn(*const Ior, *const Iov, bool, *mut c_void, c_int, usize, u64, *const c_void) -> c_int;
    /// Wakes the daemon.
    submit_ios = c"hf3fs_submit_ios": unsafe extern "C" fn(*const Ior) -> c_int;
    /// The time is absolute, on the realtime clock.
    wait_for_ios = c"hf3fs_wait_for_ios":
        unsafe extern "C" fn(*const Ior, *mut Cqe, c_int, c_int, *const libc::timespec) -> c_int;
}
