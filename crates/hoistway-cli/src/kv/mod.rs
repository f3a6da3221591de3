//! `hoistway kv`: a look at, and care for, a store of KV-cache blocks.
//!
//! `opened` opens stores as these commands need them.

mod arguments;
mod bench;
mod collect;
mod failure;
mod list;
mod opened;
mod remove;
mod stat;
mod verify;

pub(crate) use arguments::Kv;

use crate::failure::Failure;

pub(crate) fn run(kv: &Kv) -> Result<(), Failure> {
    match kv {
        Kv::Stat(arguments) => stat::run(arguments),
        Kv::Ls(arguments) => list::run(arguments),
        Kv::Verify(arguments) => verify::run(arguments),
        Kv::Gc(arguments) => collect::run(arguments),
        Kv::Rm(arguments) => remove::run(arguments),
        Kv::Bench(arguments) => bench::run(arguments),
    }
}
