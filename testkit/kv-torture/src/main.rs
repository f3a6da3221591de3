//! `kv-torture`: stores blocks that are known by their numbers, is killed or loses its power, and counts what became of
//! them.
//!
//! `write`, `disk` and `check` are what a harness calls around a power cut ([`torture.py`](../torture.py)); `kill` and `soak`
//! are whole trials.
#![allow(clippy::print_stdout, reason = "it is a program")]

mod blocks;
mod check;
mod disk;
mod kill;
mod soak;
mod write;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Stores blocks for ever, and prints the number of each when it is acknowledged.
    Write(write::Arguments),
    /// Loads blocks and prints what was found as JSON. Exits with 1 if anything is wrong or lost.
    Check(check::Arguments),
    /// Is a disk that records its writes, and leaves what a power cut may leave of them.
    Disk(disk::Arguments),
    /// Kills writers again and again, and checks after each.
    Kill(kill::Arguments),
    /// Several processes use one store, while all kinds of things go wrong.
    Soak(soak::Arguments),
    /// One of the processes of `soak`.
    #[command(hide = true)]
    SoakWorker(soak::WorkerArguments),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Write(arguments) => write::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Disk(arguments) => disk::run(&arguments),
        Command::Kill(arguments) => kill::run(&arguments),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::SoakWorker(arguments) => soak::work(&arguments),
    }
}
