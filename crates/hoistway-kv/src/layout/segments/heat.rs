//! Use by other processes: once a second, each process writes which blocks of others it has used, to a small file in its
//! directory. It reads the files of the others, and counts what they say as uses of its blocks.
#![forbid(unsafe_code)]

use super::{failed, lock, names, root::Limits, writer::Writer};
use crate::{
    Fingerprint, Result,
    disk::{FileAccess, write_full},
    format::heat::HeatFile,
};
use std::{
    collections::{HashMap, HashSet},
    io,
    sync::Mutex,
    time::Duration,
};
use uuid::Uuid;

/// Time between two looks.
const ROUND: Duration = Duration::from_secs(1);

/// Uses of blocks across processes: those of this process, and those that others published.
#[derive(Debug, Default)]
pub(super) struct Heat {
    /// Blocks of others that this process has used since it last said so.
    used: Mutex<HashSet<Fingerprint>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Duration>,
    /// The number of times that this process has published.
    round: u64,
    /// The number of each other process's publication that was read last.
    seen: HashMap<Uuid, u64>,
}

impl Heat {
    /// Notes that blocks of others were used. No more than are told of at a time.
    pub(super) fn used(&self, blocks: Vec<Fingerprint>) {
        if blocks.is_empty() {
            return;
        }
        let mut used = lock(&self.used);
        let left = Limits::MOST_HEAT.saturating_sub(used.len());
        used.extend(blocks.into_iter().take(left));
    }
}

impl Writer {
    /// Says and reads once a second what is used.
    pub(super) fn share_heat(&self) -> Result<()> {
        let now = (self.shared.surroundings.monotonic)();
        let mut state = lock(&self.shared.heat.state);
        if state.last.is_some_and(|last| now.saturating_sub(last) < ROUND) {
            return Ok(());
        }
        state.last = Some(now);
        self.read_heat(&mut state)?;
        let blocks: Vec<Fingerprint> = {
            let mut used = lock(&self.shared.heat.used);
            std::mem::take(&mut *used).into_iter().take(self.limits.heat_blocks()).collect()
        };
        if blocks.is_empty() {
            return Ok(());
        }
        // What an earlier opening of the directory has said last is another number, most likely.
        state.round = state.round.max(u64::from(self.shared.now()) << 16) + 1;
        let file = HeatFile { writer: self.id, round: state.round, blocks };
        let path = self.directory.join(names::HEAT);
        let disk = &*self.shared.disk;
        let opened = match disk.open(&path, FileAccess::ReadWrite) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => disk.open(&path, FileAccess::CreateNew),
            opened => opened,
        };
        // Nothing is lost with it but a guess: it is not synced, and one that is torn is passed over.
        let written = opened.and_then(|opened| write_full(&*opened, &file.to_bytes(), 0));
        written.map_err(failed("writing to", &path))
    }

    fn read_heat(&self, state: &mut State) -> Result<()> {
        let writers = self.shared.root.writers()?;
        state.seen.retain(|id, _| writers.iter().any(|writer| writer.id == *id));
        for writer in writers.iter().filter(|writer| writer.id != self.id) {
            let path = writer.path.join(names::HEAT);
            let read = self.shared.disk.read_file(&path, HeatFile::len(Limits::MOST_HEAT));
            let Some(said) = read.ok().and_then(|bytes| HeatFile::parse(&bytes).ok()) else { continue };
            let is_new = state.seen.insert(writer.id, said.round) != Some(said.round);
            if said.writer == writer.id && is_new {
                self.shared.index.touch(&said.blocks);
            }
        }
        Ok(())
    }
}
