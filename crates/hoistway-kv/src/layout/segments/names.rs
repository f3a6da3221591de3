//! Names of the files of a store.
#![forbid(unsafe_code)]

use crate::disk::TEMPORARY;

pub(super) use crate::layout::directory::{LEASE, NAMESPACES, SUPERBLOCK};

/// Which blocks of others a process has used.
pub(super) const HEAT: &str = "HEAT";

/// Checkpoints of even generations, and of odd ones.
pub(super) const CHECKPOINTS: [&str; 2] = ["CKPT-a", "CKPT-b"];

pub(super) fn segment(number: u32) -> String {
    format!("seg-{number:06}.kvs")
}

pub(super) fn log(number: u32) -> String {
    format!("idx-{number:06}.log")
}

pub(super) fn checkpoint(generation: u64) -> &'static str {
    CHECKPOINTS[usize::from(generation % 2 == 1)]
}

/// A file in a writer's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriterFile {
    Segment(u32),
    Log(u32),
    Checkpoint,
    Lease,
    /// It is not whole, and never will be.
    Temporary,
    Unknown,
}

impl WriterFile {
    pub(super) fn parse(name: &str) -> Self {
        let number = |prefix: &str, suffix: &str, write: fn(u32) -> String| {
            let number = name.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()?;
            (write(number) == name).then_some(number)
        };
        if let Some(number) = number("seg-", ".kvs", segment) {
            Self::Segment(number)
        } else if let Some(number) = number("idx-", ".log", log) {
            Self::Log(number)
        } else if CHECKPOINTS.contains(&name) {
            Self::Checkpoint
        } else if name == LEASE {
            Self::Lease
        } else if name.ends_with(TEMPORARY) {
            Self::Temporary
        } else {
            Self::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for number in [0, 1, 999_999, 1_000_000, u32::MAX] {
            assert_eq!(WriterFile::parse(&segment(number)), WriterFile::Segment(number));
            assert_eq!(WriterFile::parse(&log(number)), WriterFile::Log(number));
        }
        assert_eq!(WriterFile::parse("CKPT-a.tmp"), WriterFile::Temporary);
        for other in ["seg-1.kvs", "seg-+00001.kvs", "seg-000001.log", "idx-99999999999.log"] {
            assert_eq!(WriterFile::parse(other), WriterFile::Unknown, "{other}");
        }
    }
}
