//! Devices: where tensors can live besides host memory, and what fills them.
//!
//! `cuda` is the only kind so far. What the rest of the engine uses is named here, and has no type of CUDA's in it:
//! devices ([`Device`]), their memory (`Allocation`), host memory that they can copy from (`Pinned`), and queues of
//! copies (`CopyQueue`).

pub(crate) mod cuda;

pub use cuda::{
    Device, DeviceInfo, DriverError,
    cufile::{DirectBuffer, DirectFile, search_cufile_in},
    device_of, devices, driver_version,
    host_copies::{CopyDirection, CopyError, HostCopies, HostCopy},
    memory::{DeviceMemory, Pinned},
};
pub(crate) use cuda::{
    copies::{CopyQueue, Source},
    memory::Allocation,
};

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Where a load puts tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DeviceId {
    /// Host memory.
    #[default]
    Cpu,
    /// The memory of the CUDA device of this number, as the driver counts the visible ones.
    Cuda(u32),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

impl From<DeviceId> for String {
    fn from(target: DeviceId) -> Self {
        target.to_string()
    }
}

impl TryFrom<String> for DeviceId {
    type Error = crate::Error;

    fn try_from(text: String) -> crate::Result<Self> {
        text.parse()
    }
}

impl FromStr for DeviceId {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Self> {
        match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => return Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|byte| byte.is_ascii_digit()) => {
                if let Ok(ordinal) = ordinal.parse() {
                    return Ok(Self::Cuda(ordinal));
                }
            }
            _ => {}
        }
        Err(crate::Error::InvalidOption {
            option: "device",
            value: text.to_owned(),
            reason: "it is cpu, cuda, or cuda:N for the device of that number".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_as_they_are_written() {
        for (text, target) in
            [("cpu", DeviceId::Cpu), ("cuda:0", DeviceId::Cuda(0)), ("cuda:7", DeviceId::Cuda(7))]
        {
            assert_eq!(text.parse::<DeviceId>().unwrap(), target);
            assert_eq!(target.to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceId>().unwrap(), DeviceId::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:99999999999", "cpu:0", "CUDA"] {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
        }
    }
}
