//! Names of devices, and the registry of their kinds.
#![forbid(unsafe_code)]

#[cfg(feature = "toy-device")]
use crate::toy;
use crate::{Error, Result, backend::Kind, cuda, hip};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Declares [`DeviceId`] with a variant for each kind.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $(#[cfg($cfg:meta)])* $variant:ident = $name:literal $(| $alias:literal)*, $kind:expr;)*) => {
        /// Where a load puts tensors.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(into = "String", try_from = "String")]
        #[non_exhaustive]
        pub enum DeviceId {
            /// Host memory.
            #[default]
            Cpu,
            $($(#[doc = $doc])* $(#[cfg($cfg)])* $variant(u32),)*
        }

        impl DeviceId {
            /// The device's kind and its number; `None` for host memory.
            fn parts(self) -> Option<(&'static Registered, u32)> {
                match self {
                    Self::Cpu => None,
                    $($(#[cfg($cfg)])* Self::$variant(ordinal) => {
                        const KIND: &Registered = &Registered {
                            name: $name,
                            aliases: &[$($alias),*],
                            id: DeviceId::$variant,
                            kind: &$kind,
                        };
                        Some((KIND, ordinal))
                    })*
                }
            }
        }

        /// Every kind, the one that is looked for first at the beginning.
        const KINDS: &[fn(u32) -> DeviceId] = &[$($(#[cfg($cfg)])* DeviceId::$variant,)*];
    };
}

// A kind of devices is added here, and by a module. Names after the first are understood and not written.
kinds! {
    /// The memory of the CUDA device of this number, as the driver counts the visible ones.
    Cuda = "cuda", cuda::Cuda;
    /// The memory of the ROCm device of this number, as its runtime counts the visible ones.
    Rocm = "rocm" | "hip", hip::Hip;
    /// The memory of a device that plays one in host memory. For tests only.
    #[cfg(feature = "toy-device")]
    Toy = "toy", toy::Toy;
}

/// Host memory in DLPack: `kDLCPU`, and the number.
const DLPACK_HOST: (i32, i32) = (1, 0);

/// A kind under its name.
struct Registered {
    name: &'static str,
    aliases: &'static [&'static str],
    id: fn(u32) -> DeviceId,
    kind: &'static dyn Kind,
}

impl Registered {
    fn is_named(&self, name: &str) -> bool {
        self.name == name || self.aliases.contains(&name)
    }
}

/// Every kind, and how its devices are named.
pub(crate) fn kinds() -> impl Iterator<Item = (&'static dyn Kind, fn(u32) -> DeviceId)> {
    registered().map(|registered| (registered.kind, registered.id))
}

fn registered() -> impl Iterator<Item = &'static Registered> {
    KINDS.iter().filter_map(|id| id(0).parts()).map(|(registered, _)| registered)
}

impl DeviceId {
    /// The first device of the only kind whose driver this process has loaded, for its own use or others'. `None` if there
    /// is no such kind, or more than one.
    pub fn only_in_process() -> Option<Self> {
        let mut loaded = registered().filter(|registered| registered.kind.is_in_process());
        let first = loaded.next();
        first.filter(|_| loaded.next().is_none()).map(|registered| (registered.id)(0))
    }

    /// The device that DLPack names so: `DLDeviceType`, and the number. `None` if it is of no kind that is known.
    ///
    /// ```
    /// use hoistway_device::DeviceId;
    ///
    /// assert_eq!(DeviceId::from_dlpack(1, 0), Some(DeviceId::Cpu));
    /// assert_eq!(DeviceId::from_dlpack(10, 2), Some(DeviceId::Rocm(2)));
    /// // Managed memory of CUDA's.
    /// assert_eq!(DeviceId::from_dlpack(13, 1), Some(DeviceId::Cuda(1)));
    /// assert_eq!(DeviceId::from_dlpack(8, 0), None);
    /// ```
    pub fn from_dlpack(device_type: i32, number: i32) -> Option<Self> {
        let number = u32::try_from(number).ok()?;
        if device_type == DLPACK_HOST.0 {
            return Some(Self::Cpu);
        }
        let found = registered().find(|registered| registered.kind.dlpack_types().contains(&device_type));
        found.map(|registered| (registered.id)(number))
    }

    /// The first device of the kind that is looked for first.
    pub(crate) fn first_kind() -> Self {
        KINDS[0](0)
    }

    /// Whether it is host memory.
    pub fn is_host(self) -> bool {
        self == Self::Cpu
    }

    /// The device as DLPack names it: `DLDeviceType`, and the number.
    pub fn dlpack(self) -> (i32, i32) {
        self.parts().map_or(DLPACK_HOST, |(registered, ordinal)| {
            let device_type = registered.kind.dlpack_types()[0];
            (device_type, i32::try_from(ordinal).unwrap_or(i32::MAX))
        })
    }

    /// The kind, and the number among its devices; `None` for host memory.
    pub(crate) fn kind(self) -> Option<(&'static dyn Kind, u32)> {
        self.parts().map(|(registered, ordinal)| (registered.kind, ordinal))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            None => f.pad("cpu"),
            Some((registered, ordinal)) => f.pad(&format!("{}:{ordinal}", registered.name)),
        }
    }
}

impl From<DeviceId> for String {
    fn from(id: DeviceId) -> Self {
        id.to_string()
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
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        let (name, ordinal) = text.split_once(':').unwrap_or((text, "0"));
        let id = registered().find(|registered| registered.is_named(name)).map(|registered| registered.id);
        let is_number = ordinal.bytes().all(|byte| byte.is_ascii_digit());
        match (id, ordinal.parse()) {
            (Some(id), Ok(ordinal)) if is_number => Ok(id(ordinal)),
            _ => {
                let names: Vec<&str> = registered().map(|registered| registered.name).collect();
                let numbered: Vec<String> = names.iter().map(|name| format!("{name}:N")).collect();
                Err(Error::InvalidDevice {
                    value: text.to_owned(),
                    reason: format!(
                        "it must be cpu, {}, or {} for the device of that number",
                        names.join(", "),
                        numbered.join(", ")
                    ),
                })
            }
        }
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
        for (text, ordinal) in [("rocm", 0), ("hip", 0), ("hip:3", 3), ("rocm:3", 3)] {
            let id = text.parse::<DeviceId>().unwrap();
            assert_eq!((id, id.to_string()), (DeviceId::Rocm(ordinal), format!("rocm:{ordinal}")));
        }
        for text in
            ["", "gpu", "cuda:", "cuda:-1", "cuda:+1", "cuda:99999999999", "cpu:0", "CUDA", "ROCm", "hip:"]
        {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
        }
    }

    #[test]
    fn each_kind_has_a_name_and_is_found_by_it() {
        for registered in registered() {
            let id = (registered.id)(3);
            assert_eq!(id.to_string(), format!("{}:3", registered.name));
            assert_eq!(id.to_string().parse::<DeviceId>().unwrap(), id);
            assert!(!id.is_host() && id.dlpack().1 == 3 && id.dlpack().0 != 1);
            let (device_type, number) = id.dlpack();
            assert_eq!(DeviceId::from_dlpack(device_type, number), Some(id));
            assert_eq!(DeviceId::from_dlpack(device_type, -1), None);
            for &other in registered.kind.dlpack_types() {
                assert_eq!(DeviceId::from_dlpack(other, 3), Some(id));
            }
        }
    }
}
