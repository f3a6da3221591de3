//! Names of shards, such as `model-00001-of-00003.safetensors`, and whether a set of them is complete.
#![forbid(unsafe_code)]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

/// Digits of each number, at least.
const DIGITS: usize = 5;

/// The name of one file of several that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardName<'a> {
    /// What comes before the numbers.
    pub(crate) stem: &'a str,
    /// Its number, from 1.
    pub(crate) number: usize,
    /// How many there are.
    pub(crate) count: usize,
}

impl<'a> ShardName<'a> {
    /// Takes a name apart, if it is one of a shard.
    pub(crate) fn of(file_name: &'a str) -> Option<Self> {
        let (rest, count) = file_name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        Some(Self { stem, number: parse(number)?, count: parse(count)? })
    }
}

fn parse(digits: &str) -> Option<usize> {
    let is_number = digits.len() >= DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// The set that lacks files, in words, if there is one.
pub(crate) fn incomplete_set(files: &[PathBuf]) -> Option<String> {
    let mut sets: BTreeMap<(&str, usize), BTreeSet<usize>> = BTreeMap::new();
    for path in files {
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(ShardName { stem, number, count }) = name.and_then(ShardName::of)
            && (1..=count).contains(&number)
        {
            sets.entry((stem, count)).or_default().insert(number);
        }
    }
    let ((stem, count), numbers) = sets.into_iter().find(|((_, count), numbers)| numbers.len() < *count)?;
    Some(format!("it has {} of the {count} files of '{stem}-…-of-{count:05}'", numbers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let of = |name| ShardName::of(name).map(|shard| (shard.stem.to_owned(), shard.number, shard.count));
        assert_eq!(of("model-00002-of-00010.safetensors"), Some(("model".into(), 2, 10)));
        assert_eq!(of("a-b.fp16-123456-of-123457.safetensors"), Some(("a-b.fp16".into(), 123_456, 123_457)));
        for name in ["model.safetensors", "model-1-of-3.safetensors", "model-00001-of-00003.bin", "-of-"] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn a_set_that_lacks_a_file_is_named() {
        let files = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let whole = files(&["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "x.safetensors"]);
        assert_eq!(incomplete_set(&whole), None);
        assert!(incomplete_set(&whole[1..]).unwrap().contains("1 of the 2 files of 'm-"));
    }
}
