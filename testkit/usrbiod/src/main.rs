//! `usrbiod ROOT MOUNT_POINT [--chunk-bytes N] [--read-only]`: serves a directory as a 3FS until its input ends. Commands
//! on its input change how it behaves; see `usrbiod::serve_commands`.

use std::{env, io, path::Path, process::ExitCode};
use usrbiod::{Daemon, Options, serve_commands};

const USAGE: &str = "usage: usrbiod ROOT MOUNT_POINT [--chunk-bytes N] [--read-only]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use io::Write as _;
            let _ = writeln!(io::stderr(), "usrbiod: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> io::Result<()> {
    let usage = || io::Error::other(USAGE);
    let mut arguments = env::args_os().skip(1);
    let (root, mount_point) = (arguments.next().ok_or_else(usage)?, arguments.next().ok_or_else(usage)?);
    let mut options = Options::default();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--read-only") => options.read_only = true,
            Some("--chunk-bytes") => {
                let value = arguments.next().ok_or_else(usage)?;
                options.chunk_bytes =
                    value.to_str().and_then(|value| value.parse().ok()).ok_or_else(usage)?;
            }
            _ => return Err(usage()),
        }
    }
    let daemon = Daemon::mount(Path::new(&root), Path::new(&mount_point), &options)?;
    serve_commands(&daemon, io::stdin().lock(), io::stdout().lock())
}
