//! Checks of an object store: the way to it, its clock, its credentials, its latency, its speed.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower};
use crate::{
    Cancel, Error, Result,
    cache::NodeCache,
    catalog::OpenOptions,
    parallel,
    report::shown_rate,
    source::{Source, objects::ObjectSource, registry},
};
use bytesize::ByteSize;
use hoistway_objects::{Object, Problem, Reached, StoreProbe};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes of a request, as a load has them.
const REQUEST_BYTES: u64 = 8 << 20;
/// Connections that are compared with one.
const CONNECTIONS: u64 = 8;
/// Requests whose answers are timed.
const ANSWERS: u64 = 3;

/// Seconds by which clocks may differ before that is worth a word, and from which on stores refuse signatures.
const CLOCK_DIFFERS: u64 = 60;
const CLOCK_REFUSED: u64 = 900;

/// What the store of a URL answers.
pub(super) fn checks(url: &str, options: &OpenOptions) -> Vec<Check> {
    let cancel = options.cancel();
    let shown = hoistway_objects::shown(url);
    let name = |what: &str| format!("{shown}: {what}");
    let broken = |what: &str, finding: String, fix: &str| Check {
        name: name(what),
        status: Status::Broken,
        finding,
        fix: fix.into(),
    };
    let store = options.store.clone().unwrap_or_default();
    let probe = match StoreProbe::new(url, &store) {
        Ok(probe) => probe,
        Err(error) => return vec![broken("access", error.problem.to_string(), "")],
    };
    let mut checks = Vec::new();
    match probe.reach(cancel.flag()) {
        Ok(reached) => {
            checks.push(ok(&name("server"), way(&probe, &reached)));
            checks.push(clock(name("clock"), reached.clock_ahead_seconds, probe.is_dated()));
        }
        Err(error) => {
            checks.push(broken("server", error.problem.to_string(), fix_of(&error.problem)));
            return checks;
        }
    }
    match probe.credentials(cancel.flag()) {
        Ok(giver) => checks.push(ok(&name("credentials"), giver)),
        Err(error) => {
            checks.push(broken("credentials", error.problem.to_string(), fix_of(&error.problem)));
            return checks;
        }
    }
    let opened = Instant::now();
    let source = match open(url, options) {
        Ok(source) => source,
        Err(error) => {
            checks.push(broken("access", error.to_string(), fix_of_opening(&error)));
            return checks;
        }
    };
    let Some(remote) = ObjectSource::of(&source) else {
        checks.push(ok(&name("access"), format!("{} is on this machine", source.path().display())));
        return checks;
    };
    let object = remote.object();
    let opening = format!("{}, {} s to open", object.server(), seconds(opened.elapsed()));
    checks.push(ok(&name("access"), format!("{opening} {} of {}", object.url(), ByteSize(object.len()))));
    checks.push(match object.is_pinned() {
        true => ok(&name("version"), "told by an ETag, a generation or a commit"),
        false => {
            slower(&name("version"), "told by length and date alone", "have the server send strong ETags")
        }
    });
    checks.push(match measured(object, &cancel) {
        Ok(finding) => ok(&name("speed"), finding),
        Err(error) => broken("speed", error.to_string(), fix_of(&error.problem)),
    });
    checks.push(cache(name("cache"), options));
    checks
}

/// How connections get to the server.
fn way(probe: &StoreProbe, reached: &Reached) -> String {
    let by = match (&reached.proxy, reached.addresses.as_slice()) {
        (Some(proxy), _) => format!("through the proxy {proxy}"),
        (None, [address]) => format!("at {address}"),
        (None, [first, rest @ ..]) => format!("at {first} and {} more addresses", rest.len()),
        (None, []) => "at no address".into(),
    };
    format!("{} {by} answers a new connection after {} s", probe.server(), seconds(reached.answered_in))
}

/// Whether the clocks of this machine and the server agree.
fn clock(name: String, ahead_seconds: Option<i64>, is_dated: bool) -> Check {
    let Some(ahead) = ahead_seconds else { return ok(&name, "the server does not say its time") };
    let by = ahead.unsigned_abs();
    let side = if ahead > 0 { "ahead of" } else { "behind" };
    let finding = format!("{by} s {side} the server's");
    let fix = "set the clock of this machine, for instance by: timedatectl set-ntp true".to_owned();
    match by {
        0..=1 => ok(&name, "agrees with the server's"),
        CLOCK_REFUSED.. if is_dated => {
            let finding = format!("{finding}; stores refuse signatures that are {CLOCK_REFUSED} s off");
            Check { name, status: Status::Broken, finding, fix }
        }
        CLOCK_DIFFERS.. => Check { fix, ..ok(&name, finding) },
        _ => ok(&name, finding),
    }
}

/// What helps against a problem. Empty if its text says that.
fn fix_of(problem: &Problem) -> &'static str {
    match problem {
        Problem::NotFound { .. } => "check the bucket and the key in the URL",
        Problem::Denied { .. } => {
            "allow the caller to read objects (s3:GetObject) and, for a folder, to list them (s3:ListBucket); or name another \
             caller"
        }
        Problem::Tls(_) => {
            "name the root of the server's certificate by SSL_CERT_FILE, or AWS_CA_BUNDLE for S3"
        }
        Problem::Unreliable { .. } => "check the endpoint, the name service, firewalls, and HTTPS_PROXY",
        Problem::WrongAnswer(_) => "check that the endpoint is that of the store, and no page of its console",
        _ => "",
    }
}

fn fix_of_opening(error: &Error) -> &'static str {
    match error {
        Error::NotFound { .. } => fix_of(&Problem::NotFound { said: String::new() }),
        Error::Io { source, .. } => {
            source.get_ref().and_then(|inner| inner.downcast_ref::<Problem>()).map_or("", fix_of)
        }
        _ => "check the URL and the endpoint",
    }
}

/// The first file of a folder that has tensors, or the file.
fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn Source>> {
    let files = registry::list(Path::new(url), options)?.unwrap_or_default();
    let has_tensors = |path: &&std::path::PathBuf| {
        path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf")
    };
    let file = files.iter().find(has_tensors).or_else(|| files.first());
    registry::open(file.map_or(Path::new(url), |path| path), options)
}

/// How soon and how fast bytes come.
fn measured(object: &Object, cancel: &Cancel) -> hoistway_objects::Result<String> {
    let read = |offset: u64, len: u64| {
        let begun = Instant::now();
        let mut bytes = vec![0; len as usize];
        object.read(offset, &mut bytes, cancel.flag())?;
        hoistway_objects::Result::Ok(begun.elapsed())
    };
    let mut least = Duration::MAX;
    for at in 0..ANSWERS {
        least = least.min(read(at % object.len().max(1), 1)?);
    }
    let answers = format!("answers after {} s", seconds(least));
    if object.len() < 2 * REQUEST_BYTES {
        return Ok(format!("{answers}; too short to tell a rate"));
    }
    let one = read(0, REQUEST_BYTES)?;
    let requests: Vec<u64> = (0..CONNECTIONS).collect();
    let place = |number: u64| number * REQUEST_BYTES % (object.len() - REQUEST_BYTES + 1);
    let round = || {
        let begun = Instant::now();
        let ended =
            parallel::map(&requests, CONNECTIONS as usize, |&number| read(place(number), REQUEST_BYTES));
        ended.into_iter().collect::<hoistway_objects::Result<Vec<_>>>().map(|_| begun.elapsed())
    };
    // The first round makes the connections.
    round()?;
    let many = round()?;
    let rate = |bytes: u64, time: Duration| shown_rate(bytes as f64 / time.as_secs_f64().max(1e-9));
    let (one, many) = (rate(REQUEST_BYTES, one), rate(CONNECTIONS * REQUEST_BYTES, many));
    Ok(format!("{answers}; {one} by one connection, {many} by {CONNECTIONS}"))
}

/// The node's cache that the options or the environment name.
fn cache(name: String, options: &OpenOptions) -> Check {
    match options.cache.clone().map_or_else(|| NodeCache::chosen(None, None), |cache| Ok(Some(cache))) {
        Ok(Some(cache)) => ok(&name, cache.directory().display().to_string()),
        Ok(None) => Check {
            name,
            status: Status::Absent,
            finding: "each load reads the store anew".into(),
            fix: "set HOISTWAY_CACHE to a directory of a fast drive".into(),
        },
        Err(error) => Check { name, status: Status::Broken, finding: error.to_string(), fix: String::new() },
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64())
}
