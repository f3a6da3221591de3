//! `threads`: blocking `pread`s, direct or through the page cache.
#![forbid(unsafe_code)]

use super::{Access, BlockingRead, ReadOp};
use std::io;
use windlass_io::file;

/// `pread`.
#[derive(Debug, Default)]
pub(crate) struct Pread;

impl BlockingRead for Pread {
    fn read(&self, op: &mut ReadOp) -> io::Result<usize> {
        let source = op.source.clone();
        let file = match op.access {
            Access::Direct => source.direct_file()?,
            Access::Buffered => source.buffered_file(),
        };
        let offset = op.offset;
        file::read_at(file, op.target()?, offset)
    }
}
