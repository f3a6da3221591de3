//! The program of the `hoistway` command.
#![forbid(unsafe_code)]

use hoistway_cli::Invocation;
use hoistway_trace::Timeline;
use std::{
    env,
    io::{self, Write as _},
    process::ExitCode,
};
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

fn main() -> ExitCode {
    let timeline = Timeline::new();
    let log = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_filter(filter());
    tracing_subscriber::registry().with(log).with(timeline.layer()).init();
    let program = env::current_exe().into_iter().map(Into::into).collect();
    let arguments = env::args_os().skip(1).collect();
    hoistway_cli::run(&Invocation { program, arguments, timeline }).into()
}

/// The filter in `HOISTWAY_LOG`. A value that has no meaning is named on standard error, and counts as unset.
fn filter() -> EnvFilter {
    let unasked = || EnvFilter::new("error,hoistway::environment=warn,hoistway_objects::pace=warn");
    let Some(wanted) = env::var_os("HOISTWAY_LOG") else { return unasked() };
    let wanted = wanted.to_string_lossy();
    EnvFilter::try_new(&wanted).unwrap_or_else(|error| {
        // If nothing listens, there is no one to tell.
        let _ = writeln!(io::stderr(), "hoistway: HOISTWAY_LOG={wanted} is ignored: {error}");
        unasked()
    })
}
