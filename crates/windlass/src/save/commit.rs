//! How the files of a sharded save get their names, so that whoever looks finds one save, whole.
//!
//! The index is what tells a directory's reader which files belong together. So new files take names that no index
//! names, the index is replaced in one step, and only then do old files go. Where files lie without an index, one that
//! names them comes first.
#![forbid(unsafe_code)]

use super::{SaveReport, folder::Folder, io_error, lock::FolderLock, temp::TempFile};
use crate::{
    Catalog, Error, Result,
    catalog::{
        index::{Index, MAX_INDEX_BYTES},
        shard_name::{ShardName, incomplete_set},
    },
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read, Write},
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

    fn index(&self) -> String {
        format!("{}.index.json", self.single)
    }

    /// Whether a file of this name is a shard of some save of this name.
    fn is_shard(&self, name: &str) -> bool {
        let set = ShardName::of(name).and_then(|shard| shard.stem.strip_prefix(self.stem));
        set.is_some_and(|set| {
            let number = set.strip_prefix("-set");
            set.is_empty() || number.is_some_and(|number| number.parse::<usize>().is_ok())
        })
    }
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
        let lock = match FolderLock::wait(folder, go_on)? {
            Ok(lock) => Some(lock),
            Err(error) => {
                let note = "the folder cannot be locked, so saves to it at the same time are not kept apart";
                report.notes.push(format!("{note}: {error}"));
                None
            }
        };
        let indexed = read_index(&folder.path.join(names.index()))?;
        Ok(Self { folder, names, indexed, _lock: lock })
    }

    /// Names complete files, `contents` are the tensors of each, and removes those of earlier saves.
    pub(super) fn run(
        mut self,
        temps: Vec<TempFile>,
        contents: &[Vec<&str>],
        total_size: u64,
        report: &mut SaveReport,
    ) -> Result<()> {
        if self.indexed.is_none() {
            self.index_what_is_there()?;
        }
        if let [content] = contents
            && self.single_is_free()?
        {
            return self.name_single(temps, content, total_size, report);
        }
        let names = self.free_names(temps.len())?;
        let weight_map = names
            .iter()
            .zip(contents)
            .flat_map(|(name, content)| content.iter().map(move |tensor| (*tensor, name.as_str())));
        // On the disk before the first name is given: nothing but renaming is left then.
        let index = self.new_index(weight_map.collect(), total_size)?;
        self.name_shards(temps, &names)?;
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
    fn index_what_is_there(&mut self) -> Result<()> {
        let old: Vec<PathBuf> = self.old_files().into_iter().map(|name| self.path(&name)).collect();
        if old.is_empty() || incomplete_set(&old).is_some() {
            return Ok(());
        }
        // What cannot be read is no loss.
        let Ok(catalog) = Catalog::open(&old) else { return Ok(()) };
        let name_of = |path: &'_ PathBuf| {
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let names: Vec<String> = catalog.files().iter().map(|file| name_of(&file.path)).collect();
        let tensors = catalog.tensors();
        if tensors.is_empty() {
            return Ok(());
        }
        let weight_map = tensors.iter().map(|tensor| (&*tensor.name, names[tensor.file.index()].as_str()));
        let total_size = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        self.new_index(weight_map.collect(), total_size)?.persist(&self.path(&self.names.index()))?;
        self.folder.sync()?;
        self.indexed = Some(names.into_iter().collect());
        Ok(())
    }

    /// Whether a file may take the single name in one step.
    fn single_is_free(&mut self) -> Result<bool> {
        let Some(indexed) = &self.indexed else { return Ok(true) };
        if !indexed.contains(self.names.single) {
            return Ok(true);
        }
        if indexed.len() > 1 {
            return Ok(false);
        }
        // The index names the single file alone: without it and what else lies there, that is the same checkpoint.
        for shard in self.shards() {
            remove(&self.path(&shard))?;
        }
        self.folder.sync()?;
        remove(&self.path(&self.names.index()))?;
        self.folder.sync()?;
        self.indexed = None;
        Ok(true)
    }

    fn name_single(
        self,
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
                Some(self.new_index(weight_map, total_size)?)
            }
        };
        for temp in temps {
            temp.persist(&path)?;
        }
        match index {
            None => self.folder.sync_saved(&path)?,
            Some(index) => {
                self.folder.sync()?;
                index.persist(&self.path(&self.names.index()))?;
                self.folder.sync_saved(&path)?;
            }
        }
        self.remove_old(&[self.names.single].into(), report);
        if self.indexed.is_some() {
            remove_or_note(&self.path(&self.names.index()), report);
            self.sync_or_note(report);
        }
        report.paths.push(path);
        Ok(())
    }

    /// Gives shards their names, or none of them.
    fn name_shards(&self, temps: Vec<TempFile>, names: &[String]) -> Result<()> {
        let mut named = 0;
        let all = temps.into_iter().zip(names).try_for_each(|(temp, name)| {
            temp.persist(&self.path(name))?;
            named += 1;
            Ok(())
        });
        all.and_then(|()| self.folder.sync()).inspect_err(|_| {
            for name in &names[..named] {
                let _ = remove(&self.path(name));
            }
        })
    }

    /// Names for `count` shards none of which is taken.
    fn free_names(&self, count: usize) -> Result<Vec<String>> {
        // Each taken set holds one file at least, so there is a free one among these.
        let taken = self.shards().len();
        (1..=taken + 1)
            .map(|set| (1..=count).map(|number| self.names.shard(set, number, count)).collect())
            .find(|names: &Vec<String>| {
                names.iter().all(|name| fs::symlink_metadata(self.path(name)).is_err())
            })
            .ok_or_else(|| Error::Internal("there is no free name for shards".into()))
    }

    /// A complete index that has no name yet.
    fn new_index(&self, weight_map: BTreeMap<&str, &str>, total_size: u64) -> Result<TempFile> {
        let path = self.path(&self.names.index());
        let text = IndexText { metadata: IndexMetadata { total_size }, weight_map };
        let temp = self.folder.new_temp()?;
        let write = || {
            let mut text = serde_json::to_vec_pretty(&text)?;
            text.push(b'\n');
            let mut file = temp.file();
            file.write_all(&text)?;
            if self.folder.is_synced() { file.sync_all() } else { Ok(()) }
        };
        write().map_err(|source| io_error("write", &path, source))?;
        Ok(temp)
    }

    /// Removes all files of earlier saves but those of these names.
    fn remove_old(&self, keep: &BTreeSet<&str>, report: &mut SaveReport) {
        let indexed = self.indexed.iter().flatten().filter(|name| name.ends_with(".safetensors"));
        let old: BTreeSet<String> = self.old_files().into_iter().chain(indexed.cloned()).collect();
        for name in old.iter().filter(|name| !keep.contains(name.as_str())) {
            remove_or_note(&self.path(name), report);
        }
        self.sync_or_note(report);
    }

    /// The save is complete and on the disk: that old files are gone need not be.
    fn sync_or_note(&self, report: &mut SaveReport) {
        if let Err(error) = self.folder.sync() {
            report.notes.push(format!("files of an earlier save may be there again after a loss of power: {error}"));
        }
    }

    /// The single file and the shards that the folder holds.
    fn old_files(&self) -> Vec<String> {
        let mut names = self.shards();
        if fs::symlink_metadata(self.path(self.names.single)).is_ok() {
            names.push(self.names.single.to_owned());
        }
        names
    }

    fn shards(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder.path).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| self.names.is_shard(name)).collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path.join(name)
    }
}

/// The files that the index at `path` names; `None` if there is no index, and no files if it cannot be understood.
fn read_index(path: &Path) -> Result<Option<BTreeSet<String>>> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut text));
    match read {
        Ok(_) => {
            let index = Index::parse(&text);
            let files = index.iter().flat_map(Index::files).map(str::to_owned);
            Ok(Some(files.collect()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(io_error("read", path, source)),
    }
}

fn remove(path: &Path) -> Result<()> {
    #[cfg(test)]
    super::crash_tests::step();
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.map_err(|source| io_error("remove", path, source)),
    }
}

/// The save is complete: what cannot be removed any more is no failure of it.
fn remove_or_note(path: &Path, report: &mut SaveReport) {
    if let Err(error) = remove(path) {
        report.notes.push(format!("a file of an earlier save is left: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_other_names_are_not_taken_for_ones_own() {
        let names = ShardNames::new("model.safetensors");
        for own in [names.shard(1, 1, 3), names.shard(2, 3, 3), names.shard(17, 100_000, 100_001)] {
            assert!(names.is_shard(&own), "{own}");
        }
        for other in [
            "model.safetensors",
            "model.safetensors.index.json",
            "model-2-00001-of-00003.safetensors",
            "model-settings-00001-of-00003.safetensors",
            "model.fp16-00001-of-00003.safetensors",
            "my-model-00001-of-00003.safetensors",
        ] {
            assert!(!names.is_shard(other), "{other}");
        }
    }
}
