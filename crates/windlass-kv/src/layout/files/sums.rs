//! Checksums of blocks whose files have no room for them. Each writer appends those of its blocks to a file of its own,
//! and reads the others'. One counts only for the very file that it was written for.
#![forbid(unsafe_code)]

use super::{failed, lock, names, writer::Writer};
use crate::{
    Fingerprint, Result,
    disk::{Disk, DiskFile, FileAccess, RealDisk, is_unexpected_kind, read_full, write_full},
    format::checksum,
};
use std::{
    collections::{HashMap, HashSet},
    fs::Metadata,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Mutex,
};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U32, U64},
};

const MAGIC: U32 = U32::new(u32::from_le_bytes(*b"WLK1"));
const RECORD_LEN: usize = size_of::<Raw>();
/// Records that are read at a time.
const READ_RECORDS: usize = 1024;
/// A file is not written anew before it has so many records that nobody needs.
const LEAST_STALE: u64 = 64 << 10;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    /// Of all that follows.
    checksum: U32,
    magic: U32,
    fingerprint: [u8; 16],
    inode: U64,
    modified_seconds: I64,
    len: U64,
    modified_nanoseconds: U32,
    payload_checksum: U32,
    reserved: U64,
}

const _: () = assert!(RECORD_LEN == 64);

/// The checksum of a file, and which file that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    inode: u64,
    modified: (i64, u32),
    len: u64,
    checksum: u32,
}

impl Sum {
    pub(super) fn new(file: &Metadata, checksum: u32) -> Self {
        let modified = (file.mtime(), file.mtime_nsec() as u32);
        Self { inode: file.ino(), modified, len: file.len(), checksum }
    }

    fn is_of(&self, file: &Metadata) -> bool {
        *self == Self::new(file, self.checksum)
    }
}

fn to_bytes(fingerprint: &Fingerprint, sum: &Sum) -> [u8; RECORD_LEN] {
    let mut raw = Raw {
        checksum: 0.into(),
        magic: MAGIC,
        fingerprint: *fingerprint.as_bytes(),
        inode: sum.inode.into(),
        modified_seconds: sum.modified.0.into(),
        len: sum.len.into(),
        modified_nanoseconds: sum.modified.1.into(),
        payload_checksum: sum.checksum.into(),
        reserved: 0.into(),
    };
    raw.checksum = checksum(&raw.as_bytes()[4..]).into();
    zerocopy::transmute!(raw)
}

/// What a record says; `None` if it is torn, or none of ours.
fn parse(bytes: &[u8]) -> Option<(Fingerprint, Sum)> {
    let raw = Raw::ref_from_bytes(bytes).ok()?;
    if raw.magic != MAGIC || raw.checksum.get() != checksum(&bytes[4..]) {
        return None;
    }
    let sum = Sum {
        inode: raw.inode.get(),
        modified: (raw.modified_seconds.get(), raw.modified_nanoseconds.get()),
        len: raw.len.get(),
        checksum: raw.payload_checksum.get(),
    };
    Some((Fingerprint(raw.fingerprint), sum))
}

/// All checksums that are known.
#[derive(Debug, Default)]
pub(super) struct Sums {
    known: Mutex<Known>,
    own: Mutex<Option<Own>>,
    /// How far other writers' files have been read, and which files those were.
    followed: Mutex<HashMap<PathBuf, (u64, u64)>>,
}

#[derive(Debug, Default)]
struct Known {
    sums: HashMap<Fingerprint, (Sum, Writing)>,
    /// How many of these are in this process's file.
    own: usize,
    /// Of which it was learned since the last look at all files began.
    since_look: HashSet<Fingerprint>,
}

/// Whose file a checksum is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writing {
    Own,
    Others,
}

impl Known {
    fn insert(&mut self, fingerprint: Fingerprint, sum: Sum, writing: Writing) {
        self.remove(&fingerprint);
        self.own += usize::from(writing == Writing::Own);
        self.sums.insert(fingerprint, (sum, writing));
        self.since_look.insert(fingerprint);
    }

    fn remove(&mut self, fingerprint: &Fingerprint) {
        if let Some((_, Writing::Own)) = self.sums.remove(fingerprint) {
            self.own -= 1;
        }
    }

    fn retain(&mut self, is_needed: impl Fn(&Fingerprint) -> bool) {
        let own = &mut self.own;
        self.sums.retain(|fingerprint, (_, writing)| {
            let stays = is_needed(fingerprint);
            *own -= usize::from(!stays && *writing == Writing::Own);
            stays
        });
    }
}

/// The file that this process appends to.
#[derive(Debug)]
struct Own {
    path: PathBuf,
    file: Box<dyn DiskFile>,
    len: u64,
}

impl Sums {
    /// The checksum of a file, if it is the one that it was written for.
    pub(super) fn get(&self, fingerprint: &Fingerprint, file: &Metadata) -> Option<u32> {
        let known = lock(&self.known);
        known.sums.get(fingerprint).filter(|(sum, _)| sum.is_of(file)).map(|(sum, _)| sum.checksum)
    }

    /// Whether this process has written some, which others need when it has ended.
    pub(super) fn are_own(&self) -> bool {
        lock(&self.own).is_some()
    }

    pub(super) fn forget(&self, fingerprint: &Fingerprint) {
        lock(&self.known).remove(fingerprint);
    }

    /// Writes checksums down.
    pub(super) fn append(
        &self,
        disk: &RealDisk,
        writer: &Writer,
        sums: &[(Fingerprint, Sum)],
        sync: Sync,
    ) -> Result<()> {
        if sums.is_empty() {
            return Ok(());
        }
        let mut known = lock(&self.known);
        sums.iter().for_each(|(fingerprint, sum)| known.insert(*fingerprint, *sum, Writing::Own));
        drop(known);
        let bytes: Vec<u8> = sums.iter().flat_map(|(fingerprint, sum)| to_bytes(fingerprint, sum)).collect();
        let mut own = lock(&self.own);
        let own = match &mut *own {
            Some(own) => own,
            none => {
                let path = writer.directory().join(names::CHECKSUMS);
                let file = disk.open(&path, FileAccess::CreateNew).map_err(failed("making", &path))?;
                none.insert(Own { path, file, len: 0 })
            }
        };
        // What a failed write left is overwritten by the next.
        write_full(&*own.file, &bytes, own.len).map_err(failed("writing to", &own.path))?;
        if sync == Sync::Yes {
            own.file.sync_data().map_err(failed("syncing", &own.path))?;
        }
        own.len += bytes.len() as u64;
        Ok(())
    }

    /// Writes the own checksums to a file in the writer's new directory, as the old one is gone.
    pub(super) fn restart(&self, disk: &RealDisk, writer: &Writer) -> Result<()> {
        *lock(&self.own) = None;
        let known = lock(&self.known);
        let own = known.sums.iter().filter(|(_, (_, writing))| *writing == Writing::Own);
        let own: Vec<_> = own.map(|(fingerprint, (sum, _))| (*fingerprint, *sum)).collect();
        drop(known);
        self.append(disk, writer, &own, Sync::Yes)
    }

    /// Reads what others have written since.
    pub(super) fn follow(&self, disk: &RealDisk, writers: &[PathBuf]) {
        let mut followed = lock(&self.followed);
        followed.retain(|path, _| writers.contains(path));
        for writer in writers {
            let place = followed.entry(writer.clone()).or_default();
            if let Err(error) = self.read(disk, &writer.join(names::CHECKSUMS), place)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %writer.display(), %error, "checksums of another writer cannot be read");
            }
        }
    }

    /// Reads a file from where it was read to.
    fn read(&self, disk: &RealDisk, path: &Path, (inode, read): &mut (u64, u64)) -> io::Result<()> {
        let metadata = path.metadata()?;
        if metadata.ino() != *inode {
            (*inode, *read) = (metadata.ino(), 0);
        }
        if metadata.len() <= *read {
            return Ok(());
        }
        let file = disk.open(path, FileAccess::Read)?;
        let mut bytes = vec![0; READ_RECORDS * RECORD_LEN];
        loop {
            let len = read_full(&*file, &mut bytes, *read)?;
            let mut known = lock(&self.known);
            for record in bytes[..len].chunks_exact(RECORD_LEN) {
                // What is torn is being written, and looked at again.
                let Some((fingerprint, sum)) = parse(record) else { return Ok(()) };
                known.insert(fingerprint, sum, Writing::Others);
                *read += RECORD_LEN as u64;
            }
            if len < bytes.len() {
                return Ok(());
            }
        }
    }

    /// Takes over what a writer that is gone has left, as far as somebody needs it.
    pub(super) fn adopt(
        &self,
        disk: &RealDisk,
        own: &Writer,
        gone: &Path,
        is_needed: impl Fn(&Fingerprint) -> bool,
    ) -> Result<()> {
        let theirs = Self::default();
        let path = gone.join(names::CHECKSUMS);
        match theirs.read(disk, &path, &mut (0, 0)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound || is_unexpected_kind(&error) => {
                return Ok(());
            }
            read => read.map_err(failed("reading", &path))?,
        }
        let theirs = std::mem::take(&mut lock(&theirs.known).sums);
        let needed = theirs.into_iter().filter(|(fingerprint, _)| is_needed(fingerprint));
        let needed: Vec<_> = needed.map(|(fingerprint, (sum, _))| (fingerprint, sum)).collect();
        self.append(disk, own, &needed, Sync::Yes)
    }

    /// A look at all files begins: blocks that come from now on may not be seen by it.
    pub(super) fn look_begins(&self) {
        lock(&self.known).since_look.clear();
    }

    /// A look at all files has ended: forgets what is of none that there are.
    pub(super) fn look_ends(&self, is_needed: impl Fn(&Fingerprint) -> bool) {
        let mut known = lock(&self.known);
        let since_look = std::mem::take(&mut known.since_look);
        known.retain(|fingerprint| is_needed(fingerprint) || since_look.contains(fingerprint));
        known.since_look = since_look;
    }

    /// Writes the own file anew without what nobody needs, if that is most of it.
    pub(super) fn tidy(
        &self,
        disk: &RealDisk,
        writer: &Writer,
        is_needed: impl Fn(&Fingerprint) -> bool,
    ) -> Result<()> {
        let mut own = lock(&self.own);
        let Some(own) = &mut *own else { return Ok(()) };
        let records = own.len / RECORD_LEN as u64;
        if records < LEAST_STALE || records / 2 < lock(&self.known).own as u64 {
            return Ok(());
        }
        let known = lock(&self.known);
        let own_sums = known.sums.iter().filter(|(_, (_, writing))| *writing == Writing::Own);
        let living = own_sums.filter(|(fingerprint, _)| is_needed(fingerprint));
        let bytes: Vec<u8> = living.flat_map(|(fingerprint, (sum, _))| to_bytes(fingerprint, sum)).collect();
        drop(known);
        writer.write_file(disk, &own.path, &bytes).map_err(failed("writing to", &own.path))?;
        own.file = disk.open(&own.path, FileAccess::ReadWrite).map_err(failed("opening", &own.path))?;
        own.len = bytes.len() as u64;
        Ok(())
    }
}

/// Whether what is written has to be on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sync {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::{super::writer::Said, *};
    use std::os::unix::fs::FileExt;

    const SILENT: Said = Said { capacity: 0, durability: None };

    #[test]
    fn every_flipped_bit_is_found() {
        let sum = Sum { inode: 1, modified: (-2, 3), len: 4, checksum: 5 };
        let bytes = to_bytes(&Fingerprint([6; 16]), &sum);
        assert_eq!(parse(&bytes), Some((Fingerprint([6; 16]), sum)));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&flipped), None, "bit {bit}");
        }
        assert_eq!(parse(&bytes[..63]), None);
    }

    #[test]
    fn a_checksum_counts_for_its_file_alone() {
        let root = tempfile::tempdir().unwrap();
        let writer = Writer::start(&RealDisk, root.path(), SILENT).unwrap();
        let (path, fingerprint) = (root.path().join("block"), Fingerprint([1; 16]));
        std::fs::write(&path, b"bytes").unwrap();
        let sums = Sums::default();
        let metadata = path.metadata().unwrap();
        sums.append(&RealDisk, &writer, &[(fingerprint, Sum::new(&metadata, 7))], Sync::No).unwrap();
        assert_eq!(sums.get(&fingerprint, &metadata), Some(7));

        let others = Sums::default();
        others.follow(&RealDisk, std::slice::from_ref(&writer.directory()));
        assert_eq!(others.get(&fingerprint, &metadata), Some(7));

        std::fs::write(&path, b"other bytes").unwrap();
        assert_eq!(sums.get(&fingerprint, &path.metadata().unwrap()), None);
        assert_eq!(others.get(&fingerprint, &path.metadata().unwrap()), None);
    }

    #[test]
    fn what_no_file_needs_is_forgotten_unless_it_is_newer_than_the_look() {
        let root = tempfile::tempdir().unwrap();
        let writer = Writer::start(&RealDisk, root.path(), SILENT).unwrap();
        let metadata = root.path().metadata().unwrap();
        let records = [1, 2, 3].map(|number| (Fingerprint([number; 16]), Sum::new(&metadata, 7)));
        let (gone, stays, new) = (records[0].0, records[1].0, records[2].0);
        Sums::default().append(&RealDisk, &writer, &records[..2], Sync::No).unwrap();
        let sums = Sums::default();
        sums.follow(&RealDisk, std::slice::from_ref(&writer.directory()));
        let own = Writer::start(&RealDisk, root.path(), SILENT).unwrap();
        sums.look_begins();
        sums.append(&RealDisk, &own, &records[2..], Sync::No).unwrap();
        sums.look_ends(|fingerprint| *fingerprint == stays);
        let is_known = [gone, stays, new].map(|fingerprint| sums.get(&fingerprint, &metadata).is_some());
        assert_eq!(is_known, [false, true, true]);
        assert_eq!(lock(&sums.known).own, 1);
    }

    #[test]
    fn what_follows_a_torn_record_is_read_when_it_is_whole() {
        let root = tempfile::tempdir().unwrap();
        let (path, fingerprint) = (root.path().join(names::CHECKSUMS), Fingerprint([1; 16]));
        let metadata = root.path().metadata().unwrap();
        let sum = Sum::new(&metadata, 7);
        let record = to_bytes(&fingerprint, &sum);
        let sums = Sums::default();
        std::fs::write(&path, &record[..40]).unwrap();
        sums.follow(&RealDisk, &[root.path().to_owned()]);
        assert_eq!(sums.get(&fingerprint, &metadata), None);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&record, 0).unwrap();
        sums.follow(&RealDisk, &[root.path().to_owned()]);
        assert_eq!(sums.get(&fingerprint, &metadata), Some(7));
    }
}
