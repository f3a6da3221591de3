//! Checks of an object store: its credentials, its latency, its speed.
#![forbid(unsafe_code)]

use super::{Check, Status, ok, slower};
use crate::{
    Result,
    cache::NodeCache,
    catalog::OpenOptions,
    parallel,
    report::shown_rate,
    source::{Source, objects::ObjectSource, registry},
};
use bytesize::ByteSize;
use hoistway_objects::{Object, StoreOptions};
use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// Bytes of a request, as a load has them.
const REQUEST_BYTES: u64 = 8 << 20;
/// Connections that are compared with one.
const CONNECTIONS: u64 = 8;
/// Requests whose answers are timed.
const ANSWERS: u64 = 3;

/// What the store of a URL answers.
pub(super) fn checks(url: &str) -> Vec<Check> {
    let shown = hoistway_objects::shown(url);
    let name = |what: &str| format!("{shown}: {what}");
    let broken = |finding: String, fix: &str| Check {
        name: name("access"),
        status: Status::Broken,
        finding,
        fix: fix.into(),
    };
    let mut checks = Vec::new();
    match StoreOptions::default().caller(url) {
        Ok(caller) => checks.push(ok(&name("credentials"), caller)),
        Err(error) => return vec![broken(error.to_string(), "")],
    }
    let opened = Instant::now();
    let source = match open(url) {
        Ok(source) => source,
        Err(error) => {
            checks.push(broken(error.to_string(), "check the URL, the endpoint and the credentials"));
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
    checks.push(match measured(object) {
        Ok(finding) => ok(&name("speed"), finding),
        Err(error) => broken(error.to_string(), ""),
    });
    checks.push(cache(name("cache")));
    checks
}

/// The first file of a folder that has tensors, or the file.
fn open(url: &str) -> Result<Arc<dyn Source>> {
    let options = OpenOptions::default();
    let files = registry::list(Path::new(url), &options)?.unwrap_or_default();
    let has_tensors = |path: &&std::path::PathBuf| {
        path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf")
    };
    let file = files.iter().find(has_tensors).or_else(|| files.first());
    registry::open(file.map_or(Path::new(url), |path| path), &options)
}

/// How soon and how fast bytes come.
fn measured(object: &Object) -> hoistway_objects::Result<String> {
    let read = |offset: u64, len: u64| {
        let begun = Instant::now();
        let mut bytes = vec![0; len as usize];
        object.read(offset, &mut bytes, &AtomicBool::new(false))?;
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

/// The node's cache that the environment names.
fn cache(name: String) -> Check {
    match NodeCache::chosen(None, None) {
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
