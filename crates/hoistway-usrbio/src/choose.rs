//! The choice of a client, and the proof that it reads the bytes of the file.
#![forbid(unsafe_code)]

use crate::{
    Client, Error, IovOptions, Library, LibrarySearch, Mount, Refused, Result, RingOptions, Transfer,
    file::{is_3fs, protocol_version},
    proto,
};
use std::{
    os::{fd::AsFd, unix::fs::FileExt},
    path::Path,
    time::{Duration, Instant},
};

const PROBE_BYTES: usize = 4096;
/// How long the probe's read may take. The daemon registers the buffer with InfiniBand before it.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// The client that the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// The vendor's library if there is one that works, else this crate.
    #[default]
    Auto,
    /// This crate.
    Native,
    /// The vendor's library.
    Vendor,
}

/// A mount that has proved itself, and why its client is the one it is.
#[derive(Debug)]
pub struct Chosen {
    /// The mount.
    pub mount: Mount,
    /// The reason, in a few words.
    pub reason: String,
}

/// Opens the mount that `file` lies on with the client that fits, after a [`probe`].
///
/// # Errors
/// [`Error::NotOn3fs`] for other file systems. With `Auto`, whatever is wrong with the native client: what is wrong with
/// the library is in the reason of what is chosen instead. Otherwise whatever is wrong with the client asked for.
pub fn choose(file: &Path, preference: Preference, search: &LibrarySearch) -> Result<Chosen> {
    let open = |client: Client| {
        let mount = Mount::open(file, client)?;
        probe(&mount, file).map(|()| mount)
    };
    let vendor = || Library::find(search).and_then(|library| open(Client::Vendor(library)));
    match preference {
        Preference::Native => Ok(Chosen { mount: open(Client::Native)?, reason: "asked for".into() }),
        Preference::Vendor => Ok(Chosen { mount: vendor()?, reason: "asked for".into() }),
        Preference::Auto => match vendor() {
            Ok(mount) => Ok(Chosen { mount, reason: "the vendor's library was found and works".into() }),
            Err(error) => Ok(Chosen { mount: open(Client::Native)?, reason: error.to_string() }),
        },
    }
}

/// Reads the first bytes of a file through a ring, and compares with `pread`.
///
/// # Errors
/// [`Error::ProbeFailed`] if they differ, do not come in time, or the daemon speaks another version of the protocol;
/// otherwise whatever went wrong.
pub fn probe(mount: &Mount, file: &Path) -> Result<()> {
    let failed = |reason: String| Error::ProbeFailed { path: file.to_owned(), reason };
    let opened = mount.open_file(file)?;
    let handle = opened.as_fd().try_clone_to_owned().map_err(|error| Error::system("probe", file, error))?;
    if !is_3fs(handle.as_fd()) {
        return Err(Error::NotOn3fs { path: file.to_owned(), seen: vec![mount.point().to_owned()] });
    }
    match protocol_version(handle.as_fd()) {
        Some(proto::VERSION) => {}
        Some(version) => return Err(failed(format!("the daemon speaks version {version} of the protocol"))),
        None => return Err(failed("the daemon does not tell the version of its protocol".into())),
    }
    let mut expected = [0; PROBE_BYTES];
    let len = std::fs::File::from(handle)
        .read_at(&mut expected, 0)
        .map_err(|error| Error::system("probe", file, error))?;
    if len == 0 {
        return Ok(());
    }
    let slot = mount
        .create_iov(&IovOptions { len: PROBE_BYTES, ..IovOptions::default() })?
        .cut(PROBE_BYTES)
        .ok_or_else(|| failed("its buffer has no room".into()))?;
    let mut ring =
        mount.create_ring(&RingOptions { depth: 1, farewell: Duration::ZERO, ..RingOptions::default() })?;
    match ring.push(Transfer::new(opened, 0, len, slot)) {
        Ok(()) => {}
        Err(Refused::Full(_)) => return Err(failed("an empty ring has no room".into())),
        Err(Refused::Failed(_, error)) => return Err(error),
    }
    let end = Instant::now() + PROBE_LIMIT;
    let mut completions = Vec::new();
    while ring.wait(end.saturating_duration_since(Instant::now()), &mut completions)? == 0 {
        if Instant::now() >= end {
            return Err(failed(format!("{len} bytes did not come within {PROBE_LIMIT:?}")));
        }
    }
    let mut read = [0; PROBE_BYTES];
    for completion in completions {
        let got = completion.result?;
        completion.transfer.slot.copy_to(0, &mut read[..got])?;
        if read[..got] != expected[..len] {
            return Err(failed(format!("USRBIO and pread disagree on the first {len} bytes")));
        }
    }
    Ok(())
}
