//! Open segment files.
#![forbid(unsafe_code)]

use super::{failed, lock};
use crate::{
    Error, Result,
    disk::{DataFile, Disk, DiskFile, FileAccess, read_full},
    format::{
        BLOCK_LEN, HEADER_LEN, Invalid, MAX_SHARDS, PAGE, PAGED_VERSION, record::BlockRecord,
        segment::SegmentHead,
    },
};
use std::{
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};
use uuid::Uuid;

/// A segment, of ours or of another writer.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) head: SegmentHead,
    pub(super) file: Box<dyn DiskFile>,
    pub(super) data: Arc<DataFile>,
    /// The number of failed syncs. Data written before one may be lost, even if a later sync succeeds.
    failures: AtomicU64,
    /// Held while the disk syncs.
    syncing: Mutex<()>,
}

impl Segment {
    pub(super) fn new(head: SegmentHead, file: Box<dyn DiskFile>, data: Arc<DataFile>) -> Arc<Self> {
        Arc::new(Self { head, file, data, failures: AtomicU64::new(0), syncing: Mutex::default() })
    }

    /// Opens a segment; [`Invalid`] if it is damaged, or another writer's.
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        access: FileAccess,
        writer: Uuid,
        number: u32,
    ) -> Result<Result<Arc<Self>, Invalid>> {
        let head = match read_head(disk, path)? {
            Ok(head) if head.writer == writer && head.number == number => head,
            Ok(_) => return Ok(Err(Invalid::Value("it is another segment"))),
            Err(Invalid::Version { found }) => {
                return Err(Error::UnknownFormat { path: path.to_owned(), found, known: PAGED_VERSION });
            }
            Err(why) => return Ok(Err(why)),
        };
        let (file, data) = disk.open_data(path, access).map_err(failed("opening", path))?;
        Ok(Ok(Self::new(head, file, data)))
    }

    /// Whether a record describes something that can be in this segment.
    pub(super) fn may_have(&self, block: &BlockRecord) -> bool {
        let payload = u64::from(block.stride_blocks) * BLOCK_LEN * u64::from(block.shards);
        u32::from(block.shards) <= MAX_SHARDS
            && block.payload_len <= payload
            && self.head.extent(block.slot, HEADER_LEN as u64 + payload).is_some()
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Syncs all bytes that were written so far.
    pub(super) fn sync(&self) -> io::Result<()> {
        // One sync at a time, so that none succeeds after a failure that is not counted yet.
        let _syncing = lock(&self.syncing);
        self.file.sync_data().inspect_err(|_| {
            self.failures.fetch_add(1, Ordering::AcqRel);
        })
    }
}

/// The head of a segment file.
pub(super) fn read_head(disk: &dyn Disk, path: &Path) -> Result<Result<SegmentHead, Invalid>> {
    let file = disk.open(path, FileAccess::Read).map_err(failed("opening", path))?;
    let mut page = vec![0; PAGE];
    let read = read_full(&*file, &mut page, 0).map_err(failed("reading", path))?;
    Ok(SegmentHead::parse(&page[..read]))
}
