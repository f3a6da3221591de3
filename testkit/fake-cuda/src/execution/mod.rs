//! Contexts, and what runs in them: streams, events, copies and kernels.

pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod copy;
pub(crate) mod event;
pub(crate) mod handles;
pub(crate) mod kernel;
pub(crate) mod operation;
pub(crate) mod stream;
