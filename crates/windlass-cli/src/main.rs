//! The program of the `windlass` command.
#![forbid(unsafe_code)]

use std::{env, process::ExitCode};
use windlass_cli::Invocation;

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("WINDLASS_LOG").unwrap_or_default();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let program = env::current_exe().into_iter().map(Into::into).collect();
    let arguments = env::args_os().skip(1).collect();
    windlass_cli::run(&Invocation { program, arguments }).into()
}
