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
    let cancel = options.cancel_token();
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
    let on_this_machine = |source: &Arc<dyn Source>| {
        ok(&name("access"), format!("{} is on this machine", source.path().display()))
    };
    // A model of the hub may be in its cache on this machine, and then its server is not needed.
    if url.starts_with("hf://") {
        match open(url, options) {
            Ok(source) if ObjectSource::of(&source).is_none() => return vec![on_this_machine(&source)],
            Err(error) if probe.is_offline() => {
                return vec![broken("access", error.to_string(), fix_of_offline(&error))];
            }
            _ => {}
        }
    }
    let reached = match probe.reach(cancel.flag()) {
        Ok(reached) => reached,
        Err(error) => return vec![broken("server", error.problem.to_string(), fix_of(&error.problem, url))],
    };
    let mut checks = vec![server(name("server"), &probe, &reached)];
    // Whether the clock is wrong enough is for the store to say.
    let clock = |signed| clock(name("clock"), reached.clock_ahead_seconds, signed);
    let unless_dated = |signed| if probe.is_dated() { signed } else { Signed::Undated };
    match probe.credentials(cancel.flag()) {
        Ok(giver) => checks.push(ok(&name("credentials"), giver)),
        Err(error) => {
            checks.insert(1, clock(unless_dated(Signed::of(Some(&error.problem)))));
            checks.push(broken("credentials", error.problem.to_string(), fix_of(&error.problem, url)));
            return checks;
        }
    }
    let opened = Instant::now();
    let source = match open(url, options) {
        Ok(source) => source,
        Err(error) => {
            checks.insert(1, clock(unless_dated(Signed::of(problem_of(&error)))));
            checks.push(broken("access", error.to_string(), fix_of_opening(&error, url)));
            return checks;
        }
    };
    checks.insert(1, clock(unless_dated(Signed::Accepted)));
    let Some(remote) = ObjectSource::of(&source) else {
        checks.push(on_this_machine(&source));
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
        Err(error) => broken("speed", error.to_string(), fix_of(&error.problem, url)),
    });
    checks.push(cache(name("cache"), options));
    checks
}

/// How connections get to the server, and how soon it answers.
fn server(name: String, probe: &StoreProbe, reached: &Reached) -> Check {
    let by = match (&reached.proxy, reached.address) {
        (Some(proxy), _) => format!(" through the proxy {proxy}"),
        (None, Some(address)) => format!(" at {address}"),
        (None, None) => String::new(),
    };
    let finding =
        format!("{}{by} answers a new connection after {} s", probe.server(), seconds(reached.answered_in));
    match reached.status {
        // Requests are repeated until it serves them.
        500.. => slower(
            &name,
            format!("{finding}, with status {}", reached.status),
            "see the server's own log or status page",
        ),
        _ => ok(&name, finding),
    }
}

/// What became of a signature that has the time of this machine's clock.
#[derive(Clone, Copy, Debug)]
enum Signed {
    /// There is none.
    Undated,
    Accepted,
    Refused,
    /// The request failed for another reason.
    Unknown,
}

impl Signed {
    /// What the problem of a request tells of its signature.
    fn of(problem: Option<&Problem>) -> Self {
        match problem {
            Some(Problem::Denied { .. } | Problem::Credentials(_)) => Self::Refused,
            _ => Self::Unknown,
        }
    }
}

/// Whether the clocks of this machine and the server agree.
fn clock(name: String, ahead_seconds: Option<i64>, signed: Signed) -> Check {
    let Some(ahead) = ahead_seconds else { return ok(&name, "the server does not say its time") };
    let by = ahead.unsigned_abs();
    let side = if ahead > 0 { "ahead of" } else { "behind" };
    let finding = format!("at least {by} s {side} the server's");
    let fix = "set the clock of this machine, for instance by: timedatectl set-ntp true".to_owned();
    match (by, signed) {
        (0, _) => ok(&name, "agrees with the server's"),
        (CLOCK_REFUSED.., Signed::Refused) => {
            let finding = format!("{finding}; stores refuse signatures that are {CLOCK_REFUSED} s off");
            Check { name, status: Status::Broken, finding, fix }
        }
        (CLOCK_REFUSED.., Signed::Accepted) => {
            Check { fix, ..ok(&name, format!("{finding}; the store accepted a signature all the same")) }
        }
        (CLOCK_DIFFERS.., _) => Check { fix, ..ok(&name, finding) },
        _ => ok(&name, finding),
    }
}

/// What helps against a problem of a URL. Empty if its text says that.
fn fix_of(problem: &Problem, url: &str) -> &'static str {
    match problem {
        Problem::NotFound { .. } => "check the bucket and the key in the URL",
        Problem::Denied { .. } if url.starts_with("s3://") => {
            "allow the caller to read objects (s3:GetObject) and, for a folder, to list them (s3:ListBucket); or name another \
             caller"
        }
        Problem::Denied { .. } if url.starts_with("hf://") => {
            "sign in by: hf auth login; and ask for access on the page of the model, if it is gated"
        }
        Problem::Denied { .. } => {
            "allow the caller to read the object and, for a folder, to list it; or name another caller"
        }
        Problem::Tls(text) if is_of_time(text) => {
            "check this machine's clock (date -u), then the server's certificate"
        }
        Problem::Tls(_) => {
            "name the root of the server's certificate by SSL_CERT_FILE, or AWS_CA_BUNDLE for S3"
        }
        Problem::Unreliable { .. } => "check the endpoint, the name service, firewalls, and HTTPS_PROXY",
        Problem::WrongAnswer(_) => "check that the endpoint is that of the store, and no page of its console",
        _ => "",
    }
}

/// Whether a certificate was refused for the time of its use.
fn is_of_time(text: &str) -> bool {
    ["certificate expired", "certificate not valid yet", "certificate: Expired", "certificate: NotValidYet"]
        .iter()
        .any(|told| text.contains(told))
}

fn fix_of_opening(error: &Error, url: &str) -> &'static str {
    match error {
        Error::NotFound { .. } => fix_of(&Problem::NotFound { said: String::new() }, url),
        Error::Io { .. } => problem_of(error).map_or("", |problem| fix_of(problem, url)),
        Error::InvalidFile { .. } => "check that the file was uploaded whole",
        _ => "check the URL and the endpoint",
    }
}

fn fix_of_offline(error: &Error) -> &'static str {
    match error {
        Error::NotFound { .. } => {
            "download the model first, or unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
        }
        _ => "check the URL",
    }
}

/// The problem of a store that an error is of.
fn problem_of(error: &Error) -> Option<&Problem> {
    match error {
        Error::Io { source, .. } => source.get_ref()?.downcast_ref(),
        _ => None,
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
