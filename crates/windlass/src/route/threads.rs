//! `threads`: one blocking `pread` at a time. Several threads with such a lane make the pool.
#![forbid(unsafe_code)]

use super::{Access, Done, Lane, ReadOp};
use std::io;

/// One thread's share of the pool.
#[derive(Debug, Default)]
pub(crate) struct PreadLane {
    pending: Option<ReadOp>,
}

impl Lane for PreadLane {
    fn capacity(&self) -> usize {
        1
    }

    fn in_flight(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    fn push(&mut self, op: ReadOp) {
        self.pending = Some(op);
    }

    fn submit_and_wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        if let Some(mut op) = self.pending.take() {
            let result = read(&mut op);
            done.push(Done { op, result });
        }
        Ok(())
    }
}

fn read(op: &mut ReadOp) -> io::Result<usize> {
    let source = op.source.clone();
    let file = match op.access {
        Access::Direct => source.direct_file()?,
        Access::Buffered => source.buffered_file(),
    };
    let offset = op.offset;
    Ok(rustix::io::pread(file, op.target()?, offset)?)
}
