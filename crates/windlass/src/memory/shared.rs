//! Memory that is shared with the daemon of a 3FS. On systems other than Linux there is none.
#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
pub(super) use absent::{Iov, IovSlot};
#[cfg(target_os = "linux")]
pub(super) use windlass_usrbio::{Iov, IovSlot};

/// Types that have no values.
#[cfg(not(target_os = "linux"))]
mod absent {
    use std::{ptr::NonNull, sync::Arc};

    #[derive(Debug)]
    pub(crate) enum Iov {}

    impl Iov {
        pub(crate) fn cut(self: &Arc<Self>, _: usize) -> Option<IovSlot> {
            match **self {}
        }

        pub(crate) fn len(&self) -> usize {
            match *self {}
        }

        pub(crate) fn base(&self) -> NonNull<u8> {
            match *self {}
        }
    }

    #[derive(Debug)]
    pub(crate) enum IovSlot {}

    impl IovSlot {
        pub(crate) fn offset(&self) -> usize {
            match *self {}
        }

        pub(crate) fn copy_to(&self, _: usize, _: &mut [u8]) -> Result<(), ()> {
            match *self {}
        }

        pub(crate) fn copy_from(&mut self, _: usize, _: &[u8]) -> Result<(), ()> {
            match *self {}
        }
    }
}
