//! The locks of the scheduler. The model test compiles the same files with another module of this name.

pub(super) use crate::sync::{Condvar, Mutex, MutexGuard};
