//! Names of devices.
#![forbid(unsafe_code)]

use crate::{Error, Result};
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
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
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
        Err(Error::InvalidDevice {
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
