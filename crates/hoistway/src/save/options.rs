//! What a caller can ask of a save.
#![forbid(unsafe_code)]

use crate::{
    DirectIo, Error, Result,
    catalog::{safetensors::MAX_HEADER_BYTES, shard_name::ShardName},
    environment::{self, bytes, count, named},
};

/// Characters that names of files do not have.
const NOT_IN_NAMES: &[char] = if cfg!(windows) { &['/', '\\', ':', '\0'] } else { &['/', '\0'] };

/// Data begins at multiples of this: the reference implementation's.
const LEAST_ALIGNMENT: u64 = 8;

/// How to save. The default is safe, and its files are those of the reference implementation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Whether writes go past the page cache. `Auto`: where the file system allows it, if the save is synced and large.
    pub direct: DirectIo,
    /// Whether the save is on the disk when it returns, so that it survives a loss of power.
    /// What is saved to a store always is there when it returns.
    pub sync: bool,
    /// The data begins at a multiple of this, and so does the first tensor: headers are padded with blanks. With 4096,
    /// direct reads find whole blocks. A multiple of 8, the default, up to the longest header that the format allows.
    pub alignment: u64,
    /// Threads that write. Default: by cores. A save needs memory for an extent of 4 MiB of each, and for the text of all headers.
    pub threads: Option<usize>,
    /// Bytes that are sent to an object store at a time, at most: parts of 8 MiB, or longer ones of objects of more than 80 GB. At
    /// least one part is. What comes from a device needs as much memory of the host. Default: 64 MiB.
    pub in_flight: u64,
    /// The endpoint and credentials of the object store. An error in saves to a path.
    #[cfg(feature = "objects")]
    pub store: Option<hoistway_objects::StoreOptions>,
}

hoistway_io::setters! {
    SaveOptions {
        direct: DirectIo,
        sync: bool,
        alignment: u64,
        threads: Option<usize>,
        in_flight: u64,
        #[cfg(feature = "objects")]
        store: Option<hoistway_objects::StoreOptions>,
    }
}

/// Bytes that are sent to a store at a time, unless the caller says otherwise.
const IN_FLIGHT_BYTES: u64 = 64 << 20;

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            direct: DirectIo::Auto,
            sync: true,
            alignment: LEAST_ALIGNMENT,
            threads: None,
            in_flight: IN_FLIGHT_BYTES,
            #[cfg(feature = "objects")]
            store: None,
        }
    }
}

impl SaveOptions {
    /// Sets an option by its name, from text.
    ///
    /// ```
    /// use hoistway::{DirectIo, save::SaveOptions};
    /// let mut options = SaveOptions::default();
    /// options.set("direct", "never")?;
    /// options.set("alignment", "4KiB")?;
    /// assert_eq!(options.direct, DirectIo::Never);
    /// # Ok::<(), hoistway::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if there is no such option or it cannot have this value.
    pub fn set(&mut self, option: &str, value: &str) -> Result<()> {
        match option {
            "direct" => self.direct = named("direct", value)?,
            "sync" => self.sync = environment::boolean("sync", value)?,
            "alignment" => {
                self.alignment = bytes("alignment", value)?;
                self.check()?;
            }
            "threads" => self.threads = Some(count("threads", value)?),
            "in_flight" => self.in_flight = bytes("in_flight", value)?,
            _ => {
                let reason = "the options are direct, sync, alignment, threads, in_flight";
                return Err(Error::invalid_option("option", option, reason));
            }
        }
        Ok(())
    }

    /// Fails for options that no save to a path can work with.
    pub(super) fn check_for_path(&self) -> Result<()> {
        #[cfg(feature = "objects")]
        if self.store.is_some() {
            let reason = "it is for objects: save to an s3://, gs:// or az:// URL, or leave it out";
            return Err(Error::invalid_option("store", "...", reason));
        }
        self.check()
    }

    /// Fails for numbers that no save can work with.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(threads) = self.threads {
            count("threads", &threads.to_string())?;
        }
        let alignments = LEAST_ALIGNMENT..=MAX_HEADER_BYTES;
        if !alignments.contains(&self.alignment) || !self.alignment.is_multiple_of(LEAST_ALIGNMENT) {
            let reason = format!("it must be a multiple of {LEAST_ALIGNMENT}, up to {MAX_HEADER_BYTES}");
            return Err(Error::invalid_option("alignment", self.alignment, reason));
        }
        Ok(())
    }
}

/// How tensors are given out to files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sharding {
    /// Most bytes of tensors in one file, unless it holds a single one.
    pub max_shard_bytes: u64,
    /// Name of the file if there is one alone, such as `model.safetensors`: what the names of shards and index are
    /// made of.
    pub file_name: String,
}

hoistway_io::setters! {
    Sharding {
        max_shard_bytes: u64,
        file_name: String,
    }
}

impl Default for Sharding {
    /// Hugging Face's: 5 GB, `model.safetensors`.
    fn default() -> Self {
        Self { max_shard_bytes: 5_000_000_000, file_name: "model.safetensors".into() }
    }
}

impl Sharding {
    /// Sets the size of shards from text such as `5GB`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn set_max_shard_size(&mut self, value: &str) -> Result<()> {
        self.max_shard_bytes = bytes("max_shard_size", value)?;
        self.check()
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.max_shard_bytes == 0 {
            return Err(Error::invalid_option("max_shard_size", 0, "no tensor fits a shard of no bytes"));
        }
        match self.file_name.strip_suffix(".safetensors") {
            Some(stem) if stem.starts_with('.') => {
                let reason = "loads of a folder leave out hidden files";
                Err(Error::invalid_option("filename", &self.file_name, reason))
            }
            Some(_) if self.is_one_of_several() => {
                let reason = "loads of a folder take it for one of several shards";
                Err(Error::invalid_option("filename", &self.file_name, reason))
            }
            Some(stem) if !stem.is_empty() && !stem.contains(NOT_IN_NAMES) => Ok(()),
            _ => {
                let reason = "it must be a name such as model.safetensors, without folders";
                Err(Error::invalid_option("filename", &self.file_name, reason))
            }
        }
    }

    /// Whether the name is that of a shard beside which others are missed.
    fn is_one_of_several(&self) -> bool {
        ShardName::of(&self.file_name).is_some_and(|shard| (shard.number, shard.count) != (1, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_values_say_what_is_allowed() {
        for (option, value, said) in [
            ("alignment", "0", "multiple of 8"),
            ("alignment", "4", "multiple of 8"),
            ("alignment", "12", "multiple of 8"),
            ("alignment", "1GiB", "multiple of 8"),
            ("direct", "maybe", "auto"),
            ("sync", "perhaps", "true or false"),
            ("threads", "0", "1 to 256"),
            ("shards", "3", "the options are"),
        ] {
            let error = SaveOptions::default().set(option, value).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let check = |name: &str| Sharding { file_name: name.into(), ..Sharding::default() }.check();
        for (name, said) in [
            ("model.bin", "a name such as"),
            (".safetensors", "a name such as"),
            ("a/model.safetensors", "a name such as"),
            ("", "a name such as"),
            (".model.safetensors", "hidden"),
            ("model-00001-of-00002.safetensors", "several shards"),
            ("model-00002-of-00001.safetensors", "several shards"),
        ] {
            let error = check(name).unwrap_err().to_string();
            assert!(error.contains(said), "{name}: {error}");
        }
        check("model-00001-of-00001.safetensors").unwrap();
        for name in [r"other\model.safetensors", "c:model.safetensors"] {
            assert_eq!(check(name).is_err(), cfg!(windows), "{name}");
        }
        assert!(Sharding::default().set_max_shard_size("0").is_err());
    }
}
