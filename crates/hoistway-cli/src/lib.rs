//! The `hoistway` command, as its program and the Python package run it. Internal: its interface promises nothing.
//!
//! `arguments` says what can be typed; each subcommand has its file; `failure` turns errors into messages and exit
//! codes. Results go to standard output, everything else to standard error.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod cache;
mod charts;
mod doctor;
mod failure;
mod inspect;
mod key_values;
#[cfg(target_os = "linux")]
mod kv;
mod load;
mod moe;
mod output;
#[cfg(all(test, target_os = "linux"))]
mod reference;
mod tree;
mod verify;
mod warm;

use arguments::{Arguments, Command};
use clap::{CommandFactory, Parser};
use failure::Failure;
use hoistway_trace::Timeline;
use std::{ffi::OsString, thread};

/// Bytes of the stack that a command runs on. That of the first thread may be too short (`ulimit -s`).
const STACK_BYTES: usize = 2 << 20;

/// The exit code of a command that panicked: that of every program in Rust.
const PANICKED: u8 = 101;

/// A command line.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The program that runs this command, with the arguments that select it; empty if not known. Processes that the
    /// command starts run it too.
    pub program: Vec<OsString>,
    /// What follows the name of the command.
    pub arguments: Vec<OsString>,
    /// Records what the caller's subscriber sees, of which it has a layer.
    pub timeline: Timeline,
}

/// Runs a command, and returns its exit code. Prints its results, and its errors. What the engine logs is the caller's to show.
pub fn run(invocation: &Invocation) -> u8 {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("hoistway".into()).stack_size(STACK_BYTES);
        match builder.spawn_scoped(scope, || run_here(invocation)) {
            // The hook has printed the panic.
            Ok(command) => command.join().unwrap_or(PANICKED),
            // The system gives no thread: this one works.
            Err(_) => run_here(invocation),
        }
    })
}

fn run_here(invocation: &Invocation) -> u8 {
    let name = OsString::from("hoistway");
    let arguments = match Arguments::try_parse_from([&name].into_iter().chain(&invocation.arguments)) {
        Ok(arguments) => arguments,
        Err(error) => {
            // If nothing listens, the exit code has to do.
            let _ = error.print();
            return error.exit_code().try_into().unwrap_or(2);
        }
    };
    match run_command(arguments.command, invocation) {
        Ok(()) => 0,
        Err(failure) => failure.report(),
    }
}

/// The command of the Python package runs programs itself, and does not come here.
fn run_needs_python(arguments: &arguments::Run) -> Failure {
    let program = arguments.command.first().map(|program| program.display().to_string()).unwrap_or_default();
    Failure::told(
        format!(
            "'{program}' is not run: 'hoistway run' puts hoistway in place of safetensors in Python programs, and this command came \
             without the Python package: install that, and call its 'hoistway run' or 'python -m hoistway.run'"
        ),
        1,
    )
}

fn run_command(command: Command, invocation: &Invocation) -> Result<(), Failure> {
    match command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Load(arguments) => load::run(&arguments, &invocation.timeline),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Warm(arguments) => warm::run(&arguments),
        Command::Cache { what } => cache::run(&what),
        Command::Bench { what } => bench::run(&what, &invocation.program),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Run(arguments) => Err(run_needs_python(&arguments)),
        #[cfg(target_os = "linux")]
        Command::Kv { what } => kv::run(&what),
        #[cfg(not(target_os = "linux"))]
        Command::Kv { .. } => Err(Failure::told("stores of KV-cache blocks are available on Linux only", 6)),
        Command::Moe { what } => moe::run(&what),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "hoistway", &mut script);
            output::write(&script)
        }
        Command::Man { directory: Some(directory) } => {
            std::fs::create_dir_all(&directory).map_err(Failure::output)?;
            clap_mangen::generate_to(Arguments::command(), directory).map_err(Failure::output)
        }
        Command::Man { directory: None } => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Arguments::command()).render(&mut page).map_err(Failure::output)?;
            output::write(&page)
        }
    }
}
