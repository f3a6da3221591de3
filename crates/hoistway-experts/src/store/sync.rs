//! The locks of the store. The model test compiles the same files with another module of this name.

pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
