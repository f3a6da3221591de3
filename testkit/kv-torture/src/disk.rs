//! A disk with a cache of its own, as a file of a FUSE file system: it records what is written to it, and what a power cut
//! would leave. A loop device on that file passes each flush of its file system on.
#![forbid(unsafe_code)]

use crate::blocks::mix;
use anyhow::Context;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, WriteFlags,
};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io::{BufRead, Write as _},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, UNIX_EPOCH},
};

const CHUNK: usize = 64 << 10;
/// What drives write as a whole.
const SECTOR: usize = 512;
const DISK: INodeNo = INodeNo(2);
const NO_CACHING: Duration = Duration::ZERO;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Where its file `disk` appears, and a file `cut-SEED` for each line `cut SEED` of the standard input. A line
    /// `forget SEED` removes one; the end of the input unmounts it.
    mount_point: PathBuf,
    /// Bytes of the disk.
    #[arg(long, default_value_t = 3 << 30)]
    bytes: u64,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let state = Arc::<Mutex<State>>::default();
    let server = Server { state: state.clone(), bytes: arguments.bytes };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::RW, MountOption::FSName("recorded".into())];
    let session = fuser::spawn_mount(server, &arguments.mount_point, &config)?;
    let mut out = std::io::stdout().lock();
    let mut say = |line: &str| writeln!(out, "{line}").and_then(|()| out.flush());
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (word, seed) = line.split_once(' ').with_context(|| format!("no command: {line}"))?;
        let seed: u64 = seed.parse().with_context(|| format!("no number: {line}"))?;
        let mut state = lock(&state);
        if word == "cut" {
            let (image, what) = state.cut(seed);
            state.cuts.insert(seed, image);
            say(&what)?;
        } else {
            state.cuts.remove(&seed);
            say("forgotten")?;
        }
    }
    session.umount_and_join()?;
    Ok(())
}

/// Bytes of a disk. Clones share what neither changes.
#[derive(Clone, Default)]
struct Image(BTreeMap<u64, Arc<Vec<u8>>>);

impl Image {
    fn write(&mut self, mut offset: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let at = offset as usize % CHUNK;
            let (now, rest) = bytes.split_at(bytes.len().min(CHUNK - at));
            let chunk = self.0.entry(offset / CHUNK as u64).or_insert_with(|| Arc::new(vec![0; CHUNK]));
            Arc::make_mut(chunk)[at..at + now.len()].copy_from_slice(now);
            offset += now.len() as u64;
            bytes = rest;
        }
    }

    fn read(&self, mut offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = offset as usize % CHUNK;
            let count = (len - bytes.len()).min(CHUNK - at);
            match self.0.get(&(offset / CHUNK as u64)) {
                Some(chunk) => bytes.extend_from_slice(&chunk[at..at + count]),
                None => bytes.resize(bytes.len() + count, 0),
            }
            offset += count as u64;
        }
        bytes
    }
}

#[derive(Default)]
struct State {
    /// What reads get.
    current: Image,
    /// What every power cut leaves.
    flushed: Image,
    /// What was written since the last flush, oldest first.
    unflushed: Vec<(u64, Vec<u8>)>,
    cuts: BTreeMap<u64, Image>,
}

impl State {
    fn flush(&mut self) {
        for (offset, bytes) in std::mem::take(&mut self.unflushed) {
            self.flushed.write(offset, &bytes);
        }
    }

    /// What a power cut leaves now, and what that is in words: of what was not flushed all, none, some of the writes, or
    /// some of their sectors.
    fn cut(&self, seed: u64) -> (Image, String) {
        let mut image = self.flushed.clone();
        let (mut chance, mut kept) = (seed, 0);
        let mut is_kept = || {
            chance = mix(chance);
            chance.is_multiple_of(2)
        };
        let mode = ["all", "none", "some", "sectors"][(mix(!seed) % 4) as usize];
        for (offset, bytes) in &self.unflushed {
            let unit = if mode == "sectors" { SECTOR } else { bytes.len() };
            for (number, piece) in (0u64..).zip(bytes.chunks(unit.max(1))) {
                if mode == "all" || mode != "none" && is_kept() {
                    image.write(offset + number * unit as u64, piece);
                    kept += piece.len();
                }
            }
        }
        let written: usize = self.unflushed.iter().map(|(_, bytes)| bytes.len()).sum();
        (image, format!("{mode} {} {written} {kept}", self.unflushed.len()))
    }
}

struct Server {
    state: Arc<Mutex<State>>,
    bytes: u64,
}

impl Server {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_root = inode.0 == 1;
        FileAttr {
            ino: inode,
            size: if is_root { 0 } else { self.bytes },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_root { FileType::Directory } else { FileType::RegularFile },
            perm: if is_root { 0o755 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The seed of the cut that an inode is; `None` for the disk itself.
fn seed_of(inode: INodeNo) -> Option<u64> {
    inode.0.checked_sub(DISK.0 + 1)
}

impl Filesystem for Server {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_string_lossy();
        let seed = name.strip_prefix("cut-").and_then(|seed| seed.parse::<u64>().ok());
        let inode = match seed {
            Some(seed) if lock(&self.state).cuts.contains_key(&seed) => INodeNo(DISK.0 + 1 + seed),
            None if name == "disk" => DISK,
            _ => return reply.error(Errno::ENOENT),
        };
        reply.entry(&NO_CACHING, &self.attributes(inode), Generation(0));
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&NO_CACHING, &self.attributes(inode));
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // No write may stay in this kernel's page cache.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = self.bytes.saturating_sub(offset).min(size.into()) as usize;
        let state = lock(&self.state);
        let image = match seed_of(inode) {
            None => Some(&state.current),
            Some(seed) => state.cuts.get(&seed),
        };
        match image.map(|image| image.read(offset, len)) {
            Some(bytes) => reply.data(&bytes),
            None => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > self.bytes) {
            return reply.error(Errno::ENOSPC);
        }
        let mut state = lock(&self.state);
        match seed_of(inode) {
            None => {
                state.current.write(offset, bytes);
                state.unflushed.push((offset, bytes.to_vec()));
            }
            Some(seed) => match state.cuts.get_mut(&seed) {
                Some(image) => image.write(offset, bytes),
                None => return reply.error(Errno::EIO),
            },
        }
        reply.written(bytes.len() as u32);
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        if seed_of(inode).is_none() {
            lock(&self.state).flush();
        }
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        reply: ReplyDirectory,
    ) {
        reply.ok();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> State {
        let mut state = State::default();
        state.unflushed.push((0, vec![1; 4096]));
        state.flush();
        for (number, place) in (0u64..64).zip((4096..).step_by(4096)) {
            state.unflushed.push((place, vec![number as u8 + 2; 4096]));
        }
        state
    }

    #[test]
    fn a_cut_keeps_what_was_flushed_and_parts_of_the_rest() {
        let state = disk();
        let mut modes = BTreeMap::new();
        for seed in 0..64 {
            let (image, what) = state.cut(seed);
            assert_eq!(image.read(0, 4096), vec![1; 4096], "what was flushed");
            let mode = what.split(' ').next().unwrap_or_default().to_owned();
            let kept: Vec<Vec<bool>> = (1..65u64)
                .map(|block| {
                    let bytes = image.read(block * 4096, 4096);
                    bytes.chunks(SECTOR).map(|sector| sector == vec![block as u8 + 1; SECTOR]).collect()
                })
                .collect();
            let whole = kept.iter().filter(|sectors| sectors.iter().all(|kept| *kept)).count();
            let gone = kept.iter().filter(|sectors| sectors.iter().all(|kept| !*kept)).count();
            match mode.as_str() {
                "all" => assert_eq!(whole, 64),
                "none" => assert_eq!(gone, 64),
                "some" => assert!(whole + gone == 64 && whole > 0 && gone > 0, "{what}"),
                _ => assert!(whole + gone < 64, "{what}"),
            }
            *modes.entry(mode).or_insert(0) += 1;
        }
        assert_eq!(modes.len(), 4, "{modes:?}");
    }

    #[test]
    fn a_later_write_of_the_same_place_goes_on_top() {
        let mut state = State::default();
        state.unflushed.push((100, vec![1; CHUNK]));
        state.unflushed.push((200, vec![2; 10]));
        state.flush();
        let bytes = state.flushed.read(99, CHUNK + 2);
        assert_eq!(
            (bytes[0], bytes[1], bytes[101], bytes[111], bytes[CHUNK], bytes[CHUNK + 1]),
            (0, 1, 2, 1, 1, 0)
        );
    }
}
