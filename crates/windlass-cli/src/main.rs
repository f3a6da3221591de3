//! The `windlass` command.
//!
//! `arguments` says what can be typed; each subcommand has its file; `failure` turns errors into messages and exit
//! codes. Results go to standard output, everything else to standard error.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod charts;
mod doctor;
mod failure;
mod inspect;
mod key_values;
#[cfg(target_os = "linux")]
mod kv;
mod load;
mod output;
mod tree;
mod verify;
mod warm;

use arguments::{Arguments, Command};
use clap::{CommandFactory, Parser};
use failure::Failure;
use std::{process::ExitCode, thread};

/// Bytes of the stack that a command runs on. That of the first thread may be too short (`ulimit -s`).
const STACK_BYTES: usize = 2 << 20;

fn main() -> ExitCode {
    match thread::Builder::new().name("windlass".into()).stack_size(STACK_BYTES).spawn(run_command) {
        Ok(command) => command.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        // The system gives no thread: this one works.
        Err(_) => run_command(),
    }
}

fn run_command() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_env("WINDLASS_LOG").unwrap_or_default();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Load(arguments) => load::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Warm(arguments) => warm::run(&arguments),
        Command::Bench { what } => bench::run(&what),
        Command::Doctor(arguments) => doctor::run(&arguments),
        #[cfg(target_os = "linux")]
        Command::Kv { what } => kv::run(&what),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "windlass", &mut script);
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
