//! `hoistway moe`: what a model whose experts do not fit into memory can expect of a policy and a budget.
//!
//! `traces` opens traces as these commands need them.

mod arguments;
mod failure;
mod generate;
mod pack;
mod plan;
mod replay;
mod traces;

pub(crate) use arguments::Moe;

use crate::failure::Failure;

pub(crate) fn run(moe: &Moe) -> Result<(), Failure> {
    match moe {
        Moe::Replay(arguments) => replay::run(arguments),
        Moe::Plan(arguments) => plan::run(arguments),
        Moe::Pack(arguments) => pack::run(arguments),
        Moe::Generate(arguments) => generate::run(arguments),
    }
}
