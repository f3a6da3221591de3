//! How files are opened.
#![forbid(unsafe_code)]

#[cfg(feature = "objects")]
use crate::cache::NodeCache;
use crate::{Cancel, Result, environment};
#[cfg(feature = "objects")]
use hoistway_objects::StoreOptions;

/// How headers are found and how strictly they are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Takes files that break the specification of their format where no harm comes of it: safetensors files with
    /// padding after the last tensor, and GGUF files as [`gguf`](super::gguf) describes.
    pub lenient: bool,
    /// Where the GGUF begins in each file, in bytes: 0 unless it is embedded in something else.
    pub offset: u64,
    /// The endpoints and credentials of object stores.
    #[cfg(feature = "objects")]
    pub store: Option<StoreOptions>,
    /// Keeps what is loaded from stores on a drive of this machine, and reads it from there the next time.
    #[cfg(feature = "objects")]
    pub cache: Option<NodeCache>,
    /// Ends the opening before it is done.
    pub cancel: Option<Cancel>,
}

hoistway_io::setters! {
    OpenOptions {
        lenient: bool,
        offset: u64,
        #[cfg(feature = "objects")]
        store: Option<StoreOptions>,
        #[cfg(feature = "objects")]
        cache: Option<NodeCache>,
        cancel: Option<Cancel>,
    }
}

impl OpenOptions {
    /// What ends the opening.
    pub(crate) fn cancel_token(&self) -> Cancel {
        self.cancel.clone().unwrap_or_default()
    }

    /// The defaults, changed by `HOISTWAY_LENIENT` (`true` or `false`), `HOISTWAY_CACHE` and `HOISTWAY_CACHE_BYTES`. An offset
    /// is about one file: no variable sets it.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) names the variable; those of opening the cache.
    pub fn from_env() -> Result<Self> {
        Ok(Self {
            lenient: Self::lenient_from_env()?,
            #[cfg(feature = "objects")]
            cache: NodeCache::chosen(None, None)?,
            ..Self::default()
        })
    }

    /// What `HOISTWAY_LENIENT` says, or else the default.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](crate::Error::InvalidOption) names the variable.
    pub fn lenient_from_env() -> Result<bool> {
        let mut lenient = Self::default().lenient;
        environment::apply(&[("HOISTWAY_LENIENT", "lenient")], |option, value| {
            lenient = environment::boolean(option, value)?;
            Ok(())
        })?;
        Ok(lenient)
    }
}
