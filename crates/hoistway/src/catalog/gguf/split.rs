//! Models in several files: what each says of itself, and how the others are called.
#![forbid(unsafe_code)]

use super::{GgufError, Header, Value};
use crate::source::SourceName;
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Files of one model, at most: what fits the number that counts them.
const MAX_FILES: u64 = u16::MAX as u64;
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The part of a split model that a file says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::catalog) struct Part {
    /// Counted from 0.
    number: u64,
    count: u64,
}

impl Part {
    /// What a header says, or `None` if the model is in one file.
    pub(in crate::catalog) fn of(header: &Header) -> Option<Self> {
        let number = |key| header.metadata.get(key).and_then(Value::as_u64);
        let count = number(COUNT)?;
        (count > 1).then(|| Self { number: number(NUMBER).unwrap_or_default(), count })
    }

    /// Fails if a header that tells of no other files has fewer tensors than it promises, or does not say how many
    /// files there are.
    pub(in crate::catalog) fn check_whole(header: &Header, tensors: u64) -> Result<(), GgufError> {
        let whole = Self { number: 0, count: 1 };
        match header.metadata.get(COUNT) {
            Some(found) if found.as_u64().is_none() => Err(whole.differs(COUNT, Some(found), 1)),
            _ => whole.check_tensors(header, tensors),
        }
    }

    /// The files of the model, of which `path` is one.
    ///
    /// # Errors
    /// [`GgufError::SplitCount`]; [`GgufError::SplitName`] if the name is not that of this part.
    pub(in crate::catalog) fn siblings(self, path: &Path) -> Result<Vec<PathBuf>, GgufError> {
        let Self { number, count } = self;
        if count > MAX_FILES {
            return Err(GgufError::SplitCount { count, limit: MAX_FILES });
        }
        let name = Name::of(path)
            .filter(|name| name.count == count)
            .filter(|name| name.number.checked_sub(1) == Some(number))
            .ok_or(GgufError::SplitName { number, count })?;
        let name_of_path = SourceName::from(path);
        Ok((1..=count).map(|number| name_of_path.beside(&Name { number, ..name }.to_string())).collect())
    }

    /// Fails unless `header` is that of the file at `number` of this model.
    pub(in crate::catalog) fn check_member(self, header: &Header, number: u64) -> Result<(), GgufError> {
        for (key, expected) in [(COUNT, self.count), (NUMBER, number)] {
            let found = header.metadata.get(key);
            if found.and_then(Value::as_u64) != Some(expected) {
                return Err(self.differs(key, found, expected));
            }
        }
        Ok(())
    }

    /// Fails unless the first file promises as many tensors as all files have.
    pub(in crate::catalog) fn check_tensors(self, first: &Header, tensors: u64) -> Result<(), GgufError> {
        let Some(promised) = first.metadata.get(TENSORS) else { return Ok(()) };
        match promised.as_u64() {
            None => Err(self.differs(TENSORS, Some(promised), tensors)),
            Some(promised) if promised != tensors => {
                Err(GgufError::SplitTensors { count: self.count, promised, found: tensors })
            }
            Some(_) => Ok(()),
        }
    }

    fn differs(self, key: &'static str, found: Option<&Value>, expected: u64) -> GgufError {
        let found = match found {
            None => "not given".into(),
            // It may be of megabytes.
            Some(Value::String(_)) => "a string".into(),
            Some(value) => value.to_string(),
        };
        GgufError::Split { count: self.count, key, found, expected }
    }
}

/// A name such as `model-00002-of-00003.gguf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::catalog) struct Name<'a> {
    stem: &'a str,
    number: u64,
    /// Files of the model.
    count: u64,
}

impl<'a> Name<'a> {
    /// The name of a file, if it is of that form.
    pub(in crate::catalog) fn of(path: &'a Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (name, count) = name.rsplit_once("-of-")?;
        let (stem, number) = name.rsplit_once('-')?;
        // As `Display` writes them, and not otherwise: else the file would not be among its own siblings.
        let number_of = |text: &str| text.parse::<u64>().ok().filter(|number| text == format!("{number:05}"));
        Some(Self { stem, number: number_of(number)?, count: number_of(count)? })
    }

    /// Whether both are files of one model, by their names.
    pub(in crate::catalog) fn is_sibling(&self, other: &Self) -> bool {
        (self.stem, self.count) == (other.stem, other.count)
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stem, number, count } = self;
        write!(f, "{stem}-{number:05}-of-{count:05}.gguf")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_those_of_their_siblings() {
        let path = Path::new("models/a-b-00002-of-00003.gguf");
        let siblings = Part { number: 1, count: 3 }.siblings(path).unwrap();
        let expected = [1, 2, 3].map(|number| format!("models/a-b-0000{number}-of-00003.gguf"));
        assert_eq!(siblings, expected.map(PathBuf::from));
    }

    #[test]
    fn more_files_than_can_be_counted_are_refused() {
        let siblings = |count: u64| {
            let name = format!("a-00001-of-{count:05}.gguf");
            Part { number: 0, count }.siblings(Path::new(&name))
        };
        assert_eq!(siblings(65_535).unwrap().len(), 65_535);
        let found = siblings(65_536);
        assert!(matches!(found, Err(GgufError::SplitCount { count: 65_536, .. })), "{found:?}");
    }

    #[test]
    fn names_that_say_something_else_are_refused() {
        for name in [
            "a-00001-of-00003.gguf",
            "a-00002-of-00004.gguf",
            "a.gguf",
            "a-2-of-3.gguf",
            "a-00002-of-00003",
            "a-000002-of-00003.gguf",
            "a-00002-of-000003.gguf",
            "a-+0002-of-00003.gguf",
        ] {
            let found = Part { number: 1, count: 3 }.siblings(Path::new(name));
            assert!(matches!(found, Err(GgufError::SplitName { number: 1, count: 3 })), "{name}: {found:?}");
        }
    }
}
