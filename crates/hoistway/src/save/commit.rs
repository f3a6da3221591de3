//! How the files of a sharded save get their names, so that a reader always finds one whole save.
//!
//! The index is what tells a directory's reader which files belong together. So new files take names that no index
//! names, the index is replaced in one step, and only then do old files go. Where files lie without an index, one that
//! names them comes first.
#![forbid(unsafe_code)]

use super::{SaveReport, folder::Folder, io_error, lock, temp::TempFile};
use crate::{
    Alignment, Catalog, Error, Result,
    catalog::{
        OpenFile,
        index::{Index, MAX_INDEX_BYTES},
        shard_name::{ShardName, incomplete_set},
    },
    memory,
    sys::{folders::FolderLock, permissions::Permissions},
};
use hoistway_io::file::{read_exact_at, write_all_at};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, IoSlice},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// What a sharded save calls its files.
#[derive(Debug)]
pub(super) struct ShardNames<'a> {
    /// The name of a single file, such as `model.safetensors`.
    single: &'a str,
    /// What names of shards begin with.
    stem: &'a str,
}

impl<'a> ShardNames<'a> {
    /// Names made of that of a single file, which was checked.
    pub(super) fn new(single: &'a str) -> Self {
        Self { single, stem: single.strip_suffix(".safetensors").unwrap_or(single) }
    }

    /// The name of shard `number` of `count` if no such name is taken, and otherwise of the set that is the `set`th.
    fn shard(&self, set: usize, number: usize, count: usize) -> String {
        let set = if set == 1 { String::new() } else { format!("-set{set}") };
        format!("{}{set}-{number:05}-of-{count:05}.safetensors", self.stem)
    }

    /// What messages call file `number` of `count`.
    pub(super) fn plain(&self, number: usize, count: usize) -> String {
        if count == 1 { self.single.to_owned() } else { self.shard(1, number, count) }
    }

    /// The name of the index.
    pub(super) fn index(&self) -> String {
        format!("{}.index.json", self.single)
    }

    /// Names for `count` shards none of which is taken.
    #[cfg(feature = "objects")]
    pub(super) fn free(&self, count: usize, is_taken: impl Fn(&String) -> bool) -> Result<Vec<String>> {
        let names = |set| (1..=count).map(|number| self.shard(set, number, count)).collect::<Vec<_>>();
        (1..=MAX_SETS)
            .map(names)
            .find(|names| !names.iter().any(&is_taken))
            .ok_or_else(|| Error::Internal("there is no free name for shards".into()))
    }

    /// What the name of a file begins with that may be a shard of some save of this name.
    pub(super) fn stem_of<'n>(&self, name: &'n str) -> Option<&'n str> {
        let stem = ShardName::of(name)?.stem;
        let set = stem.strip_prefix(self.stem)?;
        (set.is_empty() || set.strip_prefix("-set").is_some_and(is_set_number)).then_some(stem)
    }
}

/// Whether it is such a number as sets have: from 2.
fn is_set_number(digits: &str) -> bool {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number && !digits.starts_with('0') && digits != "1"
}

/// Sets of files in one folder of a store whose names are tried.
#[cfg(feature = "objects")]
const MAX_SETS: usize = 100_000;

/// The bytes of an index file.
pub(super) fn index_text(weight_map: BTreeMap<&str, &str>, total_size: u64) -> io::Result<Vec<u8>> {
    let mut text =
        serde_json::to_vec_pretty(&IndexText { metadata: IndexMetadata { total_size }, weight_map })?;
    text.push(b'\n');
    Ok(text)
}

/// What an index file says.
#[derive(Serialize)]
struct IndexText<'a> {
    metadata: IndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_size: u64,
}

/// The naming of the files of one save. Alone in its folder as long as it lasts.
pub(super) struct Commit<'a> {
    folder: &'a Folder,
    names: &'a ShardNames<'a>,
    /// Files that the index names.
    indexed: Option<BTreeSet<String>>,
    /// Whether this save made that index.
    made_index: bool,
    /// Whether files of this save may have their names.
    has_named: bool,
    /// Files that indexes of other names name: other checkpoints'.
    theirs: BTreeSet<String>,
    /// What new files get.
    permissions: Permissions,
    _lock: Option<FolderLock>,
}

impl<'a> Commit<'a> {
    /// Waits for others who name files in the folder, and looks at what it holds. Asks `go_on` for the last time.
    pub(super) fn begin(
        folder: &'a Folder,
        names: &'a ShardNames<'a>,
        go_on: impl Fn(u64) -> ControlFlow<()>,
        report: &mut SaveReport,
    ) -> Result<Self> {
        let lock = match lock::wait(folder, go_on, &mut report.notes)? {
            Ok(lock) => Some(lock),
            Err(error) => {
                let note = "the folder cannot be locked, so saves to it at the same time are not kept apart";
                report.notes.push(format!("{note}: {error}"));
                None
            }
        };
        let indexed = read_index(&folder.path.join(names.index()))?;
        let own_index = names.index();
        let others = entries(folder).filter(|name| is_index(name) && *name != own_index);
        // One that cannot be read says nothing of whose files are whose.
        let theirs = others.filter_map(|name| read_index(&folder.path.join(name)).ok()?).flatten().collect();
        let permissions = Permissions::of_new_file();
        let mut commit = Self {
            folder,
            names,
            indexed,
            made_index: false,
            has_named: false,
            theirs,
            permissions,
            _lock: lock,
        };
        let replaced = commit.old_files().into_iter().chain([commit.names.index()]);
        commit.permissions =
            Permissions::replacing(&replaced.map(|name| commit.path(&name)).collect::<Vec<_>>())?;
        Ok(commit)
    }

    /// Names complete files, `contents` are the tensors of each, and removes those of earlier saves.
    pub(super) fn run(
        mut self,
        temps: Vec<TempFile>,
        contents: &[Vec<&str>],
        total_size: u64,
        report: &mut SaveReport,
    ) -> Result<()> {
        let done = self.name(temps, contents, total_size, report);
        if done.is_err() && self.made_index && !self.has_named {
            // It would stay in the way of programs that write such files and no index.
            let _ = fs::remove_file(self.path(&self.names.index()));
        }
        done
    }

    fn name(
        &mut self,
        mut temps: Vec<TempFile>,
        contents: &[Vec<&str>],
        total_size: u64,
        report: &mut SaveReport,
    ) -> Result<()> {
        let count = temps.len();
        for (temp, number) in temps.iter_mut().zip(1..) {
            let path = self.path(&self.names.plain(number, count));
            self.permissions.give(temp.opened()?, &path, &mut report.notes);
            temp.close(&path)?;
        }
        if self.indexed.is_none() {
            self.index_what_is_there(report)?;
        }
        if let [content] = contents
            && self.single_is_free(report)?
        {
            return self.name_single(temps, content, total_size, report);
        }
        let (names, index) = loop {
            let names = self.free_names(temps.len())?;
            let weight_map = names
                .iter()
                .zip(contents)
                .flat_map(|(name, content)| content.iter().map(move |tensor| (*tensor, name.as_str())));
            // On the disk before the first name is given: nothing but renaming is left then.
            let index = self.new_index(weight_map.collect(), total_size, report)?;
            // A process that does not lock the folder may have taken a name in the meantime.
            if self.name_shards(&mut temps, &names)? {
                break (names, index);
            }
        };
        let index_path = self.path(&self.names.index());
        index.persist(&index_path)?;
        self.folder.sync_saved(&index_path)?;
        self.remove_old(&names.iter().map(String::as_str).collect(), report);
        report.paths.extend(names.iter().map(|name| self.path(name)));
        report.paths.push(index_path);
        Ok(())
    }

    /// Where a single file or complete shards lie without an index: one that names these, so that new files beside them
    /// change nothing for those who read the directory.
    fn index_what_is_there(&mut self, report: &mut SaveReport) -> Result<()> {
        let old: Vec<PathBuf> = self.old_files().into_iter().map(|name| self.path(&name)).collect();
        if old.is_empty() || incomplete_set(&old).is_some() {
            return Ok(());
        }
        // What cannot be read is no loss.
        let Ok(catalog) = Catalog::open(&old) else { return Ok(()) };
        let name_of = |path: &Path| {
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let names: Vec<String> = catalog.files().iter().map(|file| name_of(file.source.as_path())).collect();
        let tensors = catalog.tensors();
        if tensors.is_empty() {
            return Ok(());
        }
        let weight_map = tensors.iter().map(|tensor| (&*tensor.name, names[tensor.file.index()].as_str()));
        let total_size = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        self.new_index(weight_map.collect(), total_size, report)?.persist(&self.path(&self.names.index()))?;
        self.indexed = Some(names.into_iter().collect());
        self.made_index = true;
        self.folder.sync()
    }

    /// Whether a file may take the single name in one step.
    fn single_is_free(&mut self, report: &mut SaveReport) -> Result<bool> {
        let Some(indexed) = &self.indexed else { return Ok(true) };
        if !indexed.contains(self.names.single) {
            return Ok(true);
        }
        // Without its index, a directory is all files that lie there.
        if indexed.len() > 1 || !self.made_index && self.has_others_files() {
            return Ok(false);
        }
        // The index names the single file alone: without it and what else lies there, that is the same checkpoint.
        for shard in self.shards() {
            remove(&self.path(&shard), report)?;
        }
        self.folder.sync()?;
        remove(&self.path(&self.names.index()), report)?;
        self.folder.sync()?;
        self.indexed = None;
        Ok(true)
    }

    fn name_single(
        &mut self,
        temps: Vec<TempFile>,
        content: &[&str],
        total_size: u64,
        report: &mut SaveReport,
    ) -> Result<()> {
        let path = self.path(self.names.single);
        let index = match &self.indexed {
            None => None,
            Some(_) => {
                let weight_map = content.iter().map(|tensor| (*tensor, self.names.single)).collect();
                Some(self.new_index(weight_map, total_size, report)?)
            }
        };
        for temp in temps {
            temp.persist(&path)?;
            self.has_named = true;
        }
        match index {
            None => self.folder.sync_saved(&path)?,
            Some(index) => {
                self.folder.sync()?;
                index.persist(&self.path(&self.names.index()))?;
                self.folder.sync_saved(&path)?;
            }
        }
        report.paths.push(path);
        self.remove_old(&[self.names.single].into(), report);
        if self.indexed.is_some() {
            let index = self.path(&self.names.index());
            if self.made_index || !self.has_others_files() {
                remove_or_note(&index, report);
                self.sync_or_note(report);
            } else {
                report.paths.push(index);
            }
        }
        Ok(())
    }

    /// Gives shards their names, or none of them; `false` if a name is taken.
    fn name_shards(&mut self, temps: &mut [TempFile], names: &[String]) -> Result<bool> {
        self.has_named = true;
        let mut is_free = Ok(true);
        for (temp, name) in temps.iter_mut().zip(names) {
            is_free = temp.persist_new(&self.path(name));
            if !matches!(is_free, Ok(true)) {
                break;
            }
        }
        let all = is_free.and_then(|is_free| self.folder.sync().map(|()| is_free));
        if !matches!(all, Ok(true)) {
            for (temp, name) in temps.iter_mut().zip(names) {
                temp.take_back(&self.path(name));
            }
            self.has_named = temps.iter().any(TempFile::is_named);
        }
        all
    }

    /// Names for `count` shards none of which is taken.
    fn free_names(&self, count: usize) -> Result<Vec<String>> {
        // Each taken set holds one file at least, so there is a free one among these.
        let taken = entries(self.folder).filter(|name| self.names.stem_of(name).is_some()).count();
        (1..=taken + 1)
            .map(|set| (1..=count).map(|number| self.names.shard(set, number, count)).collect())
            .find(|names: &Vec<String>| {
                names.iter().all(|name| fs::symlink_metadata(self.path(name)).is_err())
            })
            .ok_or_else(|| Error::Internal("there is no free name for shards".into()))
    }

    /// A complete index that has no name yet.
    fn new_index(
        &self,
        weight_map: BTreeMap<&str, &str>,
        total_size: u64,
        report: &mut SaveReport,
    ) -> Result<TempFile> {
        let path = self.path(&self.names.index());
        let mut temp = self.folder.new_temp()?;
        let write = || {
            let text = index_text(weight_map, total_size)?;
            write_all_at(temp.file()?, &mut [IoSlice::new(&text)], &mut 0, Alignment::BYTE)?;
            if self.folder.is_synced() { temp.sync() } else { Ok(()) }
        };
        write().map_err(|source| io_error("write", &path, source))?;
        self.permissions.give(temp.opened()?, &path, &mut report.notes);
        // Where a quota is full, the index is what it has no room for. No shard has its name yet.
        temp.close_copy(&path)?;
        Ok(temp)
    }

    /// Removes all files of earlier saves but those of these names. Files that the old index names are left if their names
    /// are none that a save gives: others may need them.
    fn remove_old(&self, keep: &BTreeSet<&str>, report: &mut SaveReport) {
        let old: BTreeSet<String> = self.old_files().into_iter().collect();
        for name in old.iter().filter(|name| !keep.contains(name.as_str())) {
            remove_or_note(&self.path(name), report);
        }
        self.sync_or_note(report);
        let is_left = |name: &&String| {
            name.ends_with(".safetensors")
                && !keep.contains(name.as_str())
                && !old.contains(*name)
                && fs::symlink_metadata(self.path(name)).is_ok()
        };
        for name in self.indexed.iter().flatten().filter(is_left) {
            let reason = "the index that was replaced named it, but it may belong to others too";
            report.notes.push(format!("{} is left: {reason}", self.path(name).display()));
        }
    }

    /// The save is complete and on the disk: that old files are gone need not be.
    fn sync_or_note(&self, report: &mut SaveReport) {
        if let Err(error) = self.folder.sync() {
            report
                .notes
                .push(format!("files of an earlier save may be there again after a loss of power: {error}"));
        }
    }

    /// The single file and the shards that the folder holds.
    fn old_files(&self) -> Vec<String> {
        let mut names = self.shards();
        let single = self.names.single;
        if !self.theirs.contains(single) && fs::symlink_metadata(self.path(single)).is_ok() {
            names.push(single.to_owned());
        }
        names
    }

    /// Shards of earlier saves.
    fn shards(&self) -> Vec<String> {
        entries(self.folder).filter(|name| self.is_own_shard(name)).collect()
    }

    fn is_own_shard(&self, name: &str) -> bool {
        match self.names.stem_of(name) {
            _ if self.theirs.contains(name) => false,
            None => false,
            Some(stem) if stem == self.names.stem => true,
            // A set of this name, unless another save uses the name that sets of this one have.
            Some(stem) => {
                let index = self.path(&format!("{stem}.safetensors.index.json"));
                self.indexed.iter().flatten().any(|indexed| indexed == name)
                    || fs::symlink_metadata(index).is_err()
            }
        }
    }

    /// Whether tensors lie in the folder that no save of this name put there.
    fn has_others_files(&self) -> bool {
        entries(self.folder).any(|name| {
            // Loads of the directory leave hidden files out.
            name.ends_with(".safetensors")
                && !name.starts_with('.')
                && name != self.names.single
                && !self.is_own_shard(&name)
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path.join(name)
    }
}

/// The files that the index at `path` names; `None` if there is no index, and no files if it cannot be understood.
fn read_index(path: &Path) -> Result<Option<BTreeSet<String>>> {
    let open_file = match OpenFile::open(path) {
        Ok(open_file) => open_file,
        Err(hoistway_io::Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // One byte more than an index may have shows that it is none.
    let len = open_file.identity.len().min(MAX_INDEX_BYTES + 1);
    let mut text = memory::zeroed(len, "memory for an index")?;
    let read = open_file.file().and_then(|file| read_exact_at(&file, &mut text, 0));
    read.map_err(|source| io_error("read", path, source))?;
    let index = Index::parse(&text);
    let files = index.iter().flat_map(Index::files).map(str::to_owned);
    Ok(Some(files.collect()))
}

/// The names in a folder, as far as they are text.
fn entries(folder: &Folder) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(&folder.path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// Whether it is the name of an index, also of a variant's, such as `model.safetensors.index.fp16.json`.
fn is_index(name: &str) -> bool {
    name.contains(".safetensors.index.") && name.ends_with(".json")
}

fn remove(path: &Path, report: &mut SaveReport) -> Result<()> {
    #[cfg(test)]
    super::crash_tests::step(super::crash_tests::Step::Remove(path.to_owned()));
    match fs::remove_file(path) {
        Ok(()) => report.removed.push(path.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(io_error("remove", path, source)),
    }
    Ok(())
}

/// The save is complete: what cannot be removed any more is no failure of it.
fn remove_or_note(path: &Path, report: &mut SaveReport) {
    if let Err(error) = remove(path, report) {
        report.notes.push(format!("a file of an earlier save is left: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_other_names_are_not_taken_for_ones_own() {
        let names = ShardNames::new("model.safetensors");
        for shard in [names.shard(1, 1, 3), names.shard(2, 3, 3), names.shard(17, 100_000, 100_001)] {
            assert!(names.stem_of(&shard).is_some(), "{shard}");
        }
        for other in [
            "model.safetensors",
            "model.safetensors.index.json",
            "model-2-00001-of-00003.safetensors",
            "model-settings-00001-of-00003.safetensors",
            "model.fp16-00001-of-00003.safetensors",
            "my-model-00001-of-00003.safetensors",
            "model-set-00001-of-00003.safetensors",
            "model-set1-00001-of-00003.safetensors",
            "model-set02-00001-of-00003.safetensors",
            "model-set+2-00001-of-00003.safetensors",
        ] {
            assert!(names.stem_of(other).is_none(), "{other}");
        }
    }
}
