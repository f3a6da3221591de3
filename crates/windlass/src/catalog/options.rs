//! How files are opened.
#![forbid(unsafe_code)]

use crate::{Result, environment};
#[cfg(feature = "objects")]
use windlass_objects::StoreOptions;

/// How headers are found and how strictly they are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Takes files that break the specification of their format where no harm comes of it: safetensors files with
    /// padding after the last tensor, and GGUF files as [`gguf`](super::gguf) describes.
    pub lenient: bool,
    /// Where the GGUF begins in each file, in bytes: 0 unless it is embedded in something else.
    pub offset: u64,
    /// Where object stores are, and who asks them.
    #[cfg(feature = "objects")]
    pub store: Option<StoreOptions>,
}

windlass_io::setters! {
    OpenOptions {
        lenient: bool,
        offset: u64,
        #[cfg(feature = "objects")]
        store: Option<StoreOptions>,
    }
}

impl OpenOptions {
    /// The defaults, changed by `WINDLASS_LENIENT` (`true` or `false`). An offset is about one file: no variable sets it.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) names the variable.
    pub fn from_env() -> Result<Self> {
        let mut options = Self::default();
        environment::apply(&[("WINDLASS_LENIENT", "lenient")], |option, value| {
            options.lenient = environment::boolean(option, value)?;
            Ok(())
        })?;
        Ok(options)
    }
}
