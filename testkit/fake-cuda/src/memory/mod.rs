//! Memory: a device's, behind addresses that the host can't follow, and the host's that devices can.

pub(crate) mod device;
pub(crate) mod host;
pub(crate) mod mapped;
mod ranges;
mod window;
